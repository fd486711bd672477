"""Parity: where the job keeps it instead of whole replicas, this node's piece of every version is made here.

The seals of all images that live in one member's node only are asked for first; they say what the piece is of
(`core.layout.parity_stripes`). Then the members are read, chunk by chunk, each proved against its seal and XORed into a slot:
one after the other at first, and twice as many at once as long as that is faster by a tenth. A piece is of one version and of the seals that it names, or it is thrown away: what breaks in the middle
begins anew from zeros. It counts once all of it stands, and is then guarded like a replica: two slots in turn, the one with the
newest replicated version is never written.

A version is replicated once all members of all groups have their piece. Until then, and as long as it is the newest one, it
needs the slots of all members: the overwrite guard keeps what nothing newer replaces.

After a restore the pieces of the version that all resumed from are made again where they are missing (`refill`). What ranks
read from storage past their keepers is in no memory: then there is nothing to make parity of, and no alarm.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.base.errors import HoldfastError, VersionNotFound
from holdfast.base.events import Events
from holdfast.core.layout import parity_groups
from holdfast.core.layout.parity_stripes import Piece, Striping
from holdfast.core.model import BundleRef, Level, Seal, Version
from holdfast.core.versions.job_bundles import JobBundles
from holdfast.keeper.replication.image_transfer import PeerReader, count_lines, require
from holdfast.keeper.replication.replicator import RECEIVING, NotYet, Replicator
from holdfast.keeper.replication.xor_sources import Parts, xor_sources
from holdfast.keeper.rpc.messages import Assembly
from holdfast.keeper.slots.job_queue import HasWorker, Worker
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.node_report import greeting, has_left
from holdfast.keeper.slots.slot_pool import PARITY_RANK, HeldSlot
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.memory.slots import ImagePlace
from holdfast.tiers.memory.xor import clear

logger = logging.getLogger(__name__)

ALARM = "parity"


@dataclass(frozen=True, slots=True)
class _Build:
    """Holds what is to be made: the piece of this node, of a version.

    Attributes:
        member: this node's place in the group.
        bundle_ids: by member, what lives in its node only.
    """

    version: Version
    group: tuple[int, ...]
    member: int
    bundle_ids: tuple[tuple[str, ...], ...]


class ParityBuilder(HasWorker):
    """Makes the parity that this node keeps.

    Args:
        replicator: gives slots, by the rules of replicas.
    """

    def __init__(self, state: NodeState, events: Events, replicator: Replicator) -> None:
        self._state = state
        self._events = events
        self._replicator = replicator
        self._worker: Worker[_Build] = Worker(
            "holdfast parity", self._build, lambda text: state.alarms.warn(ALARM, text)
        )
        self._failed: _Build | None = None
        self._lacking: Version | None = None  # resumed from, and in no memory
        self._last = (0, 0.0)
        self._made_bytes = 0
        self._at_once = count_lines()  # members, a line each
        self._stopping = False

    def put(self, version: Version) -> None:
        """A version was captured: makes its parity. Under the state's lock."""
        self._queue(version, self._state.need_ledger().bundles_of(version))

    def refill(self, version: Version) -> None:
        """All ranks resumed from `version`: its piece is made if it is not here."""
        with self._state.lock:
            ledger, table = self._state.ledger, self._state.past.tables.get(version, ())
            if ledger is None or ledger.newest(Level.CAPTURED) is not None:
                return
            world_size = ledger.topology.world_size
            if table and 1 + max(ref.runs[-1][1] for ref in table) == world_size:  # else it is of another layout
                self._queue(version, JobBundles(table, ledger.node, ledger.topology))

    def _queue(self, version: Version, bundles: JobBundles) -> None:
        if self._stopping or not bundles.of_parity:
            return
        self._failed = None
        self._worker.replace(_Build(version, bundles.group, bundles.group.index(bundles.node), bundles.of_parity))

    def tick(self) -> None:
        """Makes again what failed, as long as nothing newer was captured."""
        with self._state.lock:
            ledger, failed, self._failed = self._state.ledger, self._failed, None
            if ledger is None or failed is None or self._stopping:
                return
            if Level.REPLICATED not in ledger.standing(failed.version).reached:
                self._worker.replace(failed)

    def leave(self) -> None:
        """Drops what waits: the job it is for is over. Under the state's lock."""
        self._failed = None
        self._worker.clear()

    def stop(self) -> None:
        with self._state.lock:
            self._stopping = True
        super().stop()

    def facts(self) -> dict[str, float]:
        """Return facts for the status page. Under the state's lock."""
        held = [slot for slot in self._state.slot_pool if slot.rank == PARITY_RANK]
        ledger = self._state.ledger
        return {
            "members": len(parity_groups.by_node(ledger.topology).get(ledger.node, ())) if ledger else 0,
            "held_bytes": sum(slot.slot.total_bytes for slot in held),
            "made_bytes": self._made_bytes,
            "last_bytes": self._last[0],
            "last_seconds": self._last[1],
        }

    # --- the thread

    def _build(self, build: _Build) -> None:
        state, version = self._state, build.version
        with state.lock:
            ledger, assembly = state.ledger, state.assembly
            if ledger is None or assembly is None:
                return
            if version.incarnation != ledger.incarnation and version != state.resumed:
                return
        started = time.perf_counter()
        try:
            size = self._make(build, assembly)
        except NotYet as error:
            logger.info("parity of %s waits: %s", version, error.what)
            self._try_again(build)
            return
        except (HoldfastError, OSError) as error:  # also of a system that has no descriptor or no memory left
            if isinstance(error, VersionNotFound) and version.incarnation != ledger.incarnation:
                # Ranks may have read it from storage past their keepers. Only a keeper that adopts memory may still have it.
                if self._lacking != version:
                    logger.info("no parity of %s, from which all resumed: %s", version, error.what)
                self._lacking = version
                self._try_again(build)
                return
            # The version stays at its level until all pieces stand.
            state.alarms.warn(ALARM, f"no parity of {version}: {error}")
            self._try_again(build)
            return
        state.alarms.calm(ALARM)
        state.replicated(version, (parity_groups.STANDS,))
        if not size:
            return  # it stood here already
        seconds = time.perf_counter() - started
        self._last, self._made_bytes = (size, seconds), self._made_bytes + size
        self._events.emit("node.parity", version=str(version), size_bytes=size, seconds=seconds)
        self._events.count("parity_bytes", size)

    def _try_again(self, build: _Build) -> None:
        with self._state.lock:
            if self._worker.is_last:
                self._failed = build

    def _make(self, build: _Build, assembly: Assembly) -> int:
        """Makes the piece, unless it stands; returns bytes."""
        others = [(build.member + 1 + at) % len(build.group) for at in range(len(build.group) - 1)]
        seals: dict[int, tuple[Seal, ...]] = {build.member: self._own_seals(build)}
        for member in others:
            seals[member] = self._read_seals(build, assembly, member)
        piece = Piece(build.version, build.member, tuple(seals[member] for member in range(len(build.group))))
        striping = Striping(piece.covers, CHUNK_BYTES)
        if self._stands(piece):
            return 0
        # Members with little have nothing for some others. An empty piece is there all the same: it says who has what.
        size = max(1, striping.num_bytes(build.member))
        held = self._replicator.slot_for(PARITY_RANK, build.version, size, "parity")
        try:
            view = held.slot.view[:size]
            clear(view)
            at_once, began_s = self._at_once.now, time.monotonic()
            xor_sources(view, (self._parts(build, assembly, striping, member) for member in others), at_once)
            if others:
                self._at_once.learn(at_once, size / max(time.monotonic() - began_s, 1e-6))
            self._seal(held, piece, view)
        except BaseException:
            with self._state.lock:
                held.clear()
            raise
        finally:
            self._state.unpin(held, RECEIVING)
        return size

    def _own_seals(self, build: _Build) -> tuple[Seal, ...]:
        found = []
        with self._state.lock:
            for bundle_id in build.bundle_ids[build.member]:
                copy = self._state.slot_pool.find(build.version, bundle_id)
                if copy is None:
                    raise VersionNotFound(f"bundle {bundle_id} of {build.version} is not here any more")
                found.append(copy[1].seal)
        return tuple(found)

    def _read_seals(self, build: _Build, assembly: Assembly, member: int) -> tuple[Seal, ...]:
        names = build.bundle_ids[member]
        if not names:
            return ()
        with contextlib.closing(self._peer(build, assembly, member)) as peer:
            return _all_of(peer.seals(build.version, names), names, build, member)

    def _parts(self, build: _Build, assembly: Assembly, striping: Striping, member: int) -> Parts:
        """Reads what one member has for this one. The seals are asked for again: that pins its slots."""
        rows = [row for row in striping.rows(build.member) if member in row.chunks]
        if not rows:
            return
        scratch = memoryview(bytearray(max(row.chunks[member].length for row in rows)))
        with contextlib.closing(self._peer(build, assembly, member)) as peer:
            names = build.bundle_ids[member]
            if _all_of(peer.seals(build.version, names), names, build, member) != striping.covers[member]:
                raise VersionNotFound(f"{build.version} there is not what it was")
            seals = {seal.bundle_id: seal for seal in striping.covers[member]}
            for row in rows:
                chunk = row.chunks[member]
                part = scratch[: chunk.length]
                peer.read_chunks_into(build.version, seals[chunk.bundle_id], chunk.index, part)
                yield row.offset, part

    def _peer(self, build: _Build, assembly: Assembly, member: int) -> PeerReader:
        state, address = self._state, assembly.addresses[build.group[member]]
        return PeerReader(
            address, greeting(state, assembly), lambda: self._stopping or has_left(state, assembly), state.security
        )

    def _stands(self, piece: Piece) -> bool:
        """Return whether this very piece is here."""
        with self._state.lock:
            return any(held.parity == piece and not held.condemned for held in self._state.slot_pool.sealed())

    def _seal(self, held: HeldSlot, piece: Piece, view: memoryview) -> None:
        seal = image_format.seal(piece.name, view)
        with self._state.lock:
            held.parity = piece
            held.seal({piece.name: ImagePlace(BundleRef(piece.name), 0, seal)}, self._state.place.job)


def _all_of(seals: Mapping[str, Seal], names: Sequence[str], build: _Build, member: int) -> tuple[Seal, ...]:
    where = f"node {build.group[member]}, {build.version}"
    return tuple(require(dict(seals), name, where) for name in names)
