"""What people are told of the waits of a pipeline."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.bubbles import Window, place
from holdfast.core.idle import Idle
from holdfast.train.idle import FIRST_STEPS, Teller
from holdfast.train.pipeline import MEMORY, Profile


def measured(num_steps: int) -> Profile:
    return Profile({}, idle=0.031, period=0.12, ending=0.0, num_steps=num_steps)


def test_it_is_logged_once_when_enough_was_measured_and_told_again_when_all_is_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "holdfast.train.idle")
    told: list[Idle] = []
    now = 0
    bubbles: Any = SimpleNamespace(profile=lambda: measured(now))
    teller = Teller(bubbles, told.append)
    fits, too_much = (place([0.004] * number, [Window(0, 0.02)]) for number in (4, 6))

    def versions(number: int, placement: Any = fits, copy_s: float = 0.016) -> None:
        nonlocal now
        for _ in range(number):
            now += 1
            teller.placed(placement, copy_s)

    versions(FIRST_STEPS - 1)
    assert told == []
    versions(1)
    reason = "idle 31.0 ms of a step of 120.0 ms; all 4 chunks (16.0 ms) fit into 20.0 ms of waits"
    assert told == [Idle(idle_s=0.031, period_s=0.12, copy_s=0.016, left_s=0.0, reason=reason)]
    assert caplog.messages == [f"waits: {reason}"]
    versions(MEMORY - 1, too_much, 0.024)
    assert len(told) == 1
    versions(1, too_much, 0.024)
    assert told[1].left_s == pytest.approx(0.008), "two chunks fit into no wait: every step is too often to be free"
    assert len(told) == 2
    assert len(caplog.messages) == 1, "once is enough for a log"
