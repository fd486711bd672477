"""Holds what one keeper knows and holds, behind one lock: the pure ledger, the slots, and what follows from each fact.

Every method is one fact or one question; decisions come from core (ledger, slots). Consequences that move bytes or
messages leave through `StateCallbacks`, whose functions only queue. Nothing here waits, so the lock is held for microseconds;
it is reentrant, because facts lead to further facts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from holdfast.base.errors import Fenced, KeeperError, UsageError
from holdfast.core.model import BundleRef, Level, RankLayout, Seal, Version
from holdfast.core.pipeline.idle_stats import Idle
from holdfast.core.versions.coordinator_board import OF_WRITING, Announcement, Kind
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger, Reports
from holdfast.core.versions.replication_lag import ReplicationLag
from holdfast.core.versions.slot_guard import SlotState
from holdfast.keeper.rpc.messages import Appointed, Assembly, Message, News, Progress
from holdfast.keeper.rpc.paths import RuntimePaths
from holdfast.keeper.slots.alarm_book import AlarmBook
from holdfast.keeper.slots.overwrite_guard import OverwriteGuard
from holdfast.keeper.slots.slot_pool import PARITY_RANK, HeldSlot, SlotPool
from holdfast.tiers.wire.frames import Security

logger = logging.getLogger(__name__)

# A bound of what is remembered for the status page and for late comers.
MAX_LEVELS = 64


@dataclass(slots=True)
class StateCallbacks:
    """Says where consequences go. Each queues and returns at once."""

    report: Callable[[Reports], None]
    push: Callable[[str, Message], None]
    replicate: Callable[[Version], None]
    writing: Callable[[Announcement], None]
    began: Callable[[], None]
    examine: Callable[[Version, str], None]
    follow: Callable[[Assembly, int], None]
    changed: Callable[[], None]


@dataclass(slots=True)
class EarlierIncarnations:
    """Holds what outlives an incarnation: needed to come back, and to answer questions."""

    tables: dict[Version, tuple[BundleRef, ...]] = field(default_factory=dict)
    suspects: dict[Version, str] = field(default_factory=dict)
    levels: OrderedDict[Version, Progress] = field(default_factory=OrderedDict)


class NodeState:
    """The keeper's state. `lock` is the one lock; the desks take it too when they combine several questions.

    Attributes:
        guard: says which slots may be overwritten.
        alarms: what an operator should know.
        past: what outlives an incarnation.
    """

    def __init__(self, place: RuntimePaths, slot_pool: SlotPool) -> None:
        self.lock = threading.RLock()
        self.place = place
        self.slot_pool = slot_pool
        self.node = -1
        self.assembly: Assembly | None = None
        self.ledger: NodeLedger | None = None
        self.layouts: dict[int, RankLayout] = {}
        self.finished: set[int] = set()
        self.cadences: dict[int, str] = {}  # how often a rank found it can save, in words
        self.idle: dict[int, Idle] = {}  # what a rank of a pipeline measured of its waits
        self.callbacks: StateCallbacks
        self.alarms = AlarmBook(self.lock, lambda key, message: self.callbacks.push(key, message))  # noqa: PLW0108 - they are set later
        self.guard = OverwriteGuard(lambda: self.ledger, self.alarms, self._give_up)
        self.security: Security | None = None
        self.past = EarlierIncarnations()
        self.resumed: Version | None = None  # what the incarnation resumed from, once it has
        self.is_resumed = False

    @property
    def incarnation(self) -> int:
        """The highest incarnation assembled here; 0 if none."""
        return self.assembly.incarnation if self.assembly else 0

    def need_ledger(self) -> NodeLedger:
        """The ledger.

        Raises:
            UsageError: the job has not come together yet.
        """
        if self.ledger is None:
            raise UsageError("the job has not come together on this node", remedy="call assemble first")
        return self.ledger

    def _give_up(self, version: Version) -> None:
        self.callbacks.report(Reports(dropped=(version,)))

    def changed(self) -> None:
        """Something that somebody may wait for; for those that do not hold the lock."""
        with self.lock:
            self.callbacks.changed()

    # --- coming together

    def assemble(self, assembly: Assembly) -> None:
        """A rank tells who belongs to the job; only a higher incarnation changes anything."""
        with self.lock:
            if assembly.incarnation < self.incarnation:
                raise Fenced(f"incarnation {assembly.incarnation} is over; {self.incarnation} has begun")
            if assembly == self.assembly:
                return
            if assembly.incarnation == self.incarnation:
                raise KeeperError(f"ranks disagree about incarnation {assembly.incarnation}", where=self.place.node)
            if self.place.node not in assembly.topology.nodes:
                known = ", ".join(assembly.topology.nodes)
                raise KeeperError(f"node {self.place.node!r} is not part of the job ({known})")
            self._begin_incarnation(assembly)

    def _begin_incarnation(self, assembly: Assembly) -> None:
        """Ledgers start anew; sealed slots stay."""
        self.node = assembly.topology.nodes.index(self.place.node)
        self.assembly = assembly
        self.ledger = NodeLedger(
            node=self.node,
            topology=assembly.topology,
            incarnation=assembly.incarnation,
            lineage=Lineage(dict(assembly.lineage)),
        )
        self.layouts, self.finished = {}, set()
        self.resumed, self.is_resumed = None, False
        self.guard.lag.since_s = None
        for held in self.slot_pool:
            held.outgrown |= not held.replica and held.rank not in self.ledger.ranks
            if held.state is SlotState.WRITING and not held.pins:
                held.clear()
        logger.info("incarnation %d: node %d of %d", assembly.incarnation, self.node, len(assembly.topology.nodes))
        self.callbacks.began()
        self.callbacks.follow(assembly, self.node)
        self.callbacks.changed()

    def leave_job(self) -> None:
        """The job is over: no fact of it has an effect any more. What it left stays until `forget_job`."""
        with self.lock:
            self.node, self.assembly, self.ledger = -1, None, None
            self.layouts, self.finished = {}, set()
            self.resumed, self.is_resumed = None, False
            self.callbacks.began()

    def forget_job(self) -> None:
        """Slots, levels, tables and alarms of the job that is over. Nobody needs a byte of them."""
        with self.lock:
            for held in self.slot_pool:
                self.slot_pool.drop(held)
            self.alarms.raised.clear()
            self.cadences.clear()
            self.idle.clear()
            self.past, self.guard.lag = EarlierIncarnations(), ReplicationLag()

    def resume(self, incarnation: int, version: Version | None, table: tuple[BundleRef, ...] = ()) -> None:
        """All ranks loaded `version`; saving may begin. Of its `table` a keeper that came later has heard from nobody else."""
        with self.lock:
            ledger = self.need_ledger()
            if incarnation != ledger.incarnation:
                raise Fenced(f"incarnation {incarnation} is over; {ledger.incarnation} has begun")
            if self.is_resumed and version != self.resumed:
                raise KeeperError(f"ranks disagree about what to resume from: {self.resumed} and {version}")
            if not self.is_resumed:
                self.resumed, self.is_resumed = version, True
                ledger.resume(version)
                if version is not None and table:
                    self.past.tables.setdefault(version, table)
                self._feed()
                self.slot_pool.collect(self.guard.is_free)
                self.callbacks.changed()

    def register(self, layout: RankLayout, shared: tuple[str, ...] = ()) -> None:
        """Takes a local rank's bundles, and the names of the tensors that it shares with other local ranks."""
        with self.lock:
            ledger = self.need_ledger()
            if layout.rank not in ledger.ranks:
                raise UsageError(f"rank {layout.rank} is not on node {self.place.node}")
            world_size = ledger.topology.world_size
            for ref in layout.bundles:
                if not ref.has(layout.rank) or ref.runs[-1][1] >= world_size:
                    raise UsageError(f"bundle {ref.bundle_id} of rank {layout.rank} has an impossible group")
            ledger.register(layout, shared)
            self.layouts[layout.rank] = layout
            self.callbacks.report(Reports(layouts=(layout,)))
            self._feed()

    def adopted(self) -> None:
        """Slots of a dead keeper were added to the slot pool."""
        with self.lock:
            self._feed()
            self.callbacks.changed()

    def _feed(self) -> None:
        """Sealed slots of this incarnation that the ledger does not know: they came from a keeper that died."""
        ledger = self.ledger
        if ledger is None or not self.is_resumed:
            return
        own = [held for held in self.slot_pool.sealed() if not held.replica and held.layout]
        for held in sorted(own, key=lambda held: held.version or Version(0, 0)):
            if held.version is not None and held.version.incarnation == ledger.incarnation:
                seals = _report_seals(held)
                done = ledger.adopt(held.rank, held.version, seals, layout=held.layout, durable=held.durable)
                if done.sealed:
                    self.callbacks.report(done)

    # --- saving

    def sealed(self, held: HeldSlot, version: Version) -> None:
        """The header of a local rank's slot was written."""
        with self.lock:
            held.state = SlotState.SEALED
            if self.ledger is not None and version.incarnation == self.ledger.incarnation:
                self._seal(held, version)
            self.callbacks.changed()

    def _seal(self, held: HeldSlot, version: Version) -> None:
        done = self.need_ledger().seal(held.rank, version, _report_seals(held), durable=held.durable)
        if done.sealed:
            self.callbacks.report(done)
        suspicion = self.need_ledger().suspects().get(version)
        if suspicion is not None and suspicion.bundle:
            self.callbacks.examine(version, suspicion.bundle)

    def due(self, rank: int, version: Version) -> None:
        """A local rank asks for storage of a version that it began without."""
        with self.lock:
            if self.ledger is None or version.incarnation != self.ledger.incarnation:
                return
            for held in self.slot_pool.of_rank(rank):
                held.durable |= held.version == version
            if self.ledger.want_durable(version):
                self.callbacks.report(Reports(due=(version,)))

    def abandon(self, rank: int, version: Version, reason: str) -> None:
        """A local rank gives a version up, or died in it."""
        with self.lock:
            if self.ledger is None or version.incarnation != self.ledger.incarnation:
                return
            told = self.ledger.abandon(rank, version, reason)
            if told is not None:
                logger.info("%s abandoned by rank %d: %s", version, rank, reason)
                self.callbacks.report(Reports(abandoned=(told,)))
                self._publish(version)
            self.callbacks.changed()

    def hear(self, news: News) -> None:
        """The coordinator announced something."""
        with self.lock:
            ledger, told = self.ledger, news.announcement
            if ledger is None or news.incarnation != ledger.incarnation:
                return  # of another incarnation: it must have no effect here
            if news.table:
                ledger.tables.learn(told.layout, news.table)
            if told.kind in OF_WRITING:
                self._hear_of_writing(told)
                return
            if told.kind is Kind.SENDING:
                if ledger.awaits_copies(told.version):
                    self.guard.sent(told.version)
                return
            if not ledger.told(told):
                return
            if told.kind is Kind.SUSPECT:
                self.past.suspects[told.version] = told.reason
                self.callbacks.examine(told.version, told.bundle)
                self.alarms.warn(
                    f"twins {told.version}", f"twins differ in {told.version}: {told.reason}; not used again"
                )
            self._publish(told.version)
            if told.kind is Kind.CAPTURED:
                self.guard.lag.captured(time.monotonic())
                self._captured(told)
            if told.kind is Kind.REPLICATED:
                newest = ledger.knowledge.captured == ledger.newest(Level.REPLICATED)
                self.guard.replicated(newest=newest)
            if told.kind is Kind.DURABLE and Level.REPLICATED not in ledger.standing(told.version).reached:
                self.guard.lag.stored()
            if told.kind in (Kind.PERSIST, Kind.DURABLE):
                self.callbacks.writing(told)
            self.slot_pool.collect(self.guard.is_free)
            self.callbacks.changed()

    def _hear_of_writing(self, told: Announcement) -> None:
        self.callbacks.writing(told)
        if told.kind is Kind.AT_WORK and self.need_ledger().standing(told.version).passed:
            self._publish(told.version)  # who waits for it would give it up

    def _captured(self, told: Announcement) -> None:
        bundles = self.need_ledger().bundles_of(told.version)
        kept = {held.version for held in self.slot_pool} | {told.version}
        self.past.tables = {v: t for v, t in self.past.tables.items() if v in kept}
        self.past.suspects = {v: why for v, why in self.past.suspects.items() if v in kept}
        self.past.tables[told.version] = bundles.refs
        sources = {rank for _, rank, _ in bundles.to_replicate} | ({PARITY_RANK} if bundles.of_parity else set())
        for held in self.slot_pool:  # replicas that somebody else keeps by now
            held.outgrown |= held.replica and held.rank not in sources
        if sources:
            self.callbacks.replicate(told.version)

    def condemn(self, version: Version, bundle_id: str, reason: str, *, only: HeldSlot | None = None) -> None:
        """Takes this node's copies of a bundle out of use, or the one in slot `only`, and raises an alarm."""
        with self.lock:
            for held in self.slot_pool.sealed():
                if held.version == version and bundle_id in held.images and only in (None, held):
                    held.condemned.add(bundle_id)
            self.alarms.quarantined(version, bundle_id, f"node {self.place.node}", reason)

    def unpin(self, held: HeldSlot, why: str) -> None:
        """An activity no longer needs the slot's bytes."""
        with self.lock:
            held.unpin(why)
            self.slot_pool.collect(self.guard.is_free)
            self.callbacks.changed()

    def replicated(self, version: Version, bundle_ids: Iterable[str]) -> None:
        """Replicas of another node's bundles are sealed here."""
        with self.lock:
            if self.ledger is not None and version.incarnation == self.ledger.incarnation:
                ids = tuple(sorted(bundle_ids))
                self.ledger.replicated(version, ids)
                self.callbacks.report(Reports(replicas=((version, ids),)))
            self.callbacks.changed()

    def repeat_part(self, version: Version) -> None:
        """Reports this node's part of a version once more: the coordinator then tries again to commit it."""
        with self.lock:
            if self.ledger is not None and version.incarnation == self.ledger.incarnation:
                self.callbacks.report(
                    Reports(parts=tuple(p for p in self.ledger.reports().parts if p.version == version))
                )

    def appointed(self, message: Appointed) -> None:
        """The coordinator named a step."""
        with self.lock:
            if message.incarnation == self.incarnation:
                self.callbacks.push(f"appointment {message.appointment.purpose.value}", message)

    # --- telling

    def progress(self) -> list[Progress]:
        """The level of every version that is remembered, for a client that just came."""
        with self.lock:
            return list(self.past.levels.values())

    def _publish(self, version: Version) -> None:
        standing = self.need_ledger().standing(version)
        reached = tuple(sorted(standing.reached))
        message = Progress(
            version=version, reached=reached, reason=standing.reason, abandoned=standing.abandoned, due=standing.due
        )
        self.past.levels[version] = message
        self.past.levels.move_to_end(version)
        while len(self.past.levels) > MAX_LEVELS:
            self.past.levels.popitem(last=False)
        self.callbacks.push(f"progress {version}", message)

    def awaits_commit(self) -> bool:
        """Return whether something of this node is due for storage and not committed yet: a slot, or a part it wrote."""
        with self.lock:
            if self.ledger is None:
                return False
            durable = self.ledger.newest(Level.DURABLE)
            due = {part.version for part in self.ledger.reports().parts}
            due |= {h.version for h in self.slot_pool if h.durable and not h.replica and h.version is not None}
            open_ = [v for v in due if v.incarnation == self.incarnation and (durable is None or v > durable)]
            return any(not self.ledger.standing(version).abandoned for version in open_)


def _report_seals(held: HeldSlot) -> tuple[Seal, ...]:
    """The coordinator compares digests of images; those of chunks would only make the report long."""
    return tuple(replace(place.seal, chunk_digests=()) for place in held.images.values())
