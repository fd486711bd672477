"""Reads what the kernel tells of a process in `/proc/PID/stat` (proc_pid_stat(5))."""

from __future__ import annotations

import os

_MAX_BYTES = 4096  # 52 numbers and a name; one read, for it is asked of every silent worker several times a second


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of proc_pid_stat(5) from the state on, which is field 3; none if there is no such process.

    The name before them may hold spaces and parentheses: what is read begins behind its last one.

    Raises:
        OSError: it cannot be known, as without a descriptor left. That is no sign of an end.
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        return os.read(fd, _MAX_BYTES).rpartition(b")")[2].split()
    except ProcessLookupError:  # it ended since
        return []
    finally:
        os.close(fd)
