"""A checkpoint path on a mount that never answers: nothing of ours waits for it without a limit, and memory goes on.

The mount is real, and its server says nothing: calls stand in the kernel as those to a server that is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.base.errors import LevelNotReached, StorageBusy
from holdfast.tiers.storage import read_limit
from kit.checkpointers import Make, Trainee, leave
from kit.hanging_mount import HangingMount
from sample_kit import sampled

pytestmark = pytest.mark.root
LIMIT_S = 2.0


@pytest.fixture(autouse=True)
def _mounts(tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        HangingMount(tmp_path_factory.mktemp("mount")).end()
    except OSError as error:
        pytest.skip(f"needs a FUSE mount: {error}")


@pytest.fixture
def job(make: Make, tmp_path: Path) -> Path:
    """A path with one durable version, of step 1."""
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    assert checkpointer.save(1, "durable").wait("durable", 60)
    checkpointer.close()
    return tmp_path / "job"


@pytest.mark.parametrize("moment", sampled(["before the constructor", "before the restore"], "before the constructor"))
def test_a_start_on_a_mount_that_hangs_ends_by_name(
    make: Make, job: Path, moment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(read_limit, "SAY_S", 0.5)
    checkpointer = make(Trainee(), close_timeout_s=LIMIT_S) if moment == "before the restore" else None
    with HangingMount(job), pytest.raises(StorageBusy, match="nothing was read for 2 s") as caught:
        (checkpointer or make(Trainee(), close_timeout_s=LIMIT_S)).restore()
    assert str(job) in str(caught.value)
    assert f"{job} has answered nothing for 1 s; it is waited for 2 s" in caplog.text
    if checkpointer is not None:
        leave(checkpointer)
    assert make(Trainee()).restore() == 2, "nothing is held against the version"


def test_a_mount_that_hangs_in_training_costs_the_durable_level_and_nothing_else(make: Make, job: Path) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, close_timeout_s=LIMIT_S)
    assert checkpointer.restore() == 2
    trainee.train()
    with HangingMount(job):
        handle = checkpointer.save(2, "durable")
        assert handle.wait("captured", 60)
        expected = trainee.fingerprint()
        trainee.train()
        assert checkpointer.save(3).wait("captured", 60)
        with pytest.raises(LevelNotReached):
            handle.wait("durable", LIMIT_S)
        with pytest.raises(LevelNotReached):
            checkpointer.close()
    again = Trainee()
    assert make(again).restore("i000002-s0000000002") == 3
    assert again.fingerprint() == expected


SCRIPT = """
import sys, torch, holdfast
model = torch.nn.Linear(4, 4)
holdfast.Checkpointer(sys.argv[1], model=model).restore()
"""


@pytest.mark.slow
def test_a_job_on_a_mount_that_hangs_ends_by_name(job: Path, tmp_path: Path) -> None:
    """The launcher waits for it as well, to start the keeper of the path, and then goes on without one.

    The mount lies beside the script, as a directory of checkpoints often does.
    """
    script, settings = tmp_path / "train.py", tmp_path / "settings.toml"
    script.write_text(SCRIPT)
    settings.write_text(f"close_timeout_s = {LIMIT_S}\n")
    launch = [sys.executable, "-m", "holdfast.elastic.launch.run_command", "--nproc-per-node=2", "--max-restarts=0"]
    with HangingMount(job):
        ended = subprocess.run(
            [*launch, f"--checkpoint-dir={job}", str(script), str(job)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100,
            env=os.environ | {"HOLDFAST_CONFIG": str(settings)},
        )  # fmt: skip
    assert ended.returncode == 1
    assert "no keeper yet, the first rank will try again: nothing was read for 2 s" in ended.stdout, ended.stdout[
        -4000:
    ]
    assert "StorageBusy: nothing was read for 2 s" in ended.stdout, ended.stdout[-4000:]
