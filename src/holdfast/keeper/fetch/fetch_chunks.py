"""Chunks of bundles for a rank that comes back in another layout: what is here, what a peer has read, what storage has.

Only the chunks that are asked for are fetched. They lie end to end in memory of their own, each proved against the
seal, and can be pulled by other keepers of the job, so that storage need read each chunk once. They are no copy of a
bundle: nothing is sealed, nothing counts for a level, and the memory goes with its last pin. Two ranks that need the
same chunk cause one fetch. Runs in the thread of the connection that asked; every wait has its deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.base.errors import CorruptError, HoldfastError, KeeperLost, UsageError, VersionNotFound
from holdfast.base.events import Events
from holdfast.core.layout import reshard
from holdfast.core.layout.reshard import Runs
from holdfast.core.model import Seal, Version
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.keeper.fetch.fetch_bundles import PIN, PresentBundle, copy_here
from holdfast.keeper.fetch.fetch_sources import OpenPlaces
from holdfast.keeper.replication.image_transfer import require
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.progress import RESTORING, Activities
from holdfast.keeper.slots.slot_pool import HeldSlot, PieceOf
from holdfast.keeper.storage.lazy_storage import LazyStorage
from holdfast.tiers.format.image import ALIGN, CHUNK_BYTES

_Chunk = tuple[Version, str, int]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A run of chunks that this request fetches, and where they will lie."""

    fetch: Fetch
    first: int
    end: int
    offset: int
    length: int


