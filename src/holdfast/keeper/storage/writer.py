"""Writes to storage, in the background, straight from the slots: bundles and parts by every node, the manifest by one.

What a node writes, also for others, is keeper.storage.writer_failover's business. A slot is pinned from the moment it is found until
its order is done, and what is written is compared with the seal before it counts: a copy that differs is used no more, and
whoever holds a good one writes it. Any error leaves the version without the durable level, says so, and touches nothing
else: memory levels go on. The newest version that failed is written again from memory, with growing pauses, as long as it
is held and nothing newer is due; the alarm stands until then. The order of writes is tiers.storage's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from holdfast.base.errors import CorruptError, Fenced, HoldfastError, KeeperError, StorageBusy, StorageFull
from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Level, Version
from holdfast.core.versions.coordinator_board import CommitOrder, PartReport
from holdfast.core.versions.node_ledger import Reports
from holdfast.core.versions.writer_failover import Order
from holdfast.keeper.rpc.messages import Assembly, superseded
from holdfast.keeper.slots.job_queue import HasWorker, Worker
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.progress import WRITING, Activities
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.keeper.storage.lazy_storage import LazyStorage
from holdfast.keeper.storage.retention import RetentionRunner, make_room
from holdfast.keeper.storage.superseded_watch import newer_run
from holdfast.keeper.storage.writer_failover import WriteAttempt, WriterFailover
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory.slots import ImagePlace
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.read_limit import SLOWEST_BYTES_PER_S
from holdfast.tiers.storage.version_store import Storage

logger = logging.getLogger(__name__)

# Between two attempts at one version: doubled each time.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
# Failures in a row after which an operator has to look.
MAX_TRIES = 5
# A sign of writing to those who watch; and none any more when nothing moved for SILENCE_S plus the time in which the
# slowest storage that is worth waiting for would have taken the largest bundle.
SIGN_S = 1.0
SILENCE_S = 5.0


class _RetryState:
    """Holds what failed of the newest version that did, and when it is tried again. Under the state's lock.

    After MAX_TRIES failures of storage in a row it counts as unserviceable: that is an alarm, and from then on there is
    one try in MAX_PAUSE_S and one for every new version.
    """

    def __init__(self) -> None:
        self._version: Version | None = None
        self._orders: dict[tuple[int, ...], Order] = {}
        self._at_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._tries = 0

    def failed(self, order: Order, error: HoldfastError) -> bool:
        """An attempt failed; only what may get better by itself is tried again. True if storage failed too often."""
        lacking = isinstance(error, CorruptError)  # of good bytes; a replica may still be on its way here
        self._tries += not lacking
        newest = self._version is None or order.version >= self._version
        if newest and (error.retryable or lacking):
            if order.version != self._version:
                self._version, self._orders, self._pause_s = order.version, {}, FIRST_PAUSE_S
            if not self._orders:
                self._at_s = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._orders[tuple(part.index for part in order.parts)] = order
        return not lacking and self._tries >= MAX_TRIES

    def due(self) -> tuple[Order, ...]:
        """Return what is to be tried again now; each is named once, unless it fails again."""
        if time.monotonic() < self._at_s:
            return ()
        orders, self._orders = tuple(self._orders.values()), {}
        return orders

    @property
    def pending(self) -> Version | None:
        """Return what is tried again later; None if nothing is."""
        return self._version if self._orders else None

    def succeeded(self) -> None:
        """Storage serves."""
        self._tries = 0

    def forget(self, *, before: Version | None = None) -> None:
        """Something newer takes its place; everything goes if nothing is named."""
        if before is None or (self._version is not None and self._version < before):
            self._version, self._orders = None, {}


def _tell_later(state: NodeState, versions: Iterable[Version | None]) -> None:
    """Tells of what is done later, where a newer version is durable: who waits would give it up. Under the state's lock."""
    ledger = state.ledger
    if ledger is None:
        return
    for version in dict.fromkeys(versions):
        if version is not None and version.incarnation == ledger.incarnation and ledger.standing(version).passed:
            state.callbacks.report(Reports(at_work=(version,)))


