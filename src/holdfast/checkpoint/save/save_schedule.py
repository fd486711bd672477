"""Decides when this rank saves, at which level, and when the job stops: cadences, appointments and SIGTERM put
together.

Cadences in steps need no talk. A cadence in seconds is rank 0's: it proposes, and the coordinator's keeper appoints a
step for all ranks (core.scheduling.step_agreement). A stop is agreed in the same way, whoever got the signal. Whether a version is
due for storage needs no agreement: one rank that says so is enough.

An appointment may arrive when this rank is past its step. That is reported at once, from the thread that heard it and
not at the next step, because ranks that keep the appointment of a stop wait there and may keep us from ever finishing
our next step. Called once per step; `take` by the keeper's reader thread.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.base.config import Config
from holdfast.base.errors import ConfigError
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.save.overhead_budget import Budget
from holdfast.core.scheduling.cadence import Cadence
from holdfast.core.scheduling.step_agreement import Appointment, Proposal, Purpose, StepAgreement

# A version is due for storage by the clock at the latest after so many times its cadence.
PUT_OFF_TIMES = 3


@dataclass(frozen=True, slots=True)
class Due:
    """Says what is to be done after a step.

    Attributes:
        save: capture this step.
        durable: and it is due for storage.
        stop: this is the last step, if all ranks can save it.
        missed: steps that the others save and this rank is past.
        propose: proposals for the coordinator.
    """

    save: bool = False
    durable: bool = False
    stop: bool = False
    missed: tuple[int, ...] = ()
    propose: tuple[Proposal, ...] = ()


def parse_cadence(name: str, text: str) -> Cadence:
    """The cadence of a setting.

    Raises:
        ConfigError: not a cadence; names the setting.
    """
    try:
        return Cadence.parse(text)
    except ValueError as error:
        pass_on(error)
        raise ConfigError(str(error), where=name, remedy='write "10", "30s", "10,30s" or "0" for never') from error


class Schedule:
    """The clockwork of one rank.

    Args:
        missed: called with a step that the others save and this rank is past.
        clock: monotonic seconds.
        budget: finds the captured cadence, instead of the setting, once it has measured; None: the setting stands.
        writing: whether the version that was due for storage last is still on its way there.

    Attributes:
        back: as in `MeetingSchedule`; here memory was never gone.
    """

    back = False

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        world_size: int,
        missed: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
        budget: Budget | None = None,
        writing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._budget = budget
        self._writing = writing
        self._capture = parse_cadence("every", config.every)
        self._durable = parse_cadence("durable_every", config.durable_every)
        self._clocked = _by_clock(self._capture, self._durable)
        self._rank = rank
        self._alone = world_size == 1
        self._missed = missed
        self._calendar = StepAgreement(rank)
        # What the coordinator said since the last step, and what of it came late. Without a lock: a signal's handler that strikes
        # in between would keep it, and the thread that hears the keeper could take nothing. Who takes one out answers for it.
        self._numbers = itertools.count()
        self._heard: dict[int, Appointment] = {}
        self._late: deque[Appointment] = deque()
        self._finished = -1
        self._saved_step: int | None = None
        self._clock = clock
        self._capture_s = self._durable_s = clock()

    def after(self, step: int, *, stop_wanted: bool) -> Due:
        """Return what is due now that `step` is finished. Call it exactly once per step."""
        now = self._clock()
        found = self._budget.after_step() if self._budget is not None else None
        if found is not None:
            self._capture = Cadence(steps=found)
            self._clocked = _by_clock(self._capture, self._durable)
        durable = self._is_due(self._durable, step, now, self._durable_s) and not self._is_put_off(now)
        by_steps = self._capture.steps is not None and self._is_due(self._capture, step, now, self._capture_s)
        save = by_steps or (durable and self._durable.steps is not None)
        by_clock = self._clocked is not None and self._is_due(self._clocked, step, now, self._capture_s)
        if self._clocked is self._durable:
            by_clock = by_clock and durable
        if self._alone:
            self._finished = step
            return Due(save or by_clock or stop_wanted, durable or stop_wanted, stop_wanted)
        if by_clock and self._rank == 0:
            self._calendar.want(Purpose.SAVE)
        if stop_wanted:
            self._calendar.want(Purpose.STOP)
        while self._late:
            self._calendar.take(self._late.popleft())
        self._finished = step  # what is heard from here on is late, or taken out here, or of a later step
        for number in tuple(self._heard):
            if (appointment := self._heard.pop(number, None)) is not None:
                self._calendar.take(appointment)
        due = self._calendar.finished(step)
        return Due(save or due.save or due.stop, durable or due.stop, due.stop, due.missed, due.propose)

    def take(self, appointment: Appointment) -> None:
        """The coordinator's word, in whatever thread it arrives."""
        number = next(self._numbers)
        self._heard[number] = appointment
        if appointment.step <= self._finished and self._heard.pop(number, None) is not None:
            self._late.append(appointment)
            self._missed(appointment.step)

    def saved(self, step: int, *, durable: bool) -> None:
        """`step` was saved, for whatever reason."""
        now = self._clock()
        self._saved_step, self._capture_s = step, now
        if self._budget is not None:
            self._budget.saved()
        if durable:
            self._durable_s = now

    def stored(self) -> None:
        """A version was made due for storage by another rank, whose clock was first."""
        self._durable_s = self._clock()

    def _is_put_off(self, now: float) -> bool:
        """Return whether storage by the clock waits: two versions that are written at once take two slots, and as long.

        Not for ever, for a version that storage refuses may never get there.
        """
        seconds = self._durable.seconds if self._durable.needs_agreement else None
        return seconds is not None and now - self._durable_s < PUT_OFF_TIMES * seconds and self._writing()

    def _is_due(self, cadence: Cadence, step: int, now: float, last_s: float) -> bool:
        return cadence.due(step=step, last_step=self._saved_step, now_s=now, last_s=last_s).value


def _by_clock(capture: Cadence, durable: Cadence) -> Cadence | None:
    """The cadence in seconds that decides when to save: of captures, or of storage if there are no captures."""
    if capture.needs_agreement:
        return capture
    return durable if not capture.steps and durable.needs_agreement else None
