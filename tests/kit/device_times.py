"""A device whose events the test lets happen."""

from __future__ import annotations


class Device:
    """A device whose time is set by hand; its events are passed when it has come that far."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.queued_ms = 0.0

    def event(self) -> Event:
        return Event(self, self.queued_ms)


class Event:
    def __init__(self, device: Device, at_ms: float) -> None:
        self.device, self.at_ms = device, at_ms

    def query(self) -> bool:
        return self.device.now_ms >= self.at_ms

    def elapsed_time(self, later: Event) -> float:
        assert later.query(), "elapsed_time of an event that has not come waits for the device"
        return later.at_ms - self.at_ms
