"""Replicas: what lives in one node only is pulled by the node that keeps them (core.layout.replica_placement), off everybody's way.

One puller per source node, so that a slow one delays nobody else. Newest wins: of versions that wait only the newest
is pulled. Two replica slots per source rank; the one that holds the newest replicated version is never written, so a
node that dies in the middle of a transfer costs one version at most. A replica counts when every digest matched, and
one that counts is not overwritten before a newer version is replicated, or the coordinator has said DROPPED.

A pull may be repeated whenever that seems right: it brings what does not stand here. A version takes one of a rank's two
slots at most, whatever is pulled of it in several turns (a transfer broke, a copy went bad, two nodes hold its parts):
the rest lies beside them, in memory that goes when the guard allows. In both it would keep both, and nothing newer
would ever be pulled.

After a restore the version that all resumed from has lost a copy with every node that was lost. `refill` asks what all
keepers hold, and pulls what this node is to keep a second copy of, without waiting for the next version.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.base.errors import HoldfastError, KeeperLost
from holdfast.base.events import Events
from holdfast.core.layout import replica_placement
from holdfast.core.model import BundleRef, Level, Seal, Topology, Version
from holdfast.core.recovery.version_choice import MemoryCopy
from holdfast.core.versions.replication_lag import FIRST_PATIENCE_S
from holdfast.core.versions.slot_guard import Knowledge, SlotState, SlotView, choose_slot
from holdfast.keeper.replication import kept_images
from holdfast.keeper.replication.image_transfer import PeerReader, count_lines, require
from holdfast.keeper.rpc.messages import Inventory
from holdfast.keeper.slots.job_queue import Worker
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.node_report import greeting, has_left
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.tiers.backends.parallel_streams import StreamCount
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory.slots import ImagePlace

logger = logging.getLogger(__name__)

NUM_REPLICA_SLOTS = 2
# Captured versions whose time is remembered for the lag.
MAX_WATCHED = 64
# How long a replica that stands is kept for other nodes that still pull theirs of the same version, and nobody says so.
GRACE_S = 1.0
RECEIVING = "receiving"


class NotYet(KeeperLost):
    """No replica slot may be overwritten yet. Not a fault: the pull is repeated."""


@dataclass(frozen=True, slots=True)
class _Pull:
    """Holds what is to be pulled from one node: bundles by the rank whose slot holds them."""

    version: Version
    wanted: Mapping[int, tuple[BundleRef, ...]]

    @property
    def bundle_ids(self) -> list[str]:
        return [ref.bundle_id for refs in self.wanted.values() for ref in refs]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Pulls from one node that find no slot: since when (monotonic seconds), and what was said of it last."""

    since_s: float
    said: str


