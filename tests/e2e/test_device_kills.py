"""Jobs on the simulated device, hurt in every part of a step, end bit for bit as a job that nobody hurt.

Their host is ahead of the device, and collectives run on the device: when a rank dies, work hangs behind a collective that
is aborted a moment later, and runs on with gradients that nobody reduced.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import forked
from sample_kit import MORE

LAUNCHER = str(Path(__file__).resolve().parent / "device_launcher.py")
JOB = str(Path(__file__).resolve().parent / "device_job.py")
KINDS = (
    "ddp",
    "fsdp",
    "hsdp",
    "uneven",
    "offloaded",
    "tensor",
    "scaled",
    "capturable",
    "reused",
    "pipeline",
    "apart",
    "one-backend",
    "eager",
    "compiled",
)
RANKS = dict.fromkeys(KINDS, 2) | {"hsdp": 4}
PARTS = ("forward", "backward", "collective", "optimizer", "save")
AROUND = ("start", "restore", "evaluation", "end", "close")  # beside those

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]


def run(
    directory: Path, kind: str, *words: str, watchdog: str = "careful", ranks: int = 0, **environ: str
) -> tuple[dict[str, str], str]:
    """How each rank ended, and what was said.

    Keepers wait a minute for ranks that come back. One that gives up sooner, as after 2 s on a loaded machine, takes with it
    what it holds: a job of which nothing is durable then rightly begins at its first step.
    """
    ranks = ranks or RANKS[kind]
    program = [LAUNCHER] if watchdog == "short" else ["-m", "holdfast.elastic.launch.run_command"]
    launcher = [sys.executable, *program, f"--nproc-per-node={ranks}", "--max-restarts=3", f"--watchdog={watchdog}"]
    command = [*launcher, JOB, str(directory / "checkpoints"), kind, *words]
    answer = forked.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, env=os.environ | environ
    )
    ends = dict(re.findall(r"rank (\d+) ends with (\S+)", answer.stdout))
    assert answer.returncode == 0, answer.stdout[-4000:]
    assert len(ends) == ranks, answer.stdout[-4000:]
    return ends, answer.stdout


def came_back(said: str) -> int:
    """The step that the ranks went on from when they began for the last time."""
    return int(re.findall(r"rank \d+ starts at (\d+)", said)[-1])


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
    cases += [("ddp", f"{how}-{part}") for how in ("kill", "fault") for part in ("evaluation", "end")]
    cases += [("ddp", "kill-close")]  # a fault there harms nothing: everything is durable
    return [
        pytest.param(
            kind,
            where,
            marks=[pytest.mark.slow] * ((kind, where) != ("ddp", "kill-save")),
        )
        for kind, where in cases
    ]


@pytest.mark.parametrize(("kind", "where"), matrix())
def test_a_job_that_was_hurt_ends_as_one_that_was_not(
    kind: str, where: str, tmp_path: Path, runtime_dir: Path, undisturbed
) -> None:
    ends, said = run(tmp_path, kind, where)
    assert said.count("incarnation 2") == 1, said[-4000:]
    assert ends == undisturbed(kind)
    assert came_back(said) > 0 or "is given up" in said, said[-4000:]


@MORE
def test_a_device_that_hangs_while_its_rank_waits_in_item_is_found_in_quick_mode(
    tmp_path: Path, runtime_dir: Path, undisturbed
) -> None:
    """Every rank stands in `.item()`: it is a wait of the script's last steps, and no start that may last half an hour."""
    ends, said = run(tmp_path, "ddp", "hang-forward", watchdog="quick")
    assert "is stuck: it neither computes nor wakes nor reads" in said, said[-4000:]
    assert "in phase step" in said
    assert ends == undisturbed("ddp")


@pytest.mark.slow
@pytest.mark.parametrize("part", [*PARTS[1:], *AROUND])
def test_a_device_that_hangs_in_any_part_is_replaced_in_quick_mode(
    part: str, tmp_path: Path, runtime_dir: Path, undisturbed
) -> None:
    """The limits of a start, a restore, a save and an evaluation are a minute here (device_launcher.py)."""
    if part == "restore":  # there is something to restore
        run(tmp_path, "ddp", "nowhere", DEVICE_JOB_STEPS="8")
    ends, said = run(tmp_path, "ddp", f"hang-{part}", watchdog="short")
    assert ends == undisturbed("ddp"), said[-4000:]


