"""What the kernel says of a process and its children: real processes that compute, read, starve, stop."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.core.elastic.worker_facts import PERSON, SLEEP, ProcessStats
from holdfast.elastic.watchdog import proc_stats
from holdfast.elastic.watchdog.proc_stats import ProcessSampler, is_frozen, vitals

WAIT_S = 30.0
# A worker that waits, and a child of it (a data loader) that does the work.
PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-IS', '-c', sys.argv[1]]); sys.stdin.read()"


@contextmanager
def worker(*command: str) -> Iterator[int]:
    """Its process id; it and its children die with the block."""
    process = subprocess.Popen([sys.executable, "-IS", "-c", *command], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def becomes(pid: int, right: Callable[[ProcessStats], bool], examiner: ProcessSampler | None = None) -> ProcessStats:
    """What a look shows as soon as it is right; an examiner sees the dear things now and then, on a clock that runs fast."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        seen = examiner.look(pid, 20 * time.monotonic()) if examiner is not None else vitals(pid)
        assert seen is not None, "it ended"
        if right(seen):
            return seen
        time.sleep(0.01)
    raise AssertionError(f"waited {WAIT_S} s; last seen: {seen}")


def test_a_worker_whose_children_compute_or_read_is_seen_at_work() -> None:
    """Its own main thread does nothing but wait for them."""
    with worker(PARENT, "while True: pass") as pid:
        idle = becomes(pid, lambda seen: seen.state == "S" and seen.wakes > 0)
        assert becomes(pid, lambda seen: seen.family_s > idle.family_s + 0.2)
    with worker(PARENT, "f = open('/dev/zero', 'rb', 0)\nwhile True: f.read(4096)") as pid:
        assert becomes(pid, lambda seen: seen.file_bytes > 1 << 20)


def test_what_its_other_threads_compute_is_told_apart() -> None:
    """The main thread sleeps in a collective while others move its bytes."""
    spin = (
        "import threading\nthreading.Thread(target=exec, args=['while True: pass']).start()\nthreading.Event().wait()"
    )
    with worker(spin) as pid:
        idle = becomes(pid, lambda seen: seen.state == "S" and seen.spent_s > 0.1)
        later = becomes(pid, lambda seen: seen.spent_s > idle.spent_s + 0.5)
        assert later.busy_s - idle.busy_s < 0.1


SENDER = r"""
import socket, subprocess, sys
ours = socket.create_server(("127.0.0.1", 0))
subprocess.Popen([sys.executable, "-ISc", "import socket, time; c = socket.create_connection(('127.0.0.1', %d))\n"
    "while True: c.send(bytes(4096)); time.sleep(0.01)" % ours.getsockname()[1]])
link, _ = ours.accept()
while link.recv(65536): pass
"""


def test_bytes_that_come_through_its_connections_are_seen() -> None:
    """`recv` is in none of the kernel's counters of a process."""
    examiner = ProcessSampler()
    with worker(SENDER) as pid:
        first = becomes(pid, lambda seen: (seen.socket_bytes or 0) > 0, examiner)
        assert first.socket_bytes is not None
        becomes(pid, lambda seen: (seen.socket_bytes or 0) > (first.socket_bytes or 0) + 8192, examiner)


def test_what_a_shell_left_behind_counts_too() -> None:
    """It has another parent, and the session of the worker."""
    orphan = "import subprocess, sys; subprocess.run(['bash', '-c', sys.argv[1]]); sys.stdin.read()"
    with worker(orphan, f"({sys.executable} -ISc 'while True: pass') > /dev/null &") as pid:
        becomes(pid, lambda seen: seen.family_s > 0.3)


def test_growth_of_memory_is_seen() -> None:
    with worker("import sys; sys.stdin.readline(); held = bytearray(64 << 20); sys.stdin.read()") as pid:
        before = becomes(pid, lambda seen: seen.memory_bytes > 0)
        with open(f"/proc/{pid}/fd/0", "w") as keyboard:
            keyboard.write("\n")
        becomes(pid, lambda seen: seen.memory_bytes > before.memory_bytes + (60 << 20))


def test_a_call_that_is_no_lock_is_told_and_a_lock_is_not() -> None:
    """In `recv` a rank waits for somebody; at a lock it may wait for itself."""
    with worker("import socket; pair = socket.socketpair(); pair[0].recv(1)") as pid:
        becomes(pid, lambda seen: "system call" in seen.call)
    lock = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
    with worker(lock) as pid:
        seen = becomes(pid, lambda seen: seen.state == "S" and seen.wakes > 0)
        seen = becomes(pid, lambda seen: seen.state == "S" and not seen.call)
        assert not seen.waits_in


