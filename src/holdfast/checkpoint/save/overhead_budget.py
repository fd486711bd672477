"""A cadence that is found: how often this job can save for a share of its steps, measured on every rank.

A few reviews in a run (`core.pipeline.bubble_placement.review_due`) look at what a save stopped the trainer for since the last one, and at
what is left to copy where no wait hides it. All ranks exchange that and decide alike, so that they save the same steps;
this is the only collective between restore and close, at steps that every rank counts alike.

Called once per step, in the trainer's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.base.config import parse_share
from holdfast.base.events import Events
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.checkpoint.pipeline.bubbles import Bubbles
from holdfast.core.pipeline import bubble_placement as bubbles
from holdfast.core.pipeline.bubble_placement import Load

logger = logging.getLogger(__name__)

_STALLS = ("save_seconds", "fence_wait_seconds")


class Budget:
    """The cadence of one rank, from restore to restore.

    Args:
        share: `"0.5%"`: what saving may cost of a step.
        tell: called with the decision in words, when it changes.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        share: str,
        *,
        group: Ranks,
        events: Events,
        bubbles: Bubbles | None,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = parse_share(share)
        self._group = group
        self._events = events
        self._bubbles = bubbles
        self._tell = tell
        self._clock = clock
        self._num_steps = self._since = self._num_saves = 0
        self._every = 0
        self._call = 0.0  # of the last save that was measured
        self._restart()

    def saved(self) -> None:
        """A save was made."""
        self._num_saves += 1

    def after_step(self) -> int | None:
        """Every how many steps to save from now on (0: never), if that was reviewed now; collective then."""
        self._num_steps += 1
        if self._num_steps == bubbles.UNLIKE_STEPS:
            self._restart()
        if not bubbles.review_due(self._num_steps):
            return None
        loads = [Load(*row) for row in collectives.gather_json(self._group, self._measured())]
        decision = bubbles.reviewed(self._every, loads, budget=self._share)
        if decision.value != self._every:
            logger.info("cadence: %s", decision.reason)
        self._every = decision.value
        self._events.emit("cadence", every=decision.value, reason=decision.reason)
        self._tell(decision.reason)
        self._restart()
        return decision.value

    def _measured(self) -> tuple[float, float, float]:
        """Since the last review: seconds that a save stops the step, seconds that copies in no wait cost, seconds of a step."""
        stalled = self._stalled() - self._stalled_before
        if self._num_saves:
            self._call = stalled / self._num_saves
        steps = self._num_steps - self._since
        period = (self._clock() - self._began_s - stalled) / steps
        return self._call, self._bubbles.left_cost if self._bubbles else 0.0, period

    def _restart(self) -> None:
        self._since, self._num_saves = self._num_steps, 0
        self._began_s, self._stalled_before = self._clock(), self._stalled()

    def _stalled(self) -> float:
        counters = self._events.counters()
        return sum(counters.get(name, 0.0) for name in _STALLS)