class Persister(HasWorker):
    """Writes the parts that this node is ordered to write. Stopped in the middle of a bundle, it leaves a temporary file.

    Args:
        failover: told of what was written and what failed.
    """

    def __init__(
        self,
        state: NodeState,
        lazy_storage: LazyStorage,
        events: Events,
        activities: Activities,
        failover: WriterFailover,
    ) -> None:
        self._state = state
        self._lazy_storage = lazy_storage
        self._events = events
        self._activities = activities
        self._failover = failover
        self._worker: Worker[WriteAttempt] = Worker(
            "holdfast persister",
            self._persist,
            lambda text: state.alarms.warn("persister", text),
            on_idle=state.changed,
        )
        self._again = _RetryState()
        self._writing: WriteAttempt | None = None
        self._moved_s = self._told_s = 0.0
        self._allowance_s = 0.0

    def put(self, writing: WriteAttempt) -> None:
        """Queues parts that are to be written. Under the state's lock."""
        self._again.forget(before=writing.order.version)
        if not self._worker.put(writing):
            self._failover.done(writing)
            self._again.failed(writing.order, StorageBusy("storage is behind, and no more writes may wait"))

    def leave(self) -> None:
        """Drops what waits: the job it is for is over. Under the state's lock."""
        for writing in self._worker.clear():
            self._failover.done(writing)
        self._again.forget()

    def tick(self) -> None:
        """Gives a sign while bytes move, and writes again what failed, if it is time and its bytes are still held."""
        now = time.monotonic()
        with self._state.lock:
            writing = self._writing
            is_moving = writing is not None and now - self._moved_s <= self._allowance_s
            if now - self._told_s >= SIGN_S:
                self._told_s = now
                if writing is not None and is_moving:
                    self._failover.at_work(writing.order.version)
                later = [job.order.version for job in self._worker.waiting]
                _tell_later(self._state, (self._again.pending, *later))
            for again in self._again.due() if not self._worker.stopping else ():
                if not self._failover.again(again):
                    self._again.failed(again, CorruptError("its replica is not here yet"))

    def _persist(self, writing: WriteAttempt) -> None:
        state, order = self._state, writing.order
        try:
            with self._events.span("node.persisted", version=str(order.version), term=order.term) as facts:
                facts["size_bytes"] = self._write(writing)
            state.alarms.calm("storage")
            state.alarms.calm("unserviceable")
            with state.lock:
                self._again.succeeded()
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits and who is next in line must be told
            self._failed(order, _of_storage(error))
        finally:
            with state.lock:
                self._writing = None
                self._failover.done(writing)

    def _failed(self, order: Order, error: HoldfastError) -> None:
        state = self._state
        state.alarms.warn("storage", f"{order.version} is not durable: {error}")
        with state.lock:
            self._failover.failed(order, error.what)
            hopeless = self._again.failed(order, error)
            assembly = state.assembly
        if isinstance(error, StorageFull) and assembly is not None:
            self._make_room(assembly)
        if hopeless:
            state.alarms.warn(
                "unserviceable",
                f"storage is unserviceable: {MAX_TRIES} attempts failed, the last with: {error.what}; training and the "
                f"levels in memory go on, storage is tried every {MAX_PAUSE_S:.0f} s and with every new version",
            )

    def _make_room(self, assembly: Assembly) -> None:
        """Gives up what dead incarnations left half done, before the next attempt."""
        try:
            halves = make_room(self._lazy_storage.open(), assembly)
        except HoldfastError as error:  # of another node, perhaps, which removes the same
            logger.info("what earlier incarnations left half done stays: %s", error)
        else:
            for half in halves:
                self._events.emit("node.retired", version=str(half))

    def _write(self, writing: WriteAttempt) -> int:
        """Writes the order's bundles and parts; returns bytes. Nothing, if the version became durable meanwhile."""
        state, order = self._state, writing.order
        version = order.version
        with state.lock:
            if Level.DURABLE in state.need_ledger().standing(version).reached:
                return 0
            places = {ref.bundle_id: self._find(writing, ref) for part in order.parts for ref in part.refs}
            assembly = state.assembly
            lengths = [place.seal.length for _, place in places.values()]
            total, largest = sum(lengths), max(lengths, default=0)
            self._allowance_s = SILENCE_S + largest / SLOWEST_BYTES_PER_S
            self._writing, self._moved_s = writing, time.monotonic()
        with self._activities.start(WRITING, version, total) as progress:
            self._write_parts(order, places, assembly, self._moving(progress))
        return total

    def _moving(self, progress: Callable[[int], None]) -> Callable[[int], None]:
        def moved(num_bytes: int) -> None:
            self._moved_s = time.monotonic()
            progress(num_bytes)

        return moved

    def _write_parts(
        self,
        order: Order,
        places: Mapping[str, tuple[HeldSlot, ImagePlace]],
        assembly: Assembly | None,
        progress: Callable[[int], None],
    ) -> None:
        state, version = self._state, order.version
        storage = self._lazy_storage.open()
        if assembly is not None:
            storage.require_job(assembly.job_id)  # else what follows would stand in somebody else's directory
        stamp = make_stamp(version.incarnation, order.term)
        for part in order.parts:
            files = []
            for ref in part.refs:
                self._require_current(version, assembly)
                held, place = places[ref.bundle_id]
                view = held.slot.view[place.offset : place.offset + place.seal.length]
                try:
                    files.append(storage.bundles.write(version, ref, place.seal, view, stamp=stamp, progress=progress))
                except CorruptError as error:
                    self._condemn_if_bad(version, held, place, error.what)
                    raise
            self._require_current(version, assembly)
            if assembly is not None:
                storage.require_job(assembly.job_id)  # once more: the bundles may have taken minutes
            name, length, digest = storage.write_part(version, part.index, files, stamp=stamp)
            ids = tuple(ref.bundle_id for ref in part.refs)
            with state.lock:
                written = PartReport(version, state.node, name, length, digest, ids, part.index)
                self._failover.wrote(written)

    def _condemn_if_bad(self, version: Version, held: HeldSlot, place: ImagePlace, why: str) -> None:
        """Takes a copy out of use that does not hold what was sealed: what was refused is not to be written again."""
        view = held.slot.view[place.offset : place.offset + place.seal.length]
        try:
            image_format.verify(view, place.seal, f"node {self._state.place.node}")
        except CorruptError:
            self._state.condemn(version, place.ref.bundle_id, why, only=held)

    def _find(self, writing: WriteAttempt, ref: BundleRef) -> tuple[HeldSlot, ImagePlace]:
        found = writing.find(self._state.slot_pool, ref)
        if found is None:
            raise CorruptError(
                f"no good copy of bundle {ref.bundle_id} of {writing.order.version} is held here any more"
            )
        return found

    def _require_current(self, version: Version, assembly: Assembly | None) -> None:
        """A writer of a dead incarnation stops early; what it wrote is harmless either way. One of a job that is over
        must stop: another job's directory may stand at the same path.
        """
        now = self._state.assembly
        if now is None or assembly is None or now.job_id != assembly.job_id:
            raise Fenced("the job is over")
        if version.incarnation < now.incarnation:
            raise Fenced(f"incarnation {version.incarnation} is over")
        if self._worker.stopping:
            raise KeeperError("the keeper stops")


