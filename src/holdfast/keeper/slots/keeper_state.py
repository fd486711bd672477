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
from holdfast.core.recovery.version_choice import MemoryCopy
from holdfast.core.scheduling.step_agreement import Appointment
from holdfast.core.versions.coordinator_board import OF_WRITING, Announcement, Kind
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger, Reports
from holdfast.core.versions.replication_lag import ReplicationLag
from holdfast.core.versions.slot_guard import SlotState, SlotView, reusable
from holdfast.keeper.rpc.messages import KEEPER, Alarm, Appointed, Assembly, Hello, Inventory, Message, News, Progress
from holdfast.keeper.rpc.paths import RuntimePaths
from holdfast.keeper.slots.slot_pool import HeldSlot, SlotPool
from holdfast.tiers.wire.frames import Security

logger = logging.getLogger(__name__)

# Bounds of what is remembered for the status page and for late comers.
MAX_LEVELS = 64
MAX_ALARMS = 64


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


@dataclass(frozen=True, slots=True)
class Warned:
    """An alarm and when it was last raised (monotonic seconds)."""

    text: str
    at_s: float
    count: int


@dataclass(slots=True)
class _EarlierIncarnations:
    """Holds what outlives an incarnation: needed to come back, and to answer questions."""

    tables: dict[Version, tuple[BundleRef, ...]] = field(default_factory=dict)
    suspects: dict[Version, str] = field(default_factory=dict)
    levels: OrderedDict[Version, Progress] = field(default_factory=OrderedDict)


