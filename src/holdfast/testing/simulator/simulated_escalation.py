"""The escalation policy of a simulated job: core.elastic.escalation says what is done about every fault, and what comes of it is judged.

Faults of a script are modelled as a curse: one rank dies whenever it comes to one step. Half of them lie in the newest
version and go with it, the others never end. What must hold: who can be helped by an older version gets it before the
job stops, nobody goes back further without need, a first failure restarts and stops nothing (V4), and no number of
failures goes on for ever (V2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.elastic.escalation import EscalationPolicy, Failure, Fault, Limits, RecoveryAction, RecoveryDecision
from holdfast.core.model import Version
from holdfast.testing.simulator.clock import Violation

# Failures without a step in between after which something must have ended; the escalation policy itself needs fewer.
BOUND = 12
LIMITS = Limits(failures=10_000)


@dataclass(slots=True)
class Curse:
    """`rank` dies at `step`; `curable`: not any more once the job came back from before its newest version."""

    rank: int
    step: int
    curable: bool
    strikes: int = 0


class Climb:
    """Climbs back from storage alone, for one job.

    Args:
        recover: brings the job back, with the reason.
        kill: ends the process of a rank; lose: ends all, with what the launchers keep for them.
    """

    def __init__(self, *, recover: Callable[[str], None], kill: Callable[[int], None], lose: Callable[[], None]):
        self._recover, self._kill, self._lose = recover, kill, lose
        self._ladder = EscalationPolicy(LIMITS)
        self._since: list[tuple[Failure, RecoveryDecision]] = []
        self._best = -1
        self.curse: Curse | None = None
        self.wants_older = False
        self.answers: Counter[str] = Counter()

    def strikes(self, step: int) -> bool:
        """Before a step is made: whether the curse does."""
        curse = self.curse
        if curse is None or curse.step != step:
            return False
        curse.strikes += 1
        self._kill(curse.rank)
        self.failed(Fault.PROCESS, f"rank {curse.rank} fails at step {step}", rank=curse.rank, step=step)
        return True

    def made(self, step: int) -> None:
        """A step is made by all ranks."""
        if step > self._best:
            self._best = step
            self._ladder.progressed()
            self._since.clear()
            if self.curse is not None and self.curse.step < step:
                self.curse = None  # it was passed over

    def came_back(self, version: Version | None, newest: Version | None) -> None:
        """The job resumed from `version`; without the wish for an older one it would have been `newest`."""
        if version != newest and self.curse is not None and self.curse.curable:
            self.curse = None
        self.wants_older = False

    def failed(self, fault: Fault, why: str, *, rank: int = -1, step: int = -1) -> None:
        """Something failed: the escalation policy's answer is carried out."""
        failure = Failure(fault, rank, step, why)
        answer = self._ladder.failed(failure)
        self._judge(failure, answer)
        self._since.append((failure, answer))
        self.answers[answer.action.value] += 1
        self.wants_older = answer.older
        if answer.action in (RecoveryAction.RESTART_ALL, RecoveryAction.STOP):
            self._lose()
        if (
            answer.action is RecoveryAction.STOP
        ):  # somebody reads the summary, mends the script, and starts the job again
            self._ladder, self.curse = EscalationPolicy(LIMITS), None
            self._since.clear()
        self._recover(f"{why}: {answer.action.value}{', older version' if answer.older else ''}")

    def _judge(self, failure: Failure, answer: RecoveryDecision) -> None:
        before, curse = len(self._since), self.curse
        if answer.action in (RecoveryAction.RESTART_ALL, RecoveryAction.STOP) and before < LIMITS.attempts_per_action:
            raise Violation("V4", f"{answer.action.value} after {before} other failures without a step in between")
        if before >= BOUND and answer.action is not RecoveryAction.STOP and failure.fault is not Fault.NODE:
            raise Violation("V2", f"{before} failures without a step in between, and the job goes on failing")
        tried_older = any(known.older for _, known in self._since)
        if (
            answer.action is RecoveryAction.STOP
            and curse is not None
            and curse.curable
            and curse.strikes > 2
            and not tried_older
        ):
            raise Violation("V2", "the job stops, and an older version would have helped")
        same = sum((known.rank, known.step) == (failure.rank, failure.step) for known, _ in self._since)
        if answer.older and same < LIMITS.same_place - 1:
            raise Violation("S8", f"an older version is taken after {same} failures at the same place")
