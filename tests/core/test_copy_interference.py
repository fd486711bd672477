"""What copies cost the work beside them, from times alone."""

from __future__ import annotations

import pytest

from holdfast.core.pipeline.copy_interference import LEAST_S, Drag

WORK = 0.010


def after(drag: Drag, extra: float, copies: list[tuple[float, float]], *, times: int = 4) -> float | None:
    """Actions of `WORK`, eight of them alone; then some that take `extra` longer, with copies at these offsets in each."""
    now = 0.0
    for _ in range(8):
        drag.acted("0F", now, now + WORK)
        now += 2 * WORK
    for _ in range(times):
        for start, end in copies:
            drag.copied(now + start, now + end)
        drag.acted("0F", now, now + WORK + extra)
        now += 2 * WORK
    drag.acted("end", now, now)
    return drag.share


@pytest.mark.parametrize(("extra", "expected"), [(0.0, 0.0), (0.002, 0.5), (0.004, 1.0), (-0.001, 0.0)])
def test_it_is_the_time_lost_per_time_copied_beside(extra: float, expected: float) -> None:
    assert after(Drag(), extra, [(0.001, 0.003), (0.005, 0.007)]) == pytest.approx(expected)


def test_only_the_overlapping_part_of_a_copy_counts() -> None:
    assert after(Drag(), 0.002, [(-0.001, 0.004)]) == pytest.approx(0.5)


def test_nothing_is_claimed_from_nothing() -> None:
    assert after(Drag(), 0.002, []) is None
    assert after(Drag(), 0.002, [(0.001, 0.001 + LEAST_S / 10)]) is None
    assert after(Drag(), 0.002, [(-0.005, 0.0)]) is None  # a copy in a wait before it


def test_an_action_that_was_never_seen_alone_tells_nothing() -> None:
    drag = Drag()
    for step in range(20):
        drag.copied(step + 0.001, step + 0.003)
        drag.acted("1B", step, step + WORK)
    assert drag.share is None


def test_a_copy_that_ends_after_the_action_is_counted() -> None:
    drag = Drag()
    for step in range(8):
        drag.acted("0F", step, step + WORK)
    for step in range(8, 16):
        drag.acted("0F", step, step + WORK + 0.003)
        drag.copied(step + 0.007, step + 0.050)  # told only now
    drag.acted("0F", 99.0, 99.0 + WORK)
    assert drag.share == pytest.approx(0.003 / 0.006)
