"""The life of a version over the whole job: captured, replicated, durable, or abandoned. The coordinator's board.

Pure. Facts come in as method calls, announcements and orders come out as values; whoever runs the board sends and
executes them. Every fact is idempotent, so a new coordinator is fed by every node repeating what it knows. Nothing
here depends on a clock or on who the coordinator is.

Order of a durable version (protocol section 5): every rank sealed -> CAPTURED is announced -> PERSIST, if the version
is due for storage or as soon as somebody asks for it -> every node that represents bundles reports its part -> COMMIT
is ordered -> the manifest stands -> DURABLE is announced and retention may run. A level is announced once, and only when it is reached (S13).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.core import bundles
from holdfast.core.model import BundleRef, Level, RankLayout, Seal, Topology, Version

# Versions that the board remembers below the newest captured one. Enough for storage that lags a few saves behind;
# a bound, because nothing may grow with time (S15).
MAX_VERSIONS = 32
# Layouts remembered; a job has one, or two when optimizer state appears with the first step.
MAX_LAYOUTS = 8


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank sealed its part of a version.

    Attributes:
        layout: fingerprint of the RankLayout that was registered when the rank began the version.
        durable: the version is due for storage.
    """

    version: Version
    rank: int
    layout: str
    seals: tuple[Seal, ...]
    durable: bool


@dataclass(frozen=True, slots=True)
class PartReport:
    """One node wrote the bundles it represents and its part of the manifest."""

    version: Version
    node: int
    part: str
    length: int
    digest: str
    bundle_ids: tuple[str, ...]


class Kind(enum.Enum):
    """What an announcement says of a version."""

    CAPTURED = "captured"
    PERSIST = "persist"  # an order, not a level: every node writes the bundles it represents
    REPLICATED = "replicated"
    DURABLE = "durable"
    ABANDONED = "abandoned"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class Announcement:
    """What every node is told.

    Attributes:
        layout: fingerprint of the job's layout (CAPTURED only); nodes that lack its table are sent it first.
    """

    kind: Kind
    version: Version
    reason: str
    layout: str = ""


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """The coordinator's own node writes the root manifest now."""

    version: Version
    layout: str
    parts: tuple[PartReport, ...]


Action = Announcement | CommitOrder


@dataclass(slots=True)
class _Entry:
    sealed: dict[int, RankReport] = field(default_factory=dict)
    replicas: dict[str, set[int]] = field(default_factory=dict)
    parts: dict[int, PartReport] = field(default_factory=dict)
    table: dict[str, BundleRef] = field(default_factory=dict)
    layout: str = ""
    level: Level = Level.NONE
    abandoned: str = ""
    suspect: str = ""
    durable_due: bool = False
    persist_ordered: bool = False
    commit_ordered: bool = False


