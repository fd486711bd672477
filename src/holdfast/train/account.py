"""What one recovery was, as facts for its incident: opened when a failure is found, closed when steps are made again.

Seconds by part: T1 from the finding to the order that everybody gets, T2 until all local workers run the script again,
T3 until the first step after that (groups and loading; only known of workers that write beats). Used by `train.agent`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WITHOUT_BEATS_S = 1.0


@dataclass(slots=True)
class Account:
    """Of the recovery that is under way, if one is. Times are monotonic."""

    _facts: dict[str, Any] = field(default_factory=dict)
    _found: float = 0.0
    _ordered: float = 0.0
    _running: float = 0.0

    @property
    def open(self) -> bool:
        """Whether a recovery is under way."""
        return bool(self._facts)

    def found(self, now: float, facts: dict[str, Any]) -> None:
        """A failure; a second one during the recovery belongs to the same incident."""
        if self._facts:
            ranks = dict.fromkeys([*self._facts.get("ranks", ()), *facts.get("ranks", ())])
            self._facts |= {"ranks": list(ranks), "action": facts.get("action", ""), "why": facts.get("why", "")}
        else:
            self._facts, self._found = dict(facts), now

    def ordered(self, now: float, kept: list[int]) -> None:
        """Everybody has the order; `kept`: ranks whose processes stay."""
        self._facts["kept"] = kept
        self._ordered, self._running = now, 0.0

    def look(self, now: float, *, all_run: bool, steps: list[int] | None) -> dict[str, Any] | None:
        """The facts once the recovery is over; `steps`: what workers did since they began anew, None if they do not say."""
        if not self._facts or not all_run or not self._ordered:
            self._running = 0.0
            return None
        self._running = self._running or now
        well = all(steps) if steps else now - self._running > WITHOUT_BEATS_S
        if not well:
            return None
        parts = {"T1": self._ordered - self._found, "T2": self._running - self._ordered}
        if steps:
            parts["T3"] = now - self._running
        facts = {**self._facts, "seconds": {name: round(max(0.0, value), 3) for name, value in parts.items()}}
        self._facts, self._ordered = {}, 0.0
        return facts