class ChunkFetcher:
    """Fetches chunks; one per keeper."""

    def __init__(self, state: NodeState, lazy_storage: LazyStorage, events: Events, activities: Activities) -> None:
        self._state = state
        self._lazy_storage = lazy_storage
        self._events = events
        self._activities = activities
        self._landed = threading.Condition(state.lock)
        self._under_way: set[_Chunk] = set()
        self._stopping = False

    def stop(self) -> None:
        """Ends fetches at their next chunk."""
        self._stopping = True

    def obtain(self, rank: int, version: Version, fetches: Sequence[Fetch], timeout_s: float) -> list[PresentBundle]:
        """Every chunk that is asked for, pinned: as a part of the whole image where that is here, else in runs.

        Raises:
            HoldfastError: of the first chunk that could not be had; nothing stays pinned then.
        """
        for fetch in fetches:
            if not fetch.chunks or not 0 <= fetch.chunks[0][0] < fetch.chunks[-1][1] <= _num_chunks(fetch.seal):
                raise UsageError(f"bundle {fetch.ref.bundle_id} has no chunks {fetch.chunks}")
        fetched: list[HeldSlot] = []
        try:
            return self._obtain(rank, version, fetches, fetched, time.monotonic() + timeout_s)
        finally:
            for held in fetched:  # what the request needs of it has a pin of its own by now
                self._state.unpin(held, PIN)

    def _obtain(
        self, rank: int, version: Version, fetches: Sequence[Fetch], fetched: list[HeldSlot], deadline: float
    ) -> list[PresentBundle]:
        while True:
            with self._state.lock:
                present, missing = self._look(rank, version, fetches)
                if not missing:
                    for item in present:
                        item.held.pins[PIN] += 1
                    return present
                mine = [(f, free) for f, runs in missing if (free := self._free(version, f, runs))]
                self._under_way.update(_chunks(version, mine))
                if not mine:
                    self._wait(deadline)
            if mine:
                self._fetch(rank, version, mine, fetched)

    def _look(
        self, rank: int, version: Version, fetches: Sequence[Fetch]
    ) -> tuple[list[PresentBundle], list[tuple[Fetch, Runs]]]:
        """Return what is here, and what is not."""
        slot_pool = self._state.slot_pool
        present: list[PresentBundle] = []
        missing: list[tuple[Fetch, Runs]] = []
        for fetch in fetches:
            assert fetch.chunks is not None
            whole = copy_here(slot_pool, rank, version, fetch)
            if whole is not None:
                present.append(whole)
                continue
            left = fetch.chunks
            for held, piece in slot_pool.find_pieces(version, fetch.seal):
                if reshard.minus(left, ((piece.first, piece.end),)) != left:
                    left = reshard.minus(left, ((piece.first, piece.end),))
                    present.append(PresentBundle(held, piece, fetch.source, 0.0))
            if left:
                missing.append((fetch, left))
        return present, missing

    def _free(self, version: Version, fetch: Fetch, runs: Runs) -> Runs:
        """Return those of these chunks that nobody fetches."""
        busy = [c for v, name, c in self._under_way if v == version and name == fetch.ref.bundle_id]
        return reshard.minus(runs, reshard.merged((chunk, chunk + 1) for chunk in busy))

    def _wait(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or self._stopping:
            raise KeeperLost("the chunks did not arrive in time", remedy="try again, or use an older version")
        self._landed.wait(left)

    def _fetch(self, rank: int, version: Version, mine: Sequence[tuple[Fetch, Runs]], fetched: list[HeldSlot]) -> None:
        """Fetches into memory of its own, which keeps one pin for `fetched`."""
        places = _Places(self._state, self._lazy_storage, lambda: self._stopping)
        try:
            wanted = list(_laid_out(mine))
            slot = self._state.slot_pool.allocate(wanted[-1].offset + wanted[-1].length, f"chunks of {version}")
            with self._state.lock:
                held = self._state.slot_pool.add(slot, rank)
                held.transient = True
                held.claim(version, PIN)
                fetched.append(held)
            total = sum(item.length for item in wanted)
            with self._activities.start(RESTORING, version, total, rank=rank) as progress:
                for item in wanted:
                    self._read(places, version, item, held, progress)
        finally:
            places.close()
            with self._landed:
                self._under_way.difference_update(_chunks(version, mine))
                self._landed.notify_all()

    def _read(
        self, places: _Places, version: Version, item: _Wanted, held: HeldSlot, progress: Callable[[int], None]
    ) -> None:
        fetch, view = item.fetch, held.slot.view[item.offset : item.offset + item.length]
        name = f"restore.{fetch.source.name.lower()}"
        with self._events.span(name, version=str(version), bundle=fetch.ref.bundle_id, size_bytes=item.length):
            seal = places.read(version, fetch, item.first, view, progress)
        with self._state.lock:
            held.pieces.append(PieceOf(fetch.ref, seal, item.first, item.end, item.offset))


class _Places(OpenPlaces):
    """Reads chunks for one fetch."""

    def read(
        self, version: Version, fetch: Fetch, first: int, view: memoryview, progress: Callable[[int], None]
    ) -> Seal:
        """Fills `view` with chunks from number `first` on, each proved; returns the seal that proves them.

        Raises:
            VersionNotFound: not there (any more). CorruptError: not what was sealed. KeeperLost, StorageError.
        """
        if fetch.source is Source.STORAGE:
            return self._from_storage(version, fetch, first, view, progress)
        if fetch.source is Source.PEER and fetch.node is not None:
            return self._from_peer(version, fetch, first, view, progress)
        if fetch.source is Source.PARITY:
            return self.parity.read(version, fetch, first, view, progress)
        raise VersionNotFound(f"bundle {fetch.ref.bundle_id} of {version} is not on this node any more")

    def _from_storage(
        self, version: Version, fetch: Fetch, first: int, view: memoryview, progress: Callable[[int], None]
    ) -> Seal:
        storage, file = self._lazy_storage.open(), self.stored(version, fetch.ref.bundle_id)
        if self._stopping():
            raise KeeperLost("this keeper stops, or its job is over")
        if file.digest != fetch.seal.digest:
            where = storage.bundles.where(version, file)
            raise CorruptError("the manifest's copy is not the one that was agreed on", where=where)
        storage.bundles.read_chunks_into(version, file, first, view, progress)
        return file.seal

    def _from_peer(
        self, version: Version, fetch: Fetch, first: int, view: memoryview, progress: Callable[[int], None]
    ) -> Seal:
        bundle_id, node = fetch.ref.bundle_id, fetch.node
        assert node is not None
        try:
            peer = self.peer(node)
            seal = require(peer.seals(version, (bundle_id,)), bundle_id, f"node {node}")
            if seal.digest != fetch.seal.digest:
                raise VersionNotFound("it holds another copy than was agreed on")
            peer.read_chunks_into(version, seal, first, view, progress)
        except HoldfastError as error:
            what = f"node {node}, bundle {bundle_id}: {error.what}"
            raise type(error)(what, where=error.where, remedy=error.remedy) from error
        return seal


def _laid_out(mine: Iterable[tuple[Fetch, Runs]]) -> Iterable[_Wanted]:
    """Runs one behind the other, each at a page."""
    offset = 0
    for fetch, runs in mine:
        for first, end in runs:
            length = min(end * CHUNK_BYTES, fetch.seal.length) - first * CHUNK_BYTES
            yield _Wanted(fetch, first, end, offset, length)
            offset += -(-length // ALIGN) * ALIGN


def _chunks(version: Version, mine: Iterable[tuple[Fetch, Runs]]) -> set[_Chunk]:
    return {
        (version, fetch.ref.bundle_id, chunk)
        for fetch, runs in mine
        for first, end in runs
        for chunk in range(first, end)
    }


def _num_chunks(seal: Seal) -> int:
    return -(-seal.length // CHUNK_BYTES)
