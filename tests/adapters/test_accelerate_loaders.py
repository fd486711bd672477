"""A loop with Accelerate that goes on reads the rows of the undisturbed one, wherever their order comes from. Real package."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doors_kit import SOURCE, launching
from holdfast.testing.contracts.door import Workshop

STORY = Path(__file__).with_name("accelerate_story.py")
# Where the order comes from, ranks, steps when one rank or all (-1) are killed. Five steps are an epoch of one rank.
CASES = [
    ("process", 1, 8, 0), ("process", 2, 4, 0), ("generator", 1, 8, 0), ("generator", 2, 8, -1), ("seedable", 1, 8, 0),
    ("seedable", 2, 8, -1), ("stateful", 1, 8, 0), ("stateful", 2, 8, -1), ("both", 1, 11, 0), ("process", 1, 6, 0),
]  # fmt: skip

pytestmark = [pytest.mark.rival("accelerate"), pytest.mark.rival("torchdata"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("accelerate")
    with Workshop(made):
        yield made


def ended_with(place: Path, plan: str, ranks: int, *words: str) -> list[dict[str, Any]]:
    place.mkdir()
    command = [*launching(ranks), str(STORY), str(place / "root"), str(place / "facts"), "--plan", plan, *words]
    variables = {**os.environ, **SOURCE, "HOLDFAST_RUNTIME_DIR": str(place.parent / "runtime"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((place / f"facts.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("plan", "ranks", "kill", "of"),
    [pytest.param(*case, marks=() if case == CASES[0] else pytest.mark.slow) for case in CASES],
)
def test_a_killed_loop_reads_the_rows_of_the_undisturbed_one(
    place: Path, plan: str, ranks: int, kill: int, of: int
) -> None:
    name = f"{plan}-{ranks}-{kill}"
    undisturbed = ended_with(place / f"{name}-whole", plan, ranks)
    killed = ended_with(place / name, plan, ranks, "--kill", str(kill), "--of", str(of))
    for facts, whole in zip(killed, undisturbed, strict=True):
        assert facts.pop("start") in (kill - 1, kill)
        assert whole.pop("start") == 0
        assert facts == whole
