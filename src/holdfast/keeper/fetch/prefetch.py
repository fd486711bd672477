"""Fetching before anybody asks: while the trainers import and build, their keeper brings what they will restore.

`holdfast run` says which ranks start on this node (`elastic.launch.keeper_hints`). If nothing is held here yet, the newest version that a
restore would choose is looked for, and this node's part of it is read, bundle by bundle, each proved as in a restore.
When the first rank joins the job this ends: the bundle under way is finished, or given up where that takes too long.
What is here is then found by the restore like any other copy.

Must never be in the way: it takes a share of the free memory only, gives it back where memory is refused, and goes when
the job resumes from another version or captures a newer one. Nothing that is said of a version rests on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.errors import HoldfastError, KeeperLost
from holdfast.core.layout.parity_stripes import PieceCopy
from holdfast.core.model import BundleRef, Topology, Version
from holdfast.core.recovery import prefetch, version_choice
from holdfast.core.recovery.version_choice import Choice, Facts, Fetch, MemoryCopy, Stored
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.slot_guard import SlotState
from holdfast.keeper.fetch.fetch_sources import FetchTarget, Sources
from holdfast.keeper.fetch.streaming_relay import IncomingBundles
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.messages import Assembly, Inventory, Ok
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.progress import PRELOADING, Activities
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.keeper.storage.lazy_storage import LazyStorage
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory.slots import ImagePlace
from holdfast.tiers.storage.manifest import stored_of
from holdfast.tiers.storage.version_store import Storage

logger = logging.getLogger(__name__)

# How long a rank that joins waits for the bundle under way.
PATIENCE_S = 0.5
# Bundles share memory up to this size: each piece of memory has two descriptors.
BATCH_BYTES = 256 << 20


@dataclass(slots=True)
class _PrefetchOutcome:
    """Holds what became of it, for the status."""

    version: Version | None = None
    reason: str = ""
    wanted_bytes: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class Preloader:
    """One per keeper.

    Args:
        survey: what all keepers of a job hold, this one being that node.
    """

    def __init__(
        self,
        state: NodeState,
        lazy_storage: LazyStorage,
        activities: Activities,
        survey: Callable[[Assembly, int], Inventory],
    ) -> None:
        self._state = state
        self._lazy_storage = lazy_storage
        self._activities = activities
        self._survey = survey
        self._thread: threading.Thread | None = None
        self._told = _PrefetchOutcome()
        self._closed = False  # no further bundle
        self._stopping = False  # no further chunk
        state.slot_pool.make_room = self._make_room

    def begin(self, request: messages.Preload) -> Ok:
        """These ranks start on this node. Returns at once."""
        with self._state.lock:
            knows = self._closed or self._state.assembly is not None or any(True for _ in self._state.slot_pool)
            if self._thread is None and not knows:
                self._thread = threading.Thread(target=self._run, args=(request,), name="holdfast preload", daemon=True)
                self._thread.start()
        return Ok(id=request.id)

    def give_way(self) -> None:
        """A rank joins the job: from now on the restore decides what is fetched."""
        with self._state.lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join(PATIENCE_S)
            self.stop()
            thread.join(PATIENCE_S)  # storage that hangs holds nobody up; what still comes of it is dropped

    def stop(self) -> None:
        """Ends it at the next chunk."""
        self._closed = self._stopping = True

    def facts(self) -> dict[str, Any]:
        """Return facts for the status page. Under the state's lock."""
        told = self._told
        return {
            "version": str(told.version) if told.version else None,
            "reason": told.reason,
            "wanted_bytes": told.wanted_bytes,
            "bytes": dict(told.sources),
            "seconds": told.seconds,
            "held_bytes": sum(held.slot.total_bytes for held in self._state.slot_pool if held.preloaded),
        }

    def _run(self, request: messages.Preload) -> None:
        try:
            self._preload(request)
        except HoldfastError as error:
            self._told.reason = f"it ended: {error.what}"
            logger.info("preloading %s", self._told.reason)
        except Exception as error:  # the top of the thread: the restore fetches for itself
            self._told.reason = f"it failed: {error}"
            logger.exception("preloading failed")

    def _preload(self, request: messages.Preload) -> None:
        started, told = time.perf_counter(), self._told
        storage = self._lazy_storage.open()
        names = tuple(f"node {number}" for number in range(1 + max(request.node_of)))
        topology = Topology(names, request.node_of)
        assembly = Assembly(
            storage.incarnations.highest(), "", storage.job_id(), topology, request.addresses or ("",) * len(names)
        )
        facts = self._find(storage, assembly, request)
        chosen = version_choice.choose_version(facts)
        choice = chosen.value
        if not isinstance(choice, Choice):
            told.reason = chosen.reason
            return
        wanted = prefetch.to_preload(choice, request.node, facts)
        told.version, told.reason = choice.version, wanted.reason
        told.wanted_bytes = sum(fetch.seal.length for fetch in wanted.value)
        budget = self._state.slot_pool.budget
        fitting = prefetch.that_fit(wanted.value, budget.allowed - budget.used)
        if len(fitting) < len(wanted.value):
            told.reason += f"; {len(fitting)} of {len(wanted.value)} bundles fit beside the slots"
        sources = Sources(self._state, self._lazy_storage, IncomingBundles(), lambda: self._stopping, assembly)
        total = sum(fetch.seal.length for fetch in fitting)
        try:
            with self._activities.start(PRELOADING, choice.version, total) as sources.progress:
                for batch in _batches(fitting):
                    self._fetch(sources, choice.version, batch)
        finally:
            sources.close()
            told.seconds = time.perf_counter() - started
            self._lazy_storage.events.emit(
                "node.preloaded", version=str(told.version), size_bytes=told.sources.total(), seconds=told.seconds
            )
            logger.info("preloaded %s of %s in %.2f s: %s", dict(told.sources), told.version, told.seconds, told.reason)

    def _find(self, storage: Storage, assembly: Assembly, request: messages.Preload) -> Facts:
        """Return what a restore would be told now; what others have preloaded is theirs to read, as if they had not."""
        memory: tuple[MemoryCopy, ...] = ()
        parity: tuple[PieceCopy, ...] = ()
        tables: dict[Version, tuple[BundleRef, ...]] = {}
        suspects: frozenset[Version] = frozenset()
        if request.addresses:
            found = self._survey(assembly, request.node)
            memory = tuple(copy for copy in found.copies if not copy.preloaded)
            parity = found.parity
            tables, suspects = found.tables, frozenset(version for version, _ in found.suspects)
        lineage = Lineage(storage.incarnations.lineage())
        return Facts(
            memory, tables, _newest(storage, lineage), lineage, assembly.topology, suspects,
            ranks_per_reader=request.ranks_per_reader, parity=parity,
        )  # fmt: skip

    def _fetch(self, sources: Sources, version: Version, batch: Sequence[Fetch]) -> None:
        """Some bundles into memory of their own; those that came stay, whatever becomes of the others."""
        if self._closed:
            raise KeeperLost("the ranks join the job")
        lengths = [-(-fetch.seal.length // image_format.ALIGN) * image_format.ALIGN for fetch in batch]
        slot = self._state.slot_pool.allocate(sum(lengths), f"preloading {version}")
        with self._state.lock:
            held = self._state.slot_pool.add(slot, batch[0].ref.ranks[0], replica=True)
            held.preloaded = held.outgrown = True
            held.claim(version, PRELOADING)
        places: dict[str, ImagePlace] = {}
        at = 0
        try:
            for fetch, length in zip(batch, lengths, strict=True):
                if self._closed:
                    raise KeeperLost("the ranks join the job")
                seal = sources.read(version, FetchTarget(fetch, at), slot.view[at : at + fetch.seal.length])
                self._told.sources[fetch.source.name.lower()] += fetch.seal.length
                places[fetch.ref.bundle_id] = ImagePlace(fetch.ref, at, seal)
                at += length
        finally:
            self._seal(held, places)

    def _seal(self, held: HeldSlot, places: dict[str, ImagePlace]) -> None:
        size = sum(place.seal.length for place in places.values())
        with self._state.lock:
            held.images, held.state = places, SlotState.SEALED
            if not places:
                held.clear()
            held.unpin(PRELOADING)
            self._state.slot_pool.collect(self._state.guard.is_free)
        self._lazy_storage.events.count("preloaded_bytes", size)

    def _make_room(self) -> bool:
        """Memory was refused: what was preloaded goes, unless a rank reads it. Whether anything did."""
        with self._state.lock:
            gone = [held for held in self._state.slot_pool if held.preloaded and not held.pins]
            for held in gone:
                self._state.slot_pool.drop(held)
            if gone:
                logger.info("what was preloaded gives way: memory is needed")
            return bool(gone)


def _newest(storage: Storage, lineage: Lineage) -> Mapping[Version, Stored]:
    """The newest version that is committed, no dead lineage, and has a manifest that can be read."""
    for version in sorted(storage.versions(), reverse=True):
        if not lineage.is_live(version):
            continue
        try:
            return {version: stored_of(storage.manifest(version))}
        except HoldfastError as error:
            if not error.condemns:
                raise  # a restore will wait for it, and take nothing older
            logger.info("%s is not preloaded: %s", version, error)
    return {}


def _batches(fetches: Sequence[Fetch]) -> Iterator[list[Fetch]]:
    batch: list[Fetch] = []
    for fetch in fetches:
        if batch and sum(other.seal.length for other in batch) + fetch.seal.length > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(fetch)
    if batch:
        yield batch