def _of_storage(error: Exception) -> HoldfastError:
    """Return a fault as one of storage, which is tried again: no thread or no memory may be left for a while."""
    if isinstance(error, HoldfastError):
        return error
    logger.error("writing to storage failed", exc_info=error)
    return StorageBusy(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class CommitJob:
    """A manifest to write, and whom to tell."""

    order: CommitOrder
    assembly: Assembly
    resumed_from: Version | None
    done: Callable[[Version, bool], None]


class Committer(HasWorker):
    """Writes root manifests and applies retention, each in a thread: the next commit waits for no removal, which may take long.

    Idle except on the coordinator's node.
    """

    def __init__(self, state: NodeState, lazy_storage: LazyStorage, events: Events) -> None:
        self._state = state
        self._lazy_storage = lazy_storage
        self._events = events
        self._worker: Worker[CommitJob] = Worker(
            "holdfast committer", self._commit, lambda text: state.alarms.warn("committer", text), on_idle=state.changed
        )
        self._retirement = RetentionRunner(events, self._in_hand)
        self._removal: Worker[tuple[Storage, CommitJob]] = Worker(
            "holdfast retention",
            self._retire,
            lambda text: state.alarms.warn("committer", text),
            on_idle=state.changed,
        )
        self._again = _RetryState()
        self._superseded = ""  # the key of the alarm that a newer incarnation is registered
        self._told_s = 0.0
        self._committing: Version | None = None

    def put(self, job: CommitJob) -> bool:
        """Queues a commit. False if too many wait: the newest of those is tried again. Under the state's lock."""
        version = job.order.version
        self._again.forget(before=version)
        is_queued = self._worker.put(job)
        if not is_queued:
            self._again.failed(
                Order(version, (), 0, "commit"), StorageBusy("storage is behind, and no more commits may wait")
            )
        return is_queued

    def leave(self) -> None:
        """Drops what waits: the job it is for is over. Under the state's lock."""
        self._worker.clear()
        self._removal.clear()
        self._again.forget()

    @property
    def idle(self) -> bool:
        """Return whether nothing waits and nothing is being done, removals included."""
        return self._worker.idle and self._removal.idle  # in this order: a commit orders its removal before it ends

    def stop(self) -> None:
        """Ends both workers."""
        super().stop()
        self._removal.stop()

    def _in_hand(self) -> set[Version]:
        """Return the version whose commit goes on: without it who commits would take it for removed while it was paused."""
        version = self._committing
        return set() if version is None else {version}

    def tick(self) -> None:
        """Has this node's part reported again, if a commit failed and it is time: that is what orders it anew."""
        now = time.monotonic()
        with self._state.lock:
            if now - self._told_s >= SIGN_S:
                self._told_s = now
                later = [job.order.version for job in self._worker.waiting]
                committing = self._committing if not self._worker.idle else None  # a fault of ours may have ended it
                _tell_later(self._state, (self._again.pending, committing, *later))
            for order in self._again.due() if not self._worker.stopping else ():
                self._state.repeat_part(order.version)

    def _commit(self, job: CommitJob) -> None:
        version = self._committing = job.order.version
        try:
            storage = self._lazy_storage.open()
            storage.require_job(job.assembly.job_id)
            manifest = Manifest(
                version=version,
                job_id=job.assembly.job_id,
                world_size=job.assembly.topology.world_size,
                layout=job.order.layout,
                resumed_from=job.resumed_from,
                parts={part.part: (part.length, part.digest) for part in job.order.parts},
            )
            with self._events.span("node.committed", version=str(version)):
                storage.commit(manifest, stamp=make_stamp(version.incarnation), lineage=dict(job.assembly.lineage))
        except Exception as trouble:  # noqa: BLE001 - whatever it is, the version must be free for another attempt
            error = _of_storage(trouble)
            if isinstance(error, Fenced) and newer_run(self._lazy_storage, version.incarnation, job.assembly.job_id):
                self._superseded = superseded(version.incarnation)
                self._state.alarms.warn(self._superseded, f"{version} is not durable: {error}")
            else:
                self._state.alarms.warn("storage", f"{version} is not durable: {error}")
            job.done(version, False)
            with self._state.lock:
                self._committing = None
                self._again.failed(Order(version, (), 0, "commit"), error)
            return
        with self._state.lock:
            self._committing = None
            self._again.succeeded()
        logger.info("%s is durable", version)
        self._state.alarms.calm("storage")
        self._state.alarms.calm(self._superseded)
        job.done(version, True)
        self._removal.replace((storage, job))  # what the newest commit lets go is all that can go

    def _retire(self, retiring: tuple[Storage, CommitJob]) -> None:
        """Old versions go only after a newer commit. A failure here costs space, nothing else."""
        storage, job = retiring
        try:
            self._retirement.after(storage, job.order.version, job.assembly, job.resumed_from)
            self._state.alarms.calm("retention")
        except Fenced as error:  # the newer incarnation applies it after its own commits: nobody has to do anything
            logger.info("retention is left to the incarnation that runs now: %s", error.what)
        except HoldfastError as error:
            self._state.alarms.warn("retention", f"an old version was not removed: {error}")
