"""Decides who writes a bundle to storage, who is next in line, and when the next one starts.

A bundle's line is the nodes that may write it: the representative's first, then those of its other twins, then the node
that keeps its replica. Bundles with the same line are one part of the manifest, whoever writes it, so that every writer
writes the same bytes. The place in the line is the term: it rises when a writer is out, for one part of one version,
and touches nothing else. Nothing is fenced by it. A writer that was taken for dead and goes on writes the same files
again, and the manifest exists once (protocol section 6).

`Watch` is one node's view. A successor starts when everybody before it in the line is out: its keeper is gone, it
reported that it cannot, or it gave no sign for LEASE_S by this node's own clock. A wrong guess costs I/O and nothing
else. Pure: facts come in with `now_s`, orders come out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.core.layout import bundles, replica_placement
from holdfast.core.model import BundleRef, Topology, Version
from holdfast.core.rank_runs import Runs

# Writers of one bundle. If this many nodes fail one after the other the version stays where it is.
MAX_LINE = 8
# Silence that ends a lease. A writer gives a sign every second, and a busy machine may hold one up for a few.
LEASE_S = 6.0
# Versions that are watched at a time.
MAX_WATCHED = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Bundles with one line of writers; one part of the manifest.

    Attributes:
        index: its number, the same for everybody who knows the table.
        line: nodes, the representative's first.
    """

    index: int
    line: tuple[int, ...]
    refs: tuple[BundleRef, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """This node writes these parts now.

    Attributes:
        term: its place in the line; 0 is the representative.
    """

    version: Version
    parts: tuple[Part, ...]
    term: int
    reason: str


def _line(ref: BundleRef, homes: Sequence[int], topology: Topology, backup: int | None) -> tuple[int, ...]:
    first = homes.index(topology.node_of[bundles.representative(ref)])
    order = [*homes[first:], *homes[:first]]
    return tuple(order[:MAX_LINE] if backup is None else [*order, backup])


def parts(table: Iterable[BundleRef], topology: Topology) -> tuple[Part, ...]:
    """The parts of a version's manifest, determined by its table alone."""
    table = tuple(table)
    placed = replica_placement.place(table, topology)
    homes: dict[Runs, tuple[int, ...]] = {}  # groups recur
    lines: dict[tuple[int, ...], list[BundleRef]] = {}
    for ref in table:
        if ref.runs not in homes:
            homes[ref.runs] = tuple(sorted({topology.node_of[rank] for rank in ref.ranks}))
        order = _line(ref, homes[ref.runs], topology, placed.get(ref.bundle_id))
        lines.setdefault(order, []).append(ref)
    return tuple(
        Part(index, key, tuple(sorted(lines[key], key=lambda ref: ref.bundle_id)))
        for index, key in enumerate(sorted(lines))
    )


@dataclass(slots=True)
class _Open:
    """A part that is not known to be written."""

    part: Part
    since_s: float
    out: dict[int, str] = field(default_factory=dict)
    ordered: bool = False

    @property
    def writer(self) -> int | None:
        """Return whose turn it is; None if everybody in the line is out."""
        return next((node for node in self.part.line if node not in self.out), None)


class Watch:
    """Knows what one node writes of the versions that are due for storage, and whom it watches meanwhile."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._open: OrderedDict[Version, dict[int, _Open]] = OrderedDict()
        self._silent: dict[int, str] = {}

    def watched(self, version: Version) -> tuple[Part, ...]:
        """The parts that this node may have to take over; nothing if the version is not watched."""
        return tuple(item.part for item in self._open.get(version, {}).values() if not item.ordered)

    @property
    def versions(self) -> tuple[Version, ...]:
        """Those that are watched."""
        return tuple(self._open)

    def persist(self, version: Version, wanted: Iterable[Part], now_s: float) -> list[Order]:
        """The version is due for storage."""
        if version in self._open:
            return []
        mine = (part for part in wanted if self._node in part.line)
        self._open[version] = {part.index: _Open(part, now_s) for part in mine}
        while len(self._open) > MAX_WATCHED:
            self._open.popitem(last=False)
        return self._orders(version, now_s)

    def sign(self, version: Version, node: int, now_s: float) -> None:
        """`node` is at work on the version."""
        self._silent.pop(node, None)
        for item in self._open.get(version, {}).values():
            if item.writer == node:
                item.since_s = now_s

    def written(self, version: Version, node: int, indices: Iterable[int]) -> None:
        """These parts are in storage; `node` wrote them."""
        self._silent.pop(node, None)
        for index in indices:
            self._open.get(version, {}).pop(index, None)

    def failed(self, version: Version, node: int, indices: Iterable[int], reason: str, now_s: float) -> list[Order]:
        """`node` will not write these parts (none named: any of the version)."""
        watched = self._open.get(version, {})
        named = set(indices) or set(watched)
        for index in named & set(watched):
            item = watched[index]
            if node in item.part.line and node not in item.out:
                item.out[node] = reason
                item.since_s = now_s
        return self._orders(version, now_s)

    def forget(self, version: Version) -> None:
        """It is durable, or nobody can make it so any more."""
        self._open.pop(version, None)

    def tick(self, now_s: float) -> list[Order]:
        """Ends leases."""
        orders: list[Order] = []
        for version, watched in list(self._open.items()):
            for item in watched.values():
                writer = item.writer
                if writer not in (None, self._node) and now_s - item.since_s > LEASE_S:
                    self._silent[writer] = item.out[writer] = f"it gave no sign for {LEASE_S:.0f} s"
                    item.since_s = now_s
            orders += self._orders(version, now_s)
        return orders

    def _orders(self, version: Version, now_s: float) -> list[Order]:
        """Return what is this node's turn by now, by term."""
        by_term: dict[int, list[Part]] = {}
        reasons: dict[int, str] = {}
        for item in self._open[version].values() if version in self._open else ():
            while (writer := item.writer) in self._silent and writer != self._node:
                item.out[writer], item.since_s = self._silent[writer], now_s
            if writer != self._node or item.ordered:
                continue
            item.ordered = True
            term = item.part.line.index(self._node)
            by_term.setdefault(term, []).append(item.part)
            if term:
                before = item.part.line[term - 1]
                reasons[term] = f"node {before} is out: {item.out[before]}"
        return [
            Order(version, tuple(chosen), term, reasons.get(term, "it is the representative"))
            for term, chosen in sorted(by_term.items())
        ]
