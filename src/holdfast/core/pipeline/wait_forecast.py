"""The waits of a step as they were measured, and so as they are expected: learnt, not described.

The waits of a schedule come in the same order at every step, so the n-th wait is known by its number. What is expected of
it is a low quantile of the last few: a window that is believed too long delays the schedule's own work, one that is
believed too short leaves some idle time unused. Drift shows after a few steps, without asking anybody; a wait that the
last step did not have is no longer believed at all.

Pure: all times are arguments, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from holdfast.core.pipeline.bubble_placement import Window

# Steps that a prediction rests on: few, so that drift is followed within seconds.
MEMORY = 8
# The quantile of these that is believed.
QUANTILE = 0.25
# Waits of one step that are told apart; a schedule with more shares the last one. A bound, for nothing may grow (S15).
MAX_WAITS = 4096
# The keeper's work is held back for a step at most, so that all its waits come by, and never longer than this: a third
# of the shortest patience that saves have with replicas (`core.versions.replication_lag`).
MAX_HOLD_S = 1.5


def has_room(until_s: float | None, now_s: float, seconds: float) -> bool:
    """Return whether what takes so many seconds may begin in a wait that should last until then; None: nobody knows.

    What lasts longer than ever may end at any moment or never; either way one chunk is all it can cost.
    """
    return until_s is None or now_s + seconds <= until_s or now_s >= until_s


@dataclass(frozen=True, slots=True)
class Shown:
    """Holds what a rank shows of its waits.

    Attributes:
        number: of the wait that is under way, from 1; 0: it computes.
        until_s: when that wait should end; infinite: nobody knows.
        period_s: seconds of a step; 0: not known yet.
    """

    number: int
    until_s: float
    period_s: float


def patience_s(shown: Shown) -> float:
    """Return how long a transfer, or the hashing of a version, is held back in all; a page without a number is no
    reason for more.
    """
    return min(MAX_HOLD_S, shown.period_s)


def may_begin(shown: Shown, now_s: float, seconds: float, *, held_s: float) -> bool:
    """Return whether a block that takes so many seconds may begin, of work that was held back for `held_s` already.

    In a wait with room; and at any time once the waits of a whole step came by, for safety does not depend on them.
    """
    if held_s >= patience_s(shown):
        return True
    return bool(shown.number) and has_room(shown.until_s, now_s, seconds)


class Waits:
    """Holds what is known of the waits of one rank's step."""

    def __init__(self) -> None:
        self._seen: list[deque[float]] = []
        self._at = 0
        self.num_steps = 0

    @property
    def index(self) -> int:
        """The number of the wait that comes next, or of the one that is under way."""
        return min(self._at, MAX_WAITS - 1)

    def begin_step(self) -> None:
        """The next wait is the first of a step. Of the waits before only those of the last step are still expected."""
        self._seen = self._seen[: self._at]  # a new one: the copying thread may be looking at the old one
        self._at = 0
        self.num_steps += 1

    def forget(self) -> None:
        """Nothing is expected any more, until it is seen again."""
        self._seen, self._at = [], 0

    def ended(self, seconds: float) -> None:
        """The wait with number `index` is over and took this long."""
        index = self.index
        if index == len(self._seen):
            self._seen.append(deque([seconds], maxlen=MEMORY))
        else:
            self._seen[index].append(seconds)
        self._at += 1

    def expected(self, index: int) -> float | None:
        """Seconds that this wait takes at least, most of the time; None if it was never seen."""
        seen = self._seen
        if index >= len(seen):
            return None
        ordered = sorted(seen[index])
        return ordered[int(QUANTILE * (len(ordered) - 1))]

    @property
    def known(self) -> bool:
        """Return whether a step has waits at all, as far as the last ones were seen."""
        return bool(self._seen)

    def windows(self) -> tuple[Window, ...]:
        """The waits of a step as they are expected, in order."""
        expected = ((index, self.expected(index)) for index in range(len(self._seen)))
        return tuple(Window(index, seconds) for index, seconds in expected if seconds)
