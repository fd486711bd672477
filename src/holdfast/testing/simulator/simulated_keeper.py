"""One node of the simulated cluster: its keeper's memory, and the real NodeLedger that decides about it.

What surrounds the ledger is modelled as keeper.service.save_requests, keeper.slots.keeper_state and keeper.replication.replicator do it: slots are views with digests
in place of bytes, messages are calls through testing.simulator.network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast.core.layout.parity_stripes import Piece
from holdfast.core.model import BundleRef, Level, Seal, Topology, Version
from holdfast.core.versions import slot_guard
from holdfast.core.versions.coordinator_board import Announcement, Board, Kind
from holdfast.core.versions.node_ledger import NodeLedger, Reports
from holdfast.core.versions.replication_lag import ReplicationLag
from holdfast.core.versions.slot_guard import SlotState, SlotView
from holdfast.core.versions.writer_failover import Watch as Line

if TYPE_CHECKING:
    from holdfast.core.versions.lineage import Lineage


@dataclass(slots=True)
class Held:
    """One slot: what the guard sees, what its header says, and what its bytes are."""

    view: SlotView
    seals: dict[str, str] = field(default_factory=dict)
    content: dict[str, str] = field(default_factory=dict)
    durable: bool = False

    @property
    def intact(self) -> bool:
        """Return whether the bytes are what the header says."""
        return self.seals == self.content


@dataclass(slots=True)
class Desk:
    """Holds what the coordinating keeper has on its desk."""

    board: Board
    incarnation: int
    history: list[Announcement] = field(default_factory=list)
    followers: set[int] = field(default_factory=set)
    missing: dict[int, float] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)


class Keeper:
    """A node's keeper and its memory. `life` grows when the process is another one, so that late events find out."""

    def __init__(self, node: int, topology: Topology, num_slots: int) -> None:
        self.node = node
        self.topology = topology
        self.ranks = topology.ranks_on(node)
        self.num_slots = num_slots
        self.alive = True
        self.life = 0
        self.slots: dict[int, list[Held]] = {}
        self.replicas: dict[Version, dict[str, tuple[int, Held]]] = {}
        self.parity: dict[Version, Piece] = {}
        self.tables: dict[Version, tuple[BundleRef, ...]] = {}
        self.suspects: set[Version] = set()
        self.ledger: NodeLedger | None = None
        self.resumed: Version | None = None
        self.patience = ReplicationLag()
        self.dropping: list[Version] = []
        self.follows: tuple[int, int] | None = None  # node and life of the coordinator
        self.desk: Desk | None = None
        self.line = Line(node)
        self.clear()

    def clear(self) -> None:
        """All memory is gone."""
        self.slots = {rank: [Held(SlotView(i)) for i in range(self.num_slots)] for rank in self.ranks}
        self.forget()

    def forget(self) -> None:
        """The process is gone; slots that trainers map stay, everything else does not."""
        self.life += 1
        self.replicas, self.parity, self.tables, self.suspects = {}, {}, {}, set()
        self.ledger, self.desk, self.follows, self.line = None, None, None, Line(self.node)
        for own in self.slots.values():
            for held in own:
                if held.view.state is not SlotState.SEALED:
                    held.view = SlotView(held.view.index)
                held.view = replace(held.view, pins=0)

    def new_ledger(
        self, incarnation: int, lineage: Lineage, resumed: Version | None, table: tuple[BundleRef, ...]
    ) -> NodeLedger:
        """The next incarnation begins here, and the ranks tell of which bundles the version consists that they resumed from."""
        self.ledger = NodeLedger(node=self.node, topology=self.topology, incarnation=incarnation, lineage=lineage)
        self.ledger.resume(resumed)
        self.resumed, self.patience, self.line = resumed, ReplicationLag(), Line(self.node)
        self.learn(resumed, table)
        for own in self.slots.values():
            for held in own:
                if held.view.state is SlotState.WRITING:
                    held.view = SlotView(held.view.index)
                held.view = replace(held.view, pins=0)
        return self.ledger

    def learn(self, version: Version | None, table: tuple[BundleRef, ...]) -> None:
        """The ranks know the bundles of what they resumed from, whatever the keeper has heard of."""
        if version is not None:
            self.tables[version] = table

    # --- the guard, as keeper.slots.keeper_state sees it

    def views(self, rank: int, now_s: float) -> list[SlotView]:
        """All slots of a rank, as the guard is shown them."""
        awaited = self._awaited([held.view.version for held in self.slots[rank]], now_s)
        return [
            replace(held.view, pins=held.view.pins + 1) if held.view.version in awaited else held.view
            for held in self.slots[rank]
        ]

    def _awaited(self, versions: list[Version | None], now_s: float) -> set[Version | None]:
        """Versions that nothing newer in two nodes makes superfluous, while there is patience."""
        if self.ledger is None or len(self.topology.nodes) < 2:
            return set()
        found = {version for version in versions if version is not None and self.ledger.awaits_copies(version)}
        if not found or self.patience.lasts(now_s):
            return {*found}
        decisions = {version: self.ledger.give_up_copies(version) for version in sorted(found)}
        self.dropping += [version for version, decision in decisions.items() if decision.reason]
        return {version for version, decision in decisions.items() if not decision.value}

    def find(self, rank: int, version: Version, state: SlotState = SlotState.SEALED) -> Held | None:
        """The slot in which a rank holds a version."""
        return next((h for h in self.slots.get(rank, ()) if h.view.version == version and h.view.state is state), None)

    def seals_of(self, version: Version, bundle_ids: Sequence[str]) -> tuple[Seal, ...] | None:
        """Seals of these bundles from slots of local ranks; None if one is not here, or its bytes are not what was sealed."""
        own = {name: held for v, rank, name, held in self.copies() if v == version and rank is not None}
        if not all(name in own and own[name].seals[name] == own[name].content[name] for name in bundle_ids):
            return None
        return tuple(Seal(name, 1, own[name].seals[name]) for name in bundle_ids)

    def copies(self) -> list[tuple[Version, int | None, str, Held]]:
        """(version, whose slot or None for a replica, bundle, slot) of everything that is sealed here."""
        own = [
            (held.view.version, rank, bundle_id, held)
            for rank, mine in self.slots.items()
            for held in mine
            if held.view.state is SlotState.SEALED and held.view.version is not None
            for bundle_id in held.seals
        ]
        kept = [
            (v, None, bundle_id, held) for v, table in self.replicas.items() for bundle_id, (_, held) in table.items()
        ]
        return [*own, *kept]

    def collect(self, now_s: float) -> None:
        """Replicas that nobody needs go."""
        if self.ledger is None:
            return
        awaited, knowledge = self._awaited([*self.replicas, *self.parity], now_s), self.ledger.knowledge
        for version in list(self.parity):
            if slot_guard.reusable(SlotView(0, SlotState.SEALED, version, int(version in awaited)), knowledge).value:
                del self.parity[version]
        for version in list(self.replicas):
            pins = int(version in awaited) + sum(held.view.pins for _, held in self.replicas[version].values())
            if slot_guard.reusable(SlotView(0, SlotState.SEALED, version, pins), knowledge).value:
                del self.replicas[version]

    def take(self, news: Announcement, table: tuple[BundleRef, ...], now_s: float) -> bool:
        """The coordinator's news; True if it was news here."""
        ledger = self.ledger
        if ledger is None or news.version.incarnation != ledger.incarnation:
            return False
        if table and news.layout:
            ledger.tables.learn(news.layout, table)
        if not ledger.told(news):
            return False
        if news.kind is Kind.SUSPECT:
            self.suspects.add(news.version)
        if news.kind is Kind.CAPTURED:
            self.patience.captured(now_s)
            self.tables[news.version] = ledger.bundles_of(news.version).refs
            kept = {v for v, _, _, _ in self.copies()} | {news.version}
            self.tables = {version: known for version, known in self.tables.items() if version in kept}
        if news.kind is Kind.REPLICATED:
            newest = ledger.knowledge.captured == ledger.newest(Level.REPLICATED)
            self.patience.replicated(now_s, newest=newest)
        self.collect(now_s)
        return True

    def adopt(self, layouts: dict[int, str]) -> list[Reports]:
        """A new process got the sealed slots from its trainers."""
        assert self.ledger is not None
        told = []
        for rank in self.ranks:
            sealed = [h for h in self.slots[rank] if h.view.state is SlotState.SEALED and h.view.version is not None]
            for held in sorted(sealed, key=lambda h: h.view.version or Version(0, 0)):
                version = held.view.version
                if version is not None and version.incarnation == self.ledger.incarnation:
                    seals = as_seals(held.seals)
                    told.append(self.ledger.adopt(rank, version, seals, layout=layouts[rank], durable=held.durable))
        return told


def as_seals(digests: dict[str, str]) -> tuple[Seal, ...]:
    """Digests as the core knows them."""
    return tuple(Seal(bundle_id, 1, digest) for bundle_id, digest in sorted(digests.items()))
