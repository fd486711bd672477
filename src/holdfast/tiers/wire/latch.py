"""Something that happens once, or again and again, and the threads that wait for it.

Events and conditions of the standard library hold a lock while a thread begins to wait. A signal's handler that strikes there keeps that lock
from the thread that would set the event, and may wait for that thread, or for the event itself, without end. Here nobody
holds anything between two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Latch:
    """Is set once and stays so. Any thread, and a signal's handler in the middle of any of these."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[threading.Lock] = deque()  # each held; it is let go to wake who waits for it

    def is_set(self) -> bool:
        """Return whether it happened."""
        return self._is_set

    def set(self) -> None:
        """It happened: all that wait go on."""
        self._is_set = True
        with suppress(IndexError):
            while True:
                self._waiters.popleft().release()

    def wait(self, timeout_s: float) -> bool:
        """Waits until it happened, at most so long; returns whether it did."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            if not self._is_set:  # else who set it may not have seen us
                waiter.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX))
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)
        return self._is_set


class Changes:
    """Happens again and again. Any thread, and a signal's handler in the middle of any of these."""

    def __init__(self) -> None:
        self._awaited: deque[Latch] = deque()

    def tell(self) -> None:
        """One happened: all that wait go on."""
        with suppress(IndexError):
            for _ in range(len(self._awaited)):
                self._awaited.popleft().set()

    @contextmanager
    def next(self) -> Iterator[Latch]:
        """Gives what is set by the next one. Whoever looks within the block, and then waits for it, misses none."""
        change = Latch()
        self._awaited.append(change)
        try:
            yield change
        finally:
            with suppress(ValueError):
                self._awaited.remove(change)
