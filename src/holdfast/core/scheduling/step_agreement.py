"""Agreeing on a step without a collective: "save at step S", "stop after step S".

A rank proposes (its clock says that a save is due, or it got SIGTERM); the coordinator answers all ranks with one
step that lies ahead of the proposer. Ranks may run apart, so a rank can be past S when the word arrives: it gives
version S up and, for a stop, proposes again; the others see version S abandoned and go on to the next appointment.
So a wrong guess costs time, never consistency. Pure: the coordinator's keeper has the Diary, trainers have the
StepAgreement.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# How far ahead of the proposer: one step may be under way on every rank, and the word needs a moment.
MARGIN_STEPS = 2
# A proposal that nobody answered (the coordinator died) is repeated after this many steps.
REPEAT_STEPS = 20


class Purpose(enum.Enum):
    """Names what is to happen at the agreed step."""

    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Proposal:
    """`rank` finished `step` and asks for `purpose` soon."""

    purpose: Purpose
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Appointment:
    """All ranks do `purpose` when they have finished `step`."""

    purpose: Purpose
    step: int


class Diary:
    """The coordinator's side: one open appointment per purpose."""

    def __init__(self) -> None:
        self._open: dict[Purpose, Appointment] = {}

    def propose(self, proposal: Proposal) -> Appointment:
        """The appointment that answers the proposal; the standing one if it still lies ahead of the proposer."""
        standing = self._open.get(proposal.purpose)
        if standing is None or standing.step <= proposal.step:
            standing = Appointment(proposal.purpose, proposal.step + MARGIN_STEPS)
            self._open[proposal.purpose] = standing
        return standing


@dataclass(frozen=True, slots=True)
class Due:
    """Says what a finished step asks for.

    Attributes:
        save, stop: do it now.
        missed: appointed steps that this rank is already past; their versions are to be given up.
        propose: send these proposals.
    """

    save: bool = False
    stop: bool = False
    missed: tuple[int, ...] = ()
    propose: tuple[Proposal, ...] = ()


class StepAgreement:
    """A rank's side: what it wants, what was appointed."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._wanted: dict[Purpose, int | None] = {}
        self._appointed: dict[Purpose, Appointment] = {}

    def want(self, purpose: Purpose) -> None:
        """Something local asks for `purpose`; it is proposed at the end of the current step."""
        self._wanted.setdefault(purpose, None)

    def take(self, appointment: Appointment) -> None:
        """The coordinator's word; a later one for the same purpose replaces an earlier one."""
        known = self._appointed.get(appointment.purpose)
        if known is None or appointment.step > known.step:
            self._appointed[appointment.purpose] = appointment

    def finished(self, step: int) -> Due:
        """`step` is done: what is due, what was missed, what to propose."""
        due = dict.fromkeys(Purpose, False)
        missed: list[int] = []
        for purpose, appointment in tuple(self._appointed.items()):
            if appointment.step > step:
                continue
            del self._appointed[purpose]
            if appointment.step == step:
                due[purpose] = True
                self._wanted.pop(purpose, None)
            else:
                missed.append(appointment.step)
                if purpose is Purpose.STOP:
                    self._wanted[purpose] = None
        return Due(due[Purpose.SAVE], due[Purpose.STOP], tuple(missed), self._proposals(step))

    def _proposals(self, step: int) -> tuple[Proposal, ...]:
        proposals = []
        for purpose, asked in self._wanted.items():
            ahead = self._appointed.get(purpose)
            if ahead is None and (asked is None or step - asked >= REPEAT_STEPS):
                self._wanted[purpose] = step
                proposals.append(Proposal(purpose, self._rank, step))
        return tuple(proposals)
