"""Scripts as PyTorch's examples for accelerators are, untouched under `holdfast run` on the simulated device, killed and back.

They are not its examples, but have their shape: they ask `torch.accelerator` for a device and its backend. They save nothing. Without a
checkpoint directory they begin again, and the rank that was not killed keeps its process; with one they go on.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.testing import device
from keepers_kit import end_keepers

SCRIPT = str(Path(__file__).resolve().parent / "fsdp2_example.py")
WAYS = {"fsdp": (), "mixed": ("--mixed-precision",), "tensor": ("--parallel=tensor",)}

pytestmark = [pytest.mark.device, pytest.mark.slow, pytest.mark.timeout(300)]


def trained(
    directory: Path, *words: str, kill_at: int = -1, flags: tuple[str, ...] = ()
) -> tuple[dict[str, list[str]], str]:
    """The losses of each rank, by step from the last time that it made it, and all that was said."""
    directory.mkdir()
    path = os.pathsep.join(filter(None, [device.autoload_directory(), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SIMULATED_DEVICE_KERNEL_TIME": "0.0002"}
    command = [
        sys.executable,
        "-m",
        "holdfast.cli.cli",
        "run",
        "--nproc-per-node=2",
        "--max-restarts=2",
        *flags,
        SCRIPT,
        *words,
    ]
    said = []
    with subprocess.Popen(
        command, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            said.append(line)
            if kill_at >= 0 and f"rank 1 step {kill_at} " in line:
                kill_at = -1
                os.kill(process_of(launcher.pid, 1), signal.SIGKILL)
        code = launcher.wait(60)
    everything = "".join(said)
    assert code == 0, everything[-4000:]
    losses: dict[str, list[str]] = {}
    for rank, step, loss in re.findall(r"rank (\d) step (\d+) loss ([0-9.]+)", everything):
        found = losses.setdefault(rank, [])
        assert int(step) <= len(found), f"rank {rank} left a step out in front of {step}"
        found[int(step) :] = [loss]
    return losses, everything


def process_of(launcher: int, rank: int) -> int:
    """The id of the process that runs a rank now."""
    found = [p.pid for p in psutil.Process(launcher).children(recursive=True) if p.name() == f"hf-rank-{rank}"]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("way", WAYS)
def test_an_example_is_killed_and_ends_as_one_that_was_not(way: str, tmp_path: Path, runtime_dir: Path) -> None:
    expected, _ = trained(tmp_path / "undisturbed", *WAYS[way])
    assert {rank: len(losses) for rank, losses in expected.items()} == {"0": 40, "1": 40}
    losses, said = trained(tmp_path / "killed", *WAYS[way], kill_at=20)
    assert "incarnation 2" in said, said[-4000:]
    assert losses == expected


KEPT = {
    "fsdp": (),
    "tensor, gradients that add up": ("--parallel=tensor", "--never-clear"),
    "fsdp, gradients that add up": ("--never-clear",),
}


@pytest.mark.parametrize("way", KEPT)
def test_an_example_is_kept_without_a_line(way: str, tmp_path: Path, runtime_dir: Path) -> None:
    expected, _ = trained(tmp_path / "undisturbed", *KEPT[way])
    flags = (f"--checkpoint-dir={tmp_path / 'checkpoints'}", "--every=1")
    losses, said = trained(tmp_path / "killed", *KEPT[way], kill_at=20, flags=flags)
    assert "incarnation 2" in said, said[-4000:]
    assert said.count("rank 1 step 0 ") == 1, "it began anew"
    assert losses == expected
    end_keepers(runtime_dir)


def test_gradients_that_no_rank_has_reduced_are_not_kept_without_a_line(tmp_path: Path, runtime_dir: Path) -> None:
    """They are in no parameter: every second step adds up in memory of `fully_shard`'s own."""
    words = ("--reduce-every=2", "--never-clear")
    expected, _ = trained(tmp_path / "undisturbed", *words)
    flags = (f"--checkpoint-dir={tmp_path / 'checkpoints'}", "--every=1")
    losses, said = trained(tmp_path / "killed", *words, kill_at=20, flags=flags)
    assert "that no rank has reduced yet" in said, said[-4000:]
    assert losses == expected, "it began anew, as it is written"
