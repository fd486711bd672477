"""Making bundles present on this node for a rank that comes back: slot, other slot, peer, storage.

What is here already is only pinned. What is not is fetched into one of the rank's free slots, or into memory of its
own if none is free, proved against its seal, and sealed there, so that it counts as a copy again. Two ranks that need
the same bundle cause one fetch. Runs in the thread of the connection that asked; every wait has its deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.base.errors import HoldfastError, KeeperError, KeeperLost, VersionNotFound
from holdfast.base.events import Events
from holdfast.core.model import Seal, Version
from holdfast.core.recovery import Fetch, Source
from holdfast.core.slots import SlotState, choose_slot
from holdfast.node.activity import RESTORING, Activities
from holdfast.node.arena import Held, PieceOf
from holdfast.node.state import NodeState, greeting
from holdfast.node.transfer import PeerReader, require
from holdfast.node.vault import Vault
from holdfast.tiers import format as image_format
from holdfast.tiers import memory
from holdfast.tiers.manifest import BundleFile
from holdfast.tiers.memory import ImagePlace

logger = logging.getLogger(__name__)

PIN = "restoring"


@dataclass(frozen=True, slots=True)
class Present:
    """A bundle, or chunks of one, in a slot of this node; pinned."""

    held: Held
    place: ImagePlace | PieceOf
    source: Source
    seconds: float


class Obtainer:
    """Fetches what a rank needs; one per keeper."""

    def __init__(self, state: NodeState, vault: Vault, events: Events, activities: Activities) -> None:
        self._state = state
        self._vault = vault
        self._events = events
        self._activities = activities
        self._landed = threading.Condition(state.lock)
        self._under_way: set[tuple[Version, str]] = set()
        self._stopping = False

    def stop(self) -> None:
        """Ends fetches at their next chunk."""
        self._stopping = True

    def obtain(self, rank: int, version: Version, fetches: Sequence[Fetch], timeout_s: float) -> list[Present]:
        """All bundles, pinned, in order.

        Raises:
            HoldfastError: of the first copy that could not be had; nothing stays pinned then.
        """
        deadline = time.monotonic() + timeout_s
        present: dict[str, Present] = {}
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
                    self._fetch(rank, version, mine, present)
        except BaseException:
            self.release(found.held for found in present.values())
            raise

    def release(self, held: Iterable[Held]) -> None:
        """What was obtained is no longer read."""
        for slot in held:
            self._state.unpin(slot, PIN)

    def _wait(self, deadline: float) -> None:
        """Until another rank's fetch landed or failed."""
        left = deadline - time.monotonic()
        if left <= 0 or self._stopping:
            raise KeeperLost("the bundles did not arrive in time", remedy="try again, or use an older version")
        self._landed.wait(left)

    def _collect(
        self, rank: int, version: Version, fetches: Sequence[Fetch], present: dict[str, Present]
    ) -> list[Fetch]:
        """Pins what is here; returns what is not."""
        missing = []
        for fetch in fetches:
            bundle_id = fetch.ref.bundle_id
            if bundle_id in present:
                continue
            found = self._state.arena.find(version, bundle_id, rank)
            if found is None or found[1].seal.digest != fetch.seal.digest:
                missing.append(fetch)
                continue
            held, place = found
            held.pins[PIN] += 1
            own = held.rank == rank and not held.replica
            present[bundle_id] = Present(held, place, Source.SLOT if own else Source.NODE, 0.0)
        return missing

    def _fetch(self, rank: int, version: Version, fetches: Sequence[Fetch], present: dict[str, Present]) -> None:
        """Fetches into one slot and seals it."""
        try:
            lengths = [-(-fetch.seal.length // image_format.ALIGN) * image_format.ALIGN for fetch in fetches]
            held = self._target(rank, version, sum(lengths))
            sources = _Sources(self._state, self._vault, self._events, lambda: self._stopping)
            total = sum(fetch.seal.length for fetch in fetches)
            try:
                places: dict[str, ImagePlace] = {}
                with self._activities.start(RESTORING, version, total, rank=rank) as sources.progress:
                    for fetch, offset in zip(fetches, _offsets(lengths), strict=True):
                        started = time.perf_counter()
                        seal = sources.read(version, fetch, held.slot.view[offset : offset + fetch.seal.length])
                        place = places[fetch.ref.bundle_id] = ImagePlace(fetch.ref, offset, seal)
                        present[fetch.ref.bundle_id] = Present(held, place, fetch.source, time.perf_counter() - started)
                self._seal(held, places)
            except BaseException:
                self._forget(held, present)
                raise
            finally:
                sources.close()
        finally:
            with self._landed:
                self._under_way.difference_update((version, fetch.ref.bundle_id) for fetch in fetches)
                self._landed.notify_all()

    def _seal(self, held: Held, places: dict[str, ImagePlace]) -> None:
        with self._state.lock:
            held.images = places
            memory.write_header(held.slot, held.header(self._state.place.job))
            held.state = SlotState.SEALED
            held.pins[PIN] += len(places) - 1  # one per bundle, as for those that were here

    def _forget(self, held: Held, present: dict[str, Present]) -> None:
        with self._state.lock:
            for bundle_id in [name for name, found in present.items() if found.held is held]:
                del present[bundle_id]
            held.pins.pop(PIN, None)
            held.clear()
            self._state.arena.collect(self._state.is_free)

    def _target(self, rank: int, version: Version, num_bytes: int) -> Held:
        """A slot of the rank that may be written, else memory of its own that goes when the guard allows."""
        state = self._state
        with state.lock:
            fitting = [h for h in state.arena.of_rank(rank) if h.slot.num_bytes >= num_bytes and not h.outgrown]
            chosen = choose_slot([state.view(h) for h in fitting], state.need_ledger().knowledge)
            held = state.arena.get(chosen.value) if chosen.value is not None else None
            if held is not None:
                return self._claim(held, version)
        slot = state.arena.allocate(num_bytes, f"restoring {version} for rank {rank}")
        with state.lock:
            held = state.arena.add(slot, rank)
            held.outgrown = True
            return self._claim(held, version)

    def _claim(self, held: Held, version: Version) -> Held:
        held.start(version, layout="", durable=False)
        held.pins[PIN] += 1
        return held


class _Sources:
    """The places that one fetch reads from; each is opened once."""

    def __init__(self, state: NodeState, vault: Vault, events: Events, stopping: Callable[[], bool]) -> None:
        self._state = state
        self._vault = vault
        self._events = events
        self._stopping = stopping
        self.progress: Callable[[int], None] = lambda _: None
        self._peers: dict[int, PeerReader] = {}
        self._stored: dict[str, BundleFile] = {}

    def read(self, version: Version, fetch: Fetch, view: memoryview) -> Seal:
        """Fills `view` with the bundle and proves it; returns its seal with chunk digests."""
        name = f"restore.{fetch.source.name.lower()}"
        with self._events.span(name, version=str(version), bundle=fetch.ref.bundle_id, size_bytes=len(view)):
            if fetch.source is Source.STORAGE:
                return self._from_storage(version, fetch, view)
            if fetch.source is Source.PEER and fetch.node is not None:
                return self._from_peer(version, fetch, fetch.node, view)
        raise VersionNotFound(f"bundle {fetch.ref.bundle_id} of {version} is not on this node any more")

    def close(self) -> None:
        """Ends the connections."""
        for peer in self._peers.values():
            peer.close()

    def _from_storage(self, version: Version, fetch: Fetch, view: memoryview) -> Seal:
        storage = self._vault.open()
        if not self._stored:
            self._stored = {file.ref.bundle_id: file for file in storage.manifest(version).bundles}
        file = self._stored.get(fetch.ref.bundle_id)
        if file is None:
            raise VersionNotFound(f"the manifest of {version} does not list bundle {fetch.ref.bundle_id}")
        where = f"{storage.where}/{version}/{file.file}"
        image_format.check_length(len(view), file.seal, where)
        storage.read_bundle_into(version, file, view, self.progress)
        image_format.verify(view, file.seal, where)
        return file.seal

    def _from_peer(self, version: Version, fetch: Fetch, node: int, view: memoryview) -> Seal:
        bundle_id, where = fetch.ref.bundle_id, f"node {node}"
        try:
            if node not in self._peers:
                self._peers[node] = self._dial(node)
            seal = require(self._peers[node].seals(version, (bundle_id,)), bundle_id, where)
            self._peers[node].read_into(version, seal, view, self.progress)
        except HoldfastError as error:
            what = f"node {node}, bundle {bundle_id}: {error.what}"
            raise type(error)(what, where=error.where, remedy=error.remedy) from error
        return seal

    def _dial(self, node: int) -> PeerReader:
        assembly = self._state.assembly
        if assembly is None or not 0 <= node < len(assembly.addresses):
            raise KeeperError(f"node {node} is not part of the job")
        return PeerReader(
            assembly.addresses[node], greeting(self._state, assembly), self._stopping, self._state.security
        )


def _offsets(lengths: Sequence[int]) -> Iterable[int]:
    at = 0
    for length in lengths:
        yield at
        at += length
