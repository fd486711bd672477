"""Lets processes of one node read a bundle's chunks from storage once between them.

A file in the node's runtime directory has one byte per chunk: whether some process has read and proved it. Who reads a
chunk locks its byte (fcntl(2), F_OFD_SETLK), so a second one waits. The others then read the same bytes of the same
file with RWF_NOWAIT, which takes them from the page cache or says that they are not there: storage is not asked for
them. What the page cache has lost is read from storage again, by one of them. The kernel drops the lock of a process
that was killed, and another one reads its chunk. Nothing is believed because of that byte: whoever reads proves. So where
the file refuses (a full disk, no locks left), a chunk is read from storage a second time, and that is all.

A forked child has the open file too, and would keep the lock when its parent is dead: it closes it first of all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from holdfast.base.errors import StorageBusy
from holdfast.base.handler_errors import forgive, pass_on
from holdfast.core.recovery.shared_reading import ReadingPlan

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK = struct.Struct("hhqqi4x")
_READ = b"\1"
# Pauses while another process reads a chunk.
FIRST_PAUSE_S, MOST_PAUSE_S = 0.0005, 0.02


class SharedReads:
    """The chunks that this process and others read between them. Any thread; each chunk is one thread's at a time.

    Args:
        path: the file, in a directory of this user alone; the same for all of them, and of this restore alone.
        timeout_s: how long a chunk may take that another process reads.

    Raises:
        OSError: the file cannot be made, something else stands there, or this kernel has no such locks.
    """

    def __init__(self, path: Path, plan: ReadingPlan, *, timeout_s: float) -> None:
        self.plan = plan
        self._path = path
        self._timeout_s = timeout_s
        self._refused = False
        self._guard = threading.Lock()
        self._num_reads, self._is_over = 0, False
        self._fd = os.open(path, _FLAGS, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(path))
            self._set(fcntl.F_UNLCK, 0)
        except BaseException:
            self.let_go()
            raise
        _let_children_go()
        _opened.add(self)

    def read(
        self, bundle_id: str, index: int, cached: Callable[[], T | None], stored: Callable[[], T], where: str
    ) -> T:
        """Read a chunk: from the page cache if somebody has read it, else from storage while the others wait. `cached`
        returns None where the page cache has not all of it; `where` is the file, for the error.

        Raises:
            StorageBusy: another process reads it, and does not end in time. Else what the two functions raise.
        """
        with self._guard:
            self._num_reads += 1
        try:
            return self._read(self.plan.first[bundle_id] + index, index, cached, stored, where)
        finally:
            with self._guard:
                self._num_reads -= 1
                self._end()

    def _read(self, at: int, index: int, cached: Callable[[], T | None], stored: Callable[[], T], where: str) -> T:
        deadline, pause_s = time.monotonic() + self._timeout_s, FIRST_PAUSE_S
        while True:
            if self._was_read(at) and (found := cached()) is not None:
                return found
            with self._turn(at) as is_mine:
                if is_mine:
                    if self._was_read(at) and (found := cached()) is not None:
                        return found
                    found = stored()
                    self._note(at)
                    return found
            if time.monotonic() > deadline:
                raise StorageBusy(
                    f"another rank of this node has read chunk {index} for {self._timeout_s:g} s and is not done",
                    where=where,
                    remedy="check that storage, and that no rank of this node is stopped",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def remove(self) -> None:
        """Takes the name away; who has the file open keeps it."""
        with forgive(OSError):
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the file, and gives up what this process holds of it: at once, or when the last read has ended.

        A read may hang that nobody waits for any more. The number of its file must not become another one's meanwhile.
        """
        self.remove()
        with self._guard:
            self._is_over = True
            self._end()

    def _end(self) -> None:
        if self._is_over and not self._num_reads:
            self.let_go()

    def let_go(self) -> None:
        """Closes the file, whose name stays for the others."""
        _opened.discard(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _was_read(self, at: int) -> bool:
        try:
            return os.pread(self._fd, 1, at) == _READ
        except OSError as error:
            pass_on(error)
            self._say(error)
            return False

    def _note(self, at: int) -> None:
        try:
            os.pwrite(self._fd, _READ, at)
        except OSError as error:
            pass_on(error)
            self._say(error)

    @contextlib.contextmanager
    def _turn(self, at: int) -> Iterator[bool]:
        """Locks a chunk for the block; False: another process has it. Where there are no locks left, nobody waits."""
        is_locked = False
        try:
            self._set(fcntl.F_WRLCK, at)
            is_locked = True
        except OSError as error:
            pass_on(error)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                yield False
                return
            self._say(error)
        try:
            yield True
        finally:
            if is_locked:
                with forgive(OSError):
                    self._set(fcntl.F_UNLCK, at)

    def _say(self, error: OSError) -> None:
        """Says once that the ranks cannot take turns any more: no byte is wrong for that."""
        if not self._refused:
            self._refused = True
            logger.warning(
                "%s refuses (%s), so ranks of this node may read the same of storage several times; make room in that "
                "directory, or name another one as runtime_dir",
                self._path,
                error,
            )

    def _set(self, kind: int, at: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, at, 1, 0))


# Those of this process that are open.
_opened: weakref.WeakSet[SharedReads] = weakref.WeakSet()


@functools.cache
def _let_children_go() -> None:
    """Has every forked child close the files: a lock of an open file lasts until its last owner has."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for shared in list(_opened):
        with forgive(OSError):
            shared.let_go()
