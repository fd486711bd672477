"""Replicas: what lives in one node only is pulled by the next one round, off everybody's way.

One puller per source node, so that a slow one delays nobody else. Newest wins: of versions that wait only the newest
is pulled. Two replica slots per source rank; the one that holds the newest replicated version is never written, so a
node that dies in the middle of a transfer costs one version at most. A replica counts when every digest matched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from holdfast.base.errors import HoldfastError, KeeperLost
from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Level, Seal, Version
from holdfast.core.slots import Knowledge, SlotState, SlotView, choose_slot
from holdfast.node.arena import Held
from holdfast.node.messages import Assembly
from holdfast.node.state import NodeState, greeting
from holdfast.node.transfer import PeerReader, require
from holdfast.node.worker import Worker
from holdfast.tiers import format as image_format
from holdfast.tiers import memory
from holdfast.tiers.memory import ImagePlace

logger = logging.getLogger(__name__)

NUM_REPLICA_SLOTS = 2
_PIN = "receiving"


class Replicator:
    """Pulls the replicas that this node keeps."""

    def __init__(self, state: NodeState, events: Events) -> None:
        self._state = state
        self._events = events
        self._pullers: dict[int, Worker[Version]] = {}
        self._failed: dict[int, Version] = {}
        self._stopping = False

    def put(self, version: Version) -> None:
        """A version was captured: pulls what this node keeps of it. Under the state's lock."""
        if self._stopping:
            return
        for home in {home for home, _, _ in self._state.need_ledger().to_replicate(version)}:
            if home not in self._pullers:
                name = f"holdfast puller {home}"
                on_fault = partial(self._state.alarm, f"replica of node {home}")
                self._pullers[home] = Worker(name, partial(self._pull, home), on_fault)
            self._failed.pop(home, None)
            self._pullers[home].replace(version)

    def tick(self) -> None:
        """Pulls again what failed, as long as nothing newer was captured and nobody else made it good."""
        with self._state.lock:
            ledger, failed = self._state.ledger, self._failed
            self._failed = {}
            if ledger is None or self._stopping:
                return
            for home, version in failed.items():
                if Level.REPLICATED not in ledger.standing(version)[0]:
                    self._pullers[home].replace(version)

    def leave(self) -> None:
        """Drops what waits, and what is to be pulled again: the job it is for is over. Under the state's lock."""
        self._failed = {}
        for puller in self._pullers.values():
            puller.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing is being pulled. Under the state's lock."""
        return all(puller.idle for puller in self._pullers.values())

    def stop(self) -> None:
        """Ends the pullers."""
        with self._state.lock:
            self._stopping = True
            pullers = list(self._pullers.values())
        for puller in pullers:
            puller.stop()

    def _pull(self, home: int, version: Version) -> None:
        state = self._state
        with state.lock:
            ledger, assembly = state.ledger, state.assembly
            if ledger is None or assembly is None or version.incarnation != ledger.incarnation:
                return
            wanted: dict[int, list[BundleRef]] = {}
            for source, rank, ref in ledger.to_replicate(version):
                if source == home:
                    wanted.setdefault(rank, []).append(ref)
        started = time.perf_counter()
        try:
            hello = greeting(state, assembly)
            peer = PeerReader(assembly.addresses[home], hello, lambda: self._is_over(assembly), state.security)
            try:
                size = sum(self._pull_rank(peer, version, rank, refs) for rank, refs in wanted.items())
            finally:
                peer.close()
        except HoldfastError as error:
            # The version stays at its level until a pull succeeds.
            state.alarm(f"replica of node {home}", f"no replica of {version}: {error}")
            with state.lock:
                if self._pullers[home].is_last:
                    self._failed[home] = version
            return
        state.calm(f"replica of node {home}")
        state.replicated(version, [ref.bundle_id for refs in wanted.values() for ref in refs])
        seconds = time.perf_counter() - started
        self._events.emit("node.replicated", version=str(version), home=home, size_bytes=size, seconds=seconds)
        self._events.count("replicated_bytes", size)

    def _is_over(self, assembly: Assembly) -> bool:
        now = self._state.assembly
        return self._stopping or now is None or now.job_id != assembly.job_id

    def _pull_rank(self, peer: PeerReader, version: Version, rank: int, refs: Sequence[BundleRef]) -> int:
        """Pulls one rank's bundles into a replica slot and seals it; returns bytes."""
        offered = peer.seals(version, tuple(ref.bundle_id for ref in refs))
        seals = [require(offered, ref.bundle_id, f"rank {rank}, {version}") for ref in refs]
        places, total = _lay_out(refs, seals)
        held = self._slot_for(rank, version, total)
        try:
            for place in places:
                view = held.slot.view[place.offset : place.offset + place.seal.length]
                peer.read_into(version, place.seal, view)
            with self._state.lock:
                held.images = {place.ref.bundle_id: place for place in places}
                memory.write_header(held.slot, held.header(self._state.place.job))
                held.state = SlotState.SEALED
        except BaseException:
            with self._state.lock:
                held.clear()
            raise
        finally:
            self._state.unpin(held, _PIN)
        return sum(seal.length for seal in seals)

    def _slot_for(self, rank: int, version: Version, num_bytes: int) -> Held:
        """A replica slot of the rank, pinned and being written; a new one while there are fewer than two."""
        state = self._state
        with state.lock:
            held = self._reuse(rank, version, num_bytes)
        if held is not None:
            return held
        slot = state.arena.allocate(num_bytes, f"a replica of rank {rank}")
        with state.lock:
            held = state.arena.add(slot, rank, replica=True)
            return self._claim(held, version)

    def _reuse(self, rank: int, version: Version, num_bytes: int) -> Held | None:
        arena = self._state.arena
        held_slots = arena.of_rank(rank, replica=True)
        views = [held.view for held in held_slots]
        decision = choose_slot(views, self._protection(views))
        chosen = arena.get(decision.value) if decision.value is not None else None
        if chosen is not None and chosen.slot.num_bytes >= num_bytes:
            return self._claim(chosen, version)
        if chosen is not None:
            arena.drop(chosen)  # outgrown
        elif len(held_slots) >= NUM_REPLICA_SLOTS:
            raise KeeperLost(f"no replica slot of rank {rank} is free: {decision.reason}")
        return None

    def _claim(self, held: Held, version: Version) -> Held:
        held.start(version, layout="", durable=False)
        held.pins[_PIN] += 1
        return held

    def _protection(self, views: Sequence[SlotView]) -> Knowledge:
        """Only the newest replicated version is protected; half-replicated newer ones help nobody."""
        ledger = self._state.need_ledger()
        newest = ledger.newest(Level.REPLICATED) or self._state.resumed
        sealed = [view.version for view in views if view.version is not None and view.state is SlotState.SEALED]
        if newest not in sealed:
            newest = max(sealed, default=None)
        useless = frozenset(view.version for view in views if view.version is not None and view.version != newest)
        return Knowledge(newest, useless | ledger.knowledge.abandoned, ledger.knowledge.lineage)


def _lay_out(refs: Sequence[BundleRef], seals: Sequence[Seal]) -> tuple[list[ImagePlace], int]:
    """Places for the images, each aligned; and the bytes needed."""
    places, offset = [], 0
    for ref, seal in zip(refs, seals, strict=True):
        places.append(ImagePlace(ref, offset, seal))
        offset += -(-seal.length // image_format.ALIGN) * image_format.ALIGN
    return places, offset
