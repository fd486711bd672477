"""A worker that does not begin its order is ended, sooner if nothing can wake it. Real processes, a clock of the test's."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

import forked
from holdfast.elastic.launch import worker_eviction
from holdfast.elastic.processes.worker_processes import WorkerSlot, WorkerStatus
from holdfast.elastic.watchdog import proc_stats
from holdfast.elastic.worker import interruptible_store
from holdfast.elastic.worker.agent_channel import AgentChannel
from launch_kit import Job, wait_for

SLEEPS = "import time; print(flush=True); time.sleep(1000)"
COMPUTES = "print(flush=True)\nwhile True: pass"
POLLS = "import time; print(flush=True)\nwhile True: time.sleep(0.01)"


class Child(subprocess.Popen[bytes]):
    """Like the fork server's; a SIGKILL is noted instead of sent."""

    def __init__(self, code: str) -> None:
        super().__init__([sys.executable, "-c", code], stdout=subprocess.PIPE)
        self.pidfd = os.pidfd_open(self.pid)
        self.killed = False
        self.computes, self.ran = code == COMPUTES, 0.0
        assert self.stdout is not None
        self.stdout.readline()

    def send_signal(self, number: int) -> None:
        self.killed |= number == signal.SIGKILL


@pytest.fixture
def worker_slot_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], WorkerSlot]]:
    made: list[tuple[WorkerSlot, socket.socket]] = []

    def make(code: str) -> WorkerSlot:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker_slot = WorkerSlot(
            0, Child(code), AgentChannel(ours), -1, status=WorkerStatus.LEAVES, since=1000.0, began=True
        )  # type: ignore[arg-type]
        made.append((worker_slot, theirs))
        return worker_slot

    def times(pid: int) -> tuple[float, float]:
        """By the clock of the test."""
        (ran,) = (slot.proc.ran for slot, _ in made if slot.proc.pid == pid)  # type: ignore[attr-defined]
        return ran, 0.0

    monkeypatch.setattr(proc_stats, "main_thread_times", times)
    yield make
    for worker_slot, theirs in made:
        os.kill(worker_slot.proc.pid, signal.SIGKILL)
        with worker_slot.proc:  # type: ignore[attr-defined]
            pass
        os.close(worker_slot.proc.pidfd)
        worker_slot.line.close()
        theirs.close()


def look(worker_slot: WorkerSlot, first: float, last: float) -> float | None:
    """Looks at it every tenth of a second of that part of its order; when it was killed, in seconds."""
    proc: Any = worker_slot.proc
    for tenth in range(round(first * 10), round(last * 10)):
        proc.ran += 0.1 * (proc.computes and proc_stats.state(proc.pid) != "T")
        worker_eviction.enforce_deadlines(worker_slot, worker_slot.since + tenth / 10, store_port=1, exit_grace_s=60.0)
        if proc.killed:
            return tenth / 10
    return None


def make(worker_slot: WorkerSlot, number: int, *, still: bool) -> None:
    os.kill(worker_slot.proc.pid, number)
    wait_for(lambda: (proc_stats.state(worker_slot.proc.pid) in "ST") is still, "the signal's effect", str)


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGSTOP])
def test_what_nothing_wakes_is_ended_after_ten_cuts(
    worker_slot_of: Callable[[str], WorkerSlot], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    worker_slot = worker_slot_of(SLEEPS)
    make(worker_slot, number, still=True)
    killed = look(worker_slot, 0, 70)
    assert killed is not None
    assert (
        worker_eviction.CUT_S * worker_eviction.STILL_CUTS
        < killed
        < worker_eviction.CUT_S * (worker_eviction.STILL_CUTS + 5)
    )
    assert (worker_eviction.STOPPED in caplog.text) == (number == signal.SIGSTOP)


def test_what_computes_has_its_time(
    worker_slot_of: Callable[[str], WorkerSlot], caplog: pytest.LogCaptureFixture
) -> None:
    worker_slot = worker_slot_of(COMPUTES)
    killed = look(worker_slot, 0, 70)
    assert killed is not None
    assert worker_eviction.KILL_S <= killed < worker_eviction.KILL_S + 1
    worker_slot.proc.killed = False  # type: ignore[attr-defined]
    assert look(worker_slot, 62, 64) is None, "who does not die at once"
    assert caplog.text.count("did not begin its order") == 1


def test_only_cuts_in_a_row_count(worker_slot_of: Callable[[str], WorkerSlot]) -> None:
    worker_slot = worker_slot_of(COMPUTES)
    make(worker_slot, signal.SIGSTOP, still=True)
    assert look(worker_slot, 0, 4.5) is None
    make(worker_slot, signal.SIGCONT, still=False)
    assert look(worker_slot, 4.5, 5.5) is None
    make(worker_slot, signal.SIGSTOP, still=True)
    assert look(worker_slot, 5.5, 9.5) is None
    worker_slot.since += 9.5  # another order
    assert look(worker_slot, 0, 4.5) is None
    assert look(worker_slot, 4.5, 7) is not None


def test_a_process_that_never_began_may_import_for_long(worker_slot_of: Callable[[str], WorkerSlot]) -> None:
    worker_slot = worker_slot_of(SLEEPS)
    worker_slot.began = False
    assert look(worker_slot, 0, worker_eviction.START_S) is None
    assert look(worker_slot, worker_eviction.START_S, worker_eviction.START_S + 1) is not None


def test_who_was_killed_for_standing_still_is_told_from_who_died(worker_slot_of: Callable[[str], WorkerSlot]) -> None:
    worker_slot = worker_slot_of(COMPUTES)
    make(worker_slot, signal.SIGSTOP, still=True)
    assert look(worker_slot, 0, 4.5) is None
    worker_slot.proc.returncode = -signal.SIGKILL
    assert not worker_eviction.was_evicted(worker_slot), "somebody else killed it"
    worker_slot.proc.returncode = None
    assert look(worker_slot, 4.5, 7) is not None
    make(worker_slot, signal.SIGCONT, still=False)  # as who frees much memory before it is dead
    worker_slot.proc.killed = False  # type: ignore[attr-defined]
    assert look(worker_slot, 7, 15) is None
    worker_slot.proc.returncode = -signal.SIGKILL
    assert worker_eviction.was_evicted(worker_slot)
    worker_slot.proc.returncode = None


@pytest.mark.parametrize(
    ("code", "number", "still"), [(POLLS, 0, True), (COMPUTES, 0, False), (POLLS, signal.SIGSTOP, False)]
)
def test_who_hardly_runs_between_short_sleeps_stands_still_whatever_one_look_shows(
    code: str, number: int, still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's `FileStore` looks a hundred times a second. Who never runs although it is ready, here a stopped one, is starved."""
    with Child(code) as child:
        try:
            os.kill(child.pid, number)
            slot = WorkerSlot(0, child, None, -1)  # type: ignore[arg-type]
            monkeypatch.setattr(proc_stats, "state", lambda _: "R")
            found = []
            worker_eviction.stood_still(slot, 0.0)
            for _ in range(10):
                began = time.monotonic()
                time.sleep(0.1)
                found.append(worker_eviction.stood_still(slot, time.monotonic() - began))
            assert any(found[1:]) is still  # of a process that has just been stopped the first time may be spent
        finally:
            os.kill(child.pid, signal.SIGKILL)
            os.close(child.pidfd)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "wait", "own"])
