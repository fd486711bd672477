"""Several streams to one place: a store often gives one stream a small part of what it gives many.

How many go at once is learnt from the place itself: eight at first, twice as many as long as that makes it faster by a
tenth. What they did is told in the order in which it was begun, by the thread that began it. The first error ends all,
and nothing runs any more when the block is left: a descriptor may be closed then, a buffer given to something else. The
threads are daemons, for a place that hangs must not keep a process from ending.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType

from holdfast.base.handler_errors import pass_on

# What one stream moves in one call.
UNIT_BYTES = 8 << 20
FIRST_STREAMS = 8
MOST_STREAMS = 32
# So many times faster it has to become by twice as many.
GAIN = 1.1
# A trial is so many units per stream; after so many trials without a change the next number is tried once more.
UNITS_PER_TRIAL = 2
TRIALS_BETWEEN = 64

# Requests to an object store are more, and each holds what it moves in memory.
MOST_REQUESTS = 64
BUFFERED_SHARE = 8


def requests_at_once(num_bytes: int, part_bytes: int = UNIT_BYTES) -> int:
    """Returns how many parts of an object may be in memory at once: an eighth of it, or as many as one begins with."""
    return max(FIRST_STREAMS, min(MOST_REQUESTS, num_bytes // (BUFFERED_SHARE * part_bytes)))


class StreamCount:
    """Holds how many streams one place is worth in one direction. Any thread may call it."""

    def __init__(self, *, first: int = FIRST_STREAMS, most: int = MOST_STREAMS) -> None:
        self.now = first
        self._most = most
        self._lock = threading.Lock()
        self._fewer_rate = 0.0  # what half as many moved; 0: not known
        self._rest = 0

    def learn(self, count: int, bytes_per_s: float) -> None:
        """Takes what so many streams moved in one trial."""
        with self._lock:
            if count != self.now:
                return  # a trial that began before the last change
            if self._rest:
                self._rest -= 1
                self._fewer_rate = 0.0
            elif self._fewer_rate and bytes_per_s < GAIN * self._fewer_rate:
                self.now, self._rest = max(1, count // 2), TRIALS_BETWEEN
            elif 2 * count <= self._most:
                self.now, self._fewer_rate = 2 * count, bytes_per_s

    def failed(self, count: int) -> None:
        """Takes that a request failed while so many shared the way: the next time half as many do, and for a while."""
        with self._lock:
            if count == self.now:
                self.now, self._rest = max(1, count // 2), TRIALS_BETWEEN


class Streams:
    """Does work of one kind, some of it at once: `with Streams(count, at_once, done) as streams: streams.put(work)`.

    Args:
        count: how many the place is worth; it learns from this.
        at_once: never more than so many, the one that is put included. 1: the caller's own thread does it.
        done: told the bytes that each work moved, in the order of `put`, by the thread that puts.
    """

    def __init__(self, count: StreamCount, at_once: int, done: Callable[[int], None]) -> None:
        self._count = count
        self._at_once = at_once
        self._done = done
        self._running: deque[Future[int]] = deque()
        self._errors: list[BaseException] = []
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._over = False
        self._began_s, self._trial, self._units, self._bytes = time.monotonic(), count.now, 0, 0

    def __enter__(self) -> Streams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.drain()
        finally:
            self._over = True
            self._join()

    def put(self, work: Callable[[], int]) -> None:
        """Begins a work. When this returns, fewer than `at_once` are under way.

        Raises:
            BaseException: what the first work that failed raised; nothing more is begun then.
        """
        if self._at_once == 1:
            self._done(work())
            return
        future: Future[int] = Future()
        self._running.append(future)
        self._works.put(partial(self._do, work, future))
        if len(self._threads) < len(self._running):
            self._start()
        self._wait(min(self._count.now, self._at_once) - 1)

    def drain(self) -> None:
        """Waits until nothing is under way; raises as `put`."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._running) > left or (self._running and self._running[0].done()):
            if self._errors:
                raise self._errors[0]
            num_bytes = self._running.popleft().result()
            self._measure(num_bytes)
            self._done(num_bytes)
        if self._errors:
            raise self._errors[0]

    def _start(self) -> None:
        """Starts one more thread. Where the system allows none, those that run do the work, or the caller's own."""
        thread = threading.Thread(target=self._stream, name="holdfast stream", daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError as error:
            pass_on(error)
            self._threads.remove(thread)
            if not self._threads and (do := self._works.get()) is not None:
                do()

    def _stream(self) -> None:
        while (do := self._works.get()) is not None:
            do()

    def _do(self, work: Callable[[], int], future: Future[int]) -> None:
        """Does a work in one of the threads; after an error, or when the block is left, it moves nothing."""
        try:
            future.set_result(0 if self._errors or self._over else work())
        except BaseException as error:  # noqa: BLE001  # raised by whoever waits for it
            self._errors.append(error)
            future.set_exception(error)

    def _join(self) -> None:
        """Waits for the threads, also if that is interrupted: what they use is the caller's again afterwards."""
        for _ in self._threads:
            self._works.put(None)
        interrupted: BaseException | None = None
        for thread in self._threads:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as error:  # noqa: BLE001  # raised below
                    interrupted = error
        if interrupted is not None:
            raise interrupted

    def _measure(self, num_bytes: int) -> None:
        if self._trial != self._count.now:
            self._began_s, self._trial, self._units, self._bytes = time.monotonic(), self._count.now, 0, 0
        self._units += 1
        self._bytes += num_bytes
        if self._units < UNITS_PER_TRIAL * self._trial:
            return
        now = time.monotonic()
        if self._at_once >= self._trial:
            self._count.learn(self._trial, self._bytes / max(now - self._began_s, 1e-6))
        self._began_s, self._trial, self._units, self._bytes = now, self._count.now, 0, 0