class Replicator:
    """Pulls the replicas that this node keeps.

    Args:
        survey: what all keepers hold, asked from each; used by `refill`.
    """

    def __init__(self, state: NodeState, events: Events, survey: Callable[[], Inventory]) -> None:
        self._state = state
        self._events = events
        self._survey = survey
        self._pullers: dict[int, Worker[_Pull]] = {}
        self._lines: defaultdict[int, StreamCount] = defaultdict(count_lines)
        self._failed: dict[int, _Pull] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._filled: tuple[int, Version] | None = None
        self._unfilled: Version | None = None
        self._filler: Worker[Version] = Worker("holdfast refill", self._refill, self._fault("refill"))
        self._captured_s: dict[Version, float] = {}
        self._in_the_way: dict[Version, float] = {}
        self._last = (0, 0.0)
        self._pulled_bytes = self._kept_bytes = 0
        self._stopping = False

    def put(self, version: Version) -> None:
        """A version was captured: pulls what this node keeps of it. Under the state's lock."""
        if self._stopping:
            return
        plan: dict[int, dict[int, list[BundleRef]]] = {}
        for home, rank, ref in self._state.need_ledger().bundles_of(version).to_replicate:
            plan.setdefault(home, {}).setdefault(rank, []).append(ref)
        for home, wanted in plan.items():
            self._queue(home, version, wanted)
        self._captured_s[version] = time.monotonic()
        while len(self._captured_s) > MAX_WATCHED:
            del self._captured_s[min(self._captured_s)]

    def _queue(self, home: int, version: Version, wanted: Mapping[int, Sequence[BundleRef]]) -> None:
        if home not in self._pullers:
            work = partial(self._pull, home)
            self._pullers[home] = Worker(f"holdfast puller {home}", work, self._fault(f"replica of node {home}"))
        self._failed.pop(home, None)
        self._pullers[home].replace(_Pull(version, {rank: tuple(refs) for rank, refs in wanted.items()}))

    def _fault(self, what: str) -> Callable[[str], None]:
        return partial(self._state.alarms.warn, what)

    def tick(self) -> None:
        """Pulls again what failed, as long as nothing newer was captured and nobody else made it good."""
        with self._state.lock:
            ledger, failed = self._state.ledger, self._failed
            unfilled, self._failed, self._unfilled = self._unfilled, {}, None
            if ledger is None or self._stopping:
                return
            for home, pull in failed.items():
                if Level.REPLICATED not in ledger.standing(pull.version).reached:
                    self._queue(home, pull.version, pull.wanted)
                else:
                    self._is_well(home)
            if unfilled is not None and unfilled == self._state.resumed:
                self._filler.replace(unfilled)

    # --- after a restore

    def refill(self, version: Version) -> None:
        """All ranks resumed from `version`: its lost copies are made again."""
        with self._state.lock:
            asked = (self._state.incarnation, version)  # every local rank says so
            if not self._stopping and self._filled != asked:
                self._filled = asked
                self._filler.replace(version)

    def _refill(self, version: Version) -> None:
        started = time.perf_counter()
        found = self._survey()
        with self._state.lock:
            ledger = self._state.ledger
            if ledger is None or version != self._state.resumed or ledger.newest(Level.CAPTURED) is not None:
                return  # something newer is pulled by now, and must not be replaced by this
            table = found.tables.get(version, ())
            plan = to_refill(version, table, found.copies, ledger.topology, ledger.node)
            for home, wanted in plan.items():
                self._queue(home, version, wanted)
            if found.silent:
                self._unfilled = version  # who did not answer may hold, or lack, a copy: asked again at the next tick
        if plan:
            logger.info("%s is made whole again: %d nodes hold what has one copy", version, len(plan))
            self._events.emit(
                "node.refilled", version=str(version), homes=len(plan), seconds=time.perf_counter() - started
            )

    def leave(self) -> None:
        """Drops what waits, and what is to be pulled again: the job it is for is over. Under the state's lock."""
        self._failed, self._filled, self._unfilled = {}, None, None
        self._waiting.clear()
        self._lines.clear()
        self._captured_s.clear()
        self._in_the_way.clear()
        self._filler.clear()
        for puller in self._pullers.values():
            puller.clear()

    @property
    def idle(self) -> bool:
        """Return whether nothing is being pulled. Under the state's lock."""
        return self._filler.idle and all(puller.idle for puller in self._pullers.values())

    def stop(self) -> None:
        """Ends the pullers."""
        with self._state.lock:
            self._stopping = True
            pullers = list(self._pullers.values())
        self._filler.stop()
        for puller in pullers:
            puller.stop()

    def facts(self) -> dict[str, float]:
        """Return facts for the status page. `lag_s`: age of the oldest captured version that nothing in two nodes has
        overtaken.
        """
        with self._state.lock:
            ledger, now = self._state.ledger, time.monotonic()
            safe = ledger.newest(Level.REPLICATED) if ledger else None
            newest = ledger.newest(Level.CAPTURED) if ledger else None
            bundles = ledger.bundles_of(newest) if ledger and newest else None
            late = [at for version, at in self._captured_s.items() if safe is None or version > safe]
            return {
                "unique_bytes": bundles.unique_bytes if bundles else 0,
                "kept_bytes": sum(ref.num_bytes for _, _, ref in bundles.to_replicate) if bundles else 0,
                "pulled_bytes": self._pulled_bytes,
                "unsent_bytes": self._kept_bytes,
                "last_bytes": self._last[0],
                "last_seconds": self._last[1],
                "behind_versions": len(late),
                "lag_s": now - min(late) if late else 0.0,
            }

    # --- the pullers

    def _pull(self, home: int, pull: _Pull) -> None:
        state, version = self._state, pull.version
        with state.lock:
            ledger, assembly = state.ledger, state.assembly
            if ledger is None or assembly is None:
                return
            if version.incarnation != ledger.incarnation and version != state.resumed:
                self._is_well(home)
                return
        started = time.perf_counter()
        try:
            hello = greeting(state, assembly)
            address, lines = assembly.addresses[home], self._lines[home]
            peer = PeerReader(
                address, hello, lambda: self._stopping or has_left(state, assembly), state.security, count=lines
            )
            try:
                brought = [self._pull_rank(peer, version, rank, refs) for rank, refs in pull.wanted.items()]
            finally:
                peer.close()
        except NotYet as error:
            self._waits(home, version, error.what)
            self._try_again(home, pull)
            return
        except (HoldfastError, OSError) as error:  # also of a system that has no descriptor or no memory left
            # The version stays at its level until a pull succeeds.
            state.alarms.warn(_alarm_of(home), f"no replica of {version}: {error}")
            self._try_again(home, pull)
            return
        self._is_well(home)
        state.replicated(version, pull.bundle_ids)
        size, kept = (sum(sizes) for sizes in zip(*brought, strict=True)) if brought else (0, 0)
        if not size + kept:
            return  # all of it stood here already
        seconds = time.perf_counter() - started
        self._last, self._pulled_bytes = (size, seconds), self._pulled_bytes + size
        self._kept_bytes += kept
        self._events.emit(
            "node.replicated", version=str(version), home=home, size_bytes=size, kept_bytes=kept, seconds=seconds
        )
        self._events.count("replicated_bytes", size)
        self._events.count("replica_kept_bytes", kept)

    def _try_again(self, home: int, pull: _Pull) -> None:
        with self._state.lock:
            if self._pullers[home].is_last:
                self._failed[home] = pull

    def _waits(self, home: int, version: Version, why: str) -> None:
        """No slot may be overwritten yet: said once, and an alarm when it lasts longer than a moment can."""
        now, said = time.monotonic(), f"{version} waits: {why}"
        with self._state.lock:
            before = self._waiting.get(home)
            since_s = before.since_s if before else now
            self._waiting[home] = _Waiting(since_s, said)
        if before is None or before.said != said:
            logger.info("%s", said)
        if now - since_s > FIRST_PATIENCE_S:
            text = f"no replica of {version}, which waits for more than {FIRST_PATIENCE_S:.0f} s: {why}"
            self._state.alarms.warn(_alarm_of(home), text)

    def _is_well(self, home: int) -> None:
        """Take note that what was to be had from that node was had, or is needed no more."""
        with self._state.lock:
            self._waiting.pop(home, None)
            self._state.alarms.calm(_alarm_of(home))

    def _pull_rank(self, peer: PeerReader, version: Version, rank: int, refs: Sequence[BundleRef]) -> tuple[int, int]:
        """Pulls what does not stand here of one rank's bundles into a replica slot and seals it.

        Returns bytes that were sent, and bytes that were here, in an earlier version.
        """
        offered = peer.seals(version, tuple(ref.bundle_id for ref in refs))
        seals = {ref: require(offered, ref.bundle_id, f"rank {rank}, {version}") for ref in refs}
        standing = self._standing(rank, version)
        places, total = _lay_out(
            {ref: seal for ref, seal in seals.items() if (ref.bundle_id, seal.digest) not in standing}
        )
        sent = kept = 0
        if not places:
            return sent, kept
        held = self.slot_for(rank, version, total, f"a replica of rank {rank}")
        try:
            for place in places:
                if kept_images.keep(self._state, held, place, lambda: self._stopping):
                    kept += place.seal.length
                    continue
                view = held.slot.view[place.offset : place.offset + place.seal.length]
                peer.read_into(version, place.seal, view)
                sent += place.seal.length
            with self._state.lock:
                held.seal({place.ref.bundle_id: place for place in places}, self._state.place.job)
        except BaseException:
            with self._state.lock:
                held.clear()
            raise
        finally:
            self._state.unpin(held, RECEIVING)
        return sent, kept

    def _standing(self, rank: int, version: Version) -> set[tuple[str, str]]:
        """Bundles and digests of the version that count as the rank's replicas here. What was preloaded may go any time."""
        with self._state.lock:
            return {
                (bundle_id, place.seal.digest)
                for held in self._state.slot_pool.of_rank(rank, replica=True)
                if held.version == version and held.state is SlotState.SEALED and not held.preloaded
                for bundle_id, place in held.images.items()
                if bundle_id not in held.condemned
            }

    def slot_for(self, rank: int, version: Version, num_bytes: int, what: str) -> HeldSlot:
        """A replica slot of the rank, pinned with `RECEIVING` and being written; a new one while there are fewer than two.

        Where one of them has part of the version already, memory beside them: the rest must not take the other one too.
        """
        state = self._state
        with state.lock:
            held = None if self._is_begun(rank, version) else self._reuse(rank, version, num_bytes)
        if held is not None:
            return held
        slot = state.slot_pool.allocate(num_bytes, what)
        with state.lock:  # asked again: the puller of another node may have made a slot of this rank meanwhile
            beside = self._is_begun(rank, version) or len(self._in_use(rank)) >= NUM_REPLICA_SLOTS
            held = state.slot_pool.add(slot, rank, replica=True)
            held.outgrown = beside
            return held.claim(version, RECEIVING)

    def _in_use(self, rank: int) -> list[HeldSlot]:
        """The replica slots of the rank that newer versions go into."""
        return self._state.slot_pool.in_use(rank, replica=True)

    def _is_begun(self, rank: int, version: Version) -> bool:
        """Return whether one of the rank's replica slots has anything of the version that is worth something, or
        receives it.
        """
        return any(held.view.version == version for held in self._in_use(rank))

    def _reuse(self, rank: int, version: Version, num_bytes: int) -> HeldSlot | None:
        slot_pool = self._state.slot_pool
        held_slots = self._in_use(rank)
        views = [held.view for held in held_slots]
        decision = choose_slot(views, self._protection(views))
        chosen = slot_pool.get(decision.value) if decision.value is not None else None
        if chosen is not None and chosen.slot.num_bytes >= num_bytes:
            return chosen.claim(version, RECEIVING)
        if chosen is not None:
            slot_pool.drop(chosen)  # outgrown
        elif len(held_slots) >= NUM_REPLICA_SLOTS:
            raise NotYet(
                f"no {f'replica slot of rank {rank}' if rank >= 0 else 'slot for parity'} is free: {decision.reason}"
            )
        return None

    def _protection(self, views: Sequence[SlotView]) -> Knowledge:
        """The newest replicated version is protected, and replicas that count; half-made newer ones help nobody."""
        ledger = self._state.need_ledger()
        newest = ledger.newest(Level.REPLICATED) or self._state.resumed
        sealed = [view.version for view in views if view.version is not None and view.state is SlotState.SEALED]
        if newest not in sealed:
            newest = max(sealed, default=None)
        kept = {v for v in sealed if v != newest and self._counted(v)} | ({newest} if newest else set())
        useless = frozenset(view.version for view in views if view.version is not None and view.version not in kept)
        return Knowledge(min(kept, default=None), useless | ledger.knowledge.abandoned, ledger.knowledge.lineage)

    def _counted(self, version: Version) -> bool:
        """Return whether a replica that stands must stay: it may be what the last holder is waiting for to call it
        replicated.

        If that does not come, the coordinator is asked to count it no more. Under the state's lock.
        """
        ledger = self._state.need_ledger()
        if not ledger.counts(version) or not ledger.awaits_copies(version):
            self._in_the_way.pop(version, None)
            return False
        since = self._in_the_way.setdefault(version, time.monotonic())
        while len(self._in_the_way) > MAX_WATCHED:
            del self._in_the_way[min(self._in_the_way)]
        guard = self._state.guard
        return guard.is_sent(version) or time.monotonic() - since < GRACE_S or not guard.may_drop(ledger, version)


