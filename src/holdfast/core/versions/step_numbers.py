"""Judges whether the number of a finished step can be right: what `restore()` returned comes first, and then they grow.

A number that is one more than the step that was made is not seen in a run that nobody disturbs; after a restart a step is missing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import SupportsIndex


@dataclass(frozen=True, slots=True)
class Reason:
    """A number that is wrong.

    Attributes:
        what: one sentence.
        remedy: what to change.
    """

    what: str
    remedy: str


# A version's name has room for sixteen digits; a longer one is no name, so nobody would find the version again.
MAX_STEP = 10**16 - 1


def as_number(step: SupportsIndex) -> int | Reason:
    """Returns a step as a plain whole number, also of NumPy and torch, or why it is none that a version can be named by."""
    try:
        number = int(operator.index(step))
    except (TypeError, ValueError, RuntimeError):  # torch raises what it likes for a tensor of several elements
        kind = f"{type(step).__module__}.{type(step).__qualname__}".removeprefix("builtins.")
        return Reason(f"a step is a whole number, and this is {kind}", "count finished steps: 0, 1, 2, ..")
    if not 0 <= number <= MAX_STEP:
        return Reason(
            f"a version cannot be named by step {number}", f"count finished steps from 0, to {MAX_STEP} at most"
        )
    return number


def why_not(step: int, *, newest: int, start: int, one_more: bool) -> Reason | None:
    """Returns why `step` cannot be the next number; None if it can.

    Args:
        step: the number that is told.
        newest: the one before; -1 if there is none.
        start: what `restore()` returned.
        one_more: the text of the loop says that the first number is one more than `start`.
    """
    if step == newest:
        return Reason(f"step {step} was reported twice", "report every finished step once")
    if step < newest:
        return Reason(
            f"step {step} was reported after step {newest}", "report every finished step once, in ascending order"
        )
    if newest >= 0:
        return None
    if step < start:
        return Reason(
            f"step {step} was reported first, and restore() returned {start}: the steps before it are made already",
            "go on at the step that restore() returned: for step in range(start, steps)",
        )
    if one_more and step == start + 1:
        return Reason(
            f"step {step} was reported first, and restore() returned {start}: after a restart that step would be left out, "
            f"for restore() returns the number behind the one that was reported last",
            "report the number of the step that was made: step(step), and count behind it",
        )
    return None


def is_one_off(start: int, first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Tell whether the first two numbers after a restart show that a step was left out.

    Args:
        start: what `restore()` returned.
        first: its number, and how many optimizer steps were made since `restore()`.
        second: its number, and how many were made since the first.
    """
    if start == 0:  # a loop may count from one
        return False
    return first[0] == start + 1 and second[0] == first[0] + 1 and first[1] == second[1] > 0
