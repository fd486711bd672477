"""Links between nodes that are cut, cut in one direction, slow, that repeat and reorder messages; and storage.

A message to a node that cannot be reached is lost, and the sender's link counts as broken: whoever keeps it joins
anew, as over a connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.core.model import Version
from holdfast.testing.simulator.clock import Clock, Violation


@dataclass(slots=True)
class Network:
    """Directed links by (from, to)."""

    clock: Clock
    cut: dict[tuple[int, int], int] = field(default_factory=dict)
    slow: float = 1.0
    repeats: float = 0.0
    reorders: bool = False
    _last: dict[tuple[int, int], float] = field(default_factory=dict)

    def is_open(self, source: int, target: int) -> bool:
        """Return whether bytes go that way now."""
        return source == target or not self.cut.get((source, target))

    def both_ways(self, one: int, other: int) -> bool:
        """Return whether two nodes can talk."""
        return self.is_open(one, other) and self.is_open(other, one)

    def send(
        self, source: int, target: int, arrive: Callable[[], None], lost: Callable[[], None], *, ordered: bool = False
    ) -> None:
        """Delivers once or twice, or tells the sender that the link is broken. `ordered`: after what was sent before."""
        chance = self.clock.chance
        delay = 0.0 if source == target else chance.uniform(0.001, 0.02) * self.slow

        def delivered() -> None:
            if self.is_open(source, target):
                arrive()
            else:
                lost()

        if not self.is_open(source, target):
            self.clock.after(delay, lost)
            return
        at = self.clock.now_s + delay
        if ordered or not self.reorders:
            at = self._last[source, target] = max(at, self._last.get((source, target), 0.0))
        self.clock.after(at - self.clock.now_s, delivered)
        if chance.random() < self.repeats:
            self.clock.after(at - self.clock.now_s + chance.uniform(0, 0.5), delivered)

    def partition(self, pairs: list[tuple[int, int]], seconds: float) -> None:
        """Cuts these directions for a while; cuts may overlap."""
        for pair in pairs:
            self.cut[pair] = self.cut.get(pair, 0) + 1
        self.clock.after(seconds, lambda: self._heal(pairs))

    def _heal(self, pairs: list[tuple[int, int]]) -> None:
        for pair in pairs:
            self.cut[pair] -= 1


@dataclass(slots=True)
class Storage:
    """Holds what every node can reach, unless it is down: parts, manifests, incarnations. Create-once and fenced.

    Attributes:
        parts: (version, node that wrote) -> bundles and their digests.
        resumed: what each incarnation came back with.
        acked: the newest version that was called durable.
        unreadable: how many faults keep manifests from being read now; they are listed all the same.
    """

    clock: Clock
    down: int = 0
    unreadable: int = 0
    slow: float = 1.0
    parts: dict[tuple[Version, str], dict[str, str]] = field(default_factory=dict)
    manifests: dict[Version, dict[str, str]] = field(default_factory=dict)
    removed: set[Version] = field(default_factory=set)
    incarnation: int = 0
    resumed: dict[int, Version | None] = field(default_factory=dict)
    acked: Version | None = None

    def seconds(self) -> float:
        """Return how long a write takes now."""
        return self.clock.chance.uniform(0.05, 0.4) * self.slow

    def commit(self, version: Version, content: dict[str, str]) -> bool:
        """Creates the manifest once; an equal one is success. Refused to lower incarnations and while storage is down."""
        if self.down or version.incarnation != self.incarnation:
            return False
        known = self.manifests.get(version)
        if known is not None and known != content:
            raise Violation("S7", f"two contents of the manifest of {version}")
        self.manifests[version] = content
        return True
