"""Decides whether a script may run again in its process, and which deaths follow one failure.

A script runs again in its process only if the last run left nothing that the next one could meet: a thread that writes,
a library that was set up for another group, a second model in memory. What was left is seen by `elastic.worker.run_leftovers`; here is
what follows from it. A process that is not clean is replaced by a fork, which is no failure. What holds for one rank's
process will hold for others of the same job, so from the first such finding on the whole job replaces.

No clock: times are arguments, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# How long after an order a death of another rank counts as part of the failure that led to the order.
BURST_S = 2.0
# Of a script that tells no steps: what fails later is not taken for what a second run cannot bear.
EARLY_S = 600.0
MAX_NAMED = 3
# Ends of a process that come from outside of it: they say nothing of its script.
_FROM_OUTSIDE = (-1, -2, -9, -15)  # hang-up, interrupt, kill, terminate


@dataclass(frozen=True, slots=True)
class Leftover:
    """Things of one kind that a run left in its process.

    Attributes:
        kind: what they are, as a plural.
        names: of the things, for people.
    """

    kind: str
    names: Sequence[str] = ()


def why_not(left: Iterable[Leftover]) -> str:
    """Return why the script may not run again in this process; empty if it may."""
    return "; ".join(
        f"{one.kind}: {', '.join(list(one.names)[:MAX_NAMED])}{' ...' if len(one.names) > MAX_NAMED else ''}"
        for one in left
        if one.names
    )


def cannot_run_twice(*, again: bool, num_steps: int, ran_s: float, code: int, condemned: bool) -> bool:
    """Return whether an end proves that the script cannot run twice in one process, and no more than that.

    Args:
        again: the process had run the script before.
        num_steps: that it made in this run; below 1 if none is known.
        ran_s: how long it ran this time.
        code: its exit code; negative: the signal.
        condemned: the watchdog ended it.
    """
    return again and num_steps < 1 and ran_s < EARLY_S and not condemned and code not in _FROM_OUTSIDE


@dataclass(slots=True)
class Burst:
    """The deaths that follow one failure: ranks that were hit by the interruption where they could not bear it.

    A rank that dies a second time is never part of it, so a script that always fails is counted every time.
    """

    _ranks: set[int] = field(default_factory=set)
    _until_s: float = -math.inf

    def failed(self, ranks: Iterable[int]) -> None:
        """A failure was counted; the order that follows is not given yet."""
        self._ranks, self._until_s = set(ranks), math.inf

    def ordered(self, now: float, *, survivors: bool) -> None:
        """Everybody got an order; `survivors`: some run already, so it is because somebody failed, here or elsewhere."""
        if self._until_s == math.inf:
            self._until_s = now + BURST_S
        elif survivors and now > self._until_s:
            self._ranks, self._until_s = set(), now + BURST_S

    def joins(self, ranks: Iterable[int], now: float) -> bool:
        """Return whether the deaths of these ranks belong to the failure before; they are part of it from now on."""
        died = set(ranks)
        if now > self._until_s or self._ranks & died:
            return False
        self._ranks |= died
        return True
