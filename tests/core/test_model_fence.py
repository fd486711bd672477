"""Every order of a save, its copy, steps, waits and signals, with the real rules of the fence, and with each taken out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.core.versions import late_copy_rules
from holdfast.core.versions.late_copy_rules import Who
from model_check import fence
from model_check.fence import check
from sample_kit import sampled

Patch = pytest.MonkeyPatch
Calls = tuple[str, ...]

TRAINERS: list[Calls] = [
    ("save", "step"), ("save", "step", "save", "step"), ("save", "step that saves", "step"), ("save", "save", "step"),
    ("step that saves", "save", "step that saves"),
]  # fmt: skip
OTHERS: list[Calls] = [(), ("wait",), ("wait", "wait"), ("settle",), ("step",), ("step", "wait"), ("settle", "step")]


@pytest.mark.parametrize("trainer", sampled(((trainer,) for trainer in TRAINERS), (TRAINERS[2],)), ids="-".join)
def test_no_order_of_events_mixes_two_steps_or_waits_for_ever(trainer: Calls) -> None:
    for other in OTHERS:
        for signals in (0, 1, 2):
            result = check(trainer, other, signals=signals)
            assert result.invariant == "", "\n".join((f"beside {other}", *result.story))
            assert result.num_states > 6


def waits_open_it(patch: Patch) -> None:
    """As it was: whoever waits takes the copy out of the fence, and the next step runs into it."""
    patch.setattr(late_copy_rules, "opens", lambda who, *, ended: ended or who is Who.WAIT)


def steps_do_not_wait(patch: Patch) -> None:
    patch.setattr(late_copy_rules, "opens", lambda who, *, ended: ended or who is Who.STEP)


def settling_opens_it_at_once(patch: Patch) -> None:
    patch.setattr(late_copy_rules, "opens", lambda who, *, ended: ended or who is Who.SETTLE)


def late_within_a_step(patch: Patch) -> None:
    patch.setattr(late_copy_rules, "may_be_late", lambda **_: True)


def steps_of_others_do_not_count(patch: Patch) -> None:
    patch.setattr(late_copy_rules, "is_void", lambda **_: False)


def steps_under_way_do_not_count(patch: Patch) -> None:
    patch.setattr(late_copy_rules, "is_void", lambda *, steps_before, steps_now, **_: steps_before != steps_now)


def saves_within_saves(patch: Patch) -> None:
    patch.setattr(fence, "refuses_nested", lambda: False)


def handlers_wait_for_their_thread(patch: Patch) -> None:
    patch.setattr(fence, "reenters", lambda: False)


PLANTED: list[tuple[Callable[[Patch], None], Calls, Calls, int, str]] = [
    (waits_open_it, ("save", "step"), ("wait",), 0, "S23"),
    (steps_do_not_wait, ("save", "step"), (), 0, "S23"),
    (settling_opens_it_at_once, ("save", "step"), ("settle",), 0, "S23"),
    (late_within_a_step, ("step that saves",), (), 0, "S12"),
    (late_within_a_step, ("step",), (), 1, "S12"),
    (steps_of_others_do_not_count, ("save",), ("step",), 0, "S12"),
    (steps_under_way_do_not_count, ("save",), ("step",), 0, "S12"),
    (saves_within_saves, ("save",), (), 1, "S23"),
    (handlers_wait_for_their_thread, ("save", "step"), (), 1, "S19"),
]


@pytest.mark.parametrize(
    ("plant", "trainer", "other", "signals", "expected"), PLANTED, ids=lambda item: getattr(item, "__name__", "")
)
def test_a_rule_that_is_missing_is_missed(
    plant: Callable[[Patch], None], trainer: Calls, other: Calls, signals: int, expected: str, monkeypatch: Patch
) -> None:
    assert check(trainer, other, signals=signals).invariant == ""
    plant(monkeypatch)
    result = check(trainer, other, signals=signals)
    assert result.invariant == expected, f"nothing found in {result.num_states} states"
    assert len(result.story) <= 16
