"""The life of a version over the whole job: captured, replicated, durable, or abandoned. The coordinator's board.

Pure. Facts come in as method calls, announcements and orders come out as values; whoever runs the board sends and
executes them. Every fact is idempotent, so a new coordinator is fed by every node repeating what it knows. Nothing
here depends on a clock or on who the coordinator is.

Order of a durable version (protocol section 6): every rank sealed -> CAPTURED is announced -> PERSIST, if the version
is due for storage or as soon as somebody asks for it -> every node that represents bundles reports its part -> COMMIT
is ordered -> the manifest stands -> DURABLE is announced and retention may run. A level is announced once, and only
when it is reached (S13). ABANDONED is final and never said of a version that was captured. A version whose twins differ
is abandoned too: it may not take the place of a verified one (S16). What nodes report of their writing is passed on to
those in the same lines (core.takeover): they decide by themselves when to take over.

No fact costs more than the rank, node or bundles that it speaks of: a version of 1,024 ranks is judged in one pass.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from holdfast.core.layout import bundles, parity_groups
from holdfast.core.model import BundleRef, Level, RankLayout, Seal, Topology, Version, structure_of
from holdfast.core.versions import twin_vote
from holdfast.core.versions.bundle_table import Table, disagreement, new_table

# Versions that the board remembers below the newest captured one. Enough for storage that lags a few saves behind;
# a bound, because nothing may grow with time (S15).
MAX_VERSIONS = 32
# Versions on their way to storage that stay besides, the newest: storage may take longer than any number of saves.
MAX_WRITTEN = 8
# Captured versions that second copies are awaited of stay besides: as many as a rank has slots, and one. While a copy
# takes its time any number of versions may be begun and left out.
MAX_AWAITED = 4
# Layouts remembered; a job has one, or two when optimizer state appears with the first step.
MAX_LAYOUTS = 8


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank sealed its part of a version.

    Attributes:
        layout: fingerprint of the RankLayout that was registered when the rank began the version.
        durable: the version is due for storage.
        captured: it is known to be, so all seals were compared; they are left out then.
    """

    version: Version
    rank: int
    layout: str
    seals: tuple[Seal, ...]
    durable: bool
    captured: bool = False


@dataclass(frozen=True, slots=True)
class PartReport:
    """One node wrote the bundles of a part of the manifest, and the part.

    Attributes:
        part: its file.
        index: its number in `core.versions.writer_failover.parts`.
    """

    version: Version
    node: int
    part: str
    length: int
    digest: str
    bundle_ids: tuple[str, ...]
    index: int = -1


@dataclass(frozen=True, slots=True)
class WriteFailure:
    """One node could not write these parts.

    Attributes:
        gone: because it does not hold the bytes any more.
    """

    version: Version
    parts: tuple[int, ...]
    reason: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class KnownCapture:
    """A version that a node knows to be captured, for a coordinator that was not there.

    Attributes:
        table: every bundle of the job under `layout`; empty where one before it in the same report has told it.
        due: it is due for storage.
    """

    version: Version
    layout: str
    table: tuple[BundleRef, ...]
    due: bool


class Kind(enum.Enum):
    """Names what an announcement says of a version."""

    CAPTURED = "captured"
    PERSIST = "persist"  # an order, not a level: every node writes the bundles it represents
    REPLICATED = "replicated"
    DURABLE = "durable"
    ABANDONED = "abandoned"
    SUSPECT = "suspect"
    DROPPED = "dropped"  # by one node: its copies count no more, and from here on it may overwrite them
    SENDING = "sending"  # bytes of it leave a node, to be its second copy
    AT_WORK = "at work"
    WRITTEN = "written"
    FAILED = "failed"


