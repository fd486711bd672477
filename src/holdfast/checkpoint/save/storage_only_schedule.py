"""The schedule of a job without a level in memory: what `checkpoint.save.save_schedule` is where keepers appoint steps.

Only what is due for storage is saved. Cadences in steps need no talk; for one in seconds, and for a stop, the ranks meet
in a collective at steps that they all know (`core.scheduling.storage_only_steps`). Called once per step, with the same
steps on every rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from holdfast.base.config import Config
from holdfast.base.errors import LevelNotReached
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.job.collectives import AT_END, LeftBehind, Meeting, Ranks
from holdfast.checkpoint.save.save_schedule import Due, parse_cadence
from holdfast.core.scheduling import storage_only_steps
from holdfast.core.scheduling.step_agreement import Appointment
from holdfast.core.scheduling.storage_only_steps import MeetingInput


class MeetingSchedule:
    """The clockwork of one rank.

    Args:
        root: of the checkpoints.
        could: in a job that had memory: whether this rank could have it again. A save is due at the first meeting then.
        clock: monotonic seconds.

    Attributes:
        back: all ranks could have memory again; known to all after the same step.
    """

    def __init__(
        self,
        config: Config,
        group: Ranks,
        root: str,
        *,
        could: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.back = False
        self._could = could
        self._is_overdue = could is not None
        self._cadence = parse_cadence("durable_every", config.durable_every)
        self._group, self._root = group, root
        self._clock = clock
        self._saved_s = self._met_s = clock()
        self._saved_step: int | None = None
        self._met_step: int | None = None
        self._next_step = -1
        self._longest = 0

    def after(self, step: int, *, stop_wanted: bool) -> Due:
        """Return what is due now that `step` is finished. Collective at some steps. Call it exactly once per step."""
        now = self._clock()
        due = self._cadence.due(step=step, last_step=self._saved_step, now_s=now, last_s=self._saved_s).value
        overdue, self._is_overdue = self._is_overdue and self._cadence.is_set, False
        by_steps = due and self._cadence.steps is not None
        if self._group.world_size == 1:
            if self._could is not None and now - self._met_s >= storage_only_steps.MAX_GAP_S:
                self._met_s, self.back = now, self._could()
            due = due or overdue or stop_wanted
            return Due(due, due, stop_wanted)
        if step < self._next_step:
            return Due(by_steps, by_steps)
        could = self._could is not None and self._could()
        meeting = Meeting(self._group, step, 0, self._root)
        try:
            found = self._meet(
                meeting, step, now, MeetingInput(stop_wanted, (due and not by_steps) or overdue, memory=could)
            )
        except BaseException as error:  # who waits for this rank is told first
            meeting.leave(error)
            pass_on(error)
            if not isinstance(error, LevelNotReached):
                raise
            # A handler took a rank out of this meeting, or of the one at which a later step was named.
            self._next_step = max(step + 1, error.step if isinstance(error, LeftBehind) and error.step < AT_END else 0)
            return Due(by_steps, by_steps)
        self.back = found.memory
        return Due(by_steps or found.save, by_steps or found.save, found.stop)

    def take(self, appointment: Appointment) -> None:
        """A keeper's word means nothing here: what it appoints needs slots."""

    def saved(self, step: int, *, durable: bool) -> None:  # noqa: ARG002 - all are
        """`step` was saved, or tried."""
        self._saved_step, self._saved_s = step, self._clock()

    def _meet(self, meeting: Meeting, step: int, now: float, word: MeetingInput) -> storage_only_steps.Outcome:
        gap = 0 if self._met_step is None else step - self._met_step
        wait_s = storage_only_steps.MAX_GAP_S
        if self._cadence.needs_agreement and not word.save:
            wait_s = (self._cadence.seconds or 0.0) - (now - self._saved_s)
        following = storage_only_steps.next_step(
            step=step, gap=gap, longest=self._longest, elapsed_s=now - self._met_s, wait_s=wait_s
        )
        self._longest = max(self._longest, gap)
        said = json.dumps([word.stop, word.save, following, word.memory]).encode()
        told = meeting.gather(said)
        found = storage_only_steps.outcome([MeetingInput(*json.loads(row)) for row in told])
        self._met_step, self._met_s, self._next_step = step, now, found.next_step
        return found
