"""Tells of steps that are reported while gradients are added up that no version can have.

An optimizer's step ends several turns of the loop, each turn is reported, and the gradients are such as
`checkpoint.entries.gradients_part` does not save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FrameType

from holdfast.checkpoint.usage import user_frames

logger = logging.getLogger(__name__)

_TEXT = (
    "step %d was reported while gradients are added up, and no version has them, for %s: a job that comes back there loses what "
    "was added. Report a step only behind optimizer.step(): if it is called in every Nth turn of the loop, call step() in that turn"
)


# Turns of the loop that are looked at, from the first optimizer step on, and how many of them without one mean an accumulation:
# a scaler of gradients leaves single steps out, and what lies in the gradients then is cleared.
LOOKS = 64
FEWEST = 3


class AccumulationNotice:
    """Looks at the first reported steps.

    Args:
        num_steps: optimizer steps that had begun when the run began.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._turns = self._without = 0

    def look(self, step: int, why_lost: Callable[[], str], num_steps: int, frame: FrameType | None) -> None:
        """Warn, once, if gradients live on behind `step`, which `frame` reported, and are lost."""
        if self._turns > LOOKS:
            return
        stepped, self._num_steps = num_steps != self._num_steps, num_steps
        self._turns += stepped or self._turns > 0
        if stepped or not self._turns or not (why := why_lost()):
            return
        self._without += 1
        if self._without >= FEWEST and self._turns <= 4 * self._without:
            self._turns = LOOKS + 1
            if user_frames.users(frame) is not None:  # adapters keep gradients, or report behind a step only
                logger.warning(_TEXT, step, why)