# These say nothing of the version itself, and are told only to those in the same line of writers.
OF_WRITING = (Kind.AT_WORK, Kind.WRITTEN, Kind.FAILED)
# Told to whoever follows, and to nobody later: silence tells as well.
FLEETING = (*OF_WRITING, Kind.SENDING)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Holds what every node is told.

    Attributes:
        layout: fingerprint of the job's layout (CAPTURED only); nodes that lack its table are sent it first.
        node, parts: of writing: who, and which parts (none: all of the version).
        bundle: of SUSPECT: in which twins differ.
        lost: of DROPPED: the version is no longer in two nodes.
        report: of WRITTEN: it is repeated to a new coordinator if the one who wrote is gone by then.
    """

    kind: Kind
    version: Version
    reason: str
    layout: str = ""
    node: int = -1
    parts: tuple[int, ...] = ()
    report: PartReport | None = None
    bundle: str = ""
    lost: bool = False


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
    digests: dict[str, tuple[str, int]] = field(default_factory=dict)
    replicas: dict[str, set[int]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    parts: dict[str, PartReport] = field(default_factory=dict)
    layout: str = ""
    under_replicated: set[str] = field(default_factory=set)
    unwritten: set[str] = field(default_factory=set)
    reached: set[Level] = field(default_factory=set)
    abandoned: str = ""
    suspect: str = ""
    exams: dict[int, twin_vote.Examined] = field(default_factory=dict)
    durable_due: bool = False
    persist_ordered: bool = False
    commit_ordered: bool = False

    @property
    def is_open(self) -> bool:
        """Return whether it may still become complete."""
        return not self.reached and not self.abandoned

    @property
    def is_written(self) -> bool:
        """Return whether it is on its way to storage."""
        return self.persist_ordered and Level.DURABLE not in self.reached


class Board:
    """Holds what the coordinator of one incarnation knows and concludes."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._parity = parity_groups.by_node(topology)
        self._layouts: dict[tuple[int, str], RankLayout] = {}
        self._lists: dict[str, tuple[BundleRef, ...]] = {}  # by digest: one list for all twins
        self._entries: dict[Version, _Entry] = {}
        self._tables: dict[str, Table] = {}
        self._named: dict[tuple[str, ...], str] = {}
        self._high: dict[int, Version] = {}
        self._newest: Version | None = None  # captured
        self._owed: Version | None = None  # due for storage and given up: the next that is captured is due
        self._safest: Version | None = None  # ever called replicated
        self._forgotten: Version | None = None

    def register(self, layout: RankLayout) -> None:
        """A rank's layout, before the first version that is sealed under it; again if the rank has a newer one by then."""
        key = (layout.rank, layout.fingerprint)
        self._layouts.pop(key, None)  # the newest stands last
        known = self._lists.setdefault(structure_of(layout.bundles), layout.bundles)
        self._layouts[key] = replace(layout, bundles=known) if known == layout.bundles else layout

    def table(self, layout: str) -> tuple[BundleRef, ...]:
        """Every bundle of the job under that layout; empty if unknown."""
        table = self._tables.get(layout)
        return table.refs if table else ()

    def reached(self, version: Version) -> frozenset[Level]:
        """The levels that the version reached. A durable one need not be replicated."""
        entry = self._entries.get(version)
        return frozenset(entry.reached) if entry else frozenset()

    def sealed(self, reports: Iterable[RankReport]) -> list[Action]:
        """Ranks sealed a version. A rank that reports a version is past all earlier ones."""
        actions: list[Action] = []
        for report in reports:
            if self._is_settled(report.version):
                actions += self._tell_again(report.version)
                continue
            entry = self._entry(report.version)
            known = entry.sealed.get(report.rank)
            if known is None or not self._knows_layout(known):
                entry.sealed[report.rank] = report
            entry.durable_due |= report.durable
            actions += self._skipped_by(report.rank, report.version)
            actions += self._compare_twins(report.version, entry, report)
            actions += self._try_captured(report.version, entry)
        self._forget()
        return actions

    def abandoned(self, version: Version, rank: int, reason: str) -> list[Action]:
        """A rank skipped, failed or ran out of time. Final, unless every rank had sealed already.

        It says nothing of earlier versions: the rank's copy of one may still be on its way to a seal. A `rank` below
        zero repeats what an earlier coordinator had announced.
        """
        if self._is_settled(version):
            return self._tell_again(version)
        entry = self._entry(version)
        self._forget()
        return self._abandon(version, entry, f"rank {rank}: {reason}" if rank >= 0 else reason)

    def due(self, versions: Iterable[Version]) -> list[Action]:
        """These versions are wanted in storage, although they were not when they were captured."""
        actions: list[Action] = []
        for version in versions:
            entry = self._entry(version)
            entry.durable_due = True
            actions += self._try_persist(version, entry)
        return actions

    def heard(self, facts: Iterable[KnownCapture]) -> list[Action]:
        """Versions that an earlier coordinator called captured. So they are, although ranks of a node that died with it
        never report them here.
        """
        actions: list[Action] = []
        for fact in facts:
            if fact.table and fact.layout not in self._tables:
                self._tables[fact.layout] = new_table({r.bundle_id: r for r in fact.table}, self._topology)
            if self._is_settled(fact.version):
                continue
            entry = self._entry(fact.version)
            entry.durable_due |= fact.due
            if entry.is_open:
                actions += self._captured(fact.version, entry, fact.layout, "an earlier coordinator said so")
            else:
                actions += self._try_persist(fact.version, entry)
        return actions

    def replicated(self, version: Version, node: int, bundle_ids: Iterable[str]) -> list[Action]:
        """A node holds verified replicas of these bundles, or its parity of the version (`parity_groups.STANDS`)."""
        entry = self._entry(version)
        for bundle_id in bundle_ids:
            entry.replicas.setdefault(bundle_id, set()).add(node)
            for counted in self._made_safe(entry, node) if bundle_id == parity_groups.STANDS else (bundle_id,):
                self._count_copy(entry, counted)
        return self._try_replicated(version, entry)

    def dropped(self, node: int, version: Version) -> list[Action]:
        """A node is about to overwrite its copies. Its question and this answer pass in order with all other news, so
        whoever is told that a version is replicated was told so before a copy was gone, or was told that it is not.
        """
        entry = self._entry(version)
        entry.dropped.add(node)
        lost = False
        if Level.CAPTURED in entry.reached:
            entry.under_replicated = self._under_replicated(entry)
            lost = bool(entry.under_replicated) and Level.REPLICATED in entry.reached
            entry.reached -= {Level.REPLICATED} if lost else set()
        reason = "no second copy any more" if lost else "given up before it had a second copy"
        return [Announcement(Kind.DROPPED, version, f"{reason}: replication did not keep up", node=node, lost=lost)]

    def left(self, node: int) -> list[Action]:
        """A node's keeper is gone, its replicas perhaps with it: one that lives repeats them when it is back."""
        for entry in self._entries.values():
            for nodes in entry.replicas.values():
                nodes.discard(node)
            if Level.CAPTURED in entry.reached and Level.REPLICATED not in entry.reached:
                entry.under_replicated = self._under_replicated(entry)
        return []

    def sending(self, node: int, versions: Iterable[Version]) -> list[Action]:
        """Bytes of these leave a node: whoever waits for second copies has patience."""
        return [Announcement(Kind.SENDING, v, f"node {node} sends it", node=node) for v in versions]

    def written(self, report: PartReport) -> list[Action]:
        """A node's bundles and part are in storage."""
        entry = self._entry(report.version)
        news: list[Action] = []
        if report.part not in entry.parts:
            told = f"node {report.node} wrote {report.part}"
            mine = (report.index,)
            news.append(Announcement(Kind.WRITTEN, report.version, told, node=report.node, parts=mine, report=report))
        entry.parts[report.part] = report
        entry.unwritten.difference_update(report.bundle_ids)
        return [*news, *self._try_commit(report.version, entry)]

    def failed(self, node: int, failure: WriteFailure) -> list[Action]:
        """A node cannot write its parts. If nobody holds the bytes any more, a newer version takes its place."""
        version = failure.version
        told: list[Action] = [Announcement(Kind.FAILED, version, failure.reason, node=node, parts=failure.parts)]
        if failure.gone and self._newest is not None and version < self._newest:
            entry = self._entry(self._newest)
            entry.durable_due = True
            told += self._try_persist(self._newest, entry)
        return told

    def lost(self, node: int) -> list[Action]:
        """A node's keeper is gone: whatever it was to write, it will not."""
        return [Announcement(Kind.FAILED, version, "its keeper is gone", node=node) for version in self.being_written()]

    def at_work(self, node: int, versions: Iterable[Version]) -> list[Action]:
        """A node is writing these."""
        return [Announcement(Kind.AT_WORK, v, f"node {node} is writing", node=node) for v in versions]

    def being_written(self) -> tuple[Version, ...]:
        """Versions that were ordered into storage and do not stand there yet."""
        entries = sorted(self._entries.items())
        return tuple(v for v, e in entries if e.is_written)

    def in_line_with(self, version: Version, node: int) -> frozenset[int]:
        """The nodes that may have to do a node's writing, or whose writing it may have to do."""
        entry = self._entries.get(version)
        table = self._tables.get(entry.layout) if entry else None
        return frozenset().union(*(part.line for part in table.parts if node in part.line)) if table else frozenset()

    def committed(self, version: Version) -> list[Action]:
        """The root manifest stands, created by us or equal to ours."""
        entry = self._entry(version)
        if Level.DURABLE in entry.reached:
            return []
        entry.reached.add(Level.DURABLE)
        return [Announcement(Kind.DURABLE, version, "the manifest is committed")]

    def commit_failed(self, version: Version) -> None:
        """The manifest could not be written; a repeated part report tries again."""
        self._entry(version).commit_ordered = False

    def _entry(self, version: Version) -> _Entry:
        """The version's entry; one that nobody looks at again if the version was settled and forgotten."""
        entry = self._entries.get(version)
        if entry is None:
            entry = _Entry()
            if not self._is_settled(version):
                self._entries[version] = entry
        return entry

    def _is_settled(self, version: Version) -> bool:
        """Return whether the version was decided so long ago that its entry is gone."""
        return version not in self._entries and self._forgotten is not None and version <= self._forgotten

    def _tell_again(self, version: Version) -> list[Action]:
        """A keeper that lost its memory asks, with its report, about a version that is forgotten here."""
        if self._newest is not None and version <= self._newest:
            return []  # it is told of the newest captured one, which frees the slot as well
        return [Announcement(Kind.ABANDONED, version, "it was given up long ago")]

    def _abandon(self, version: Version, entry: _Entry, reason: str) -> list[Action]:
        if not entry.is_open:
            return []
        entry.abandoned = reason
        return [Announcement(Kind.ABANDONED, version, reason), *(self._owe(version) if entry.durable_due else [])]

    def _owe(self, version: Version) -> list[Action]:
        """A version that was due for storage is given up: a newer one takes its place, or storage falls behind for as long
        as the cadence meets saves that are given up.
        """
        if self._newest is None or self._newest < version:
            self._owed = max(self._owed or version, version)
            return []
        entry = self._entry(self._newest)
        entry.durable_due = True
        return self._try_persist(self._newest, entry)

    def _skipped_by(self, rank: int, version: Version) -> list[Action]:
        """Versions that a rank has gone past without sealing them will never be complete."""
        self._high[rank] = max(self._high.get(rank, version), version)
        passed = {v: rank for v, e in self._entries.items() if v < version and e.is_open and rank not in e.sealed}
        entry = self._entries[version]
        if entry.is_open and len(entry.sealed) <= 1:  # the first news of a version that others may have passed already
            others = [r for r, high in self._high.items() if high > version and r not in entry.sealed]
            passed.update([(version, min(others))] if others else [])
        actions: list[Action] = []
        for earlier, by in sorted(passed.items()):
            actions += self._abandon(earlier, self._entries[earlier], f"rank {by} went on without it")
        return actions

    def _compare_twins(self, version: Version, entry: _Entry, report: RankReport) -> list[Action]:
        """Digests of the same bundle from different ranks must agree (decision 6)."""
        for seal in report.seals:
            digest, other = entry.digests.setdefault(seal.bundle_id, (seal.digest, report.rank))
            if digest != seal.digest and not entry.suspect:
                entry.suspect = f"ranks {other} and {report.rank} differ in bundle {seal.bundle_id}"
                suspect = Announcement(Kind.SUSPECT, version, entry.suspect, bundle=seal.bundle_id)
                return [suspect, *self._abandon(version, entry, f"suspect: {entry.suspect}")]
        return []

    def examined(self, exam: twin_vote.Examined) -> list[Action]:
        """A rank's copy of a bundle whose twins differ was looked at; with two of them it can be said where."""
        entry = self._entries.get(exam.version)
        if entry is None or not entry.suspect or exam.bundle_id not in entry.digests:
            return []
        entry.exams[exam.rank] = exam
        said = twin_vote.verdict(
            {rank: other for rank, other in entry.exams.items() if other.bundle_id == exam.bundle_id}
        )
        if not said or said == entry.suspect:
            return []
        entry.suspect = said
        return [Announcement(Kind.SUSPECT, exam.version, said, bundle=exam.bundle_id)]

    def _try_captured(self, version: Version, entry: _Entry) -> list[Action]:
        if not entry.is_open or len(entry.sealed) < self._topology.world_size:
            return []
        if not all(self._knows_layout(report) for report in entry.sealed.values()):
            return []
        entry.layout = self._job_layout(entry)
        table = self._tables[entry.layout]
        if table.flaw:
            return self._abandon(version, entry, table.flaw)
        lacking = sorted(table.ids.difference(*(_ids(report) for report in entry.sealed.values())))
        if lacking and not any(report.captured for report in entry.sealed.values()):
            return self._abandon(version, entry, f"no rank sealed bundle {lacking[0]}")
        return self._captured(version, entry, entry.layout, f"all {self._topology.world_size} ranks sealed it")

    def _captured(self, version: Version, entry: _Entry, layout: str, reason: str) -> list[Action]:
        entry.layout, table = layout, self._tables[layout]
        entry.reached.add(Level.CAPTURED)
        self._newest = max(self._newest or version, version)
        if self._owed is not None and self._owed < version:
            entry.durable_due, self._owed = True, None
        entry.under_replicated = set(table.single_node) if not entry.dropped else set(table.ids)
        for bundle_id in sorted(entry.under_replicated):
            self._count_copy(entry, bundle_id)
        entry.unwritten = set(table.ids).difference(*(part.bundle_ids for part in entry.parts.values()))
        captured = Announcement(Kind.CAPTURED, version, reason, entry.layout)
        later = [*self._try_replicated(version, entry), *self._try_persist(version, entry)]
        return [captured, *later, *self._try_commit(version, entry)]

    def _knows_layout(self, report: RankReport) -> bool:
        return (report.rank, report.layout) in self._layouts

    def _try_persist(self, version: Version, entry: _Entry) -> list[Action]:
        captured = Level.CAPTURED in entry.reached and Level.DURABLE not in entry.reached
        if not captured or not entry.durable_due or entry.persist_ordered or entry.suspect:
            return []  # a suspect version never reaches storage, where it could evict a verified one (S16)
        entry.persist_ordered = True
        return [Announcement(Kind.PERSIST, version, "it is due for storage")]

    def _job_layout(self, entry: _Entry) -> str:
        """Fingerprint of the layout of all ranks; its table is built when a combination is first seen."""
        key = tuple(entry.sealed[rank].layout for rank in sorted(entry.sealed))
        if key not in self._named:
            layouts = {rank: self._layouts[rank, report.layout] for rank, report in entry.sealed.items()}
            table = {ref.bundle_id: ref for row, _ in bundles.distinct(layouts.values()) for ref in row}
            name = bundles.layout_fingerprint(layouts)
            self._named[key] = name
            self._tables[name] = new_table(table, self._topology, disagreement(table, layouts))
        return self._named[key]

    def _count_copy(self, entry: _Entry, bundle_id: str) -> None:
        """A bundle that lives in one node is safe as soon as another node holds a replica, or its group's parity stands."""
        if bundle_id in entry.under_replicated and self._is_safe(entry, bundle_id):
            entry.under_replicated.discard(bundle_id)

    def _under_replicated(self, entry: _Entry) -> set[str]:
        """All bundles that are in fewer than two nodes, and of no parity that stands."""
        return {name for name in self._tables[entry.layout].ids if not self._is_safe(entry, name)}

    def _is_safe(self, entry: _Entry, bundle_id: str) -> bool:
        return len(self._holders(entry, bundle_id)) > 1 or self._has_parity(entry, bundle_id)

    def _has_parity(self, entry: _Entry, bundle_id: str) -> bool:
        """Return whether any one node of the group may go: the others then need all their own copies and parity."""
        return self._stands(entry, self._parity.get(self._tables[entry.layout].single_node.get(bundle_id, -1), ()))

    def _stands(self, entry: _Entry, group: tuple[int, ...]) -> bool:
        """Return whether all members of a group have their parity, and have their copies still."""
        stands = entry.replicas.get(parity_groups.STANDS)
        return bool(stands and group) and (stands or set()).difference(entry.dropped).issuperset(group)

    def _made_safe(self, entry: _Entry, node: int) -> list[str]:
        """Return the bundles of one node only that the parity of `node`, the last of its group, makes safe."""
        group, table = self._parity.get(node, ()), self._tables.get(entry.layout)
        if table is None or not self._stands(entry, group):
            return []
        return [name for member in group for name in table.alone_on.get(member, ())]

    def _holders(self, entry: _Entry, bundle_id: str) -> frozenset[int]:
        homes = self._tables[entry.layout].homes[bundle_id]
        return (homes | entry.replicas.get(bundle_id, set())) - entry.dropped

    def _try_replicated(self, version: Version, entry: _Entry) -> list[Action]:
        if Level.CAPTURED not in entry.reached or Level.REPLICATED in entry.reached or entry.under_replicated:
            return []
        if self._safest is not None and version < self._safest:
            return []  # its slots may be overwritten since the newer one is safe
        entry.reached.add(Level.REPLICATED)
        self._safest = version
        ways = "or has parity" if self._parity else ""
        return [Announcement(Kind.REPLICATED, version, f"every bundle is sealed in at least two nodes {ways}".rstrip())]

    def _try_commit(self, version: Version, entry: _Entry) -> list[Action]:
        ready = Level.CAPTURED in entry.reached and Level.DURABLE not in entry.reached and not entry.commit_ordered
        if not ready or not entry.durable_due or entry.unwritten or not entry.parts:
            return []
        entry.commit_ordered = True
        return [CommitOrder(version, entry.layout, tuple(entry.parts[name] for name in sorted(entry.parts)))]

    def _is_awaited(self, version: Version, entry: _Entry) -> bool:
        """Return whether its second copies may be on their way."""
        is_newer = self._safest is None or version > self._safest
        return is_newer and Level.CAPTURED in entry.reached and Level.REPLICATED not in entry.reached

    def _forget(self) -> None:
        """Bounded: the oldest settled versions go first; never an open one, nor the newest captured ones, nor what is written."""
        excess = len(self._entries) - MAX_VERSIONS
        if excess > 0:
            written = sorted(v for v, entry in self._entries.items() if entry.is_written)[-MAX_WRITTEN:]
            awaited = sorted(v for v, entry in self._entries.items() if self._is_awaited(v, entry))[-MAX_AWAITED:]
            kept = {*written, *awaited, *([self._newest] if self._newest is not None else [])}
            settled = (v for v, entry in self._entries.items() if not entry.is_open and v not in kept)
            for version in sorted(settled)[:excess]:
                del self._entries[version]
                self._forgotten = max(self._forgotten or version, version)
        unsaved = len(self._layouts) > 2 * MAX_VERSIONS * self._topology.world_size  # of saves that found no slot
        if unsaved or len(self._named) > MAX_LAYOUTS:
            live = {entry.layout for entry in self._entries.values()}
            used = {(r.rank, r.layout) for entry in self._entries.values() for r in entry.sealed.values()}
            self._named = {key: name for key, name in self._named.items() if name in live}
            self._tables = {name: table for name, table in self._tables.items() if name in live}
            newest = dict(self._layouts.keys())
            self._layouts = {k: v for k, v in self._layouts.items() if k in used or newest[k[0]] == k[1]}
            lists = {id(layout.bundles) for layout in self._layouts.values()}
            self._lists = {name: row for name, row in self._lists.items() if id(row) in lists}


def _ids(report: RankReport) -> set[str]:
    return {seal.bundle_id for seal in report.seals}
