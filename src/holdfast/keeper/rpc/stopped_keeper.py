"""Continues a keeper that a signal has stopped (SIGSTOP), where somebody waits for what its memory holds.

It cannot answer, and nothing can be had past it: a restore would fail, and a job would wait at its end for nothing. To end it would lose what
it holds. So it gets SIGCONT, as ranks get it that have to save. One that a debugger holds, or whose control group is frozen, is left alone.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from holdfast.base.proc_stat import stat_fields

logger = logging.getLogger(__name__)

# What a keeper calls itself; a number may have come to another process since.
NAME = "hf-keeper"
_STOPPED = b"T"  # by a signal; `t` is by a debugger


def wake(pid: int) -> bool:
    """Continues the keeper of this process number if a signal has stopped it; returns whether it did."""
    try:
        if stat_fields(pid)[:1] != [_STOPPED] or Path(f"/proc/{pid}/comm").read_text().strip() != NAME:
            return False
        os.kill(pid, signal.SIGCONT)
    except OSError:  # it ended, is another user's, or nothing can be known of it
        return False
    logger.warning("keeper %d was stopped by a signal and is waited for: it is continued", pid)
    return True
