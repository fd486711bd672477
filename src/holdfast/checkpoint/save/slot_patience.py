"""Bounds how long a save may wait for a free slot, so that storage or a replica that takes long holds up no training.

A save that is due by the cadence may hold a step up: at most `begin_timeout_s`, and all of them together a share of the
time that passes. What is saved up of that share is the credit of the next one. Where storage writes for minutes, or a replica is
on its way, the first saves use it up; those that follow are left out at once, and the job runs on at its own speed.
Pure but for the clock.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

# Of the time that passes.
SHARE = 0.01
# So many times `begin_timeout_s` may be saved up, and is there at the start.
MOST_TIMES = 3
# An answer that comes so soon held nothing up: a round trip to the keeper, or another rank that is a little later.
FREE_S = 0.005


class Waits(enum.Enum):
    """Says who asked for a save, and so how long it may wait."""

    DUE = "due"  # the cadence
    ASKED = "asked"  # the script
    LAST = "last"  # the end of a training: nothing is held up, and it cannot be made up for


class SlotPatience:
    """The credit of one rank.

    Args:
        begin_s: how long one save may wait, in seconds.
        close_s: how long the last one may.
        clock: monotonic seconds.
    """

    def __init__(self, begin_s: float, close_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._begin_s, self._close_s = begin_s, close_s
        self._clock = clock
        self._credit_s = MOST_TIMES * begin_s
        self._since_s = clock()

    def seconds(self, why: Waits) -> float:
        """Return how long a save that begins now may wait."""
        if why is Waits.LAST:
            return max(self._begin_s, self._close_s)
        if why is Waits.ASKED:
            return self._begin_s
        now = self._clock()
        self._credit_s = min(MOST_TIMES * self._begin_s, self._credit_s + SHARE * (now - self._since_s))
        self._since_s = now
        return min(self._begin_s, max(0.0, self._credit_s))

    @property
    def in_debt(self) -> bool:
        """Return whether steps were held up for longer than they may be."""
        return self._credit_s < 0.0

    def spend(self, waited_s: float) -> None:
        """A step was held up for so long by a save that was due."""
        self._credit_s -= max(0.0, waited_s - FREE_S)