class NodeState:
    """The keeper's state. `lock` is the one lock; the desks take it too when they combine several questions."""

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
        self._patience = ReplicationLag()
        self.alarms: OrderedDict[str, Warned] = OrderedDict()
        self.callbacks: StateCallbacks
        self.security: Security | None = None
        self._past = _EarlierIncarnations()
        self._resumed: Version | None = None
        self._is_resumed = False

    @property
    def incarnation(self) -> int:
        """The highest incarnation assembled here; 0 if none."""
        return self.assembly.incarnation if self.assembly else 0

    def descent(self) -> tuple[str, tuple[tuple[int, Version | None], ...]]:
        """The job's id, and what its incarnations resumed from, the present one included once it has."""
        with self.lock:
            if self.assembly is None:
                return "", ()
            own = ((self.assembly.incarnation, self._resumed),) if self._is_resumed else ()
            return self.assembly.job_id, (*self.assembly.lineage, *own)

    @property
    def resumed(self) -> Version | None:
        """Return what the incarnation resumed from."""
        return self._resumed

    def view(self, held: HeldSlot) -> SlotView:
        """A slot as the overwrite guard is to see it: pinned, while the loss of a node would need its version."""
        if held.preloaded or not self.awaits_replicas(held):
            return held.view
        return replace(held.view, pins=held.view.pins + 1)

    def is_free(self, held: HeldSlot) -> bool:
        """Return whether the guard lets a slot be overwritten."""
        return self.ledger is not None and reusable(self.view(held), self.ledger.knowledge).value

    def awaits_replicas(self, held: HeldSlot) -> bool:
        """Return whether nothing newer than its version is known to be in two nodes, in a job that has two."""
        # Seen as the guard sees it: what all failed its digest is worth nothing and must not lock a slot.
        ledger, version = self.ledger, held.view.version
        if ledger is None or version is None or len(ledger.topology.nodes) < 2 or not ledger.awaits_copies(version):
            return False
        if self._patience.lasts(time.monotonic()):
            return True
        self.alarm(
            "replication",
            f"{ledger.knowledge.captured} has no second copy after {self._patience.limit_s:.0f} s; until replication "
            "catches up the loss of a node may cost everything since the last durable version",
        )
        return not self.may_drop(version)

    def may_drop(self, version: Version) -> bool:
        """Return whether copies that are awaited may be overwritten; the coordinator is asked the first time."""
        decision = self.need_ledger().give_up_copies(version)
        if decision.reason:
            logger.info("%s: its copies here are to count no more", decision.reason)
            self.callbacks.report(Reports(dropped=(version,)))
        return decision.value

    def need_ledger(self) -> NodeLedger:
        """The ledger.

        Raises:
            UsageError: the job has not come together yet.
        """
        if self.ledger is None:
            raise UsageError("the job has not come together on this node", remedy="call assemble first")
        return self.ledger

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
        self._resumed, self._is_resumed = None, False
        self._patience.since_s = None
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
            self._resumed, self._is_resumed = None, False
            self.callbacks.began()

    def forget_job(self) -> None:
        """Slots, levels, tables and alarms of the job that is over. Nobody needs a byte of them."""
        with self.lock:
            for held in self.slot_pool:
                self.slot_pool.drop(held)
            self.alarms.clear()
            self.cadences.clear()
            self.idle.clear()
            self._past, self._patience = _EarlierIncarnations(), ReplicationLag()

    def resume(self, incarnation: int, version: Version | None, table: tuple[BundleRef, ...] = ()) -> None:
        """All ranks loaded `version`; saving may begin. Of its `table` a keeper that came later has heard from nobody else."""
        with self.lock:
            ledger = self.need_ledger()
            if incarnation != ledger.incarnation:
                raise Fenced(f"incarnation {incarnation} is over; {ledger.incarnation} has begun")
            if self._is_resumed and version != self._resumed:
                raise KeeperError(f"ranks disagree about what to resume from: {self._resumed} and {version}")
            if not self._is_resumed:
                self._resumed, self._is_resumed = version, True
                ledger.resume(version)
                if version is not None and table:
                    self._past.tables.setdefault(version, table)
                self._feed()
                self.slot_pool.collect(self.is_free)
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
        if ledger is None or not self._is_resumed:
            return
        own = [held for held in self.slot_pool.sealed() if not held.replica and held.layout]
        for held in sorted(own, key=lambda held: held.version or Version(0, 0)):
            if held.version is not None and held.version.incarnation == ledger.incarnation:
                seals = _report_seals(held)
                done = ledger.adopt(held.rank, held.version, seals, layout=held.layout, durable=held.durable)
                if done:
                    self.callbacks.report(Reports(sealed=done))

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
        if done:
            self.callbacks.report(Reports(sealed=done))
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
                self.callbacks.writing(told)
                return
            if not ledger.told(told):
                return
            if told.kind is Kind.SUSPECT:
                self._past.suspects[told.version] = told.reason
                self.callbacks.examine(told.version, told.bundle)
                self.alarm(f"twins {told.version}", f"twins differ in {told.version}: {told.reason}; not used again")
            self._publish(told.version)
            if told.kind is Kind.CAPTURED:
                self._patience.captured(time.monotonic())
                self._captured(told)
            if told.kind is Kind.REPLICATED:
                newest = ledger.knowledge.captured == ledger.newest(Level.REPLICATED)
                self._patience.replicated(time.monotonic(), newest=newest)
                self.calm("replication")
            if told.kind in (Kind.PERSIST, Kind.DURABLE):
                self.callbacks.writing(told)
            self.slot_pool.collect(self.is_free)
            self.callbacks.changed()

    def _captured(self, told: Announcement) -> None:
        bundles = self.need_ledger().bundles_of(told.version)
        kept = {held.version for held in self.slot_pool} | {told.version}
        self._past.tables = {v: t for v, t in self._past.tables.items() if v in kept}
        self._past.suspects = {v: why for v, why in self._past.suspects.items() if v in kept}
        self._past.tables[told.version] = bundles.refs
        sources = {rank for _, rank, _ in bundles.to_replicate}
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
            self.quarantined(version, bundle_id, f"node {self.place.node}", reason)

    def quarantined(self, version: Version, bundle_id: str, place: str, reason: str) -> None:
        """Raises the alarm that a copy of a bundle is used no more; `place` is a node or storage."""
        text = f"{place}: the copy of bundle {bundle_id} of {version} is not used: {reason}"
        self.alarm(f"quarantine {version} {bundle_id} {place}", text)

    def unpin(self, held: HeldSlot, why: str) -> None:
        """An activity no longer needs the slot's bytes."""
        with self.lock:
            held.unpin(why)
            self.slot_pool.collect(self.is_free)
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

    def appoint(self, appointment: Appointment) -> Appointed:
        """The message that carries an appointment of this incarnation."""
        return Appointed(incarnation=self.incarnation, appointment=appointment)

    # --- telling

    def alarm(self, key: str, text: str) -> None:
        """Something an operator should know; repetitions of a key are counted, not piled up, nor logged."""
        with self.lock:
            before = self.alarms.pop(key, None)
            self.alarms[key] = Warned(text, time.monotonic(), before.count + 1 if before else 1)
            while len(self.alarms) > MAX_ALARMS:
                self.alarms.popitem(last=False)
            if before is None or before.text != text:
                logger.warning("%s: %s", key, text)
                self.callbacks.push(f"alarm {key}", Alarm(key=key, text=text))

    def calm(self, key: str) -> None:
        """End an alarm: what it was about is over."""
        with self.lock:
            self.alarms.pop(key, None)

    def progress(self) -> list[Progress]:
        """The level of every version that is remembered, for a client that just came."""
        with self.lock:
            return list(self._past.levels.values())

    def _publish(self, version: Version) -> None:
        reached, reason, abandoned = self.need_ledger().standing(version)
        message = Progress(version=version, reached=tuple(sorted(reached)), reason=reason, abandoned=abandoned)
        self._past.levels[version] = message
        self._past.levels.move_to_end(version)
        while len(self._past.levels) > MAX_LEVELS:
            self._past.levels.popitem(last=False)
        self.callbacks.push(f"progress {version}", message)

    def inventory(self) -> Inventory:
        """Return what this keeper holds, of whichever incarnation."""
        with self.lock:
            copies = [
                MemoryCopy(
                    held.version, self.node, None if held.replica else held.rank, _short(place.seal), held.preloaded
                )
                for held in self.slot_pool.sealed()
                if held.version is not None
                for bundle_id, place in held.images.items()
                if bundle_id not in held.condemned
            ]
            levels = {version: max(told.reached) for version, told in self._past.levels.items() if told.reached}
            return Inventory(
                copies=tuple(copies),
                tables=tuple(self._past.tables.items()),
                suspects=tuple(self._past.suspects.items()),
                levels=tuple(levels.items()),
                reachable=(self.node,),
            )

    def awaits_commit(self) -> bool:
        """Return whether something of this node is due for storage and not committed yet: a slot, or a part it wrote."""
        with self.lock:
            if self.ledger is None:
                return False
            durable = self.ledger.newest(Level.DURABLE)
            due = {part.version for part in self.ledger.reports().parts}
            due |= {h.version for h in self.slot_pool if h.durable and not h.replica and h.version is not None}
            open_ = [v for v in due if v.incarnation == self.incarnation and (durable is None or v > durable)]
            return any(not self.ledger.standing(version)[2] for version in open_)

    def whole_report(self) -> Reports:
        """All that a new coordinator needs from this node."""
        with self.lock:
            return self.need_ledger().reports()


def greeting(state: NodeState, assembly: Assembly) -> Hello:
    """Return how this keeper introduces itself to others of its job."""
    return Hello(
        job=state.place.job,
        role=KEEPER,
        node=state.node,
        incarnation=assembly.incarnation,
        job_id=assembly.job_id,
    )


def _report_seals(held: HeldSlot) -> tuple[Seal, ...]:
    """The coordinator compares digests of images; those of chunks would only make the report long."""
    return tuple(_short(place.seal) for place in held.images.values())


def _short(seal: Seal) -> Seal:
    return Seal(seal.bundle_id, seal.length, seal.digest)
