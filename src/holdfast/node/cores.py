"""The processors that the keeper may use: those of every trainer it has served.

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


def _narrower(wanted: set[int]) -> list[int]:
    found = []
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            if not os.sched_getaffinity(thread) >= wanted:
                found.append(thread)
    return found
