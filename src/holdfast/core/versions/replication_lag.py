"""Decides how long saves wait for replicas of the version before: the difference between surviving a process and a
node.

In a job of several nodes a slot that holds the newest replicated version is kept until a newer one is replicated, else
the loss of a node could find the old one overwritten and the new one not yet copied (invariant S1). But replication
may fail for good (no memory there, a slow network), and then it must not be the reason that nothing is saved at all:
after a while the next lower level takes over, and that is said. Pure: `now_s` is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

# Before anything was replicated nobody knows how long it takes.
FIRST_PATIENCE_S = 10.0
LEAST_PATIENCE_S = 5.0
# Patience is this many times what the last replication took.
FACTOR = 3.0


@dataclass(slots=True)
class ReplicationLag:
    """One node's view of how replication keeps up.

    Attributes:
        since_s: since when the newest captured version waits for its replicas; None if it does not.
        limit_s: how long is long.
    """

    since_s: float | None = None
    limit_s: float = FIRST_PATIENCE_S

    def captured(self, now_s: float) -> None:
        """A version was captured; its replicas are outstanding."""
        if self.since_s is None:
            self.since_s = now_s

    def replicated(self, now_s: float, *, newest: bool) -> None:
        """A version was replicated; `newest`: none that was captured later is outstanding."""
        if self.since_s is not None:
            self.limit_s = max(LEAST_PATIENCE_S, FACTOR * (now_s - self.since_s))
        self.since_s = None if newest else now_s

    def lasts(self, now_s: float) -> bool:
        """Return whether to keep waiting."""
        return self.since_s is None or now_s - self.since_s <= self.limit_s
