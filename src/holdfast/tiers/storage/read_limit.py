"""Ends the wait for storage that says nothing any more: a disk or a server that hangs would hold a restore for ever.

No read of such a place can be ended: its thread stays until the kernel answers. So everything is read in threads that are
daemons, and the one that waits gives up when nothing arrived for long. What arrives later is dropped: a thread that was
given up writes to nothing but a buffer of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast.base.errors import StorageBusy
from holdfast.base.handler_errors import pass_on
from holdfast.tiers.wire.latch import Changes, Latch

# The slowest storage that is worth waiting for, in either direction.
SLOWEST_BYTES_PER_S = 1 << 20

# So often it is said that something is waited for.
SAY_S = 30.0
# So long a wait that a signal breaks off stays for the chunk that each stream reads; a storage that answers needs less.
RIPE_S = 0.5

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ReadLimit:
    """Limits for how long one piece of reading may bring nothing.

    Args:
        patience_s: so long, and besides as long as the slowest storage takes for what is asked for at once.
        at_once: these bytes.
        where: the place, for the error.
    """

    def __init__(self, patience_s: float, at_once: int, where: str) -> None:
        self.limit_s = patience_s + at_once / SLOWEST_BYTES_PER_S
        self._where = where
        self._moved_s = time.monotonic()
        # Without a lock, which a signal's handler that raises in between would keep.
        self._written = Changes()
        self._writing = deque[None]()  # one for each that writes
        self._is_over = False

    def moved(self, num_bytes: int) -> None:  # noqa: ARG002 - a callback that others count bytes with
        """Takes that something arrived."""
        self._moved_s = time.monotonic()

    def has_ended(self) -> bool:
        """Return whether nobody waits any more for what is read."""
        return self._is_over

    def run(self, work: Callable[[], T]) -> T:
        """Does a work in a thread, and returns what it returns.

        Raises:
            StorageBusy: nothing arrived for long; the thread may go on for itself. Else what the work raises.
        """
        self.moved(0)
        todo, ended, found, failed = deque([work]), Latch(), list[T](), list[BaseException]()

        def do() -> None:
            try:
                found.append(todo.pop()())
            except BaseException as error:  # noqa: BLE001  # raised by whoever waits for it
                failed.append(error)
            ended.set()

        said_s = 0.0
        try:
            try:
                _start(threading.Thread(target=do, name="holdfast reading", daemon=True))
            except RuntimeError as error:  # the system allows no more threads: it is done here, without a limit
                pass_on(error)
                return work()
            while not ended.is_set():
                waited_s = time.monotonic() - self._moved_s
                left_s = self.limit_s - waited_s
                said_s = min(said_s, waited_s)  # something arrived
                if waited_s >= said_s + SAY_S:
                    said_s = waited_s
                    logger.warning(
                        "%s has answered nothing for %.0f s; it is waited for %.0f s", self._where, said_s, self.limit_s
                    )
                if left_s <= 0:
                    raise StorageBusy(
                        f"nothing was read for {self.limit_s:.0f} s",
                        where=self._where,
                        remedy="check the disk or the server, its mount and the kernel's log; a process whose disk hangs ends "
                        "when that answers",
                    )
                ended.wait(min(left_s, SAY_S))
        except StorageBusy:
            self._give_up()
            raise
        except BaseException:
            self._give_up()
            try:
                todo.pop()
            except IndexError:  # somebody has begun it
                ended.wait(min(self.limit_s, RIPE_S))
            raise
        if failed:
            raise failed.pop()
        return found[0]

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """Holds up giving up for the block; False: it has come first, and what was read is nobody's any more."""
        self._writing.append(None)  # before the look: who gives up says so first, and looks then
        try:
            yield not self._is_over
        finally:
            self._writing.pop()
            self._written.tell()

    def _give_up(self) -> None:
        """Nothing is written when this returns, nor later, also if it is interrupted."""
        try:
            self._is_over = True
            while self._writing:
                with self._written.next() as change:
                    if self._writing:
                        change.wait(math.inf)
        except BaseException:
            self._give_up()
            raise


def _start(thread: threading.Thread) -> None:
    """Starts it. What a signal's handler raises meanwhile stays what it is: the standard library may make a RuntimeError of it."""
    before = sys.exc_info()[1]
    try:
        thread.start()
    except RuntimeError as error:
        if error.__context__ is None or error.__context__ is before:
            raise
        raise error.__context__ from None
