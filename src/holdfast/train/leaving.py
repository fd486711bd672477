"""Getting out of a collective that will never end: the sockets of this process's groups are cut.

When a rank dies, only its neighbours in the ring notice; the others wait for them. `abort` and `destroy` from another
thread have no effect on a gloo group that waits (torch 2.11 to 2.15), but `shutdown` on its *connected* sockets makes
the waiting thread raise within milliseconds. Never cut: the listening socket (the process would be terminated) and the
connection to the rendezvous store.

Only reading is shut. Gloo keeps what it could not write and tells nobody who waits for that when the connection ends
(`train.urging`): of 220 groups that were cut in both directions during small all-reduces five had a rank that never came
back, of 960 that were cut in this one at most two.

Which sockets belong to groups is known because torch opens them while it makes a group: `GroupSockets.install` notes
which appear then. Sockets of the script itself (storage, logging services) are left alone.

Device groups (NCCL and the like) are aborted, all together, by what the installed torch offers. That part is written
by capability and has not been run on a GPU.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

logger = logging.getLogger(__name__)

# Set before the first group exists, so that a device group that was aborted raises instead of ending the process.
DEVICE_PRESETS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class GroupSockets:
    """The sockets that appeared while process groups were made, by inode: numbers of descriptors are used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inodes: set[int] = set()
        self._before: set[int] | None = None  # while a group is being made

    def install(self) -> None:
        """From now on, groups that torch makes are noted. Once per process."""
        make = getattr(c10d, "_new_process_group_helper", None)
        if make is None:  # this torch makes groups elsewhere; the agent cuts from outside instead
            logger.warning("this torch hides how it makes groups; an interrupted rank may be slow to leave")
            return
        c10d._new_process_group_helper = self._noting(make)

    def _noting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def noting(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._before = {inode for _, inode in own_sockets()}
            try:
                return make(*args, **kwargs)
            finally:
                with self._lock:
                    self._inodes |= {inode for _, inode in own_sockets()} - (self._before or set())
                    self._before = None

        return noting

    def cut(self, store_port: int) -> int:
        """Shuts down every connected socket of a group; returns how many. From any thread.

        Args:
            store_port: connections to this port are the rendezvous store's.
        """
        with self._lock:
            known, before = set(self._inodes), self._before
        num_cut = 0
        for fd, inode in own_sockets():
            if inode in known or (before is not None and inode not in before):
                num_cut += shut(fd, store_port)
        return num_cut

    def forget(self) -> None:
        """The groups are gone."""
        with self._lock:
            self._inodes.clear()


def own_sockets() -> Iterator[tuple[int, int]]:
    """(descriptor, inode) of every open socket of this process."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield int(entry), int(target[8:-1])


def shut(fd: int, *spared_ports: int) -> bool:
    """Shuts one socket down if it is a connection between ranks; whether it was."""
    try:
        copy = os.dup(fd)
    except OSError:
        return False  # closed meanwhile
    try:
        with socket.socket(fileno=copy) as link:
            if link.family not in (socket.AF_INET, socket.AF_INET6) or link.type != socket.SOCK_STREAM:
                return False
            if link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or link.getpeername()[1] in spared_ports:
                return False
            link.shutdown(socket.SHUT_RD)  # gloo's own thread sees an end at once, and closes it
            return True
    except OSError:
        return False  # not connected (any more)


def abort_device_groups() -> None:
    """Aborts groups that are not gloo's, all together. Returns at once; threads of its own do it."""
    for group in tuple(getattr(getattr(c10d, "_world", None), "pg_map", ())):
        abort = getattr(group, "abort", None)
        if abort is not None and _has_device(group):
            threading.Thread(target=_quietly, args=(abort,), name="holdfast-abort", daemon=True).start()


def _has_device(group: Any) -> bool:
    try:
        return any(device.type != "cpu" for device in group._device_types)
    except (AttributeError, RuntimeError):
        return False


def _quietly(abort: Callable[[], object]) -> None:
    try:
        abort()
    except Exception as error:  # noqa: BLE001 - a group that cannot be aborted is left to its timeout
        logger.warning("a group could not be aborted: %s", error)


def destroy_groups() -> None:
    """All groups of the process are gone afterwards, in whatever state they were."""
    if dist.is_available() and dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception as error:  # noqa: BLE001 - a broken group may refuse in any way; torch then forgot it
            logger.warning("a broken group resisted: %s", error)
    # Of a group whose making was interrupted only the count remains; it is part of the names that ranks must agree on.
    world: Any = getattr(c10d, "_world", None)
    if hasattr(world, "group_count"):
        world.group_count = 0
