"""Tells how far long work is, in words: bytes done of bytes to do, rate, time left. Said once it has lasted a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# What takes less is not worth a line; and so often is said how far it is.
QUIET_S = 2.0

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    power = 0
    while abs(num_bytes) >= 1024 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.0f} B" if power == 0 else f"{num_bytes:.1f} {_UNITS[power]}"


def progress_text(done_bytes: float, total_bytes: float, seconds: float) -> str:
    """`2.0 MiB of 8.0 MiB, 512.0 KiB/s, 12 s left`."""
    rate = done_bytes / seconds if seconds > 0 else 0.0
    left = f"{max(0.0, total_bytes - done_bytes) / rate:.0f} s left" if rate else "not moving yet"
    return f"{size_text(done_bytes)} of {size_text(total_bytes)}, {size_text(rate)}/s, {left}"


class Meter:
    """Counts bytes that several threads move; every QUIET_S, but not before, it says how far they are.

    Args:
        total_bytes: what is to be done.
        say: called with (bytes done, seconds) in the thread that counted last; must be quick.
    """

    def __init__(self, total_bytes: int, say: Callable[[int, float], None]) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._say = say
        self._started_s = self._said_s = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Since the work began."""
        return time.monotonic() - self._started_s

    def add(self, num_bytes: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self.done_bytes = min(self.done_bytes + num_bytes, self.total_bytes)
            now = time.monotonic()
            if now - self._said_s < QUIET_S:
                return
            self._said_s = now
        self._say(self.done_bytes, now - self._started_s)
