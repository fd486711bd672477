"""Who is alive on this machine, and locks that end with their holder.

A process is named by pid and start time, because pids are used again. A lock is a flock on a file: the kernel drops
it when the holder dies, however it dies. Used by the keeper's election and by the memory budget.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

# How often taking a lock is tried anew because its file was removed meanwhile by the one who held it.
_LOCK_ATTEMPTS = 100
_DEAD_STATES = (b"Z", b"X", b"x")


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None if it is gone or only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    # A leader that ended while other threads of it still run is a zombie too, and they can still write.
    dead = fields[0] in _DEAD_STATES and int(fields[17]) <= 1
    return None if dead else int(fields[19])


def take_lock(path: Path, *, blocking: bool) -> int | None:
    """An exclusive lock on the file `path`, held until the returned descriptor is closed; None if somebody has it.

    Raises:
        OSError: the file cannot be created.
    """
    for _ in range(_LOCK_ATTEMPTS):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
            # Whoever held it may have removed the file: a lock on a removed file excludes nobody.
            if _is_file(fd, path):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    return None


def _is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False
