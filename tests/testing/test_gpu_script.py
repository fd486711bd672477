"""The checks for a card, tried on the simulated device with small sizes: that they run, and that their goals can be met."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = (2, 6)

pytestmark = pytest.mark.device


def run(out: Path, *words: object) -> tuple[int, list[dict[str, object]]]:
    """The exit code of the script, and its lines."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--device",
        "sim",
        "--small",
        "--out",
        str(out),
        *map(str, words),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("numbers", [QUICK, pytest.param(range(1, 20), marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.timeout(1500)
def test_the_checks_run_and_miss_nothing(numbers: tuple[int, ...], tmp_path: Path) -> None:
    code, lines = run(tmp_path, "--seconds", 1400, "--only", *numbers)
    assert [line["check"] for line in lines] == list(numbers)
    states = {line["check"]: (line["state"], str(line.get("why", ""))[-800:]) for line in lines}
    assert {state for state, _ in states.values()} <= {"met", "not here"}, states
    assert code == 0
    figures = {figure["metric"]: figure["value"] for line in lines for figure in line.get("figures", [])}  # type: ignore[attr-defined]
    assert figures["torn_versions_without_the_wait"] > 0, "or nothing was tried"


def test_a_check_that_does_not_end_is_ended_and_told(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "--seconds", 6, "--only", 15, 16)
    assert [line["state"] for line in lines] == ["late", "not begun"]
    assert code == 1
