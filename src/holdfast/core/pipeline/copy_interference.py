"""Estimates how much copies slow the compute beside them: seconds of work lost per second of copying, learnt from what
happens anyway.

A chunk that fits into no wait is copied while the stage computes, and both share the memory's bandwidth, on a processor
the cores as well. 0: the copy is free there; 1: it costs what it takes, as if the work had stopped for it. An action
that a copy overlapped is compared with the median of the same action alone.

Pure: all times are arguments, in seconds on one axis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median

# Durations of an action alone that its median is taken of, and how few tell something.
MEMORY, FEW = 32, 4
# Overlaps that the answer rests on, the newest; and so much of them it takes.
OVERLAPS, LEAST_S = 256, 0.005
# Copies that an action yet to be judged may have overlapped.
MAX_COPIES = 4096


class Drag:
    """Estimates the drag of one rank. Copies may be told by another thread than the work: ends of a deque are safe to
    share.
    """

    def __init__(self) -> None:
        self._told: deque[tuple[float, float]] = deque(maxlen=MAX_COPIES)
        self._copies: deque[tuple[float, float]] = deque(maxlen=MAX_COPIES)
        self._alone: dict[Hashable, deque[float]] = {}
        self._last: tuple[Hashable, float, float] | None = None
        self._beside: deque[tuple[float, float]] = deque(maxlen=OVERLAPS)

    def copied(self, start: float, end: float) -> None:
        """A chunk was copied."""
        self._told.append((start, end))

    def acted(self, action: Hashable, start: float, end: float) -> None:
        """Work was done; it is judged when the next is told, for a chunk that it overlapped may end later."""
        last, self._last = self._last, (action, start, end)
        if last is not None:
            self._judge(*last)

    def _judge(self, action: Hashable, start: float, end: float) -> None:
        overlap = self._overlap(start, end)
        alone = self._alone.setdefault(action, deque(maxlen=MEMORY))
        if not overlap:
            alone.append(end - start)
        elif len(alone) >= FEW:
            self._beside.append((end - start - median(alone), overlap))

    def _overlap(self, start: float, end: float) -> float:
        while self._told:
            self._copies.append(self._told.popleft())
        while self._copies and self._copies[0][1] <= start:
            self._copies.popleft()
        return sum(max(0.0, min(end, until) - max(start, since)) for since, until in self._copies)

    @property
    def share(self) -> float | None:
        """Seconds of work lost per second of copying beside it, at least 0; None: too little was seen."""
        overlap = sum(seconds for _, seconds in self._beside)
        return max(0.0, sum(extra for extra, _ in self._beside) / overlap) if overlap >= LEAST_S else None