def test_ranks_that_meet_in_a_file_outlive_one_kill(how: str, tmp_path: Path, runtime_dir: Path) -> None:
    """Nothing wakes who waits in a store that is a file: its own end is no second failure, and nobody else is ordered anew."""
    num_ranks = 3 if how == "own" else 2
    script = [str(Path(__file__).with_name("file_store_worker.py")), str(tmp_path), *filter(None, [how])]
    command = [sys.executable, "-m", "holdfast.elastic.launch.run_command", "--standalone", "--max-restarts=1"]
    done = forked.run([*command, f"--nproc-per-node={num_ranks}", *script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall(r"rank \d ends, recoveries \d", done.stdout)) == [
        f"rank {rank} ends, recoveries 1" for rank in range(num_ranks)
    ]
    assert ("stands in a wait" in done.stderr) == (how == "wait")


@pytest.mark.slow
def test_who_stands_in_a_run_that_is_over_is_not_given_the_grace_of_a_last_save(
    tmp_path: Path, runtime_dir: Path
) -> None:
    job = Job(tmp_path, script=str(Path(__file__).with_name("file_store_worker.py")))
    try:
        launcher = job.launch("--standalone", "--nproc-per-node=2", "--max-restarts=1", worker=("wait",))
        wait_for(lambda: "incarnation 2" in job.logs(), "the order", job.logs)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 128 + signal.SIGTERM
        assert "stands in a wait" in job.logs()
    finally:
        job.end()


def test_groups_as_large_as_a_job_that_came_back_meet_at_its_store_and_others_in_their_file() -> None:
    asked: list[object] = []

    def file(url: str, **_: object) -> Iterator[tuple[HashStore, int, int]]:
        asked.append(url)
        yield HashStore(), 1, 2

    def reach(host: str, port: int, **_: object) -> HashStore:
        asked.append((host, port))
        return HashStore()

    order = {"WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "9", "TORCHELASTIC_RESTART_COUNT": "1"}
    meet = interruptible_store._met(file, reach, lambda: order)
    (store, *place), = meet("file:///a/b?rank=0&world_size=2")  # fmt: skip
    assert (type(store), place, asked) == (PrefixStore, [0, 2], [("::1", 9)])
    others = ["file:///a/b?rank=1&world_size=3", "file://b?rank=1&world_size=2", "file:///a/b?world_size=2"]
    order_before = {**order, "TORCHELASTIC_RESTART_COUNT": "0"}
    for url in others:
        list(meet(url))
    list(interruptible_store._met(file, reach, lambda: order_before)("file:///a/b?rank=1&world_size=2"))
    list(interruptible_store._met(file, reach, dict)("file:///a/b?rank=1&world_size=2"))
    assert asked[1:] == [*others, *["file:///a/b?rank=1&world_size=2"] * 2]


@pytest.mark.slow
def test_a_peer_that_dies_in_the_middle_of_a_message_costs_seconds(tmp_path: Path, runtime_dir: Path) -> None:
    """Gloo tells nobody who waits for a message of which a part has come: that process is replaced too."""
    job = Job(tmp_path, script=str(Path(__file__).with_name("message_worker.py")))
    try:
        launcher = job.launch("--standalone", "--nproc-per-node=2", "--max-restarts=1")
        wait_for((tmp_path / "killed").exists, "the end of the sender", job.logs)
        job.recovered(2, 1)
        job.stop()
        assert launcher.wait(60) == 0, job.logs()
        assert "stands in a wait that nothing ends" in (tmp_path / "launcher0.log").read_text()
    finally:
        job.end()
