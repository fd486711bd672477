"""One node's view: its ranks' slots, what it reported, what it was told. The keeper asks here before it acts.

Pure. The keeper calls one method per fact and carries out what comes back; a new coordinator is fed from `reports`.
One ledger serves one incarnation; the next one takes over the slots, not the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from holdfast.core.model import Decision, Level, RankLayout, Seal, Topology, Version
from holdfast.core.versions import coordinator_board, slot_guard, twin_vote
from holdfast.core.versions.coordinator_board import (
    Announcement,
    Kind,
    KnownCapture,
    PartReport,
    RankReport,
    WriteFailure,
)
from holdfast.core.versions.job_bundles import JobBundles, LayoutTables
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.slot_guard import Knowledge, SlotView
from holdfast.core.versions.twin_vote import Examined

# Versions that a rank began last stay known: its slots may hold them, and the guard must not forget what became of
# them. More than a rank has slots.
MAX_BEGUN = 4
# Who gave a version up, where it was not a local rank: the coordinator's word is kept for the next coordinator.
_COORDINATOR = -1
_LEVELS = {Kind.CAPTURED: Level.CAPTURED, Kind.REPLICATED: Level.REPLICATED, Kind.DURABLE: Level.DURABLE}


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Says why twins of a version differ, and in which bundle; empty if the coordinator did not tell."""

    reason: str
    bundle: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Holds what a node knows of a version.

    Attributes:
        reached: its levels; a durable version need not be replicated.
        due: it was ordered into storage.
        passed: it is not durable, and a newer version of the incarnation is.
    """

    reached: frozenset[Level]
    reason: str
    abandoned: bool
    due: bool
    passed: bool = False


@dataclass(slots=True)
class _Local:
    """Holds what this node knows of one version."""

    layout_of: dict[int, str] = field(default_factory=dict)
    reports: dict[int, RankReport] = field(default_factory=dict)
    sent: bool = False
    replicas: set[str] = field(default_factory=set)
    dropping: bool = False
    dropped: bool = False
    parts: dict[str, PartReport] = field(default_factory=dict)
    due: bool = False
    persist_told: bool = False
    reached: frozenset[Level] = frozenset()
    reason: str = "not yet sealed on all ranks"
    layout: str = ""
    abandoned: bool = False
    abandoned_by: dict[int, str] = field(default_factory=dict)
    suspicion: Suspicion | None = None
    spots: dict[int, dict[str, bytes]] = field(default_factory=dict)

    @property
    def is_written(self) -> bool:
        """Return whether it is on its way to storage."""
        return self.persist_told and Level.DURABLE not in self.reached


@dataclass(frozen=True, slots=True)
class Reports:
    """Everything a new coordinator needs from this node, and what it is told in between.

    Attributes:
        sealed: without the seals of versions that are captured.
        heard: versions that are known to be captured: the newest, and those on their way to storage. The table comes with the
            first of each layout.
        failures, at_work: of writing to storage; said once, and not again to a new coordinator.
        sending: versions of which bytes leave this node to be replicas; said every second.
        examined: copies of bundles whose twins differ; said once as well.
        dropped: versions whose copies here are to count no more; until DROPPED answers they stay as they are.
    """

    layouts: tuple[RankLayout, ...] = ()
    sealed: tuple[RankReport, ...] = ()
    abandoned: tuple[tuple[Version, int, str], ...] = ()
    replicas: tuple[tuple[Version, tuple[str, ...]], ...] = ()
    due: tuple[Version, ...] = ()
    parts: tuple[PartReport, ...] = ()
    heard: tuple[KnownCapture, ...] = ()
    failures: tuple[WriteFailure, ...] = ()
    at_work: tuple[Version, ...] = ()
    examined: tuple[Examined, ...] = ()
    dropped: tuple[Version, ...] = ()
    sending: tuple[Version, ...] = ()


class NodeLedger:
    """The state of one keeper within one incarnation.

    Attributes:
        tables: every bundle of the job, by layout.
    """

    def __init__(self, *, node: int, topology: Topology, incarnation: int, lineage: Lineage) -> None:
        self.node = node
        self.topology = topology
        self.incarnation = incarnation
        self.ranks = topology.ranks_on(node)
        self._lineage = lineage
        self._captured: Version | None = None
        self._versions: dict[Version, _Local] = {}
        self._layouts: dict[tuple[int, str], RankLayout] = {}
        self._current: dict[int, str] = {}
        self._shared: dict[int, tuple[str, ...]] = {}
        self.tables = LayoutTables(node, topology)
        self._begun: dict[int, tuple[Version, ...]] = {}
        self._resumed = False
        self._origin: Version | None = None

    @property
    def knowledge(self) -> Knowledge:
        """Return what the overwrite guard may rely on."""
        abandoned = frozenset(version for version, local in self._versions.items() if local.abandoned)
        return Knowledge(self._captured, abandoned, self._lineage)

    def resume(self, version: Version | None) -> None:
        """Every rank loaded `version` (None: a fresh start); it is protected like a captured one from here on."""
        self._lineage = self._lineage.with_(self.incarnation, version)
        self._captured = self._origin = version
        self._resumed = True

    def register(self, layout: RankLayout, shared: tuple[str, ...] = ()) -> None:
        """Takes a local rank's layout, and the names of the tensors that it shares with other ranks of the node.

        Earlier layouts stay known as long as a version that was begun under them.
        """
        name = layout.fingerprint
        self._layouts.pop((layout.rank, name), None)  # the newest stands last
        self._layouts[layout.rank, name] = layout
        self._current[layout.rank] = name
        self._shared[layout.rank] = shared
        self._forget_layouts()

    def compare(self, rank: int, version: Version, spots: bytes) -> str:
        """Compares the spots of what a local rank shares with those that others sent of the same version.

        Ranks of one node divide the copy of what they share, so a difference would make a version of rows of both.

        Returns:
            Which ranks differ and in what; empty as long as none do.
        """
        told = self._local(version).spots
        mine = twin_vote.words(self._shared.get(rank, ()), spots)
        differing = {other: twin_vote.differing(theirs, mine) for other, theirs in told.items()}
        told[rank] = mine
        if len(told) == len(self.ranks):
            told.clear()
        return "; ".join(f"ranks {other} and {rank} {found}" for other, found in sorted(differing.items()) if found)

    def begin(self, rank: int, version: Version, own_slots: Sequence[SlotView]) -> Decision[int | None]:
        """The slot that `rank` may write `version` into, or None with the reason."""
        if version.incarnation != self.incarnation:
            return Decision(None, f"{version} is not of incarnation {self.incarnation}; this process is fenced")
        if not self._resumed:
            return Decision(None, "the ranks have not agreed yet on what to resume from")
        if rank in self._begun and version <= self._begun[rank][-1]:
            return Decision(None, f"rank {rank} is at {self._begun[rank][-1]} already and does not turn back")
        self._pass_by(rank, version)
        known = self._versions.get(version, _Local())
        if known.abandoned and known.suspicion is None:  # a late twin's copy may tell which of the others is wrong
            return Decision(None, f"{version} is abandoned: {self._versions[version].reason}")
        if rank not in self._current:
            return Decision(None, f"rank {rank} has not registered its layout")
        decision = slot_guard.choose_slot(own_slots, self.knowledge)
        if decision.value is not None:
            self._start(rank, version, self._current[rank])
        return decision

    def _pass_by(self, rank: int, version: Version) -> None:
        """A rank never turns back: what it did not begin before `version` cannot become complete.

        The coordinator is not told: it hears of versions that all ranks of a node sealed, and this is not one of them.
        Without it a rank whose neighbour left two versions out without a word keeps them in its two slots for ever.
        """
        for earlier, local in self._versions.items():
            open_ = not local.reached and not local.abandoned
            if earlier < version and open_ and rank not in local.layout_of:
                local.abandoned, local.reason = True, f"abandoned: rank {rank}: it went on without it"
                local.abandoned_by[rank] = "it went on without it"

    def adopt(self, rank: int, version: Version, seals: Iterable[Seal], *, layout: str, durable: bool) -> Reports:
        """A sealed slot of this incarnation that a dead keeper left; feed a rank's slots oldest first.

        `layout` is the fingerprint of the one that it was sealed under, by now perhaps not the current one. The
        coordinator may know it from earlier; if nobody does, the version is not called abandoned either.
        """
        if version.incarnation != self.incarnation or rank in self._local(version).layout_of:
            return Reports()
        self._start(rank, version, layout)
        return self.seal(rank, version, seals, durable=durable)

    def _start(self, rank: int, version: Version, layout: str) -> None:
        begun = sorted({*self._begun.get(rank, ()), version})
        self._begun[rank] = tuple(begun[-MAX_BEGUN:])
        self._local(version).layout_of[rank] = layout
        self._forget(besides=version)

    def seal(self, rank: int, version: Version, seals: Iterable[Seal], *, durable: bool) -> Reports:
        """A local rank's slot is sealed. Returns the node's report once all local ranks sealed, else nothing.

        An abandoned version is reported too: it tells that the ranks are past what came before it.
        """
        local = self._local(version)
        local.reports[rank] = RankReport(version, rank, local.layout_of.get(rank, ""), tuple(seals), durable)
        if local.sent or set(local.reports) != set(self.ranks):
            return Reports()
        local.sent = True
        sealed = tuple(local.reports[r] for r in self.ranks)
        return Reports(layouts=self._outdated_layouts(sealed), sealed=sealed)

    def _outdated_layouts(self, reports: tuple[RankReport, ...]) -> tuple[RankLayout, ...]:
        """The layouts of these reports that are not their ranks' current ones, each with the current one behind it.

        A coordinator forgets what a rank registered before its current layout, unless it has a report of a version under it.
        A rank whose values grow registers the next one while its version still waits for its seal.
        """
        outdated = [report for report in reports if report.layout != self._current.get(report.rank)]
        keys = [(of.rank, name) for of in outdated for name in (of.layout, self._current.get(of.rank, ""))]
        return tuple(self._layouts[key] for key in keys if key in self._layouts)

    def abandon(self, rank: int, version: Version, reason: str) -> tuple[Version, int, str] | None:
        """A local rank gives the version up. Returns what to tell the coordinator, once per rank."""
        local = self._local(version)
        if rank in local.reports or rank in local.abandoned_by or local.reached:
            return None
        self._pass_by(rank, version)
        local.abandoned_by[rank] = reason
        local.abandoned = True
        local.reason = f"abandoned: rank {rank}: {reason}"
        return version, rank, reason

    def told(self, news: Announcement) -> bool:
        """Takes in what the coordinator announced; True if it is news to this node."""
        local = self._local(news.version)
        if news.kind is Kind.SUSPECT:
            before, local.suspicion = local.suspicion, Suspicion(news.reason, news.bundle)
            return before is None or before.reason != news.reason
        if news.kind is Kind.ABANDONED:
            # A coordinator that was not there when the version was captured may miss a report; what was captured stays.
            fresh = not local.abandoned and not local.reached
            if fresh:
                local.abandoned, local.reason = True, f"abandoned: {news.reason}"
                local.abandoned_by[_COORDINATOR] = news.reason
            self._forget(besides=news.version)
            return fresh
        if news.kind is Kind.PERSIST:
            fresh, local.persist_told = not local.persist_told, True
            return fresh
        if news.kind is Kind.DROPPED:
            return self._told_dropped(news)
        level = _LEVELS[news.kind]
        if level in local.reached:
            return False
        local.reached |= {level}
        local.reason = news.reason
        local.abandoned = False
        local.abandoned_by.clear()
        local.layout = news.layout or local.layout
        if self._captured is None or news.version > self._captured:
            self._captured = news.version
        self._forget(besides=news.version)
        return True

    def _told_dropped(self, news: Announcement) -> bool:
        local, fresh = self._local(news.version), False
        if news.node == self.node:
            fresh, local.dropped = not local.dropped, True
        if news.lost:  # older ones were free to go since this one was in two nodes
            for version, other in self._versions.items():
                if version <= news.version and Level.REPLICATED in other.reached:
                    other.reached -= {Level.REPLICATED}
                    fresh = True
            local.reason = news.reason
        return fresh

    def awaits_copies(self, version: Version) -> bool:
        """Return whether nothing newer than it is known to be in two nodes, so that the loss of a node would need it."""
        local = self._versions.get(version)
        if (local is not None and local.abandoned) or not self._lineage.is_live(version):
            return False
        safe = self.newest(Level.REPLICATED) or self._origin
        return safe is None or version >= safe

    def give_up_copies(self, version: Version) -> Decision[bool]:
        """Return whether copies of a version that is awaited may be overwritten all the same; asked where waiting has
        to end.

        The coordinator must count them no more before: it may be about to call the version replicated. True once it
        has said so (DROPPED). The reason is not empty if it has to be asked now (`Reports.dropped`).
        """
        if version.incarnation != self.incarnation:
            return Decision(True, "")  # no coordinator counts its copies
        if self._captured is None or version >= self._captured:
            return Decision(False, "")  # rule 4 of the guard keeps it whatever happens
        local = self._local(version)
        asked, local.dropping = local.dropping, True
        return Decision(local.dropped, "" if asked else f"{version} waits too long for its second copy")

    def counts(self, version: Version) -> bool:
        """Return whether the coordinator counts replicas of it here."""
        local = self._versions.get(version)
        return local is not None and bool(local.replicas)

    def bundles_of(self, version: Version) -> JobBundles:
        """Every bundle of the job at `version`; none if they are not known."""
        return self.tables.under(self._local(version).layout)

    def standing(self, version: Version) -> Standing:
        """Return what is known of the version here."""
        local = self._versions.get(version)
        if local is None:
            return Standing(frozenset(), "unknown here", abandoned=False, due=False)
        stored = self.newest(Level.DURABLE)
        passed = stored is not None and version < stored and Level.DURABLE not in local.reached
        return Standing(local.reached, local.reason, local.abandoned, local.persist_told, passed)

    def newest(self, level: Level) -> Version | None:
        """The newest version of this incarnation that is known to have reached `level`."""
        return max((version for version, local in self._versions.items() if level in local.reached), default=None)

    def suspects(self) -> dict[Version, Suspicion]:
        """Versions whose twins differ."""
        return {version: local.suspicion for version, local in self._versions.items() if local.suspicion is not None}

    def replicated(self, version: Version, bundle_ids: Iterable[str]) -> None:
        """Replicas of these bundles are sealed here."""
        self._local(version).replicas.update(bundle_ids)

    def want_durable(self, version: Version) -> bool:
        """A local rank wants an existing version in storage; True if the coordinator is to be told."""
        local = self._local(version)
        fresh, local.due = not local.due and not local.abandoned, True
        return fresh

    def wrote(self, part: PartReport) -> None:
        """A part of the version is in storage; this node wrote it, or might have had to."""
        self._local(part.version).parts[part.part] = part

    def reports(self) -> Reports:
        """All that this node would tell a coordinator that knows nothing."""
        items = sorted(self._versions.items())
        return Reports(
            layouts=tuple(self._layouts.values()),
            # Not those that are abandoned: their slots may hold something else by now.
            sealed=tuple(
                replace(x.reports[r], seals=(), captured=True) if Level.CAPTURED in x.reached else x.reports[r]
                for _, x in items
                if x.sent and not x.abandoned
                for r in self.ranks
            ),
            abandoned=tuple((v, r, why) for v, local in items for r, why in sorted(local.abandoned_by.items())),
            replicas=tuple((v, tuple(sorted(local.replicas))) for v, local in items if local.replicas),
            due=tuple(v for v, local in items if local.due),
            parts=tuple(part for _, local in items for _, part in sorted(local.parts.items())),
            dropped=tuple(v for v, local in items if local.dropping),
            heard=self._heard(),
        )

    def _heard(self) -> tuple[KnownCapture, ...]:
        """Captured versions that a new coordinator could not conclude from the nodes that are left."""
        found: list[KnownCapture] = []
        for version, local in sorted(self._versions.items()):
            open_ = Level.CAPTURED in local.reached and Level.DURABLE not in local.reached
            refs = self.bundles_of(version).refs
            if open_ and refs and (local.persist_told or version == self._captured):
                is_told = any(fact.layout == local.layout for fact in found)
                found.append(KnownCapture(version, local.layout, () if is_told else refs, local.persist_told))
        return tuple(found)

    def _local(self, version: Version) -> _Local:
        return self._versions.setdefault(version, _Local())

    def _forget(self, *, besides: Version) -> None:
        """Bounded; kept are the newest version of each level, however far behind, and whatever a slot may still hold."""
        excess = len(self._versions) - coordinator_board.MAX_VERSIONS
        if excess > 0:
            kept = {self._captured, besides, *(version for begun in self._begun.values() for version in begun)}
            kept |= {self.newest(level) for level in _LEVELS.values()}
            kept |= set(
                sorted(v for v, local in self._versions.items() if local.is_written)[-coordinator_board.MAX_WRITTEN :]
            )
            old = (v for v, local in self._versions.items() if v not in kept and self._is_settled(v, local))
            for version in sorted(old)[:excess]:
                del self._versions[version]
        self._forget_layouts()
        self.tables.forget({local.layout for local in self._versions.values()})

    def _forget_layouts(self) -> None:
        used = {key for local in self._versions.values() for key in local.layout_of.items()} | self._current.items()
        # Those of slots that a dead keeper left are registered before the slots are adopted.
        if len(self._layouts) > len(used) + MAX_BEGUN * len(self.ranks):
            self._layouts = {key: layout for key, layout in self._layouts.items() if key in used}

    def _is_settled(self, version: Version, local: _Local) -> bool:
        return local.abandoned or not local.layout_of or (self._captured is not None and version < self._captured)
