"""The keepers of jobs that a test ran: they end by themselves when all ranks have left, which takes them a moment.

Who kills them in that moment leaves their directories behind, for a keeper clears away as the last thing it does.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from holdfast.testing.contracts.adapter_processes import keepers_under

# What `tests/conftest.py` gives everything that is left at the end of the suite.
GRACE_S = 30.0


def end_keepers(runtime: Path, grace_s: float = GRACE_S) -> None:
    """Waits until the keepers of jobs that closed have ended; fails if one stays, and ends it with all that it has."""
    stayed = wait_ended(keepers_under(runtime), grace_s)
    for process in stayed:
        process.kill()
    wait_ended(stayed)
    if stayed:
        shutil.rmtree(runtime, ignore_errors=True)
        raise AssertionError(f"keepers stayed although nobody needs them: {[process.pid for process in stayed]}")


def wait_ended(processes: Iterable[psutil.Process], grace_s: float = GRACE_S) -> list[psutil.Process]:
    """Waits until processes have ended, whose children they ever are; returns those that live when the grace is over.

    A process that has ended stays in /proc until its parent asks for its exit code. For orphans that may be seconds:
    some containers' first process asks now and then. Its descriptor tells the end itself.
    """
    deadline = time.monotonic() + grace_s
    return [process for process in processes if not _ends_by(process, deadline)]


def _ends_by(process: psutil.Process, deadline: float) -> bool:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        asked = select.poll()
        asked.register(fd, select.POLLIN)
        return not process.is_running() or bool(asked.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
    finally:
        os.close(fd)


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process stand for; without those that it closes while we look."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def of_threads(pid: int, ask: Callable[[int], object]) -> set[object]:
    """What the kernel says of each thread of a process."""
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # one that answered a connection has ended since
            found.add(ask(int(thread)))
    return found


def processors_of_threads(pid: int) -> set[object]:
    """The sets of processors that threads of a process may use."""
    return of_threads(pid, lambda thread: frozenset(os.sched_getaffinity(thread)))
