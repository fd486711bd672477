"""Every example of a door runs, and a run that was ended early makes the steps of an undisturbed one when it goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from doors_kit import SOURCE

EXAMPLES = Path(__file__).parents[2] / "examples" / "doors"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NEEDS = {
    "dcp_save": (),
    "deepspeed_zero": ("deepspeed",),
    "huggingface_trainer": ("transformers",),
    "lightning_fit": ("lightning", "torchdata"),
    "ray_train": ("ray",),
    "stateful_loader": ("torchdata",),
}
# Those that start their ranks themselves, or have one.
ALONE = {"ray_train", "stateful_loader"}
EXTRA = {
    "deepspeed_zero": {"DS_ACCELERATOR": "cpu"},
    "ray_train": {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def command(name: str, checkpoints: Path, steps: int) -> list[str]:
    launcher = () if name in ALONE else TORCHRUN
    script = [str(EXAMPLES / f"{name}.py"), "--steps", str(steps), "--checkpoints", str(checkpoints)]
    return [sys.executable, "-W", "ignore", *launcher, *script]


def environment(name: str) -> Mapping[str, str]:
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **SOURCE, **own, **EXTRA.get(name, {})}


def losses(output: str) -> dict[tuple[int, int], str]:
    found = re.findall(r"rank (\d+) step (\d+) loss ([0-9.e-]+)", output)
    return {(int(rank), int(step)): loss for rank, step, loss in found}


def run(name: str, checkpoints: Path, steps: int) -> dict[tuple[int, int], str]:
    result = subprocess.run(
        command(name, checkpoints, steps), env=environment(name), capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return losses(result.stdout + result.stderr)  # Ray hands on what its workers print


def test_every_example_of_a_door_is_tested_and_short() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)
    assert all(len(path.read_text().splitlines()) < 80 for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.rival(need) for need in needs]) for name, needs in NEEDS.items()]
)
def test_what_was_ended_early_goes_on_as_if_it_had_not_been(name: str, tmp_path: Path, runtime_dir: Path) -> None:
    whole = run(name, tmp_path / "whole", 5)
    ranks = {rank for rank, _ in whole}
    assert sorted(whole) == [(rank, step) for rank in sorted(ranks) for step in range(5)]
    first = run(name, tmp_path / "broken", 2)
    then = run(name, tmp_path / "broken", 3)
    last = run(name, tmp_path / "broken", 5)
    assert {**first, **then, **last} == whole
    assert [len(part) for part in (first, then, last)] == [2 * len(ranks), len(ranks), 2 * len(ranks)]


@pytest.mark.rival("torchdata")
@pytest.mark.parametrize("at", [4, 5], ids=["in an epoch", "between two"])
def test_a_stateful_loader_beside_the_plain_checkpointer_goes_on_with_the_next_batch(
    at: int, tmp_path: Path, runtime_dir: Path
) -> None:
    """Killed with SIGKILL; epochs have three batches and the loader has worker processes."""
    whole = run("stateful_loader", tmp_path / "whole", 8)
    killed = subprocess.Popen(
        command("stateful_loader", tmp_path / "killed", 8), env=environment(""), stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    said = ""
    for line in killed.stdout:
        said += line
        if f"step {at + 1} " in line:  # so that step `at` was saved
            killed.send_signal(signal.SIGKILL)
            break
    killed.stdout.close()
    killed.wait(timeout=30)
    after = run("stateful_loader", tmp_path / "killed", 8)
    assert min(after)[1] in (at + 1, at + 2)
    assert after == {place: loss for place, loss in whole.items() if place >= min(after)}
    assert losses(said).items() <= whole.items()
