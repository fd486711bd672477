"""The way from the level in memory down to storage alone, in the middle of training: all ranks at one step, or none.

A rank that cannot save (no keeper can be had, memory is refused) spoils the versions of all. Only when saves do not
become captured do ranks look at a board that all can read (torch's store): a healthy job never does. Whoever cannot
save says so there; everybody then notes the step it is at, and rank 0 names one that lies ahead of all. There the ranks
arrive, and what comes of it is one word that is written once: "go" by the last who arrives, "no" by anybody who is past
the step or whose patience ends. So no rank ever enters a collective that another one does not.

Time is the caller's.
"""

from __future__ import annotations

import enum
from typing import Protocol

# As in core.scheduling.step_agreement: one step may be under way on every rank, and the word needs a moment.
MARGIN_STEPS = 2
# After so many attempts that came to nothing nobody tries again before the next restore.
MAX_ROUNDS = 5

GO, NO = "go", "no"


class Board(Protocol):
    """Holds what all ranks can read and write; every call is short."""

    def get(self, key: str) -> str | None:
        """Return what stands there."""

    def put(self, key: str, text: str) -> None:
        """Writes it."""

    def add(self, key: str) -> int:
        """Counts one more; returns how many."""

    def first(self, key: str, text: str) -> str:
        """Writes it unless something stands there already; returns what stands there now."""

    def least(self, key: str, number: int) -> None:
        """Write a number unless one that is not greater stands there."""


class FallbackStep(enum.Enum):
    """Names what a rank does after a step."""

    STAY = "stay"  # as before
    WAIT = "wait"  # it has arrived at the step; ask `outcome`
    GO = "go"  # down, together with all others, at this step


class FallbackState:
    """One rank's part."""

    def __init__(self, board: Board, *, rank: int, world_size: int) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._round = 0
        self._is_noted = False

    @property
    def reason(self) -> str:
        """Return who cannot save, and why."""
        return self._board.get(self._key("why")) or ""

    def after(self, step: int, trouble: str) -> FallbackStep:
        """`step` is finished, and versions do not become captured. `trouble`: why this rank cannot save, if it cannot."""
        if self._round >= MAX_ROUNDS:
            return FallbackStep.STAY
        if trouble:
            self._board.first(self._key("why"), f"rank {self._rank}: {trouble}")
        elif not self.reason:
            return FallbackStep.STAY
        if not self._is_noted:
            self._is_noted = True
            self._board.put(self._key(f"at/{self._rank}"), str(step))
        meeting = self._meeting()
        if meeting is None or step < meeting:
            return FallbackStep.STAY
        if step > meeting:
            self._say(NO)
            return FallbackStep.STAY
        if self._board.add(self._key("arrived")) == self._world_size:
            return FallbackStep.GO if self._say(GO) else FallbackStep.STAY
        return FallbackStep.WAIT

    def meets_at_the_end(self, trouble: str) -> bool:
        """Nobody takes another step: whether somebody cannot save, so that this rank has arrived."""
        if trouble:
            self._board.first(self._key("why"), f"rank {self._rank}: {trouble}")
        if not self.reason:
            return False
        if self._board.add(self._key("arrived")) == self._world_size:
            self._say(GO)
        return True

    def outcome(self) -> FallbackStep:
        """Return what came of it so far, for who waits."""
        said = self._board.get(self._key("word"))
        if said is None:
            return FallbackStep.WAIT
        return FallbackStep.GO if self._take(said) else FallbackStep.STAY

    def give_up(self) -> FallbackStep:
        """Patience has ended."""
        return FallbackStep.GO if self._say(NO) else FallbackStep.STAY

    def _meeting(self) -> int | None:
        """The step that was named; rank 0 names it as soon as it knows where all are."""
        named = self._board.get(self._key("step"))
        if named is None and self._rank == 0:
            rows = [self._board.get(self._key(f"at/{rank}")) for rank in range(self._world_size)]
            if all(row is not None for row in rows):
                named = str(max(int(row or 0) for row in rows) + MARGIN_STEPS)
                self._board.put(self._key("step"), named)
        return None if named is None else int(named)

    def _say(self, word: str) -> bool:
        return self._take(self._board.first(self._key("word"), word))

    def _take(self, word: str) -> bool:
        """Return whether it is "go"; after a "no" the next round begins."""
        if word != GO:
            self._round, self._is_noted = self._round + 1, False
        return word == GO

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"
