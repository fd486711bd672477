"""Threads that are lent to whoever has something to do: few of them, however many connections there are.

Work waits for a thread when `most` are at work. Who is about to wait for something else (a copy from another node, a
peer that proves itself) steps aside: that thread does not count while it waits, so it holds nobody up. A thread that has
had nothing to do for a while ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

IDLE_S = 30.0


class ThreadPool:
    """Lends threads until `stop`.

    Args:
        most: threads at work at once, without those that stepped aside.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._num_aside = 0
        self._stopping = False

    def lend(self, work: Callable[[], None]) -> None:
        """Does `work` in a thread, at once if there is one. It MUST handle its own errors."""
        with self._changed:
            self._work.append(work)
            self._hire()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around what a thread of the thread pool waits in."""
        with self._changed:
            self._num_aside += 1
            self._hire()
        try:
            yield
        finally:
            with self._changed:
                self._num_aside -= 1

    def stop(self, timeout_s: float) -> None:
        """Lets the threads finish all work that waits, for so long, and ends them."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _hire(self) -> None:
        """Sees to it that somebody does what waits. Under the lock."""
        if not self._work:
            return
        self._changed.notify()
        if self._num_idle < len(self._work) and len(self._threads) - self._num_aside < self._most:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread is left for now: the work waits for one that is free, or the next
                logger.warning("%s: %s", self._name, error)
            else:
                self._threads.add(thread)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:  # the top of the thread: others are served all the same
                logger.exception("%s failed", self._name)

    def _next(self) -> Callable[[], None] | None:
        """The next piece of work; None: this thread is not needed any more."""
        with self._changed:
            too_many = len(self._threads) - self._num_aside > self._most
            if not self._work and not too_many:
                self._num_idle += 1
                self._changed.wait_for(lambda: bool(self._work) or self._stopping, IDLE_S)
                self._num_idle -= 1
            if self._work and not too_many:
                return self._work.popleft()
            self._threads.discard(threading.current_thread())
            return None
