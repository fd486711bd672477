"""Decides what is done about a failure: the cheapest thing that has not failed yet, each a bounded number of times.

The actions, from cheap to dear: every process stays and the groups are made again (`REJOIN`); the failed process is
replaced while the others keep theirs (`REPLACE`); all workers are restarted, as torchrun does (`RESTART_ALL`); the job
stops with a summary (`STOP`). A node that is lost takes a way of its own: its ranks need another node (`REPLACE_NODE`).

A failure after progress begins at the bottom again. Without progress the attempts are counted, until all workers ran for a
while; the same rank failing three times at the same step, however long it runs in between, is taken for a deterministic
bug: once with the version before the newest (`older`), then the job stops. The number of mended failures is bounded by
`max_restarts` as torchrun bounds restarts of the whole group.

Facts in, decision out: no clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Fault(enum.Enum):
    """Names what was seen of a failure."""

    GROUPS = "groups broke and no process failed"
    PROCESS = "a process ended or hung"
    NODE = "a node was lost"


class RecoveryAction(enum.Enum):
    """Names what is done about a failure."""

    REJOIN = "rejoin in place"
    REPLACE = "replace the process"
    REPLACE_NODE = "replace the node"
    RESTART_ALL = "restart all workers"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Failure:
    """One fault.

    Attributes:
        rank: whose; -1 if nobody's.
        step: the newest step that the rank is known to have begun; -1 if that is not known.
        first_error: what the process said, or how it ended.
        node: where; for the summary.
        said: the process said so itself, before it ended.
    """

    fault: Fault
    rank: int = -1
    step: int = -1
    first_error: str = ""
    node: str = ""
    said: bool = False


@dataclass(frozen=True, slots=True)
class RecoveryDecision:
    """Says what to do, and why. `older`: restore the version before the newest."""

    action: RecoveryAction
    reason: str
    older: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds how often each action is tried.

    Attributes:
        failures: all failures that are mended in one life of the job; torchrun's `--max-restarts`.
        renewed: whether a long time of health with saved progress gives all of them back (when nobody gave a number).
        same_place: failures of one rank at one step before the older version is tried; and how often one and the same error
            of a process without steps stops the job.
        attempts_per_action: attempts of one action without progress before the next.
    """

    failures: int = 3
    renewed: bool = True
    same_place: int = 3
    attempts_per_action: int = 2


@dataclass(slots=True)
class EscalationPolicy:
    """Remembers what has been tried since the last progress."""

    limits: Limits
    num_failures: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # what processes said, since something was saved
    tried: list[tuple[Failure, RecoveryDecision]] = field(default_factory=list)
    num_outlived: int = 0  # so many of these are no attempts any more: all ran for a while behind them

    def progressed(self) -> None:
        """A step was finished that had not been finished before: the next failure begins at the bottom."""
        self.tried.clear()
        self.num_outlived = 0

    def outlived(self) -> None:
        """All workers ran for long, or for a while without any step: attempts are counted anew, failures at one step add up."""
        self.num_outlived = len(self.tried)

    def saved(self) -> None:
        """Something beyond the last failure was saved: what failed before is no loop."""
        self.errors.clear()

    def renew(self) -> None:
        """The job has been well for long and saved progress: its failures are forgotten, unless somebody gave their number."""
        self.outlived()
        if self.limits.renewed:
            self.num_failures = 0

    def failed(self, failure: Failure) -> RecoveryDecision:
        """Return what is done about a failure, and remember it."""
        self.num_failures += 1
        if failure.said:
            self.errors[failure.first_error] = self.errors.get(failure.first_error, 0) + 1
        answer = self._answer(failure)
        self.tried.append((failure, answer))
        return answer

    def summary(self) -> str:
        """The first error since the last progress, whose it was, and what was tried."""
        if not self.tried:
            return "nothing failed"
        first = self.tried[0][0]
        rank = f"rank {first.rank}" if first.rank >= 0 else "no single rank"
        place = f" on {first.node}" if first.node else ""
        step = f" at step {first.step}" if first.step >= 0 else ""
        steps = "; then ".join(
            answer.action.value + (" (older version)" if answer.older else "") for _, answer in self.tried
        )
        return f"first error: {rank}{place}{step}: {first.first_error or first.fault.value}; tried: {steps}"

    def _answer(self, failure: Failure) -> RecoveryDecision:
        if self.num_failures > self.limits.failures:
            return RecoveryDecision(
                RecoveryAction.STOP, f"{self.limits.failures} failures were mended, more are not allowed"
            )
        if self._repeats(failure):
            return RecoveryDecision(
                RecoveryAction.STOP, f"the same error {self.limits.same_place} times, and nothing was saved in between"
            )
        if failure.fault is Fault.NODE:
            return RecoveryDecision(RecoveryAction.REPLACE_NODE, "a node was lost; its ranks need another one")
        same = [answer for known, answer in self.tried if _same_place(known, failure)]
        if any(answer.older for answer in same):
            return RecoveryDecision(
                RecoveryAction.STOP, f"rank {failure.rank} fails at the same step with an older version too"
            )
        if len(same) >= self.limits.same_place - 1:
            times = len(same) + 1
            return RecoveryDecision(
                RecoveryAction.REPLACE,
                f"rank {failure.rank} failed {times} times at one step; older version",
                older=True,
            )
        return self._cheapest(failure)

    def _repeats(self, failure: Failure) -> bool:
        """Return whether this error comes again and again; where steps are known, and where somebody gave a number, those decide."""
        if failure.step >= 0 or not failure.said or not self.limits.renewed:
            return False
        return self.errors.get(failure.first_error, 0) >= self.limits.same_place

    def _cheapest(self, failure: Failure) -> RecoveryDecision:
        actions = (
            [RecoveryAction.REJOIN, RecoveryAction.REPLACE, RecoveryAction.RESTART_ALL]
            if failure.fault is Fault.GROUPS
            else [RecoveryAction.REPLACE, RecoveryAction.RESTART_ALL]
        )
        if failure.rank < 0 and RecoveryAction.REPLACE in actions:
            actions.remove(RecoveryAction.REPLACE)
        for action in actions:
            count = sum(answer.action is action for _, answer in self.tried[self.num_outlived :])
            if count < self.limits.attempts_per_action:
                return RecoveryDecision(
                    action, f"{failure.fault.value}; attempt {count + 1} of {self.limits.attempts_per_action} at this"
                )
        return RecoveryDecision(RecoveryAction.STOP, "nothing that can be tried is left")


def _same_place(known: Failure, failure: Failure) -> bool:
    return failure.step >= 0 and (known.rank, known.step) == (failure.rank, failure.step)
