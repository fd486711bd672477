"""What the kernel says of a process and its children: real processes that compute, read, starve, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.train.vitals import Vitals, vitals

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


def becomes(pid: int, right: Callable[[Vitals], bool]) -> Vitals:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        seen = vitals(pid)
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
