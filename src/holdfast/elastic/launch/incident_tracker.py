"""Knows what failed on this node and what became of it: the escalation policy is asked here, and every recovery becomes one
incident.

A case is opened when a failure is found and closed when steps are made again. Seconds by part: T1 from the finding to
the order that everybody gets, T2 until all local workers run the script again, T3 until the first step after that
(groups, loading), T4 what of it was compilation, T0 what it takes to make the lost steps again, at the pace of before.
Where each rank came back from it says itself (`alive.tell`); parts that nobody told of are left out.

Times are monotonic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.liveness.heartbeat_page import Reading
from holdfast.core.elastic.escalation import EscalationPolicy, Failure, Fault, Limits, RecoveryAction, RecoveryDecision
from holdfast.core.elastic.rerun import Burst
from holdfast.core.elastic.worker_facts import Phase

# Of workers that tell no steps: running for so long is taken for the first step, and for progress.
WITHOUT_BEATS_S = 1.0
PROGRESS_S = 5.0
RENEWED_S = 600.0


@dataclass(slots=True)
class _OpenIncident:
    """One recovery that is under way.

    Attributes:
        step: the newest step of before; step_s: what one took.
        over_s: when all seemed to be over at the last look; 0 if it did not.
        restored: per rank what it told: step, source.
    """

    facts: dict[str, Any]
    found_s: float
    step: int
    step_s: float
    ordered_s: float = 0.0
    running_s: float = 0.0
    over_s: float = 0.0
    restored: dict[int, Mapping[str, Any]] = field(default_factory=dict)


class IncidentTracker:
    """Keeps the cases of one agent."""

    def __init__(self, limits: Limits) -> None:
        self._ladder = EscalationPolicy(limits)
        self._case: _OpenIncident | None = None
        self._best_step = -1
        self._saved = -1  # the newest step that was saved, or came back from somewhere, as workers told
        self._beyond = -1  # of these the newest at the last failure: only what comes after it is progress that lasts
        self._ordered_s = 0.0
        self._burst = Burst()

    @property
    def saved_step(self) -> int:
        """The newest step that workers told to be safe; -1 if they told of none."""
        return self._saved

    @property
    def summary(self) -> str:
        """The first error and what was tried."""
        return self._ladder.summary()

    def may_fail(self) -> bool:
        """Return whether one more failure would be mended."""
        return self._ladder.num_failures < self._ladder.limits.failures

    def judge(
        self, failure: Failure, now: float, readings: Sequence[Reading], facts: Mapping[str, Any] | None = None
    ) -> RecoveryDecision:
        """Return what is done about a failure; its case is open from here on.

        Args:
            failure: what was found.
            now: seconds.
            readings: the local workers' pages, those of the dead included.
            facts: for the record.
        """
        facts = facts or {}
        ranks = facts.get("ranks", [failure.rank])
        if failure.fault is Fault.PROCESS and self._burst.joins(ranks, now):
            self.join(ranks)
            return RecoveryDecision(RecoveryAction.REPLACE, "it was hit by the failure before, and is part of it")
        self._burst.failed(ranks)
        newest = max(map(step_of, readings), default=-1)
        if newest > self._best_step >= 0:  # steps may be quicker than our looks
            self._ladder.progressed()
        self._best_step = max(self._best_step, newest)  # what has to be passed to count as progress
        self._look_at_saved()
        self._beyond = self._saved
        answer = self._ladder.failed(failure)
        told = {**facts, "first_error": failure.first_error, "action": answer.action.value, "why": answer.reason}
        if self._case is not None:  # a second failure during the recovery belongs to the same incident
            self.join(facts.get("ranks", ()))
            self._case.facts |= {"action": told["action"], "why": told["why"]}
        else:
            self._case = _OpenIncident(told, now, newest, max(map(_step_seconds, readings), default=0.0))
        return answer

    def join(self, ranks: Iterable[int]) -> None:
        """Count these ranks to the failure whose case is open."""
        if self._case is not None:
            self._case.facts["ranks"] = list(dict.fromkeys([*self._case.facts.get("ranks", ()), *ranks]))

    def renewed(self, rank: int) -> None:
        """The rank's process was replaced although nothing failed in it."""
        kept = self._case.facts.get("kept", []) if self._case is not None else []
        if rank in kept:
            kept.remove(rank)

    def ordered(self, now: float, kept: list[int]) -> None:
        """Everybody has the order; `kept`: ranks whose processes stay."""
        self._ordered_s = now
        self._burst.ordered(now, survivors=bool(kept))
        if self._case is not None:
            before = self._case.facts.get("kept", kept)  # at an order before: who was replaced then was not kept
            self._case.facts["kept"] = [rank for rank in kept if rank in before]
            self._case.ordered_s, self._case.running_s, self._case.over_s = now, 0.0, 0.0
            self._case.restored.clear()

    def saved(self, step: int) -> None:
        """A rank told that the state after this step lasts: it would come back after a failure."""
        self._saved = max(self._saved, step)

    def _look_at_saved(self) -> None:
        if self._saved > self._beyond:
            self._ladder.saved()

    def restored(self, rank: int, told: Mapping[str, Any]) -> None:
        """A rank holds the state of a step again."""
        self.saved(int(told["step"]))
        if self._case is not None:
            self._case.restored[rank] = told

    def look(self, now: float, readings: Mapping[int, Reading], *, all_run: bool) -> dict[str, Any] | None:
        """The facts of a recovery that is over now. Notes progress. `readings`: by rank."""
        told = self._closed(now, readings, all_run=all_run)
        if not all_run:
            return told
        newest = max(map(step_of, readings.values()), default=-1)
        started = newest < 0 and now - self._ordered_s > PROGRESS_S
        if newest > self._best_step >= 0 or (started and self._best_step < 0):
            self._ladder.progressed()
        elif started:  # who told steps once and tells none yet is loading: no progress, however long it takes
            self._ladder.outlived()
        self._best_step = max(self._best_step, newest)
        if now - self._ordered_s > RENEWED_S:
            if self._saved > self._beyond:
                self._ladder.renew()
            else:  # old steps are made again, which is no progress
                self._ladder.outlived()
        return told

    def _closed(self, now: float, readings: Mapping[int, Reading], *, all_run: bool) -> dict[str, Any] | None:
        case = self._case
        if case is None or not all_run or not case.ordered_s:
            if case is not None:
                case.running_s = case.over_s = 0.0
            return None
        case.running_s = case.running_s or now
        beats = case.step >= 0 or bool(case.restored) or any(reading.beat.step for reading in readings.values())
        # Where some tell what they came back to, all do: until then a survivor's page shows the steps of before.
        heard = not case.restored or readings.keys() <= case.restored.keys()
        made = heard and all(reading.beat.step > _began(case, rank) for rank, reading in readings.items())
        over = made if beats else now - case.running_s > WITHOUT_BEATS_S
        if not (over and case.over_s):  # who shows a step has told of its restore before: by the next look it is heard
            case.over_s = now if over else 0.0
            return None
        self._case = None
        parts = {"T1": case.ordered_s - case.found_s, "T2": case.running_s - case.ordered_s}
        if beats:
            compiled = max(reading.spent_s[Phase.COMPILE] for reading in readings.values())
            parts |= {"T3": case.over_s - case.running_s - compiled} | ({"T4": compiled} if compiled else {})
        return _told(case, parts)

    def ended(self, now: float) -> dict[str, Any] | None:
        """The job ends: the facts of a recovery that has not come to its first step, as far as it came."""
        case, self._case = self._case, None
        if case is None:
            return None
        parts = {"T1": (case.ordered_s or now) - case.found_s}
        if case.ordered_s:
            parts["T2"] = (case.running_s or now) - case.ordered_s
        if case.running_s:
            parts["T3"] = (case.over_s or now) - case.running_s
        return _told(case, parts)


