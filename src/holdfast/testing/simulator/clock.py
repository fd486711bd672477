"""Virtual time: events in order, chance from one seed, and a transcript whose digest tells two runs apart.

Nothing here waits. Everything that happens is a function called at its time; ties are broken by the order of asking, so
the same seed gives the same run.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable


class Violation(Exception):
    """A promise of the protocol does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(invariant, what)
        self.invariant = invariant
        self.what = what

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what}"


class Clock:
    """The events of one run.

    Args:
        seed: of all chance.
        verbose: keep the whole transcript, not only its digest and its end.
    """

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self.num_events = 0
        self.lines: list[str] = []
        self._verbose = verbose
        self._digest = hashlib.blake2b(digest_size=16)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Calls `event` so much later."""
        self._asked += 1
        heapq.heappush(self._queue, (self.now_s + max(0.0, seconds), self._asked, event))

    def run(self, until_s: float) -> None:
        """All events up to a time."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._queue)
            self.num_events += 1
            event()
        self.now_s = max(self.now_s, until_s)

    def say(self, text: str) -> None:
        """A line of the transcript."""
        line = f"{self.now_s:9.4f} {text}"
        self._digest.update(line.encode() + b"\n")
        self.lines.append(line)
        if not self._verbose and len(self.lines) > 60:
            del self.lines[:20]

    @property
    def digest(self) -> str:
        """Return a digest of everything that was said."""
        return self._digest.hexdigest()