def to_refill(
    version: Version,
    table: Sequence[BundleRef],
    copies: Iterable[MemoryCopy],
    topology: Topology,
    node: int,
) -> dict[int, dict[int, list[BundleRef]]]:
    """Return what `node` pulls so that every bundle of `version` is in two nodes: holder -> rank -> bundles.

    A bundle of which several nodes hold a copy, or none, is left alone.
    """
    holders: dict[str, list[MemoryCopy]] = {}
    for copy in copies:
        if copy.version == version:
            holders.setdefault(copy.seal.bundle_id, []).append(copy)
    nodes = {name: {run for copy in held for run in copy.nodes} for name, held in holders.items()}
    single_node = {
        name: first for name, runs in nodes.items() for first, last, _ in runs if len(runs) == 1 and first == last
    }
    placed = replica_placement.place_again(table, single_node, topology)
    plan: dict[int, dict[int, list[BundleRef]]] = {}
    for ref in table:
        if placed.get(ref.bundle_id) == node:
            holder = single_node[ref.bundle_id]
            rank = next((copy.ranks[0][0] for copy in holders[ref.bundle_id] if copy.ranks), ref.ranks[0])
            plan.setdefault(holder, {}).setdefault(rank, []).append(ref)
    return plan


def _alarm_of(home: int) -> str:
    return f"replica of node {home}"


def _lay_out(seals: Mapping[BundleRef, Seal]) -> tuple[list[ImagePlace], int]:
    """Places for the images, each aligned; and the bytes needed."""
    places, offset = [], 0
    for ref, seal in seals.items():
        places.append(ImagePlace(ref, offset, seal))
        offset += -(-seal.length // image_format.ALIGN) * image_format.ALIGN
    return places, offset
