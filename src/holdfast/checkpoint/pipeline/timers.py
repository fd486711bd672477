"""Tells when something began and ended: by the wall clock on a processor, by events in the stream on an accelerator.

An accelerator runs behind the program that feeds it, and its waits never block the host. So moments there are events, recorded
where the program is and read once the device has passed them; nobody ever waits for one. Until then what depends on
them is kept in order. Seconds on the axis of `time.perf_counter`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from holdfast.checkpoint.device.accelerator import device_of

# What may be left to read; a device that is further behind loses its oldest measurements, nothing else. A bound.
MAX_UNREAD = 50_000


class Clock(Protocol):
    """Marks moments and tells them."""

    def mark(self) -> Any:
        """This moment."""

    def tell(self, hear: Callable[..., None], *marks: Any) -> None:
        """Calls `hear(*seconds)` once these moments are known; calls come in the order of `tell`."""


class HostClock:
    """Every moment is known at once."""

    mark = staticmethod(time.perf_counter)

    def tell(self, hear: Callable[..., None], *marks: Any) -> None:
        """At once."""
        hear(*marks)


class DeviceClock:
    """Moments of one device, in the order of its current stream.

    Args:
        event: makes one that is recorded in the current stream now; for tests.
    """

    def __init__(self, device: torch.device, *, event: Callable[[], Any] | None = None) -> None:
        self._device = device
        self._event = event or self._recorded
        self._unread: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque(maxlen=MAX_UNREAD)
        self._first: Any = None
        self._first_s = 0.0

    def mark(self) -> Any:
        """An event behind all that the current stream holds now."""
        made = self._event()
        if self._first is None:
            self._first, self._first_s = made, time.perf_counter()
        return made

    def tell(self, hear: Callable[..., None], *marks: Any) -> None:
        """Tell times as soon as the device has passed them and somebody tells the next ones."""
        self._unread.append((hear, marks))
        while self._unread and all(mark.query() for mark in self._unread[0][1]):
            told, passed = self._unread.popleft()
            told(*(self._first_s + self._first.elapsed_time(mark) / 1e3 for mark in passed))

    def _recorded(self) -> Any:
        interface = device_of(self._device.type)
        return interface.record(interface.current_stream(self._device))


def clock_of(device: Any) -> Clock:
    """The clock of a stage that computes on `device`; None is the processor."""
    kind = getattr(device, "type", "cpu")
    return HostClock() if kind in ("cpu", "meta") else DeviceClock(device)
