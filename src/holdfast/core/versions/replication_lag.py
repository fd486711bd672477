"""Decides how long saves wait for replicas of the version before: the difference between surviving a process and a
node.

In a job of several nodes a slot that holds the newest replicated version is kept until a newer one is replicated, else
the loss of a node could find the old one overwritten and the new one not yet copied (invariant S1). But replication
may fail for good (no memory there, a dead line), and then it must not be the reason that nothing is saved at all:
after a while the next lower level takes over, and that is said.

A line that is slow is no failure. As long as some node says that bytes of a version that waits leave it, there is patience,
else a transfer longer than that would be cut again and again, and none would ever be whole. So every transfer that takes
no longer than `MOST_PATIENCE_S` is let through. But where storage has something newer before, replicas are the slower way to
survive a node, and slots are better used for saves. Pure: `now_s` is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Before anything was replicated nobody knows how long it takes.
FIRST_PATIENCE_S = 10.0
LEAST_PATIENCE_S = 5.0
# Patience is this many times what the last replication took.
FACTOR = 3.0
# But where nothing moves no more than this, however long that took.
STILL_PATIENCE_S = 30.0
# Who sends says so every second. So long a sign counts: a block takes 2 s at 1 Mbit/s.
SIGN_S = 5.0
# Patience with what moves. Meanwhile saves are left out, so a process that is lost costs as much: half of the durable cadence.
MOST_PATIENCE_S = 30.0


@dataclass(slots=True)
class ReplicationLag:
    """One node's view of how replication keeps up.

    Attributes:
        since_s: since when the newest captured version waits for its replicas; None if it does not.
        limit_s: how long is long where nothing moves.
        took_s: how long the last replication took.
        overtaken: since then something newer than the newest replicated version became durable.
        moved_s: when bytes of a version that waits left some node last, as far as is known.
    """

    since_s: float | None = None
    limit_s: float = FIRST_PATIENCE_S
    moved_s: float = -math.inf
    took_s: float = 0.0
    overtaken: bool = False

    def captured(self, now_s: float) -> None:
        """A version was captured; its replicas are outstanding."""
        if self.since_s is None:
            self.since_s, self.overtaken = now_s, False

    def replicated(self, now_s: float, *, newest: bool) -> None:
        """A version was replicated; `newest`: none that was captured later is outstanding."""
        if self.since_s is not None:
            self.took_s = now_s - self.since_s
            self.limit_s = min(max(LEAST_PATIENCE_S, FACTOR * self.took_s), STILL_PATIENCE_S)
        self.since_s, self.overtaken = None if newest else now_s, False

    def stored(self) -> None:
        """A version became durable that is newer than the newest replicated one, or is about to."""
        self.overtaken = True

    def moved(self, now_s: float) -> None:
        """Some node says that it sends a version that waits."""
        self.moved_s = now_s

    def lasts(self, now_s: float) -> bool:
        """Return whether to keep waiting."""
        return self.waited_s(now_s) <= self.patience_s(now_s)

    def patience_s(self, now_s: float) -> float:
        """Return how long is long now."""
        return MOST_PATIENCE_S if now_s - self.moved_s <= SIGN_S and not self.overtaken else self.limit_s

    @property
    def keeps_up(self) -> bool:
        """Return whether the last replication took no longer than the least patience."""
        return self.took_s <= LEAST_PATIENCE_S

    def waited_s(self, now_s: float) -> float:
        """Return for how long the newest captured version has waited; 0 if it does not."""
        return 0.0 if self.since_s is None else now_s - self.since_s