def _told(case: _OpenIncident, parts: dict[str, float]) -> dict[str, Any]:
    """The record of one case; `parts`: seconds by phase."""
    facts = {**case.facts, **_back(case)}
    if facts.get("steps_lost"):
        parts["T0"] = facts["steps_lost"] * case.step_s
    return {**facts, "seconds": {name: round(max(0.0, value), 3) for name, value in sorted(parts.items())}}


def _began(case: _OpenIncident, rank: int) -> int:
    """Return how many steps the rank had behind it when it began anew: it counts from 0, or from what it came back to."""
    return int(case.restored[rank]["step"]) + 1 if rank in case.restored else 0


def _back(case: _OpenIncident) -> dict[str, Any]:
    """Return where each rank came back from, and how many steps are made again."""
    if not case.restored:
        return {}
    facts: dict[str, Any] = {"came_back": {str(rank): told["source"] for rank, told in sorted(case.restored.items())}}
    if case.step >= 0:
        done = min(int(told["step"]) for told in case.restored.values())
        facts["steps_lost"] = max(0, case.step - done - 1)
    return facts


def step_of(reading: Reading) -> int:
    """Return how many steps a worker has finished, by its beats; -1 if they tell nothing."""
    return reading.beat.step if reading.pid and reading.beat.step else -1


def _step_seconds(reading: Reading) -> float:
    """Return what a step of this worker takes, waits and data included."""
    spent = sum(reading.spent_s[phase] for phase in (Phase.STEP, Phase.COLLECTIVE, Phase.DATA))
    return spent / reading.num_steps if reading.num_steps else 0.0
