"""Does what an agent does to a worker from outside: cut its groups' sockets, signal one of its threads.

Sockets are cut for a worker that holds the interpreter's lock while it waits.

`DistributedDataParallel.__init__`, for one, waits in a collective with the lock held: no thread of the process can run.
The agent may take copies of its children's descriptors (`pidfd_getfd`, Linux 5.6) and shut those down. Containers may
forbid it; then the worker is left to its groups' timeout or to the agent's SIGKILL. From outside nobody knows which
connections are groups', so all of TCP are cut except those to the rendezvous store.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Iterator

from holdfast.elastic.worker import group_teardown

logger = logging.getLogger(__name__)

PIDFD_GETFD = 438  # the same number on every architecture since Linux 5.6
_TGKILL = {"x86_64": 234, "aarch64": 131}


def cut(pid: int, pidfd: int, *, spared_ports: tuple[int, ...]) -> int:
    """Shuts down the connections of another process; returns how many."""
    num_cut = 0
    try:
        for copy in copies_of_sockets(pid, pidfd):
            num_cut += group_teardown.shut(copy, *spared_ports)
            os.close(copy)
    except OSError as error:
        logger.info("the sockets of process %d cannot be cut from outside: %s", pid, error.strerror)
    return num_cut


def signal_thread(pid: int, thread: int, number: int) -> bool:
    """Sends a signal to one thread of another process, which handles it; returns whether it was sent."""
    tgkill = _TGKILL.get(os.uname().machine)
    return tgkill is not None and _libc.syscall(tgkill, pid, thread, number) == 0


def copies_of_sockets(pid: int, pidfd: int) -> Iterator[int]:
    """A descriptor of our own for each socket of another process, one after the other; the caller closes it.

    Raises:
        OSError: the kernel does not let us have copies.
    """
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return  # it ended
    for entry in entries:
        try:
            if not os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:["):
                continue
        except OSError:
            continue  # closed meanwhile
        copy = _libc.syscall(PIDFD_GETFD, pidfd, int(entry), 0)
        if copy >= 0:
            yield copy
        elif ctypes.get_errno() not in (errno.EBADF, errno.ESRCH):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_libc = ctypes.CDLL(None, use_errno=True)
