"""Every example runs to its end, and started again from an older checkpoint it makes the same steps once more."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
# Name -> ranks it is started with here.
RANKS = {"plain_loop": 1, "fsdp": 2, "tensor_parallel": 2, "accumulation": 1}
STEPS = 4


def run(name: str, checkpoints: Path) -> dict[tuple[int, int], str]:
    """(rank, step) -> the loss that was printed."""
    arguments = [str(EXAMPLES / f"{name}.py"), "--steps", str(STEPS), "--checkpoints", str(checkpoints)]
    if RANKS[name] == 1:
        command = [sys.executable, *arguments]
    else:
        launcher = ["-m", "holdfast.train.elastic", "--standalone", "--nproc-per-node", str(RANKS[name])]
        command = [sys.executable, *launcher, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_DURABLE_EVERY": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent / "src")
    result = forked.run(command, env=environment, capture_output=True, text=True, timeout=90, warm_children=True)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = re.findall(r"rank (\d+) step (\d+) loss ([0-9.]+)", result.stdout)
    return {(int(rank), int(step)): loss for rank, step, loss in losses}


@pytest.mark.parametrize("name", RANKS)
def test_example_goes_on_where_it_stopped(name: str, tmp_path: Path, runtime_dir: Path) -> None:
    whole = run(name, tmp_path)
    assert sorted(whole) == [(rank, step) for rank in range(RANKS[name]) for step in range(STEPS)]
    versions = sorted(path.parent for path in tmp_path.glob("i*-s*/manifest.json"))
    assert [path.name for path in versions] == ["i000001-s0000000002", "i000001-s0000000003"]
    shutil.rmtree(versions[-1])
    again = run(name, tmp_path)
    assert again == {(rank, STEPS - 1): whole[rank, STEPS - 1] for rank in range(RANKS[name])}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RANKS)


def test_the_base_example_is_short() -> None:
    assert len((EXAMPLES / "plain_loop.py").read_text().splitlines()) < 80
