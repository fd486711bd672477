"""Knows what nobody in the cluster can see: the truth about every copy, and the promises that are judged by it.

No decision uses any of this. A promise that does not hold raises Violation with its number in the protocol. Called at
the moment that something is said, written or taken away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.layout import parity_groups, replica_placement
from holdfast.core.model import BundleRef, Level, Topology, Version
from holdfast.core.versions.coordinator_board import Announcement, Kind
from holdfast.core.versions.lineage import Lineage
from holdfast.testing.simulator.clock import Violation
from holdfast.testing.simulator.network import Storage
from holdfast.testing.simulator.simulated_keeper import Keeper

MAX_REMEMBERED = 80  # of anything that a ledger or a board keeps (S15)


def groups_of(table: Sequence[BundleRef], topology: Topology) -> dict[str, tuple[int, ...]]:
    """Return by bundle that lives in one node only the nodes that keep parity of it."""
    groups = parity_groups.by_node(topology)
    homes = {ref.bundle_id: replica_placement.only_home(ref, topology) for ref in table} if groups else {}
    return {name: groups[home] for name, home in homes.items() if home is not None}


@dataclass(slots=True)
class Observer:
    """The truth since the job began.

    Attributes:
        sealed: version -> ranks that ever sealed it; `nodes_of`: (version, bundle) -> nodes that ever held it sealed.
        state: (version, bundle) -> digest of the state at the save.
        acked: per level the newest version that was announced since the last recovery.
        abandoned: versions that a coordinator gave up.
        spoiled: versions in which a twin's bytes were wrong at the save.
        under_replicated: the newest version that was called replicated and then, by word of the coordinator, no more.
        living: versions that descend from no rolled-back step.
        origin: what the present incarnation resumed from.
        parity: version -> nodes that ever had their piece of it; `parity_of`: bundle -> the nodes whose pieces protect it.
        lost: nodes whose memory was lost since the last recovery; `renewed`: those whose keeper died.
    """

    table: tuple[BundleRef, ...]
    world_size: int
    sealed: dict[Version, set[int]] = field(default_factory=dict)
    nodes_of: dict[tuple[Version, str], set[int]] = field(default_factory=dict)
    state: dict[tuple[Version, str], str] = field(default_factory=dict)
    acked: dict[Level, Version] = field(default_factory=dict)
    spoiled: set[Version] = field(default_factory=set)
    abandoned: set[Version] = field(default_factory=set)
    living: set[Version] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    renewed: set[int] = field(default_factory=set)
    flipped: bool = False
    complete: Version | None = None
    under_replicated: Version | None = None
    origin: Version | None = None
    parity: dict[Version, set[int]] = field(default_factory=dict)
    parity_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def saves(self, version: Version, ref: BundleRef) -> str:
        """The digest of a bundle's state at the save."""
        self.living.add(version)
        return self.state.setdefault((version, ref.bundle_id), f"{version}/{ref.bundle_id}")

    def seals(self, version: Version, rank: int, node: int, bundle_ids: Sequence[str]) -> None:
        """A rank's part is sealed."""
        self.sealed.setdefault(version, set()).add(rank)
        for bundle_id in bundle_ids:
            self.nodes_of.setdefault((version, bundle_id), set()).add(node)

    def is_complete(self, version: Version, keepers: Sequence[Keeper]) -> bool:
        """Return whether every rank holds it sealed at this moment."""
        return all(keeper.find(rank, version) is not None for keeper in keepers for rank in keeper.ranks)

    def check_kept(self, keepers: Sequence[Keeper]) -> None:
        """S6: the newest complete version is never overwritten (a lost memory is another matter)."""
        if self.complete is not None and not self.lost and not self.is_complete(self.complete, keepers):
            raise Violation("S6", f"{self.complete} was the newest complete version, and a copy was overwritten")

    def check_news(self, news: Announcement, storage: Storage) -> None:
        """S13, S16: what is announced is so."""
        version = news.version
        if news.kind is Kind.CAPTURED:
            if self.sealed.get(version, set()) != set(range(self.world_size)):
                raise Violation("S13", f"{version} is called captured; only ranks {self.sealed.get(version)} sealed it")
            if version in self.spoiled:
                raise Violation("S16", f"{version} is called captured although its twins differ")
        if news.kind is Kind.REPLICATED:
            under_replicated = [
                r.bundle_id
                for r in self.table
                if len(self.nodes_of.get((version, r.bundle_id), set())) < 2
                and not self._has_parity(version, r.bundle_id)
            ]
            if under_replicated:
                raise Violation("S13", f"{version} is called replicated; {under_replicated[0]} was never in two nodes")
        if news.kind is Kind.ABANDONED:
            self.abandoned.add(version)
        if news.kind is Kind.DROPPED and news.lost:
            self.under_replicated = max(self.under_replicated or version, version)
            if version >= self.acked.get(Level.REPLICATED, version):
                self.acked.pop(Level.REPLICATED, None)
        if news.kind is Kind.DURABLE:
            superfluous = version in storage.removed and sum(v > version for v in storage.manifests) >= 2
            if version not in storage.manifests and not superfluous:
                raise Violation("S13", f"{version} is called durable; it has no manifest")
            if not superfluous:
                storage.acked = max(storage.acked or version, version)

    def _has_parity(self, version: Version, bundle_id: str) -> bool:
        group = self.parity_of.get(bundle_id, ())
        return bool(group) and self.parity.get(version, set()).issuperset(group)

    def told(self, news: Announcement) -> None:
        """A keeper whose trainer lives has heard it: from here on it is acknowledged."""
        level = {Kind.CAPTURED: Level.CAPTURED, Kind.REPLICATED: Level.REPLICATED}.get(news.kind)
        if level is Level.REPLICATED and self.under_replicated is not None and news.version <= self.under_replicated:
            return  # it was told late: it is withdrawn
        if level is not None:
            self._ack(level, news.version)

    def _ack(self, level: Level, version: Version) -> None:
        self.acked[level] = max(self.acked.get(level, version), version)

    def check_manifest(self, version: Version, content: dict[str, str]) -> None:
        """S2, S16: a manifest lists every bundle, with the state's own digests."""
        missing = {ref.bundle_id for ref in self.table} - set(content)
        if missing:
            raise Violation("S2", f"the manifest of {version} lacks {sorted(missing)[0]}")
        if version in self.spoiled:
            raise Violation("S16", f"{version} is committed although its twins differ")
        wrong = [b for b, digest in content.items() if digest != self.state.get((version, b))]
        if wrong:
            raise Violation("S12", f"{wrong[0]} of {version} in storage is not the state at its save")

    def check_retention(self, retired: Sequence[Version], storage: Storage, lineage: Lineage) -> None:
        """S11, S8: the newest two of the living lineage stay, and the one resumed from."""
        live = sorted(v for v in storage.manifests if lineage.is_live(v))
        start = storage.resumed.get(storage.incarnation)
        must = set(live[-2:]) | ({start} if start in live and not any(v > start for v in live) else set())
        gone = must & set(retired)
        if gone:
            raise Violation("S11", f"retention removes {min(gone)}")

    def check_bounds(self, keepers: Sequence[Keeper]) -> None:
        """S15: what is remembered does not grow with time."""
        for keeper in keepers:
            desk = keeper.desk
            for thing in (keeper.ledger, desk.board if desk else None):
                kept = [len(value) for value in vars(thing).values() if isinstance(value, dict)] if thing else []
                if max(kept, default=0) > MAX_REMEMBERED:
                    raise Violation("S15", f"node {keeper.node} remembers {max(kept)} things")

    def must_find(self, storage: Storage, keepers: Sequence[Keeper]) -> tuple[Version | None, str]:
        """S1: the version that a recovery may not fall below now, and why.

        A keeper that died a moment ago may not have learned again of which bundles a version consists, and one that a partition
        cut off never heard of it: if nobody who lives knows, all that did died, which is a loss of memory. Of what they resumed
        from the ranks know it, and tell every keeper.
        """
        floors: list[tuple[Version, str]] = []
        newest = self.acked.get(Level.CAPTURED)
        known = not self.renewed or newest == self.origin or any(newest in keeper.tables for keeper in keepers)
        if newest is not None and known and not self.lost and not self.flipped:
            floors.append((newest, "captured, and no memory was lost"))
        one = len(self.lost | self.renewed) <= 1
        if one and not self.flipped and Level.REPLICATED in self.acked:
            floors.append((self.acked[Level.REPLICATED], "replicated, and at most one node was lost"))
        if storage.acked is not None and Lineage(dict(storage.resumed)).is_live(storage.acked):
            floors.append((storage.acked, "durable"))
        return max(floors, key=lambda floor: floor[0], default=(None, ""))

    def check_choice(self, version: Version | None, storage: Storage, keepers: Sequence[Keeper]) -> None:
        """S1, S4, S16 at a recovery."""
        floor, why = self.must_find(storage, keepers)
        if floor is not None and (version is None or version < floor):
            raise Violation("S1", f"{floor} was {why}; {version or 'nothing'} is found")
        if version is not None and version not in self.living:
            raise Violation("S4", f"{version} is chosen, which an incarnation in between had rolled back")
        if version is not None and version in self.spoiled:
            raise Violation("S16", f"{version} is chosen although its twins differ")

    def resumes(self, version: Version | None, keepers: Sequence[Keeper]) -> None:
        """A new incarnation trains."""
        self.living = {v for v in self.living if version is not None and v <= version}
        self.acked, self.lost, self.renewed, self.flipped, self.under_replicated = {}, set(), set(), False, None
        self.origin = version
        kept = version is not None and self.is_complete(version, keepers) and self._intact(version, keepers)
        self.complete = version if kept else None
        if kept and version is not None:
            self.acked[Level.CAPTURED] = version

    def _intact(self, version: Version, keepers: Sequence[Keeper]) -> bool:
        found = [keeper.find(rank, version) for keeper in keepers for rank in keeper.ranks]
        return all(held is not None and held.intact for held in found)

    def notices(self, version: Version, keepers: Sequence[Keeper]) -> None:
        """After a seal: is it the newest complete one now? One that was given up before is none: its copies are free already."""
        if self.is_complete(version, keepers) and version not in self.spoiled | self.abandoned:
            self.complete = max(self.complete or version, version)
