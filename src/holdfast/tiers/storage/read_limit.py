"""Ends the wait for storage that says nothing any more: a disk or a server that hangs would hold a restore for ever.

No read of such a place can be ended: its thread stays until the kernel answers. So everything is read in threads that are
daemons, and the one that waits gives up when nothing arrived for long. What arrives later is dropped: a thread that was
given up writes to nothing but a buffer of its own.

Called by `checkpoint.restore`, and by `checkpoint.checkpointer`, `checkpoint.job.bootstrap` and `keeper.rpc.paths` for what comes before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

from holdfast.base.errors import StorageBusy

# The slowest storage that is worth waiting for, in either direction.
SLOWEST_BYTES_PER_S = 1 << 20

# So often it is said that something is waited for.
SAY_S = 30.0

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
        self._changed = threading.Condition()
        self._num_writing = 0
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
        future: Future[T] = Future()
        thread = threading.Thread(target=_do, args=(work, future), name="holdfast reading", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads: it is done here, without a limit
            return work()
        said_s = 0.0
        try:
            while not future.done():
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
                wait([future], min(left_s, SAY_S))
        except StorageBusy:
            self._give_up()
            raise
        except BaseException:
            self._give_up()
            thread.join(self.limit_s)  # each stream ends with the chunk that it reads
            raise
        return future.result()

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """Holds up giving up for the block; False: it has come first, and what was read is nobody's any more."""
        with self._changed:
            if not self._is_over:
                self._num_writing += 1
            is_wanted = not self._is_over
        try:
            yield is_wanted
        finally:
            if is_wanted:
                with self._changed:
                    self._num_writing -= 1
                    self._changed.notify_all()

    def _give_up(self) -> None:
        """Nothing is written when this returns, nor later, also if it is interrupted."""
        interrupted: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._is_over = True
                    self._changed.wait_for(lambda: not self._num_writing)
                break
            except BaseException as error:  # noqa: BLE001  # raised below
                interrupted = error
        if interrupted is not None:
            raise interrupted


def _do(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  # raised by whoever waits for it
        future.set_exception(error)
