"""When a script runs again in its process, and which deaths are one failure."""

from __future__ import annotations

import signal

import pytest

from holdfast.core.elastic.rerun import BURST_S, EARLY_S, Burst, Leftover, cannot_run_twice, why_not


def test_nothing_left_is_no_reason_and_many_things_are_named_shortly() -> None:
    assert why_not([]) == ""
    assert why_not([Leftover("threads", ())]) == ""
    assert why_not([Leftover("threads", ["a"]), Leftover("files", list("bcdef"))]) == "threads: a; files: b, c, d ..."


@pytest.mark.parametrize(
    ("given", "proves"),
    [
        ({}, True),
        ({"again": False}, False),
        ({"num_steps": 1}, False),
        ({"num_steps": -1}, True),
        ({"ran_s": EARLY_S}, False),
        ({"condemned": True}, False),
        ({"code": -signal.SIGKILL}, False),
        ({"code": -signal.SIGSEGV}, True),
    ],
)
def test_an_error_before_the_first_step_of_a_second_run_proves_it(given: dict[str, int], proves: bool) -> None:
    facts = {"again": True, "num_steps": 0, "ran_s": 1.0, "code": 1, "condemned": False}
    assert cannot_run_twice(**{**facts, **given}) is proves  # type: ignore[arg-type]


def test_others_that_die_within_moments_of_the_order_are_part_of_one_failure() -> None:
    burst = Burst()
    assert not burst.joins([1], 0.0), "nothing failed before"
    burst.failed([1])
    assert burst.joins([2], 100.0), "the order is not given yet"
    burst.ordered(100.0, survivors=True)
    assert burst.joins([3], 100.0 + BURST_S)
    assert not burst.joins([4], 100.1 + BURST_S)


def test_a_rank_that_dies_again_is_counted_again() -> None:
    burst = Burst()
    burst.failed([1])
    burst.ordered(0.0, survivors=True)
    assert burst.joins([2], 0.5)
    burst.ordered(0.6, survivors=True)
    assert not burst.joins([1], 0.7)
    assert not burst.joins([2, 3], 0.7)


def test_order_after_another_nodes_failure_opens_a_burst() -> None:
    burst = Burst()
    burst.ordered(0.0, survivors=False)
    assert not burst.joins([1], 0.1)
    burst.ordered(10.0, survivors=True)
    assert burst.joins([1], 10.1)
    burst.ordered(11.0, survivors=True)
    assert not burst.joins([1], 11.1), "an order within the burst makes it no longer"


def test_a_burst_ends_also_where_nobody_survived() -> None:
    burst = Burst()
    burst.failed([0])
    burst.ordered(0.0, survivors=False)
    assert not burst.joins([1], BURST_S + 1.0)
