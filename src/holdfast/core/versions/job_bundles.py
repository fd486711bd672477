"""The bundles of a job under each layout that a node remembers, and what follows from them for that node.

Pure. Owned by `core.versions.node_ledger`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from holdfast.core.layout import bundles, parity_groups, replica_placement
from holdfast.core.model import BundleRef, Topology
from holdfast.core.versions import coordinator_board, writer_failover

# Of layouts that no remembered version uses any more.
MAX_TABLES = 4 * coordinator_board.MAX_LAYOUTS


@dataclass(frozen=True)
class JobBundles:
    """Every bundle of the job under one layout, as `node` sees them; `refs` is empty where they are not known."""

    refs: tuple[BundleRef, ...]
    node: int
    topology: Topology

    @cached_property
    def parts(self) -> tuple[writer_failover.Part, ...]:
        """Return who writes the bundles to storage."""
        return writer_failover.parts(self.refs, self.topology)

    @cached_property
    def to_replicate(self) -> tuple[tuple[int, int, BundleRef], ...]:
        """(home node, rank whose slot holds it, bundle) for every bundle that this node keeps a replica of."""
        placed = replica_placement.place(self.refs, self.topology)
        kept = (ref for ref in self.refs if placed.get(ref.bundle_id) == self.node)
        homes = ((ref, self.topology.node_of[ref.ranks[0]]) for ref in kept)
        plan = ((home, bundles.capturer(ref, home, self.topology), ref) for ref, home in homes)
        return tuple((home, rank, ref) for home, rank, ref in plan if rank is not None)

    @cached_property
    def group(self) -> tuple[int, ...]:
        """Return the nodes that keep parity of each other, this one among them; none where it keeps none."""
        return parity_groups.by_node(self.topology).get(self.node, ())

    @cached_property
    def of_parity(self) -> tuple[tuple[str, ...], ...]:
        """Return by member of the group the bundles that live in its node only; nothing if that is none of any."""
        found = parity_groups.single_node_bundles(self.refs, self.group, self.topology)
        return found if any(found) else ()

    @property
    def unique_bytes(self) -> int:
        """Bytes that live in this node only, replicas not counted."""
        only = (ref for ref in self.refs if replica_placement.only_home(ref, self.topology) == self.node)
        return sum(ref.num_bytes for ref in only)


@dataclass(slots=True)
class LayoutTables:
    """The bundles of the job by layout."""

    node: int
    topology: Topology
    of: dict[str, JobBundles] = field(default_factory=dict)

    def learn(self, layout: str, refs: Sequence[BundleRef]) -> None:
        """Every bundle of the job under `layout`."""
        self.of[layout] = JobBundles(tuple(refs), self.node, self.topology)

    def under(self, layout: str) -> JobBundles:
        """The bundles under a layout; none if nobody told them."""
        return self.of.get(layout) or JobBundles((), self.node, self.topology)

    def forget(self, needed: Collection[str]) -> None:
        """Keeps the tables of these layouts and the newest, once there are too many."""
        if len(self.of) > MAX_TABLES:
            newest = next(reversed(self.of))
            self.of = {name: table for name, table in self.of.items() if name in needed or name == newest}
