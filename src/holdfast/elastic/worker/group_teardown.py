"""Getting out of a collective that will never end: the sockets of this process's groups are cut.

When a rank dies, only its neighbours in the ring notice; the others wait for them. `abort` and `destroy` from another
thread have no effect on a gloo group that waits (torch 2.11 to 2.15), but `shutdown` on its *connected* sockets makes
the waiting thread raise within milliseconds. Never cut: the listening socket (the process would be terminated) and the
connection to the rendezvous store.

Only reading is shut. Gloo keeps what it could not write and tells nobody who waits for that when the connection ends
(`elastic.launch.worker_eviction`): of 220 groups that were cut in both directions during small all-reduces five had a rank that never came
back, of 960 that were cut in this one at most two.

Which sockets belong to groups is known because torch opens them while it makes a group: `GroupSockets.install` notes
which appear then. Sockets of the script itself (storage, logging services) are left alone.

Device groups (NCCL and the like) are aborted, all together and once, by what the installed torch offers: one abort may
wait for another group's kernel, so those that know group calls are aborted inside one (as torch does it, pytorch
119797), and the others each in a thread of its own. An abort may hang itself (nccl 1777), so whoever goes on asks whether
all have ended. This part is written by capability, tested on a simulated device, and has not been run on a GPU.

Before a group is cut or aborted, `open_checkpointers.void` MUST have been called: see `leave`.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

logger = logging.getLogger(__name__)

# How long an abort may take until the process is no good any more; the agent ends one that stands still for 5 s.
ABORT_S = 3.0


class GroupSockets:
    """The sockets that appeared while process groups were made, by inode: numbers of descriptors are used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inodes: set[int] = set()
        self._before: set[int] | None = None  # while a group is being made

    def install(self) -> None:
        """Note groups that torch makes, from now on. Once per process."""
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
    """(descriptor, inode) of every open socket of this process; none if no descriptor is left to list them with."""
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError as error:
        logger.warning("the sockets of broken groups are left to the launcher: %s", error)
        return
    for entry in entries:
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


class Aborts:
    """The aborts of the device groups of this process, each group once, in threads of their own."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self) -> None:
        """Aborts groups that are not gloo's, all together, unless they are being aborted. Returns at once."""
        groups = [group for group in list(getattr(getattr(c10d, "_world", None), "pg_map", ())) if _aborts(group)]
        groups = [group for group in groups if group not in self._known]
        self._known.update(groups)
        batched = [group for group in groups if _batcher(group) is not None]
        calls = [_all_in_one(batched)] if batched else []
        calls += [group.abort for group in groups if group not in batched]
        for call in calls:
            thread = threading.Thread(target=_quietly, args=(call,), name="holdfast-abort", daemon=True)
            self._threads.append(thread)
            thread.start()

    def ended(self, timeout_s: float) -> bool:
        """Returns whether all of them have come to an end, after so many seconds at most."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads


def _aborts(group: Any) -> bool:
    return hasattr(group, "abort") and bool(_device_types(group))


def _device_types(group: Any) -> list[Any]:
    try:
        return [device for device in group._device_types if device.type != "cpu"]
    except (AttributeError, RuntimeError):
        return []


def _batcher(group: Any) -> Any:
    """The backend of a group whose library takes several calls as one, or None."""
    for device in _device_types(group):
        try:
            backend = group._get_backend(device)
        except (AttributeError, RuntimeError):
            continue
        if hasattr(backend, "_group_start") and hasattr(backend, "_group_end"):
            return backend
    return None


def _all_in_one(groups: list[Any]) -> Callable[[], None]:
    """Aborts them inside one group call, the newest first, as torch does."""
    first = _batcher(groups[0])

    def abort() -> None:
        first._group_start()
        try:
            for group in reversed(groups):
                _quietly(group.abort)
        finally:
            first._group_end()

    return abort


def _quietly(abort: Callable[[], object]) -> None:
    try:
        abort()
    except Exception as error:  # noqa: BLE001 - a group that cannot be aborted is left to its timeout
        logger.warning("a group could not be aborted: %s", error)


def holds_groups() -> bool:
    """Return whether this process is in a group, with which ranks elsewhere may go on."""
    return dist.is_available() and dist.is_initialized()


def destroy_groups() -> None:
    """All groups of the process are gone afterwards, in whatever state they were."""
    if holds_groups():
        try:
            dist.destroy_process_group()
        except Exception as error:  # noqa: BLE001 - a broken group may refuse in any way; torch then forgot it
            logger.warning("a broken group resisted: %s", error)
    # Of a group whose making was interrupted only the count remains; it is part of the names that ranks must agree on.
    world: Any = getattr(c10d, "_world", None)
    if hasattr(world, "group_count"):
        world.group_count = 0
