"""Bounds how fast this node sends replicas: a bound in bytes per second.

One Pace per keeper, shared by all connections that carry replicas; restores do not pass here. Before each block the
sender asks and waits; nothing is queued, so whoever waits holds no memory but the slot that its pin keeps. When blocks
leave, beside the waits of the trainers or in them, is another matter (`keeper.slots.idle_windows`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# What may leave at once after a pause; more would be a burst, less would cost throughput.
BURST_S = 0.05


class Pace:
    """A bucket of tokens that fills with time. Any thread.

    Args:
        bytes_per_s: the bound; 0 for none.
        clock, sleep: replaced in tests.
    """

    def __init__(
        self,
        bytes_per_s: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at_s = 0.0  # when what was let through so far has left at the bounded speed

    def wait(self, num_bytes: int) -> None:
        """Returns when `num_bytes` may leave."""
        delay_s = self._delay(num_bytes)
        if delay_s > 0:
            self._sleep(delay_s)

    def _delay(self, num_bytes: int) -> float:
        if not self.bytes_per_s:
            return 0.0
        with self._lock:
            now = self._clock()
            begin = max(self._free_at_s, now - BURST_S)
            self._free_at_s = begin + num_bytes / self.bytes_per_s
            return begin - now
