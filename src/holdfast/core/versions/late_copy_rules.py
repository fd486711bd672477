"""Rules of a copy that runs behind a save: who takes it out of the fence, what is copied late, when it is void.

And of a run that is left while a device is behind its host: in which order, and what of it counts (S20).

`checkpoint.capture.optimizer_fence`, `checkpoint.save.memory_saver`, `checkpoint.survivors.survivor_state` and `elastic.worker.worker_main` carry them out; `tests/model_check/fence.py` and `tests/model_check/device.py`
run them in every order of events. Sections 11 and 12 of the protocol state them.
"""

from __future__ import annotations

from enum import Enum, auto


class Who(Enum):
    """Names who comes to the fence while a copy is in it."""

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


# The order in which a run is left. A collective that is cut or aborted ends, and what a device has queued behind it runs on.
LEAVING = ("void", "cut", "abort")


def counts(*, broke_off: bool, passed_by_then: bool) -> bool:
    """Returns whether what was saved, or noted as the state of a step, is what it says.

    Args:
        broke_off: the run is void.
        passed_by_then: the device had finished it when the run became void, and the host had read it.
    """
    return passed_by_then or not broke_off


def is_result(*, left: bool) -> bool:
    """Returns whether the good end of a process is one of the job: not if its run is being left, or was."""
    return not left
