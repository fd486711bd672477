"""The threads that allocate the pages of slots: together on one slot, and what is waited for first comes first.

Every slot is cut into runs; a thread takes the next run of the earliest turn, whosever slot it is. So the first slot of
every rank is there before the second of any, and one rank alone is served by all threads. The threads begin with the
first slot and end with the last; a run takes a fraction of a second, and `stop` waits for the runs in hand.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.base.errors import MemoryRefused
from holdfast.tiers.memory.slots import Slot, patience_s
from holdfast.tiers.memory.usable_cores import usable_cores

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0
MAX_THREADS = 32
# Every so many-th core allocates: trainers import, load and train meanwhile.
CORES_PER_THREAD = 4
LEAST_THREADS = 2

Done = Callable[[MemoryRefused | None], None]


@dataclass(slots=True, eq=False)
class _Filling:
    """A slot on its way.

    Attributes:
        left: runs that no thread has finished.
        fault: why it will never be complete.
    """

    slot: Slot
    done: Done
    left: int
    fault: MemoryRefused | None = None


class Populator:
    """Allocates pages; one per keeper.

    Args:
        num_threads: at most (`share_of_cores`).
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._runs: list[tuple[int, int, int, int, _Filling]] = []
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._num_alone = 0

    def start(self, slot: Slot, done: Done, *, turn: int = 0) -> None:
        """Begins with a slot that was promised; calls `done(None)` in a thread once it is complete, or `done(fault)`.

        All slots of an earlier turn come first.

        Raises:
            MemoryRefused: `stop` was called.
        """
        runs = slot.runs()
        filling = _Filling(slot, done, len(runs))
        with self._lock:
            if self._stopping:
                raise MemoryRefused("the keeper ends", remedy="try again")
            for start, length in runs:
                heapq.heappush(self._runs, (turn, next(self._numbers), start, length, filling))
            self._start_threads()

    @contextmanager
    def first_turn_alone(self) -> Iterator[None]:
        """Begins no run of a later turn in the block: who reads into a slot of the first needs the cores and the memory."""
        with self._lock:
            self._num_alone += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_alone -= 1
                try:
                    self._start_threads()
                except RuntimeError as error:  # what was done in the block stands
                    logger.warning("later slots wait until more memory is asked for: %s", error)

    def fill(self, slot: Slot) -> None:
        """Does the same and waits for it.

        Raises:
            MemoryRefused: the kernel has no memory left, or it takes longer than any machine should need.
        """
        ended = threading.Event()
        faults: list[MemoryRefused | None] = []

        def done(fault: MemoryRefused | None) -> None:
            faults.append(fault)
            ended.set()

        self.start(slot, done)
        limit_s = patience_s(slot.total_bytes)
        if not ended.wait(limit_s):
            raise MemoryRefused(
                f"{slot.total_bytes} bytes were not allocated within {limit_s:.0f} s",
                remedy="see what holds this node up",
            )
        if faults[0] is not None:
            raise faults[0]

    def stop(self) -> None:
        """Ends the threads after the runs in hand; what is not complete never will be."""
        with self._lock:
            self._stopping = True
            self._start_threads()
            threads = set(self._threads)
        for thread in threads:
            thread.join(JOIN_TIMEOUT_S)

    def _start_threads(self) -> None:
        """Start as many as there is work for. Under the lock."""
        while self._has_work() and len(self._threads) < min(self._num_threads, len(self._runs)):
            thread = threading.Thread(target=self._run, name="holdfast pages", daemon=True)
            thread.start()
            self._threads.add(thread)

    def _has_work(self) -> bool:
        """Return whether a run may be begun. Under the lock."""
        return bool(self._runs) and (self._stopping or not self._num_alone or self._runs[0][0] == 0)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._has_work():
                    self._threads.discard(threading.current_thread())
                    return
                _, _, start, length, filling = heapq.heappop(self._runs)
                skip = self._stopping or filling.fault is not None
            fault = MemoryRefused("the keeper ends") if skip else _allocate(filling.slot, start, length)
            with self._lock:
                filling.fault = filling.fault or fault
                filling.left -= 1
                is_last = filling.left == 0
            if is_last:
                self._finish(filling)

    def _finish(self, filling: _Filling) -> None:
        try:
            filling.done(filling.fault or _complete(filling.slot))
        except Exception:  # the top of the thread: the other slots are somebody else's
            logger.exception("a slot of %d bytes was lost", filling.slot.total_bytes)


def _allocate(slot: Slot, start: int, length: int) -> MemoryRefused | None:
    try:
        slot.allocate(start, length)
    except MemoryRefused as error:
        return error
    except ValueError:
        return _unwanted()
    return None


def _complete(slot: Slot) -> MemoryRefused | None:
    try:
        slot.complete()
    except ValueError:
        return _unwanted()
    return None


def _unwanted() -> MemoryRefused:
    """The slot was closed meanwhile."""
    return MemoryRefused("the memory was given back before it was complete")


def share_of_cores(fewest: int = LEAST_THREADS) -> int:
    """Return how many threads a keeper has for pages, or for hashing: a quarter of the cores that this process may use.

    Args:
        fewest: threads on a machine of few cores.
    """
    num_cores = usable_cores()
    return min(num_cores, MAX_THREADS, max(fewest, num_cores // CORES_PER_THREAD))
