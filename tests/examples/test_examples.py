"""Every example runs to its end, and started again from an older checkpoint it makes the same steps once more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from sample_kit import MORE, sampled

EXAMPLES = Path(__file__).parents[2] / "examples"
# Name -> ranks it is started with here.
RANKS = {"plain_loop": 1, "fsdp": 2, "tensor_parallel": 2, "accumulation": 1, "pipeline": 2}
STEPS = 4


def run(name: str, checkpoints: Path, ranks: int = 0, steps: int = STEPS) -> dict[tuple[int, int], str]:
    """(rank, step) -> the loss that was printed."""
    arguments = [str(EXAMPLES / f"{name}.py"), "--steps", str(steps), "--checkpoints", str(checkpoints)]
    ranks = ranks or RANKS[name]
    if RANKS.get(name) == 1:
        command = [sys.executable, *arguments]
    else:
        launcher = ["-m", "holdfast.elastic.launch.run_command", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *launcher, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_DURABLE_EVERY": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent / "src")
    result = forked.run(command, env=environment, capture_output=True, text=True, timeout=90, warm_children=True)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = re.findall(r"rank (\d+) step (\d+) loss ([0-9.]+)", result.stdout)
    return {(int(rank), int(step)): loss for rank, step, loss in losses}


@pytest.mark.parametrize("name", sampled(RANKS, "plain_loop", "fsdp"))
def test_example_goes_on_where_it_stopped(name: str, tmp_path: Path, runtime_dir: Path) -> None:
    whole = run(name, tmp_path)
    assert sorted(whole) == [(rank, step) for rank in range(RANKS[name]) for step in range(STEPS)]
    versions = sorted(path.parent for path in tmp_path.glob("i*-s*/manifest.json"))
    assert [path.name for path in versions] == ["i000001-s0000000002", "i000001-s0000000003"]
    shutil.rmtree(versions[-1])
    again = run(name, tmp_path)
    assert again == {(rank, STEPS - 1): whole[rank, STEPS - 1] for rank in range(RANKS[name])}


@MORE
def test_the_example_of_other_layouts_goes_on_with_another_number_of_ranks(tmp_path: Path, runtime_dir: Path) -> None:
    assert sorted(run("other_layout", tmp_path, 2, STEPS)) == [(rank, step) for rank in (0, 1) for step in range(STEPS)]
    assert sorted(run("other_layout", tmp_path, 1, STEPS + 2)) == [(0, STEPS), (0, STEPS + 1)]


def test_every_example_is_tested() -> None:
    # What rank_files.py shows with the launcher below is tested by default in tests/checkpoint/test_strategies.py.
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RANKS) | {"rank_files", "other_layout"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_lost_ranks_files_come_back_from_its_twin(tmp_path: Path, runtime_dir: Path) -> None:
    def start(what: str) -> dict[tuple[int, int], str]:
        launcher = [
            sys.executable,
            "-m",
            "holdfast.elastic.launch.run_command",
            "--standalone",
            "--nproc-per-node",
            "8",
        ]
        command = [*launcher, str(EXAMPLES / "rank_files.py"), what, "--checkpoints", str(tmp_path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        assert result.returncode == 0, result.stdout + result.stderr
        losses = re.findall(r"rank (\d+) step (\d+) loss ([0-9.]+)", result.stdout)
        return {(int(rank), int(step)): loss for rank, step, loss in losses}

    whole = start("run")
    assert len(whole) == 8 * 8
    shutil.rmtree(tmp_path / "rank_0")
    for path in tmp_path.glob("rank_*/checkpoint-2_[34].*"):
        path.unlink()
    again = start("recover")
    assert again == {(rank, step): whole[rank, step] for rank in range(8) for step in (6, 7)}


def test_the_base_example_is_short() -> None:
    assert len((EXAMPLES / "plain_loop.py").read_text().splitlines()) < 80
