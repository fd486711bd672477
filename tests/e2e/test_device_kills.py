"""Jobs on the simulated device, hurt in every part of a step, end bit for bit as a job that nobody hurt.

Their host is ahead of the device, and collectives run on the device: when a rank dies, work hangs behind a collective that
is aborted a moment later, and runs on with gradients that nobody reduced.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

JOB = str(Path(__file__).resolve().parent / "device_job.py")
KINDS = ("ddp", "fsdp", "hsdp", "uneven", "offloaded", "tensor", "scaled", "capturable", "reused", "pipeline")
RANKS = dict.fromkeys(KINDS, 2) | {"hsdp": 4}
PARTS = ("forward", "backward", "collective", "optimizer", "save")

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]


def run(directory: Path, kind: str, *words: str, watchdog: str = "careful") -> tuple[dict[str, str], str]:
    """How each rank ended, and what was said."""
    launcher = [sys.executable, "-m", "holdfast.train.elastic", f"--nproc-per-node={RANKS[kind]}", "--max-restarts=3"]
    launcher += [f"--watchdog={watchdog}"]
    command = [*launcher, JOB, str(directory / "checkpoints"), kind, *words]
    answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    ends = dict(re.findall(r"rank (\d+) ends with (\S+)", answer.stdout))
    assert answer.returncode == 0, answer.stdout[-4000:]
    assert len(ends) == RANKS[kind], answer.stdout[-4000:]
    return ends, answer.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The end of a job that nobody hurt, by kind; each is run once."""

    @cache
    def end(kind: str) -> dict[str, str]:
        return run(tmp_path_factory.mktemp(kind), kind, "nowhere")[0]

    return end


def matrix() -> list[object]:
    cases = [(kind, f"kill-{part}") for kind in RANKS for part in PARTS]
    cases += [("ddp", f"{how}-{part}") for how in ("fault", "raise") for part in PARTS]
    return [
        pytest.param(kind, where, marks=[pytest.mark.slow] * ((kind, where) != ("ddp", "kill-save")))
        for kind, where in cases
    ]


@pytest.mark.parametrize(("kind", "where"), matrix())
def test_a_job_that_was_hurt_ends_as_one_that_was_not(
    kind: str, where: str, tmp_path: Path, runtime_dir: Path, undisturbed
) -> None:
    ends, said = run(tmp_path, kind, where)
    assert said.count("incarnation 2") == 1, said[-4000:]
    assert ends == undisturbed(kind)


def test_a_device_that_hangs_while_its_rank_waits_in_item_is_found_in_quick_mode(
    tmp_path: Path, runtime_dir: Path, undisturbed
) -> None:
    """Every rank stands in `.item()`: it is a wait of the script's last steps, and no start that may last half an hour."""
    ends, said = run(tmp_path, "ddp", "hang-forward", watchdog="quick")
    assert "is stuck: it neither computes nor wakes nor reads" in said, said[-4000:]
    assert "in phase step" in said
    assert ends == undisturbed("ddp")


@pytest.mark.slow
def test_without_the_rule_it_ends_as_another_one(tmp_path: Path, runtime_dir: Path, undisturbed) -> None:
    """Nothing is declared void before groups are aborted: the exit code is 0, and the parameters are wrong."""
    ends, _ = run(tmp_path, "ddp", "kill-save", "no-void")
    assert ends != undisturbed("ddp")