class Board:
    """What the coordinator of one incarnation knows and concludes."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._layouts: dict[tuple[int, str], RankLayout] = {}
        self._entries: dict[Version, _Entry] = {}
        self._tables: dict[str, tuple[BundleRef, ...]] = {}
        self._named: dict[tuple[str, ...], str] = {}
        self._high: dict[int, Version] = {}

    def register(self, layout: RankLayout) -> None:
        """A rank's layout, before the first version that is sealed under it."""
        key = (layout.rank, layout.fingerprint)
        self._layouts.pop(key, None)  # the newest stands last
        self._layouts[key] = layout

    def table(self, layout: str) -> tuple[BundleRef, ...]:
        """Every bundle of the job under that layout; empty if unknown."""
        return self._tables.get(layout, ())

    def level(self, version: Version) -> Level:
        entry = self._entries.get(version)
        return entry.level if entry else Level.NONE

    def sealed(self, reports: Iterable[RankReport]) -> list[Action]:
        """Ranks sealed a version. A rank that reports a version is past all earlier ones."""
        actions: list[Action] = []
        for report in reports:
            entry = self._entry(report.version)
            if (report.rank, report.layout) in self._layouts:
                entry.sealed.setdefault(report.rank, report)
            entry.durable_due |= report.durable
            actions += self._skipped_by(report.rank, report.version)
            actions += self._compare_twins(report.version, entry, report)
            actions += self._try_captured(report.version, entry)
        self._forget()
        return actions

    def abandoned(self, version: Version, rank: int, reason: str) -> list[Action]:
        """A rank skipped, failed or ran out of time. Final, unless every rank had sealed already."""
        entry = self._entry(version)
        self._high[rank] = max(self._high.get(rank, version), version)
        if entry.level is not Level.NONE or entry.abandoned:
            return []
        entry.abandoned = f"rank {rank}: {reason}"
        return [Announcement(Kind.ABANDONED, version, entry.abandoned)]

    def due(self, versions: Iterable[Version]) -> list[Action]:
        """These versions are wanted in storage, although they were not when they were captured."""
        actions: list[Action] = []
        for version in versions:
            entry = self._entry(version)
            entry.durable_due = True
            actions += self._try_persist(version, entry)
        return actions

    def replicated(self, version: Version, node: int, bundle_ids: Iterable[str]) -> list[Action]:
        """A node holds verified replicas of these bundles."""
        entry = self._entry(version)
        for bundle_id in bundle_ids:
            entry.replicas.setdefault(bundle_id, set()).add(node)
        return self._try_replicated(version, entry)

    def written(self, report: PartReport) -> list[Action]:
        """A node's bundles and part are in storage."""
        entry = self._entry(report.version)
        entry.parts[report.node] = report
        return self._try_commit(report.version, entry)

    def committed(self, version: Version) -> list[Action]:
        """The root manifest stands, created by us or equal to ours."""
        entry = self._entry(version)
        if entry.level is Level.DURABLE:
            return []
        entry.level = Level.DURABLE
        return [Announcement(Kind.DURABLE, version, "the manifest is committed")]

    def commit_failed(self, version: Version) -> None:
        """The manifest could not be written; a repeated part report tries again."""
        self._entry(version).commit_ordered = False

    def _entry(self, version: Version) -> _Entry:
        return self._entries.setdefault(version, _Entry())

    def _skipped_by(self, rank: int, version: Version) -> list[Action]:
        """Earlier versions that this rank never sealed will never be complete."""
        self._high[rank] = max(self._high.get(rank, version), version)
        actions: list[Action] = []
        for earlier, entry in sorted(self._entries.items()):
            open_ = entry.level is Level.NONE and not entry.abandoned
            if open_ and any(self._passed(other, earlier, entry) for other in self._high):
                entry.abandoned = f"rank {self._passer(earlier, entry)} skipped it"
                actions.append(Announcement(Kind.ABANDONED, earlier, entry.abandoned))
        return actions

    def _passed(self, rank: int, version: Version, entry: _Entry) -> bool:
        return self._high[rank] > version and rank not in entry.sealed

    def _passer(self, version: Version, entry: _Entry) -> int:
        return next(rank for rank in sorted(self._high) if self._passed(rank, version, entry))

    def _compare_twins(self, version: Version, entry: _Entry, report: RankReport) -> list[Action]:
        """Digests of the same bundle from different ranks must agree (decision 6)."""
        mine = {seal.bundle_id: seal.digest for seal in report.seals}
        for other in entry.sealed.values():
            for seal in other.seals:
                if not entry.suspect and mine.get(seal.bundle_id, seal.digest) != seal.digest:
                    entry.suspect = f"ranks {report.rank} and {other.rank} differ in bundle {seal.bundle_id}"
                    return [Announcement(Kind.SUSPECT, version, entry.suspect)]
        return []

    def _try_captured(self, version: Version, entry: _Entry) -> list[Action]:
        if entry.level is not Level.NONE or entry.abandoned or len(entry.sealed) < self._topology.world_size:
            return []
        entry.layout = self._job_layout(entry)
        entry.table = {ref.bundle_id: ref for ref in self._tables[entry.layout]}
        held = {seal.bundle_id for report in entry.sealed.values() for seal in report.seals}
        if lacking := sorted(set(entry.table) - held):
            entry.abandoned = f"no rank sealed bundle {lacking[0]}"
            return [Announcement(Kind.ABANDONED, version, entry.abandoned)]
        entry.level = Level.CAPTURED
        reason = f"all {self._topology.world_size} ranks sealed it"
        captured = Announcement(Kind.CAPTURED, version, reason, entry.layout)
        later = [*self._try_replicated(version, entry), *self._try_persist(version, entry)]
        return [captured, *later, *self._try_commit(version, entry)]

    def _try_persist(self, version: Version, entry: _Entry) -> list[Action]:
        captured = entry.level in (Level.CAPTURED, Level.REPLICATED)
        if not captured or not entry.durable_due or entry.persist_ordered or entry.suspect:
            return []  # a suspect version never reaches storage, where it could evict a verified one (S16)
        entry.persist_ordered = True
        return [Announcement(Kind.PERSIST, version, "it is due for storage")]

    def _job_layout(self, entry: _Entry) -> str:
        """Fingerprint of the layout of all ranks; its table is built when a combination is first seen."""
        key = tuple(entry.sealed[rank].layout for rank in sorted(entry.sealed))
        if key not in self._named:
            layouts = {rank: self._layouts[rank, report.layout] for rank, report in entry.sealed.items()}
            table = {ref.bundle_id: ref for layout in layouts.values() for ref in layout.bundles}
            name = bundles.layout_fingerprint(layouts)
            self._named[key] = name
            self._tables[name] = tuple(table[bundle_id] for bundle_id in sorted(table))
        return self._named[key]

    def _try_replicated(self, version: Version, entry: _Entry) -> list[Action]:
        if entry.level is not Level.CAPTURED:
            return []
        for ref in entry.table.values():
            if len(self._nodes_of(ref, entry)) < 2:
                return []
        entry.level = Level.REPLICATED
        return [Announcement(Kind.REPLICATED, version, "every bundle is sealed in at least two nodes")]

    def _nodes_of(self, ref: BundleRef, entry: _Entry) -> set[int]:
        nodes = {self._topology.node_of[rank] for rank in ref.ranks if rank in entry.sealed}
        return nodes | entry.replicas.get(ref.bundle_id, set())

    def _try_commit(self, version: Version, entry: _Entry) -> list[Action]:
        ready = entry.level in (Level.CAPTURED, Level.REPLICATED) and not entry.commit_ordered
        if not ready or not entry.durable_due or not entry.table:
            return []
        written = {bundle_id for part in entry.parts.values() for bundle_id in part.bundle_ids}
        if not set(entry.table) <= written:
            return []
        entry.commit_ordered = True
        return [CommitOrder(version, entry.layout, tuple(entry.parts[node] for node in sorted(entry.parts)))]

    def _forget(self) -> None:
        """Bounded: the oldest finished versions go first."""
        excess = len(self._entries) - MAX_VERSIONS
        for version in sorted(self._entries)[: max(0, excess)]:
            del self._entries[version]
        if len(self._named) > MAX_LAYOUTS:
            live = {entry.layout for entry in self._entries.values()}
            used = {(r.rank, r.layout) for entry in self._entries.values() for r in entry.sealed.values()}
            self._named = {key: name for key, name in self._named.items() if name in live}
            self._tables = {name: table for name, table in self._tables.items() if name in live}
            newest = dict(self._layouts.keys())
            self._layouts = {k: v for k, v in self._layouts.items() if k in used or newest[k[0]] == k[1]}


def represented(refs: Iterable[BundleRef], node: int, topology: Topology) -> tuple[BundleRef, ...]:
    """The bundles that `node` writes to storage."""
    return tuple(ref for ref in refs if topology.node_of[bundles.representative(ref)] == node)


def to_retire(
    durable: Iterable[Version],
    *,
    keep_last: int,
    keep_every: int,
    protected: Iterable[Version],
) -> tuple[Version, ...]:
    """Durable versions that retention may remove, oldest first (protocol section 8). Call it only after a commit.

    Args:
        durable: versions whose root manifest stands.
        keep_last: how many of the newest stay; never fewer than two.
        keep_every: versions whose step is a multiple stay; 0 for none.
        protected: the one resumed from until a newer is durable, pinned ones, the newest not suspect.
    """
    ordered = sorted(durable)
    keep = set(ordered[-max(2, keep_last) :]) | set(protected)
    if keep_every:
        keep |= {version for version in ordered if version.step % keep_every == 0}
    return tuple(version for version in ordered if version not in keep)


def newest(levels: Mapping[Version, Level], at_least: Level) -> Version | None:
    """The newest version known at a level or above."""
    return max((version for version, level in levels.items() if level >= at_least), default=None)
