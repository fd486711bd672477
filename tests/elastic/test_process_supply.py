"""A job goes on where no process can be forked for a while, and where the one that forks is lost."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from holdfast.elastic.processes.forkserver import NotForked
from holdfast.elastic.processes.process_supply import LAST_TRY_S, ProcessSupply

# Rank 0 kills the process that workers are forked from; a while later rank 1 dies, and is needed again.
FORKSERVER_KILLED = """
import os, signal, time
from pathlib import Path
here, rank = Path(os.environ["HERE"]), int(os.environ["RANK"])
run, before = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.getppid()
(here / f"ready{rank}{run}").touch()
def wait_for(name):
    while not (here / name).exists(): time.sleep(0.01)
wait_for(f"ready{1 - rank}{run}")
if run == 0:
    if rank == 0:
        os.kill(before, signal.SIGKILL)
    while os.getppid() == before: time.sleep(0.01)
    time.sleep(float(os.environ["WAITS"]))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""

LAUNCH = ["-W", "ignore", "-m", "holdfast.elastic.launch.run_command", "--standalone", "--nproc-per-node=2"]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HERE": str(tmp_path), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("waits_s", [0, pytest.param(2.5, marks=pytest.mark.slow)])
def test_another_forkserver_takes_over_when_one_is_lost(tmp_path: Path, waits_s: float) -> None:
    """At the moment in which it is needed, and in a quiet one before that."""
    (tmp_path / "script.py").write_text(FORKSERVER_KILLED)
    command = [sys.executable, *LAUNCH, "--max-restarts=1", "--spares=1", str(tmp_path / "script.py")]
    done = forked.run(
        command, env={**environment(tmp_path), "WAITS": str(waits_s)}, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is gone" in done.stderr
    assert (tmp_path / "ready11").exists()


DESCRIPTORS = """
import os, resource, time
open(os.environ["HERE"] + "/limit", "w").write(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
time.sleep(3)
"""


@pytest.mark.parametrize("spares", [pytest.param(1, marks=pytest.mark.slow), 20])
def test_too_few_descriptors_for_spares_end_no_job(tmp_path: Path, spares: int) -> None:
    (tmp_path / "script.py").write_text(DESCRIPTORS)
    command = [sys.executable, *LAUNCH, f"--spares={spares}", str(tmp_path / "script.py")]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 50; exec "$@"', "sh", *command],
        env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.findall(r"ERROR (.*); what runs goes on, and it is tried again", done.stderr)
    assert bool(told) == (spares == 20), done.stderr[-3000:]
    assert len(told) == len(set(told)), done.stderr[-3000:]


@pytest.mark.slow
def test_a_launcher_raises_its_own_limit_and_leaves_that_of_its_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DESCRIPTORS.replace("time.sleep(3)", ""))
    command = [sys.executable, *LAUNCH, "--spares=20", str(tmp_path / "script.py")]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -S -n 50; exec "$@"', "sh", *command],
        env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "limit").read_text() == "50"


# The second fork of the fork server fails, as where a machine has no process left.
REFUSED = """
import errno, os, socket
from holdfast.elastic.processes.forkserver import ForkServer, NotForked
from holdfast.checkpoint.liveness.heartbeat_page import make_page
real, calls = os.fork, []
def fork():
    calls.append(1)
    if len(calls) == 3:
        raise OSError(errno.EAGAIN, "no process left")
    return real()
os.fork = fork
forkserver = ForkServer.start(lambda link, page: 0)
for _ in range(3):
    try:
        _, theirs = socket.socketpair()
        print("forked", forkserver.fork(theirs, make_page()).wait(20))
    except NotForked as error:
        print("refused:", error)
forkserver.close()
"""


def test_forkserver_that_cannot_fork_says_so_and_lives(tmp_path: Path) -> None:
    done = forked.run([sys.executable, "-c", REFUSED], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines() == ["forked 0", "refused: no process could be forked: no process left", "forked 0"]


class Ready:
    ready = True


def test_it_is_told_once_for_each_cause_and_tried_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    forkserver: Any = Ready()
    supply, now, waits = ProcessSupply(forkserver), 0.0, []
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            supply.failed(NotForked("no memory"), now)
            since = now
            while not supply.may_try(now):
                now += 0.5
            waits.append(now - since)
        assert len(caplog.records) == 1
        assert waits == sorted(waits)
        assert (waits[0], waits[-1]) == (0.5, LAST_TRY_S)
        supply.failed(NotForked("no descriptor"), now)
        supply.worked()
        supply.worked()
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "WARNING"]
    assert supply.may_try(now)


def test_a_limit_of_the_size_of_files_ends_no_job_and_is_told(tmp_path: Path) -> None:
    """`ulimit -f 1`: 1 KiB or 512 bytes, less than a page."""
    (tmp_path / "script.py").write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
        "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)\n"
    )
    command = [
        sys.executable, "-W", "ignore", "-m", "holdfast.elastic.launch.run_command", "--standalone", "--nproc-per-node=2",
        "script.py",
    ]  # fmt: skip
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh", *command],
        cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False,
        env={**os.environ, "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run"), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("ulimit -f") == 1
    assert "Traceback" not in done.stderr
