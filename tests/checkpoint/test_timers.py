"""Moments of a device are told when it has passed them, in order, and never waited for."""

from __future__ import annotations

import torch

from holdfast.checkpoint.pipeline.timers import DeviceClock, HostClock, clock_of
from kit.device_times import Device


def test_what_a_device_has_not_passed_is_told_later_and_in_order() -> None:
    device = Device()
    clock = DeviceClock(torch.device("cuda"), event=device.event)
    heard: list[tuple[str, float]] = []
    for name, length_ms in (("a", 5.0), ("b", 20.0), ("c", 1.0)):
        began = clock.mark()
        device.queued_ms += length_ms
        clock.tell(lambda began, ended, name=name: heard.append((name, ended - began)), began, clock.mark())
    assert heard == [], "the host is ahead of the device"
    device.now_ms = 6.0
    clock.tell(lambda: None)
    assert [name for name, _ in heard] == ["a"]
    device.now_ms = 100.0
    clock.tell(lambda: None)
    assert [(name, round(1e3 * seconds)) for name, seconds in heard] == [("a", 5), ("b", 20), ("c", 1)]


def test_a_processor_has_the_wall_clock() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    assert isinstance(clock_of(torch.device("cuda", 0)), DeviceClock)
