"""Tells who is alive on this machine, and locks that end with their holder.

A process is named by pid and start time, because pids are used again. What cannot be known of one is no sign of its end:
/proc may hide processes (hidepid, gVisor), and a process may have no descriptor left to read it with. A lock is a flock
on a file: the kernel drops it when the holder dies, however it dies. Used wherever something ends with a process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
from pathlib import Path

from holdfast.base.handler_errors import pass_on
from holdfast.tiers.memory.proc_stat import stat_fields

# How often taking a lock is tried anew because its file was removed meanwhile by the one who held it.
_LOCK_ATTEMPTS = 100
_DEAD_STATES = (b"Z", b"X", b"x")
# What a process calls its machine where that cannot be known; its forks live on the same one.
_OWN_MACHINE = secrets.token_hex(6)


def start_time(pid: int) -> int | None:
    """Returns when `pid` started, in clock ticks since boot; None if it is gone, hidden, or only waits to be reaped."""
    fields = _stat(pid)
    return None if not fields or _is_zombie(fields) else int(fields[19])


def has_ended(pid: int, started: object = None) -> bool:
    """Returns whether a process is known to have ended.

    Args:
        pid: its number, in the namespace of this process; see `machine_id`.
        started: what `start_time` said of it when it lived; None: not known, and any process of the number passes for it.
    """
    if pid <= 0:
        return False  # of another namespace
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that large
        return True
    except OSError as error:  # it is there, and another user's
        pass_on(error)
    fields = _stat(pid)
    if not fields:
        return False
    return _is_zombie(fields) or (isinstance(started, int) and int(fields[19]) != started)


def machine_id() -> str:
    """Returns 12 hex digits that two processes share if a process number means the same to both.

    A digest of host, boot and PID namespace. Where one of them cannot be known it is a number of this process and its
    forks, so that nobody passes for a neighbour who is none.
    """
    try:
        boot = boot_id()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError as error:
        pass_on(error)
        return _OWN_MACHINE
    return hashlib.blake2b(f"{socket.gethostname()}\x00{boot}\x00{namespace}".encode(), digest_size=6).hexdigest()


def boot_id() -> str:
    """Return what all processes of this machine share until its next start, whatever their namespaces.

    Raises:
        OSError: the kernel does not tell.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def _stat(pid: int) -> list[bytes]:
    """Return what /proc tells of a process, from its state on; nothing if it tells nothing."""
    try:
        return stat_fields(pid)
    except OSError as error:
        pass_on(error)
        return []


def _is_zombie(fields: list[bytes]) -> bool:
    """Returns whether it has ended and waits to be reaped: a leader whose other threads still run can still write."""
    return fields[0] in _DEAD_STATES and int(fields[17]) <= 1


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
