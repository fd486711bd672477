"""The checks for a card, on the simulated device with small sizes: a card finds no typing error in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "benchmarks.gpu", "--simulated", "--scale", "0.004"]

pytestmark = [pytest.mark.device, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", ["torn", "void-before-abort"])
def test_a_check_holds_on_the_simulated_device(name: str) -> None:
    answer = subprocess.run([*COMMAND, "--only", name], capture_output=True, text=True, cwd=ROOT)
    line = json.loads(answer.stdout.splitlines()[-1])
    assert (line["check"], line["holds"], answer.returncode) == (name, True, 0), line


@pytest.mark.slow
def test_all_checks_hold_on_the_simulated_device_and_each_tells_one_line(tmp_path: Path, runtime_dir: Path) -> None:
    answer = subprocess.run(
        [*COMMAND, "--out", str(tmp_path), "--seconds", "380"], capture_output=True, text=True, cwd=ROOT
    )
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["check"] for line in lines if not line["holds"]] == [], lines
    assert len(lines) == len({line["check"] for line in lines}) >= 11
    assert answer.returncode == 0


def test_a_check_that_does_not_hold_is_told_and_the_next_is_made(tmp_path: Path) -> None:
    """Without an accelerator none can: each has its line, and the exit code says so."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--seconds", "4"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert lines
    assert not any(line["holds"] for line in lines)
    assert answer.returncode == 1
