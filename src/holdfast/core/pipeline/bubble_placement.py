"""Decides which chunks of a checkpoint are copied in which idle window of a step, and how often that is free.

The source of a version is still that version until the optimizer's next step, so its windows are the waits of one step.
Chunks are placed in order, first window first, and each window keeps a guard: a chunk that would end in it is not begun.
What fits in no window is copied beside the work, at once, and counted; correctness never depends on the prediction.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.model import Decision

# Part of a window that stays free: predictions are medians, and a chunk that runs over delays the schedule's own work.
GUARD_SHARE = 0.1
# A cadence sparser than this is no longer "often": the overlapped copy is used instead.
MAX_EVERY = 1000
# Steps of a run that say nothing of later ones: shapes are inferred, connections made, late copies not yet proven.
UNLIKE_STEPS = 8
# Steps after which a cadence is reviewed: soon, once more when things have settled, then seldom, for stages drift.
FIRST_REVIEWS = (16, 64)
REVIEW_EVERY = 512
# A cadence that keeps its budget stays unless another one saves so many times as often.
WORTH_CHANGING = 1.5


@dataclass(frozen=True, slots=True)
class Window:
    """An idle span of one rank in one step: before the action at `index` of its order, so many seconds."""

    index: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Placed:
    """Chunks `first` up to, not including, `end` are copied in the window before the action at `index`."""

    index: int
    first: int
    end: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """A version's chunks over the windows of one step.

    Attributes:
        windows: in the order of the step; windows without a chunk are left out.
        left: first chunk that fits in no window; so many are copied beside the work as it and those after it.
        left_seconds: how long that takes.
        reason: one sentence.
    """

    windows: tuple[Placed, ...]
    left: int
    left_seconds: float
    reason: str

    @property
    def hidden_seconds(self) -> float:
        """Copy time inside windows."""
        return sum(placed.seconds for placed in self.windows)


def place(chunk_seconds: Sequence[float], windows: Sequence[Window], *, guard: float = GUARD_SHARE) -> Placement:
    """Places chunks into windows, in order of both.

    Args:
        chunk_seconds: expected time of each chunk.
        windows: of one step, in the order in which they come.
        guard: share of every window that stays free, 0 to 1.
    """
    placed: list[Placed] = []
    at = 0
    for window in windows:
        first, used, room = at, 0.0, window.seconds * (1 - guard)
        while at < len(chunk_seconds) and used + chunk_seconds[at] <= room:
            used += chunk_seconds[at]
            at += 1
        if at > first:
            placed.append(Placed(window.index, first, at, used))
    left = sum(chunk_seconds[at:])
    total = sum(chunk_seconds)
    return Placement(tuple(placed), at, left, _reason(at, len(chunk_seconds), left, total, windows))


def _reason(at: int, count: int, left: float, total: float, windows: Sequence[Window]) -> str:
    idle = sum(window.seconds for window in windows)
    if not count:
        return "nothing is to be copied"
    if at == count:
        return f"all {count} chunks ({total * 1e3:.1f} ms) fit into {idle * 1e3:.1f} ms of waits"
    if not windows:
        return f"there is no wait in a step: {left * 1e3:.1f} ms are copied beside the work"
    return (
        f"{at} of {count} chunks fit into {idle * 1e3:.1f} ms of waits; {left * 1e3:.1f} ms are copied beside the work"
    )


@dataclass(frozen=True, slots=True)
class Load:
    """Says what one save costs one rank, beyond what its waits hide.

    Attributes:
        call: seconds that `save` itself takes.
        left: seconds of work that copying costs which fits in no wait.
        period: seconds of a step.
    """

    call: float
    left: float
    period: float


def highest_cadence(loads: Sequence[Load], *, budget: float) -> Decision[int]:
    """Every how many steps to save so that no rank's predicted overhead is above `budget` (a share of a step).

    The slowest rank decides, because the others wait for it. 0 if even MAX_EVERY steps are too few.
    """
    if not loads or any(load.period <= 0 for load in loads):
        return Decision(0, "no step was measured yet")
    cost, rank = max(((load.call + load.left) / load.period, rank) for rank, load in enumerate(loads))
    every = max(1, -int(-cost // budget)) if budget > 0 else MAX_EVERY + 1
    if every > MAX_EVERY:
        return Decision(
            0, f"a save costs {cost:.1%} of a step on rank {rank}; no cadence keeps that under {budget:.2%}"
        )
    share = cost / every
    return Decision(every, f"a save costs {cost:.2%} of a step on rank {rank}; every {every} steps it is {share:.2%}")


def review_due(num_steps: int) -> bool:
    """Return whether a cadence is reviewed after so many steps of a run; the same on every rank that counts them."""
    return num_steps in FIRST_REVIEWS or (num_steps > 0 and num_steps % REVIEW_EVERY == 0)


def reviewed(every: int, loads: Sequence[Load], *, budget: float) -> Decision[int]:
    """The cadence from now on, given that it was `every` (0: none yet, or none that fits).

    Measurements vary, so a cadence that keeps its budget stays unless another one saves much more often.
    """
    best = highest_cadence(loads, budget=budget)
    if best.value and best.value <= every < WORTH_CHANGING * best.value and every != best.value:
        return Decision(every, f"every {every} steps stays within {budget:.2%}: {best.reason}")
    return best
