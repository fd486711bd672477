"""Continues a keeper that a signal has stopped (SIGSTOP), where somebody waits for what its memory holds.

It cannot answer, and nothing can be had past it: a restore would fail, and a job would wait at its end for nothing. To end it would lose what
it holds. So it gets SIGCONT, as ranks get it that have to save. One that a debugger holds, or whose control group is frozen, is left alone;
so is one of another job, and whatever else has the number of a keeper that died: its owner may have stopped it by intention.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from holdfast.base.handler_errors import pass_on
from holdfast.keeper.rpc.paths import KEEPER_LOCK
from holdfast.tiers.memory.proc_stat import stat_fields

logger = logging.getLogger(__name__)

_STOPPED = b"T"  # by a signal; `t` is by a debugger


def wake(directory: Path) -> bool:
    """Continues the keeper of this directory (`RuntimePaths.directory`) if a signal has stopped it; returns whether it did."""
    lock = directory / KEEPER_LOCK
    try:
        pid = int(lock.read_text())
        if stat_fields(pid)[:1] != [_STOPPED] or not _has_open(pid, lock):
            return False
        os.kill(pid, signal.SIGCONT)
    except (OSError, ValueError) as error:  # it ended, is another user's, or nothing can be known of it
        pass_on(error)
        return False
    logger.warning("keeper %d was stopped by a signal and is waited for: it is continued", pid)
    return True


def _has_open(pid: int, file: Path) -> bool:
    """Return whether a process has this very file open, as who holds a lock on it has. Looks at no other: a disk may hang."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return any(link.readlink().name == file.name and link.samefile(file) for link in links)
