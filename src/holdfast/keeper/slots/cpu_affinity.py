"""The processors that the keeper uses: those of every trainer it has served; of one alone for work in that one's wait.

Launchers bind ranks to processors, and a keeper inherits what it was started with: the binding of whichever rank came first.
It would do the work of all ranks on the processors of that one, and hold it up. So every trainer that attaches widens it.
Nothing is taken back when one leaves: the next process of that rank is bound alike.
"""

from __future__ import annotations

import contextlib
import logging
import os

logger = logging.getLogger(__name__)


def share(pid: int) -> None:
    """Lets every thread of this process run wherever process `pid` may; nothing, if that is of another pid namespace.

    One call at a time: of two, each would set what it read before the other's.
    """
    if pid <= 0:
        return
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0) | os.sched_getaffinity(pid))
        wanted = os.sched_getaffinity(0)  # less, if a cpuset says so
        # A thread that one not yet widened starts meanwhile inherits too little; so until a look finds none.
        while narrow := _narrower(wanted):
            for thread in narrow:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, wanted)
    except OSError as error:  # it is gone, or a cpuset keeps us from all of its processors
        logger.info("the keeper stays on its processors: %s", error.strerror)


def stay(pid: int | None) -> None:
    """Keeps the calling thread on those processors of this process that process `pid` may use; None: on any of this one's.

    For work that is done while that process waits: elsewhere it would take a processor from a process that does not.
    """
    with contextlib.suppress(OSError):  # it is gone, or has none that we may use: then where we are
        every: set[int] = set()
        # Of the main thread, which stays nowhere. A trainer that attaches meanwhile widens it: then once more.
        while every != (now := os.sched_getaffinity(os.getpid())):
            every = now
            os.sched_setaffinity(0, every & os.sched_getaffinity(pid) if pid else every)


def _narrower(wanted: set[int]) -> list[int]:
    found = []
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            if not os.sched_getaffinity(thread) >= wanted:
                found.append(thread)
    return found
