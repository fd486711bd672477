"""The pace of replicas: a bound over any time, and a short burst."""

from __future__ import annotations

from holdfast.keeper.replication.rate_limit import BURST_S, Pace


class Clock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def paced(bytes_per_s: int) -> tuple[Pace, Clock]:
    clock = Clock()
    return Pace(bytes_per_s, clock=clock, sleep=clock.sleep), clock


def test_no_more_than_the_bound_leaves_in_any_time() -> None:
    pace, clock = paced(1000)
    for _ in range(100):
        pace.wait(100)
    assert 10.0 - BURST_S - 0.11 <= clock.now_s - 100.0 <= 10.0


def test_a_pause_saves_up_a_short_burst_only() -> None:
    pace, clock = paced(1000)
    pace.wait(100)
    clock.now_s += 60.0
    started = clock.now_s
    for _ in range(20):
        pace.wait(100)
    assert clock.now_s - started >= 2.0 - BURST_S - 0.11


def test_without_a_bound_nothing_waits() -> None:
    pace, clock = paced(0)
    pace.wait(1 << 30)
    assert clock.now_s == 100.0
