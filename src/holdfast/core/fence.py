"""Rules of a copy that runs behind a save: who takes it out of the fence, what is copied late, when it is void.

`train.fence` and `train.saver` carry them out; `testing.model_fence` runs them in every order of events. Section 11 of the
protocol states them.
"""

from __future__ import annotations

from enum import Enum, auto


class Who(Enum):
    """Who comes to the fence while a copy is in it."""

    STEP = auto()  # of an optimizer that may write the state, in any thread
    SAVE = auto()  # the next one
    SETTLE = auto()  # the caller of `settle()`, who wants to write the state
    WAIT = auto()  # who waits for a level, flushes, or closes


def opens(who: Who, *, ended: bool) -> bool:
    """Returns whether `who` takes the copy out of the fence.

    Args:
        who: comes to the fence.
        ended: the copy is complete or given up, or a device is told to go on only behind it.
    """
    return ended and who is not Who.WAIT


def may_be_late(*, within_step: bool) -> bool:
    """Returns whether anything may be copied after the call: not if the caller is within a step, whose rest passes no fence."""
    return not within_step


def is_void(*, others_within: bool, steps_before: int, steps_now: int) -> bool:
    """Returns whether the state that a call looked at may be a mixture.

    Args:
        others_within: another thread was within a step when the call began.
        steps_before: steps that had begun then.
        steps_now: steps that have begun when the copy stands in the fence, or is complete; whoever begins later waits for it.
    """
    return others_within or steps_before != steps_now
