"""The checkpoint path is not what it was when a job under `holdfast run` comes back: no silent start from nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.storage.version_store import open_storage
from launch_kit import Job, wait_for
from sample_kit import MORE

ZERO = str(Path(__file__).parents[1] / "adapters" / "zero_script.py")
WORKER = str(Path(__file__).parent / "unmount_worker.py")
STEPS = 8
FLAGS = ("--standalone", "--nproc-per-node=1", "--spares=0", "--watchdog=off")


@pytest.fixture
def job(tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    settings = tmp_path / "settings.toml"
    settings.write_text("linger_s = 1.0\n")
    monkeypatch.setenv("HOLDFAST_CONFIG", str(settings))
    started = Job(tmp_path, script=WORKER)
    yield started
    started.end()


def starts(job: Job) -> list[int]:
    return [int(line) for line in (job.directory / "starts").read_text().split()]


def ended(launcher: subprocess.Popen[str]) -> int:
    return launcher.wait(timeout=90)


def durable(job: Job) -> list[Version]:
    return open_storage(job.directory / "ck", Events()).versions()


def test_a_path_that_is_empty_in_the_middle_of_a_run_is_waited_for(job: Job) -> None:
    """Every process of the job that knew the path is dead; the launcher lives."""
    launcher = job.launch(*FLAGS, worker=("unmount", str(STEPS)))
    wait_for(lambda: "the checkpoint directory has vanished" in job.logs(), "the waiting restart", job.logs)
    mount_point, away = job.directory / "ck", job.directory / "away"
    assert list(mount_point.iterdir()) == [], "nothing is begun in the mount point"
    mount_point.rmdir()
    away.rename(mount_point)
    assert ended(launcher) == 0, job.logs()
    assert starts(job) == [0, 6]
    assert durable(job)[-1] == Version(2, STEPS - 1)


@MORE
def test_a_path_that_stays_empty_ends_the_run_with_its_remedy(job: Job) -> None:
    (job.directory / "settings.toml").write_text("linger_s = 1.0\nclose_timeout_s = 1.0\n")
    launcher = job.launch(*FLAGS, "--max-restarts=1", worker=("unmount", str(STEPS)))
    assert ended(launcher) != 0
    assert starts(job) == [0], "no fresh start"
    assert list((job.directory / "ck").iterdir()) == []
    assert "bring it back, or mount it" in job.logs()


def test_where_a_checkpoint_is_expected_an_empty_path_is_refused(job: Job) -> None:
    root = job.directory / "ck"
    root.mkdir()
    launcher = job.launch(*FLAGS, "--max-restarts=0", "--expect-checkpoint", worker=("none", str(STEPS)))
    assert ended(launcher) != 0
    assert not (job.directory / "starts").exists()
    assert list(root.iterdir()) == []
    assert "a checkpoint was expected" in job.logs()
    assert "mount it" in job.logs()


@pytest.mark.slow
def test_where_a_checkpoint_is_expected_and_there_the_job_goes_on(job: Job) -> None:
    assert ended(job.launch(*FLAGS, worker=("none", str(STEPS)))) == 0
    assert ended(job.launch(*FLAGS, "--expect-checkpoint", worker=("none", str(STEPS + 1)))) == 0
    assert starts(job) == [0, STEPS]


@MORE
def test_a_script_of_zero_lines_expects_its_checkpoint_too(job: Job) -> None:
    """On all ranks, before a step is made; and nothing is written to the mount point."""
    root = job.directory / "ck"
    root.mkdir()
    flags = ("--standalone", "--nproc-per-node=2", "--spares=0", "--max-restarts=0", f"--checkpoint-dir={root}")
    command = [
        sys.executable,
        "-m",
        "holdfast.adapters.zero_lines.launcher",
        *flags,
        "--expect-checkpoint",
        ZERO,
        "--steps",
        "2",
    ]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert told.returncode != 0
    assert told.stderr.count("VersionNotFound: ") >= 2, told.stderr
    assert '"step"' not in told.stdout
    assert list(root.iterdir()) == []


@pytest.mark.slow
def test_a_job_goes_back_once_to_the_version_that_its_operator_names(job: Job) -> None:
    """And goes on from there, also after a failure: it does not go back again."""
    assert ended(job.launch(*FLAGS, worker=("none", "4"))) == 0
    back = str(durable(job)[-2])
    launcher = job.launch(*FLAGS, f"--from-version={back}", worker=("die", str(STEPS)))
    assert ended(launcher) == 0, job.logs()
    assert starts(job) == [0, 3, 6]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--from-version=newest",), "is not a version"),
        (("--from-version=i000001-s0000000004", "--no-python"), "Python scripts only"),
    ],
)
def test_a_version_that_cannot_be_meant_is_a_usage_error(job: Job, flags: tuple[str, ...], said: str) -> None:
    launcher = job.launch(*FLAGS, *flags, worker=("none", "1"))
    assert ended(launcher) == 2
    assert said in job.logs()
