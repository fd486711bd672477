"""Lets one thread at a time do something, also where threads are interrupted at any moment.

The lock is always given back: for an exception that another thread or a signal raises here, `with` and a lock of the
interpreter's own are one step. A context manager in Python would not be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from holdfast.base.errors import LevelNotReached

T = TypeVar("T")


class OneAtATime:
    """Makes others wait. Who comes again in the middle of its own call, by a signal's handler, is refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0  # the thread that has it, or had it last

    def run(self, call: Callable[[], T]) -> T:
        """Returns what `call` returns.

        Raises:
            LevelNotReached: this thread is in the middle of a call already.
        """
        if self._holder == threading.get_ident() and self._lock.locked():
            raise LevelNotReached("a copy was asked for in the middle of another, by the same thread")
        with self._lock:
            try:
                self._holder = threading.get_ident()
                return call()
            finally:
                self._holder = 0
