"""Megatron Core through the contract of doors: two ranks on CPU with the real package and its distributed optimizer."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.testing.contracts.door import CHECKS, Door, Task, Workshop

WORKER = Path(__file__).with_name("megatron_worker.py")
SOURCE = str(Path(__file__).parents[2] / "src")
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]

pytestmark = [pytest.mark.slow, pytest.mark.rival("megatron"), pytest.mark.timeout(900)]


def door(tp: int, *words: str) -> Door:
    def start(task: Task) -> list[str]:
        width = ["--width", "48"] if task.changed else []
        arguments = [str(task.checkpoints), "--steps", str(task.steps), "--tp", str(tp)]
        return [*TORCHRUN, "--nproc-per-node", str(task.ranks), str(WORKER), *arguments, *width, *words]

    return Door(
        start,
        steps=6,
        # The parts of the distributed optimizer are each rank's own and outweigh the model.
        twins=1,
        refuses="does not match|mismatch|[Ss]hape|size",
        root=lambda path: path / "holdfast",
        environment={"PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])},
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["dp2", "tp2"])
def tp(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def workshop(tp: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with Workshop(tmp_path_factory.mktemp(f"megatron{tp}"), timeout_s=300.0) as made:
        yield made


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_contract(check: object, tp: int, workshop: Workshop) -> None:
    check(door(tp), workshop)  # type: ignore[operator]


def test_a_load_comes_from_holdfast_and_without_it_from_the_same_tree(tp: int, workshop: Workshop) -> None:
    """The native loader reads what the tracker names; the state of every rank is the same bit for bit."""
    root = workshop.directory("native")
    ours = workshop.run(door(tp), Task(root, 2, 3))
    again = workshop.run(door(tp), Task(root, 2, 3))
    assert re.findall(r"from \d (.*)", again.output) == ['"holdfast"', '"holdfast"']
    shutil.rmtree(root / "holdfast")
    theirs = workshop.run(door(tp, "--native"), Task(root, 2, 3, plain=True))
    assert set(theirs.starts.values()) == {3}
    assert _states(theirs.output) == _states(again.output) == _states(ours.output) != {}


def _states(output: str) -> dict[str, str]:
    return dict(re.findall(r"state (\d+) (\w+)", output))
