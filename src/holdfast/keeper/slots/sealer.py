"""Sealing: hash what the trainer copied, write the header last, then say so. Off the trainer's time.

One version after the other, its chunks on several threads where there are cores: the next save may wait for the slot, and one
thread hashes a state of 10 GiB for longer than a device takes to copy it. The slot is pinned meanwhile. If the version was
abandoned before the header was written, no header is written. Where the trainer shows its waits, chunks are hashed in
them, one after the other (`keeper.slots.idle_windows`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from holdfast.base.errors import CorruptError, HoldfastError, KeeperError
from holdfast.base.events import Events
from holdfast.core.model import RankLayout, Seal, Version
from holdfast.core.versions.slot_guard import SlotState
from holdfast.keeper.rpc.messages import ImageSpan
from holdfast.keeper.slots.idle_windows import Windows
from holdfast.keeper.slots.job_queue import HasWorker, Worker
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory import slots
from holdfast.tiers.memory.page_populate import share_of_cores
from holdfast.tiers.memory.slots import ImagePlace
from holdfast.tiers.memory.spoiled_images import spoiled

logger = logging.getLogger(__name__)

_PIN = "sealing"


@dataclass(frozen=True, slots=True)
class _Job:
    held: HeldSlot
    version: Version
    images: tuple[ImageSpan, ...]
    kept: Mapping[str, Seal]


class Sealer(HasWorker):
    """Turns copied slots into sealed ones; in the waits that trainers show, if they do."""

    def __init__(self, state: NodeState, events: Events, windows: Windows) -> None:
        num_threads = share_of_cores(fewest=1)
        self._threads = ThreadPoolExecutor(num_threads, "holdfast hashes") if num_threads > 1 else None
        self._state = state
        self._events = events
        self._windows = windows
        self._worker: Worker[_Job] = Worker(
            "holdfast sealer",
            self._seal,
            lambda text: state.alarms.warn("sealer", text),
            on_idle=state.changed,
            niceness=0,  # it takes milliseconds, and the next save may wait for the level
        )

    def put(self, held: HeldSlot, version: Version, images: Sequence[ImageSpan], kept: Collection[str] = ()) -> None:
        """Takes a slot over from the trainer. Under the state's lock.

        Args:
            held: the slot.
            version: what was copied into it.
            images: where they lie.
            kept: bundles of which the trainer wrote nothing, since what stood there was right: they keep their seals.

        Raises:
            KeeperError: an image lies outside the slot, overlaps another, is not the rank's, or was kept and did not stand there.
        """
        _check(held, self._state.layouts.get(held.rank), images)
        seals = _kept(held, images, kept)
        held.copied = True
        held.pins[_PIN] += 1
        if not self._worker.put(_Job(held, version, tuple(images), seals)):
            held.unpin(_PIN)
            raise KeeperError("too many slots wait to be sealed")

    def leave(self) -> None:
        """Drops what waits: the job it is for is over. Under the state's lock."""
        for job in self._worker.clear():
            self._state.unpin(job.held, _PIN)

    def stop(self) -> None:
        super().stop()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _seal(self, job: _Job) -> None:
        held, state, turns = job.held, self._state, self._windows.turns()
        started = time.perf_counter()
        try:
            places = {}
            for span in job.images:
                view = held.slot.view[span.offset : span.offset + span.length]
                if span.ref.bundle_id in job.kept:
                    turns.wait(held.rank, min(span.length, image_format.CHUNK_BYTES))
                    seal = self._keep(job, view, job.kept[span.ref.bundle_id])
                elif self._threads is None or self._windows.shown(held.rank) is not None:
                    seal = image_format.seal(span.ref.bundle_id, view, before=lambda size: turns.wait(held.rank, size))
                else:
                    seal = self._seal_on_threads(self._threads, span.ref.bundle_id, view)
                places[span.ref.bundle_id] = ImagePlace(span.ref, span.offset, seal)
            turns.done()
            kept = sum(span.length for span in job.images if span.ref.bundle_id in job.kept)
            self._events.count("hash_kept_bytes", kept)  # before anybody hears that it is sealed
            self._events.count("hashed_bytes", sum(span.length for span in job.images) - kept)
            with state.lock:
                if held.state is SlotState.WRITING and held.version == job.version and held.copied:
                    held.images = places
                    slots.write_header(held.slot, held.header(state.place.job))
                    state.sealed(held, job.version)
        except Exception as error:  # the other ranks would wait for it
            with state.lock:
                held.clear()
                state.abandon(held.rank, job.version, getattr(error, "what", f"it was not sealed: {error}"))
            if not isinstance(error, HoldfastError):
                raise
        finally:
            state.unpin(held, _PIN)
        self._events.emit(
            "node.sealed",
            version=str(job.version),
            rank=held.rank,
            size_bytes=sum(span.length for span in job.images),
            seconds=time.perf_counter() - started,
        )

    def _keep(self, job: _Job, view: memoryview, seal: Seal) -> Seal:
        """The seal of an image that nobody wrote to since it was sealed; a share of it is proved.

        Raises:
            CorruptError: it is not what was sealed. Nobody can tell what is right then, so it is not hashed again.
        """
        fault = spoiled(view, seal)
        if fault:
            rank = job.held.rank
            text = f"{job.version} is abandoned: what was not copied again has changed in memory: {fault}"
            self._state.alarms.warn(f"images of rank {rank}", text)
            raise CorruptError(f"what was not copied again has changed in memory: {fault}", where=f"rank {rank}")
        return seal

    def _seal_on_threads(self, threads: ThreadPoolExecutor, bundle_id: str, view: memoryview) -> Seal:
        try:
            return image_format.seal(bundle_id, view, each=threads.map)
        except RuntimeError as error:
            logger.warning("chunks are hashed one after the other: %s", error)
            self._threads = None
            threads.shutdown(wait=False, cancel_futures=True)
            return image_format.seal(bundle_id, view)


def _kept(held: HeldSlot, images: Sequence[ImageSpan], kept: Collection[str]) -> dict[str, Seal]:
    """The seals of images that stood in the slot when it was begun, and were left as they are."""
    spans = {span.ref.bundle_id: span for span in images}
    seals = {}
    for bundle_id in kept:
        place, span = held.before.get(bundle_id), spans.get(bundle_id)
        if place is None or span is None or (place.offset, place.seal.length) != (span.offset, span.length):
            raise KeeperError(f"the image of bundle {bundle_id} was not copied, and does not stand there")
        seals[bundle_id] = place.seal
    return seals


def _check(held: HeldSlot, layout: RankLayout | None, images: Sequence[ImageSpan]) -> None:
    known = {ref.bundle_id: ref for ref in layout.bundles} if layout else {}
    end = 0
    for span in sorted(images, key=lambda span: span.offset):
        if known.get(span.ref.bundle_id) != span.ref:
            raise KeeperError(f"bundle {span.ref.bundle_id} is not in the layout that rank {held.rank} registered")
        if span.offset < end or span.length <= 0 or span.offset + span.length > held.slot.num_bytes:
            raise KeeperError(f"the image of bundle {span.ref.bundle_id} overlaps another or lies outside the slot")
        if span.offset % image_format.ALIGN:
            raise KeeperError(f"the image of bundle {span.ref.bundle_id} is not aligned to {image_format.ALIGN} bytes")
        end = span.offset + span.length
    if len({span.ref.bundle_id for span in images}) != len(images):
        raise KeeperError("a bundle appears twice in one slot")
