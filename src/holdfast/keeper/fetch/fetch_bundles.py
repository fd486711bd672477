"""Making bundles present on this node for a rank that comes back: slot, other slot, peer, storage.

What is here already is only pinned. What is not is fetched into one of the rank's free slots, or into memory of its
own if none is free, proved against its seal, and sealed there, so that it counts as a copy again. Two ranks that need
the same bundle cause one fetch. Runs in the thread of the connection that asked; every wait has its deadline.

What this node reads from storage for the whole job is read by a thread beside the one that takes what others hand on
(`keeper.fetch.streaming_relay`), else two nodes would wait for each other's first bundle. Both go through bundles in the same order on
every node, so a bundle only ever waits for earlier ones. A node that does not hand on what it should is no reason to
fail: the bundle is then read from storage here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.base.errors import KeeperLost, MemoryRefused
from holdfast.core.model import Version
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.core.versions.slot_guard import SlotState, choose_slot
from holdfast.keeper.fetch.fetch_sources import FetchTarget, Sources
from holdfast.keeper.fetch.streaming_relay import IncomingBundle, IncomingBundles
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.progress import RESTORING, Activities
from holdfast.keeper.slots.slot_pool import HeldSlot, PieceOf, SlotPool
from holdfast.keeper.storage.lazy_storage import LazyStorage
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory.slots import ImagePlace

PIN = "restoring"


@dataclass(frozen=True, slots=True)
class PresentBundle:
    """A bundle, or chunks of one, in a slot of this node; pinned."""

    held: HeldSlot
    place: ImagePlace | PieceOf
    source: Source
    seconds: float


class BundleFetcher:
    """Fetches what a rank needs; one per keeper.

    Args:
        await_slot: waits for the first slot of a rank that is being made: rank, bytes, deadline.
    """

    def __init__(
        self,
        state: NodeState,
        lazy_storage: LazyStorage,
        activities: Activities,
        incoming: IncomingBundles,
        await_slot: Callable[[int, int, float], None],
    ) -> None:
        self._state = state
        self._await_slot = await_slot
        self._lazy_storage = lazy_storage
        self._activities = activities
        self._incoming = incoming
        self._landed = threading.Condition(state.lock)
        self._under_way: set[tuple[Version, str]] = set()
        self._stopping = False

    def stop(self) -> None:
        """Ends fetches at their next chunk."""
        self._stopping = True

    def obtain(self, rank: int, version: Version, fetches: Sequence[Fetch], timeout_s: float) -> list[PresentBundle]:
        """All bundles, pinned, in order.

        Raises:
            HoldfastError: of the first copy that could not be had; nothing stays pinned then.
        """
        deadline = time.monotonic() + timeout_s
        present: dict[str, PresentBundle] = {}
        try:
            while True:
                with self._state.lock:
                    missing = self._collect(rank, version, fetches, present)
                    mine = [fetch for fetch in missing if (version, fetch.ref.bundle_id) not in self._under_way]
                    self._under_way.update((version, fetch.ref.bundle_id) for fetch in mine)
                    if missing and not mine:
                        self._wait(deadline)
                if not missing:
                    return [present[fetch.ref.bundle_id] for fetch in fetches]
                if mine:
                    self._fetch(rank, version, mine, present, deadline)
        except BaseException:
            self.release(found.held for found in present.values())
            raise

    def release(self, held: Iterable[HeldSlot]) -> None:
        """Let go of what was obtained: it is no longer read."""
        for slot in held:
            self._state.unpin(slot, PIN)

    def _wait(self, deadline: float) -> None:
        """Until another rank's fetch landed or failed."""
        left = deadline - time.monotonic()
        if left <= 0 or self._stopping:
            raise KeeperLost("the bundles did not arrive in time", remedy="try again, or use an older version")
        self._landed.wait(left)

    def _collect(
        self, rank: int, version: Version, fetches: Sequence[Fetch], present: dict[str, PresentBundle]
    ) -> list[Fetch]:
        """Pins what is here; returns what is not."""
        missing = []
        for fetch in fetches:
            bundle_id = fetch.ref.bundle_id
            if bundle_id in present:
                continue
            found = copy_here(self._state.slot_pool, rank, version, fetch)
            if found is None:
                missing.append(fetch)
                continue
            found.held.pins[PIN] += 1
            present[bundle_id] = found
        return missing

    def _fetch(
        self, rank: int, version: Version, fetches: Sequence[Fetch], present: dict[str, PresentBundle], deadline: float
    ) -> None:
        """Fetches into one slot and seals it."""
        incoming: dict[str, IncomingBundle] = {}
        try:
            fetches = sorted(fetches, key=lambda fetch: fetch.ref.bundle_id)
            lengths = [-(-fetch.seal.length // image_format.ALIGN) * image_format.ALIGN for fetch in fetches]
            self._await_slot(rank, sum(lengths), deadline)
            held = self._target(rank, version, sum(lengths))
            spots = [FetchTarget(fetch, offset) for fetch, offset in zip(fetches, _offsets(lengths), strict=True)]
            for spot in spots:
                spot.landing = self._incoming.begin(version, spot.fetch.ref.bundle_id, held, spot.offset)
                incoming[spot.fetch.ref.bundle_id] = spot.landing
            try:
                total = sum(fetch.seal.length for fetch in fetches)
                working = self._activities.start(RESTORING, version, total, rank=rank)
                with self._state.slot_pool.first_turn_alone(), working as progress:
                    places = self._bring(version, held, spots, progress)
                present.update(
                    (
                        spot.fetch.ref.bundle_id,
                        PresentBundle(held, places[spot.fetch.ref.bundle_id], spot.came_from, spot.seconds),
                    )
                    for spot in spots
                )
                self._seal(held, places)
            except BaseException as error:
                # First of all nobody is handed any more what lies in a slot that is about to be free.
                self._incoming.end(version, incoming, str(error) or "its fetch was given up")
                self._forget(held, present)
                raise
            self._incoming.end(version, incoming)
        finally:
            with self._landed:
                self._under_way.difference_update((version, fetch.ref.bundle_id) for fetch in fetches)
                self._landed.notify_all()

    def _bring(
        self, version: Version, held: HeldSlot, spots: Sequence[FetchTarget], progress: Callable[[int], None]
    ) -> dict[str, ImagePlace]:
        """Fills all spots: what this node reads for the job in one thread, what others hand on in another."""
        own = [spot for spot in spots if spot.fetch.source is Source.STORAGE and spot.fetch.via is None]
        others = [spot for spot in spots if spot not in own]
        places: dict[str, ImagePlace] = {}
        errors: list[BaseException] = []

        def bring(some: Sequence[FetchTarget]) -> None:
            sources = Sources(self._state, self._lazy_storage, self._incoming, lambda: self._stopping or bool(errors))
            sources.progress = progress
            try:
                for spot in some:
                    view = held.slot.view[spot.offset : spot.offset + spot.fetch.seal.length]
                    seal = sources.read(version, spot, view)
                    places[spot.fetch.ref.bundle_id] = ImagePlace(spot.fetch.ref, spot.offset, seal)
            except BaseException as error:  # noqa: BLE001  raised again below, by the thread that was asked
                errors.append(error)
            finally:
                sources.close()

        reader = threading.Thread(target=bring, args=(own,), name="holdfast reader", daemon=True)
        if own and others:
            reader.start()
            bring(others)
            reader.join()
        else:
            bring(spots)
        if errors:
            raise errors[0]
        return places

    def _seal(self, held: HeldSlot, places: dict[str, ImagePlace]) -> None:
        with self._state.lock:
            held.seal(places, self._state.place.job)
            held.pins[PIN] += len(places) - 1  # one per bundle, as for those that were here

    def _forget(self, held: HeldSlot, present: dict[str, PresentBundle]) -> None:
        with self._state.lock:
            for bundle_id in [name for name, found in present.items() if found.held is held]:
                del present[bundle_id]
            held.pins.pop(PIN, None)
            held.clear()
            self._state.slot_pool.collect(self._state.guard.is_free)

    def _target(self, rank: int, version: Version, num_bytes: int) -> HeldSlot:
        """A slot of the rank that may be written, else memory of its own that goes when the guard allows.

        One slot of the rank at most: what is brought in several turns (a copy was bad, or a part is here already) would
        else end in all of them, and the guard would keep every one for the version that was resumed from. (Replicas
        follow the same rule, in `keeper.replication.replicator`.)
        """
        state = self._state
        with state.lock:
            own = state.slot_pool.in_use(rank)
            if not any(held.version == version and held.state is SlotState.SEALED for held in own):
                held = self._free(own, num_bytes)
                if held is not None:
                    return held.claim(version, PIN)
        try:
            slot = state.slot_pool.allocate(num_bytes, f"restoring {version} for rank {rank}")
        except MemoryRefused:  # coming back is worth more than the next save
            with state.lock:
                held = self._free(own, num_bytes)
                if held is None:
                    raise
                return held.claim(version, PIN)
        with state.lock:
            held = state.slot_pool.add(slot, rank)
            held.outgrown = True
            return held.claim(version, PIN)

    def _free(self, own: Sequence[HeldSlot], num_bytes: int) -> HeldSlot | None:
        """A slot that the guard lets be overwritten, large enough. Under the state's lock."""
        state = self._state
        fitting = [held for held in own if held.slot.num_bytes >= num_bytes]
        chosen = choose_slot([state.guard.view(held) for held in fitting], state.need_ledger().knowledge)
        return state.slot_pool.get(chosen.value) if chosen.value is not None else None


def copy_here(slot_pool: SlotPool, rank: int, version: Version, fetch: Fetch) -> PresentBundle | None:
    """The whole bundle on this node, if it is the copy that was agreed on. Under the state's lock; nothing is pinned."""
    found = slot_pool.find(version, fetch.ref.bundle_id, rank)
    if found is None or found[1].seal.digest != fetch.seal.digest:
        return None
    held, place = found
    if held.rank == rank and not held.replica:
        return PresentBundle(held, place, Source.SLOT, 0.0)
    return PresentBundle(held, place, Source.PRELOADED if held.preloaded else Source.NODE, 0.0)


def _offsets(lengths: Sequence[int]) -> Iterable[int]:
    at = 0
    for length in lengths:
        yield at
        at += length
