"""Tells what people are told of a pipeline's waits: how long this rank is idle in a step, and whether a checkpoint fits
there.

One line in the log once enough steps were measured, and the same for `holdfast status`, kept fresh. Told when the copies of
a version were placed into the waits, in the copying thread, so that the trainer's never does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.checkpoint.pipeline.bubbles import MEMORY, Bubbles
from holdfast.core.pipeline.bubble_placement import Placement
from holdfast.core.pipeline.idle_stats import Idle

logger = logging.getLogger(__name__)

# Steps after which means of a step are worth telling: the first ones are like no later ones.
FIRST_STEPS = 16


class IdleReporter:
    """Tells of the waits of one rank, from restore to restore.

    Args:
        tell: passes it on to the keeper.
    """

    def __init__(self, bubbles: Bubbles, tell: Callable[[Idle], None]) -> None:
        self._bubbles = bubbles
        self._tell = tell
        self._until_next = 0

    def placed(self, placement: Placement, copy_s: float) -> None:
        """The copies of a version, which take so long in all, were placed into the waits of a step."""
        if self._until_next > 1:
            self._until_next -= 1
            return
        profile = self._bubbles.profile()
        if profile.num_steps < FIRST_STEPS:
            return
        told = Idle(
            idle_s=profile.idle,
            period_s=profile.period,
            copy_s=copy_s,
            left_s=placement.left_seconds,
            reason=f"idle {profile.idle * 1e3:.1f} ms of a step of {profile.period * 1e3:.1f} ms; {placement.reason}",
        )
        if not self._until_next:
            logger.info("waits: %s", told.reason)
        self._until_next = MEMORY  # until then a part of the mean is what was told already
        self._tell(told)
