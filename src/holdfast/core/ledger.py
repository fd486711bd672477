"""One node's view: its ranks' slots, what it reported, what it was told. The keeper asks here before it acts.

Pure. The keeper calls one method per fact and carries out what comes back; a new coordinator is fed from `reports`.
One ledger serves one incarnation; the next one takes over the slots, not the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.core import bundles, commit, slots
from holdfast.core.commit import Announcement, Kind, PartReport, RankReport
from holdfast.core.lineage import Lineage
from holdfast.core.model import BundleRef, Decision, Level, RankLayout, Seal, Topology, Version
from holdfast.core.slots import Knowledge, SlotView

_LEVELS = {Kind.CAPTURED: Level.CAPTURED, Kind.REPLICATED: Level.REPLICATED, Kind.DURABLE: Level.DURABLE}


@dataclass(slots=True)
class _Local:
    """What this node knows of one version."""

    layout_of: dict[int, str] = field(default_factory=dict)
    reports: dict[int, RankReport] = field(default_factory=dict)
    sent: bool = False
    replicas: set[str] = field(default_factory=set)
    part: PartReport | None = None
    due: bool = False
    persist_told: bool = False
    level: Level = Level.NONE
    reason: str = "not yet sealed on all ranks"
    layout: str = ""
    abandoned: bool = False
    abandoned_by: dict[int, str] = field(default_factory=dict)
    suspect: str = ""


@dataclass(frozen=True, slots=True)
class Reports:
    """Everything a new coordinator needs from this node."""

    layouts: tuple[RankLayout, ...] = ()
    sealed: tuple[RankReport, ...] = ()
    abandoned: tuple[tuple[Version, int, str], ...] = ()
    replicas: tuple[tuple[Version, tuple[str, ...]], ...] = ()
    due: tuple[Version, ...] = ()
    parts: tuple[PartReport, ...] = ()


class NodeLedger:
    """The state of one keeper within one incarnation."""

    def __init__(self, *, node: int, topology: Topology, incarnation: int, lineage: Lineage) -> None:
        self.node = node
        self.topology = topology
        self.incarnation = incarnation
        self.ranks = topology.ranks_on(node)
        self._lineage = lineage
        self._captured: Version | None = None
        self._versions: dict[Version, _Local] = {}
        self._layouts: dict[int, RankLayout] = {}
        self._tables: dict[str, tuple[BundleRef, ...]] = {}
        self._begun: dict[int, Version] = {}
        self._resumed = False

    @property
    def knowledge(self) -> Knowledge:
        """What the overwrite guard may rely on."""
        abandoned = frozenset(version for version, local in self._versions.items() if local.abandoned)
        return Knowledge(self._captured, abandoned, self._lineage)

    def resume(self, version: Version | None) -> None:
        """Every rank loaded `version` (None: a fresh start); it is protected like a captured one from here on."""
        self._lineage = self._lineage.with_(self.incarnation, version)
        self._captured = version
        self._resumed = True

    def register(self, layout: RankLayout) -> None:
        """A local rank's layout."""
        self._layouts[layout.rank] = layout

    def begin(self, rank: int, version: Version, own_slots: Sequence[SlotView]) -> Decision[int | None]:
        """The slot that `rank` may write `version` into, or None with the reason."""
        if version.incarnation != self.incarnation:
            return Decision(None, f"{version} is not of incarnation {self.incarnation}; this process is fenced")
        if not self._resumed:
            return Decision(None, "the ranks have not agreed yet on what to resume from")
        if rank in self._begun and version <= self._begun[rank]:
            return Decision(None, f"rank {rank} began {self._begun[rank]} before {version}")
        if self._versions.get(version, _Local()).abandoned:
            return Decision(None, f"{version} is abandoned: {self._versions[version].reason}")
        decision = slots.choose_slot(own_slots, self.knowledge)
        if rank not in self._layouts:
            return Decision(None, f"rank {rank} has not registered its layout")
        if decision.value is not None:
            self._begun[rank] = version
            self._local(version).layout_of[rank] = self._layouts[rank].fingerprint
        return decision

    def seal(self, rank: int, version: Version, seals: Iterable[Seal], *, durable: bool) -> tuple[RankReport, ...]:
        """A local rank's slot is sealed. Returns the node's report once all local ranks sealed, else nothing."""
        local = self._local(version)
        local.reports[rank] = RankReport(version, rank, local.layout_of.get(rank, ""), tuple(seals), durable)
        if local.sent or set(local.reports) != set(self.ranks):
            return ()
        local.sent = True
        return tuple(local.reports[r] for r in self.ranks)

    def abandon(self, rank: int, version: Version, reason: str) -> tuple[Version, int, str] | None:
        """A local rank gives the version up. Returns what to tell the coordinator, once per rank."""
        local = self._local(version)
        if rank in local.reports or rank in local.abandoned_by or local.level is not Level.NONE:
            return None
        local.abandoned_by[rank] = reason
        local.abandoned = True
        local.reason = f"abandoned: rank {rank}: {reason}"
        return version, rank, reason

    def told(self, news: Announcement) -> bool:
        """Takes in what the coordinator announced; True if it is news to this node."""
        local = self._local(news.version)
        if news.kind is Kind.SUSPECT:
            fresh, local.suspect = not local.suspect, news.reason
            return fresh
        if news.kind is Kind.ABANDONED:
            fresh = not local.abandoned
            local.abandoned, local.reason = True, f"abandoned: {news.reason}"
            return fresh
        if news.kind is Kind.PERSIST:
            fresh, local.persist_told = not local.persist_told, True
            return fresh
        level = _LEVELS[news.kind]
        if local.level >= level:
            return False
        local.level, local.reason = level, news.reason
        local.layout = news.layout or local.layout
        if self._captured is None or news.version > self._captured:
            self._captured = news.version
        self._forget()
        return True

    def learn_table(self, layout: str, table: Sequence[BundleRef]) -> None:
        """Every bundle of the job under `layout`."""
        self._tables[layout] = tuple(table)

    def table_of(self, version: Version) -> tuple[BundleRef, ...]:
        """Every bundle of the job at `version`, if known."""
        return self._tables.get(self._local(version).layout, ())

    def knows_table(self, layout: str) -> bool:
        return layout in self._tables

    def level(self, version: Version) -> tuple[Level, str, bool]:
        """(level, reason, abandoned) as known here."""
        local = self._versions.get(version)
        return (local.level, local.reason, local.abandoned) if local else (Level.NONE, "unknown here", False)

    def newest(self, level: Level) -> Version | None:
        """The newest version of this incarnation known at `level` or above."""
        return commit.newest({version: local.level for version, local in self._versions.items()}, level)

    def suspects(self) -> dict[Version, str]:
        """Versions whose twins differ, with the reason."""
        return {version: local.suspect for version, local in self._versions.items() if local.suspect}

    def to_persist(self, version: Version) -> tuple[tuple[int, BundleRef], ...]:
        """(local rank whose slot holds it, bundle) for every bundle that this node writes to storage."""
        refs = commit.represented(self.table_of(version), self.node, self.topology)
        plan = ((bundles.capturer(ref, self.node, self.topology), ref) for ref in refs)
        return tuple((rank, ref) for rank, ref in plan if rank is not None)

    def to_replicate(self, version: Version) -> tuple[tuple[int, int, BundleRef], ...]:
        """(home node, rank whose slot holds it, bundle) for every bundle that this node keeps a replica of."""
        plan = []
        for ref in self.table_of(version):
            if bundles.backup_node(ref, self.topology) == self.node:
                home = self.topology.node_of[ref.ranks[0]]
                rank = bundles.capturer(ref, home, self.topology)
                if rank is not None:
                    plan.append((home, rank, ref))
        return tuple(plan)

    def replicated(self, version: Version, bundle_ids: Iterable[str]) -> None:
        """Replicas of these bundles are sealed here."""
        self._local(version).replicas.update(bundle_ids)

    def want_durable(self, version: Version) -> bool:
        """A local rank wants an existing version in storage; True if the coordinator is to be told."""
        local = self._local(version)
        fresh, local.due = not local.due and not local.abandoned, True
        return fresh

    def wrote(self, part: PartReport) -> None:
        """This node's part of the version is in storage."""
        self._local(part.version).part = part

    def reports(self) -> Reports:
        """All that this node would tell a coordinator that knows nothing."""
        items = sorted(self._versions.items())
        return Reports(
            layouts=tuple(self._layouts[rank] for rank in sorted(self._layouts)),
            sealed=tuple(local.reports[r] for _, local in items if local.sent for r in self.ranks),
            abandoned=tuple((v, r, why) for v, local in items for r, why in sorted(local.abandoned_by.items())),
            replicas=tuple((v, tuple(sorted(local.replicas))) for v, local in items if local.replicas),
            due=tuple(v for v, local in items if local.due),
            parts=tuple(local.part for _, local in items if local.part),
        )

    def _local(self, version: Version) -> _Local:
        return self._versions.setdefault(version, _Local())

    def _forget(self) -> None:
        """Bounded: versions far below the newest captured one are settled."""
        for version in sorted(self._versions)[: max(0, len(self._versions) - commit.MAX_VERSIONS)]:
            del self._versions[version]
