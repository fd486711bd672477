"""Bugs that are planted in the ranks of a case, each with a case that finds it: so the red team is known to see.

What keepers may get wrong is planted in the matrix of faults (`holdfast.testing.faults`) and in the crash drill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.capture.late_copy_check import CopyCheck
from holdfast.checkpoint.capture.optimizer_fence import Fence
from holdfast.checkpoint.capture.twin_comparison import Shared
from holdfast.checkpoint.save.save_completion import SaveCompletion
from holdfast.checkpoint.state.optimizer_extras import OptimizerExtras
from holdfast.checkpoint.state.step_observer import Steps
from planted.crash import always, put
from redteam.case import Case


@dataclass(frozen=True)
class Planted:
    """A bug: what it does, and a case in which it shows."""

    plant: Callable[[], None]
    case: Case


def _unchecked() -> None:
    """Copies are not compared with what was seen at the call, which would find out what comes before them."""
    put(SaveCompletion, "_wrong", always(""))
    put(CopyCheck, "moved", always(set()))


def _open_fence() -> None:
    """No step waits for a copy."""
    real = Fence._before_step

    def passes(fence: Fence) -> None:
        if fence._open is not None and not fence._open.done.is_set():
            fence._open = None
        real(fence)

    put(Fence, "_before_step", passes)
    _unchecked()


def _waits_open_it() -> None:
    """Whoever waits for the copy, in whichever thread, takes it out of the fence."""
    real = Fence._wait

    def settle(fence: Fence, timeout_s: float = 0.0) -> None:
        job = fence._open
        if job is not None and not job.done.is_set():
            fence._open = None
            real(fence, job)

    put(Fence, "settle", settle)
    _unchecked()


def _rest_of_a_step() -> None:
    """A save within a step is copied late, as any other."""
    put(Steps, "under_way", always(set()))
    _unchecked()


def _twins_believed() -> None:
    """What ranks of one node share is not compared."""
    put(Shared, "words", lambda shared, _: bytes(8 * len(shared.names)))


def _handed_forgotten() -> None:
    """What an optimizer hands out beyond its state and groups is not kept."""
    put(OptimizerExtras, "more", always(None))


def torn(call: str, **more: Any) -> Case:
    """The version of the call is the newest when the rank is killed behind it."""
    return Case(
        **{"state": "big", "copies": "torn", "fault": "kill", "moment": "behind the call", "call": call, **more}
    )


BUGS: dict[str, Planted] = {
    "no step waits": Planted(_open_fence, torn("wait_in_a_thread")),
    "waits open the fence": Planted(_waits_open_it, torn("wait_in_a_thread")),
    "copies are not checked": Planted(_unchecked, torn("swapped_and_waited")),
    "the rest of a step is not waited for": Planted(_rest_of_a_step, torn("post_hook_that_saves")),
    "twins of a node are believed": Planted(_twins_believed, torn("ranks_differ", state="small", world=2, shared=True)),
    "handed out state is forgotten": Planted(_handed_forgotten, Case(state="handed")),
}


def apply(name: str) -> None:
    """Plants the bug in this process."""
    if name:
        BUGS[name].plant()