def test_lock_holder_waiting_outside_is_reported_unlike_own_servers() -> None:
    waits = "import threading; threading.Thread(target=lambda: pair[0].recv(1)).start(); lock = threading.Lock(); lock.acquire(); lock.acquire()"
    tcp = "import socket; server = socket.create_server(('127.0.0.1', 0)); pair = [socket.create_connection(server.getsockname())]; "
    with worker(tcp + waits) as pid:
        becomes(pid, lambda seen: "of its own thread" in seen.call, ProcessSampler())
    with worker("import socket; pair = socket.socketpair(); " + waits) as pid:
        becomes(pid, lambda seen: seen.state == "S" and seen.wakes > 0 and not seen.call, ProcessSampler())
        threads = {int(entry) for entry in os.listdir(f"/proc/{pid}/task")}
        assert len(threads) == 2
        assert not vitals(pid).call  # type: ignore[union-attr]


def test_a_sleep_and_a_question_at_a_terminal_are_known_by_their_system_call() -> None:
    with worker("import time; time.sleep(100)") as pid:
        becomes(pid, lambda seen: seen.waits_in == SLEEP)
    with worker("import select; select.select([], [], [], 100)") as pid:  # as `time.sleep` of Python 3.10
        becomes(pid, lambda seen: seen.waits_in == SLEEP)
    with worker("import os, select; select.select([os.pipe()[0]], [], [], 100)") as pid:
        assert becomes(pid, lambda seen: "system call" in seen.call).waits_in == ""
    ours, terminal = pty.openpty()
    asks = subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=terminal)
    try:
        becomes(asks.pid, lambda seen: seen.waits_in == PERSON)
    finally:
        asks.kill()
        asks.wait()
        os.close(ours)
        os.close(terminal)


@pytest.mark.parametrize(
    ("name", "told"), [("cgroup.events", "populated 1\nfrozen {}\n"), ("freezer.state", "{}")], ids=["v2", "v1"]
)
def test_a_frozen_control_group_is_known(name: str, told: str, tmp_path: Path) -> None:
    """The files of both versions; a group of this process's own is not frozen."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    kinds = {"cgroup.events": "", "freezer.state": "freezer"}
    paths = [path for _, kind, path in lines if kinds[name] in kind.split(",")]
    if not paths or (name == "freezer.state" and paths[0] == "/"):
        pytest.skip("this machine has no such control group")
    place = tmp_path / (("freezer" + paths[0]) if name == "freezer.state" else paths[0].lstrip("/"))
    place.mkdir(parents=True, exist_ok=True)
    frozen, thawed = ("FROZEN", "THAWED") if name == "freezer.state" else ("1", "0")
    (place / name).write_text(told.format(thawed))
    assert not is_frozen(os.getpid(), str(tmp_path))
    (place / name).write_text(told.format(frozen))
    assert is_frozen(os.getpid(), str(tmp_path))
    assert not is_frozen(os.getpid())


def test_time_that_it_waits_for_a_processor_is_told() -> None:
    one_core = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])\nwhile True: pass"
    with worker(one_core) as pid, worker(one_core):
        assert becomes(pid, lambda seen: seen.starved_s > 0.1)


def test_it_stops_handles_signals_and_is_gone() -> None:
    with worker("import signal, sys; signal.signal(signal.SIGUSR1, print); sys.stdin.read()") as pid:
        handled = becomes(pid, lambda seen: bool(seen.catches >> (signal.SIGUSR1 - 1) & 1))
        assert not handled.catches >> (signal.SIGUSR2 - 1) & 1, "that one would end it"
        os.kill(pid, signal.SIGSTOP)
        becomes(pid, lambda seen: seen.state == "T")
    assert vitals(pid) is None


def test_who_was_woken_between_two_readings_is_ready_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        read = proc_stats._read
        deadline = time.monotonic() + WAIT_S
        while proc_stats.state(process.pid) != "S" and time.monotonic() < deadline:
            time.sleep(0.01)
        monkeypatch.setattr(proc_stats, "_read", lambda path: "running\n" if path.endswith("syscall") else read(path))
        seen = proc_stats.vitals(process.pid)
        process.kill()
    assert seen is not None
    assert (seen.state, seen.call, seen.waits_in) == ("R", "", "")