@pytest.mark.slow
def test_a_rank_that_dies_while_all_agree_through_the_device_leaves_no_half_of_it(
    tmp_path: Path, runtime_dir: Path, undisturbed
) -> None:
    """The others wait for it in a collective of ours, which is aborted, and ends with what is in memory."""
    run(tmp_path, "one-backend", "nowhere", DEVICE_JOB_STEPS="8")
    ends, said = run(tmp_path, "one-backend", "kill-restore")
    assert ends == undisturbed("one-backend")
    assert came_back(said) == 8, said[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["pinned", "none"])
@pytest.mark.parametrize("where", ["kill-save", "kill-backward", "hang-forward"])
def test_a_device_that_registers_no_memory_goes_the_same_way(
    memory: str, where: str, tmp_path: Path, runtime_dir: Path, undisturbed
) -> None:
    ends, _ = run(tmp_path, "ddp", where, watchdog="quick", SIMULATED_DEVICE_HOST_MEMORY=memory)
    assert ends == undisturbed("ddp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where"), [("ddp", "kill-backward"), ("fsdp", "kill-save"), ("scaled", "fault-collective")]
)
def test_a_device_named_as_a_vendors_goes_the_same_way(
    kind: str, where: str, tmp_path: Path, runtime_dir: Path, undisturbed
) -> None:
    """Our calls, not the vendor's: presets, generators, streams and groups by the names that `torch.npu` has for them."""
    ends, _ = run(tmp_path, kind, where, SIMULATED_DEVICE_NAME="npu")
    assert ends == undisturbed(kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "ranks"), [(("resharded", "resharded-hsdp"), (2, 4)), (("resharded-hsdp", "resharded"), (4, 2))]
)
def test_another_number_of_ranks_goes_on_with_the_same_numbers(
    kinds: tuple[str, str], ranks: tuple[int, int], tmp_path: Path, runtime_dir: Path
) -> None:
    """Killed before and after the change; the whole tensors at the end are those of one job that nobody hurt."""
    expected, _ = run(tmp_path / "undisturbed", kinds[0], "nowhere", ranks=ranks[0])
    assert len(set(expected.values())) == 1
    run(tmp_path, kinds[0], "kill-backward", ranks=ranks[0], DEVICE_JOB_STEPS="14")
    (tmp_path / "checkpoints.hurt").unlink()
    ends, said = run(tmp_path, kinds[1], "kill-save", ranks=ranks[1], DEVICE_JOB_AT="18")
    assert said.count("incarnation 2") >= 1 or "incarnation 4" in said, said[-4000:]
    assert set(ends.values()) == set(expected.values()), said[-4000:]


@pytest.mark.slow
def test_a_rank_whose_device_is_behind_costs_the_others_no_version(
    tmp_path: Path, runtime_dir: Path, undisturbed
) -> None:
    """Their hosts come to the next save while every slot waits for the copy of the one whose device is seconds behind."""
    ends, said = run(tmp_path, "ddp", "behind-forward")
    assert ends == undisturbed("ddp")
    assert "is given up" not in said, said[-4000:]
    assert "is left out" not in said, said[-4000:]


@pytest.mark.slow
def test_without_patience_a_device_that_is_behind_costs_versions(tmp_path: Path, runtime_dir: Path) -> None:
    """The test before finds what it looks for."""
    _, said = run(tmp_path, "ddp", "behind-forward", "no-patience")
    assert "is left out" in said, said[-4000:]


@pytest.mark.slow
def test_without_the_rule_it_ends_as_another_one(tmp_path: Path, runtime_dir: Path, undisturbed) -> None:
    """Nothing is declared void before groups are aborted: the exit code is 0, and the parameters are wrong."""
    ends, _ = run(tmp_path, "ddp", "kill-save", "no-void")
    assert ends != undisturbed("ddp")
