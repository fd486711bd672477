"""Decides who may say what to a keeper: roles, and one operation per message. What is not listed is refused.

A rank saves and restores, a keeper reports and pulls, an operator takes a bad copy out of use
and says that trainers start, a viewer only looks; no
rank can commit, replicate, or speak for another one. Over TCP the role is the one in the certificate, and ranks do not
come that way; on the Unix socket of a job with a secret nobody passes for a keeper. Nothing here decides; it unpacks a request,
asks the part that knows, and packs the reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.base.errors import KeeperError
from holdfast.core.model import Version
from holdfast.core.recovery.version_choice import Source
from holdfast.keeper.coordination.coordinator_client import CoordinatorClient
from holdfast.keeper.fetch.fetch_bundles import BundleFetcher, PresentBundle
from holdfast.keeper.fetch.fetch_chunks import ChunkFetcher
from holdfast.keeper.fetch.prefetch import Preloader
from holdfast.keeper.fetch.streaming_relay import RelayRequests
from holdfast.keeper.observe import describe_job
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.messages import (
    KEEPER,
    OPERATOR,
    RANK,
    VIEWER,
    AnyMessage,
    Found,
    InventoryReply,
    Message,
    Obtained,
    Ok,
)
from holdfast.keeper.rpc.server import Answer, Connection
from holdfast.keeper.service.job_change import JobChange
from holdfast.keeper.service.peer_requests import PeerRequests
from holdfast.keeper.service.save_requests import SaveRequests
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.sessions import Trainer, Trainers
from holdfast.keeper.slots.slot_allocation import SlotAllocator
from holdfast.keeper.slots.slot_pool import PieceOf
from holdfast.keeper.storage.lazy_storage import LazyStorage
from holdfast.tiers.memory.slots import ImagePlace
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.wire.frames import SHARE, Principal

Reply = Message | Answer | None
Operation = Callable[[Connection, Any], Reply]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a keeper that answer requests."""

    state: NodeState
    lazy_storage: LazyStorage
    job_change: JobChange
    trainers: Trainers
    reserve: SlotAllocator
    saving: SaveRequests
    bundle_fetcher: BundleFetcher
    pieces: ChunkFetcher
    incoming: RelayRequests
    peers: PeerRequests
    coordinator_client: CoordinatorClient
    refill: Callable[[Version], None]
    preloader: Preloader
    status: Callable[[], dict[str, Any]]


class Operations:
    """The table of operations."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        looking: dict[type, Operation] = {
            messages.TakeInventory: self._inventory,
            messages.AskStatus: self._status,
            messages.AskInside: self._inside,
        }
        training: dict[type, Operation] = {
            messages.Assemble: self._assemble,
            messages.Resume: self._resume,
            messages.Register: self._register,
            messages.Prepare: parts.reserve.prepare,
            messages.Begin: self._begin,
            messages.Copied: parts.saving.copied,
            messages.Persist: parts.saving.persist,
            messages.Abandon: parts.saving.abandon,
            messages.Propose: self._propose,
            messages.Cadence: self._cadence,
            messages.Obtain: self._obtain,
            messages.Release: self._release,
            messages.Condemn: self._condemn,
            messages.Goodbye: self._goodbye,
        }
        keeping: dict[type, Operation] = {
            messages.Ping: self._ping,
            messages.Report: parts.peers.report,
            messages.Propose: parts.peers.propose,
            messages.AskSeals: parts.peers.seals,
            messages.Pull: parts.peers.pull,
            messages.AskParity: parts.peers.parity,
            messages.AskLanding: parts.incoming.ask,
            messages.PullLanding: parts.incoming.pull,
            messages.Condemn: self._condemn,
        }
        operating: dict[type, Operation] = {messages.Condemn: self._condemn, messages.Preload: self._preload}
        self._table = {
            RANK: training | looking,
            KEEPER: keeping | looking,
            OPERATOR: operating | looking,
            VIEWER: looking,
        }

    def carry_out(self, connection: Connection, message: AnyMessage, fds: list[int]) -> Reply:
        """Does what the message asks, if the client's role allows it."""
        role = connection.greeted.role
        if isinstance(message, messages.Adopt) and role == RANK:
            return self._parts.reserve.adopt(connection, message, fds)
        if isinstance(message, messages.ShowWaits) and role == RANK:
            return self._parts.trainers.show(connection, message, fds)
        operation = self._table[role].get(type(message))
        if operation is None:
            raise KeeperError(f"a {role} may not say {type(message).__name__}")
        return operation(connection, message)

    def forget(self, trainer: Trainer) -> None:
        """A trainer goes. Under the state's lock."""
        self._parts.saving.forget(trainer)
        self._let_go(trainer)

    def _assemble(self, connection: Connection, request: messages.Assemble) -> Ok:
        """Levels are told from here on and not before: those of another job may bear the same names."""
        self._parts.preloader.give_way()
        self._parts.job_change.assemble(connection, request.assembly)
        if request.key is not None:
            source = KeySource(request.key, request.key_required, request.key_id)
            self._parts.lazy_storage.use(source, request.assembly.incarnation)
        for progress in self._parts.state.progress():
            connection.push(f"progress {progress.version}", progress)
        return Ok(id=request.id)

    def _preload(self, _: Connection, request: messages.Preload) -> Ok:
        return self._parts.preloader.begin(request)

    def _resume(self, connection: Connection, request: messages.Resume) -> Ok:
        self._parts.state.resume(request.incarnation, request.version, request.table)
        if request.version is not None:
            if request.read_bytes > 0:
                with self._parts.state.lock:
                    trainer = self._parts.trainers.of(connection)
                    trainer.brought(request.version, Source.STORAGE, request.read_bytes)
            self._parts.refill(request.version)
        return Ok(id=request.id)

    def _register(self, connection: Connection, request: messages.Register) -> Ok:
        rank = connection.greeted.rank
        if request.layout.rank != rank:
            raise KeeperError(f"rank {rank} registers the layout of rank {request.layout.rank}")
        self._parts.state.register(request.layout, request.shared)
        return Ok(id=request.id)

    def _begin(self, connection: Connection, request: messages.Begin) -> None:
        """Training goes on: what was restored from is free again."""
        with self._parts.state.lock:
            self._let_go(self._parts.trainers.of(connection))
            self._parts.saving.begin(connection, request)

    def _propose(self, _: Connection, request: messages.Propose) -> None:
        with self._parts.state.lock:
            self._parts.coordinator_client.propose(request.proposal)

    def _cadence(self, connection: Connection, request: messages.Cadence) -> None:
        with self._parts.state.lock:
            rank = self._parts.trainers.of(connection).rank
            if request.idle is not None:
                self._parts.state.idle[rank] = request.idle
            else:
                self._parts.state.cadences[rank] = request.reason[:1000]

    def _goodbye(self, connection: Connection, request: messages.Goodbye) -> Ok:
        with self._parts.state.lock:
            if request.finished:
                self._parts.state.finished.add(self._parts.trainers.finish(connection))
            self._parts.state.callbacks.changed()
        return Ok(id=request.id)

    def _condemn(self, _: Connection, request: messages.Condemn) -> Ok:
        self._parts.peers.condemn(request)
        return Ok(id=request.id)

    def _ping(self, _: Connection, request: messages.Ping) -> Ok:
        return Ok(id=request.id)

    def _inventory(self, _: Connection, request: messages.TakeInventory) -> InventoryReply:
        return InventoryReply(id=request.id, inventory=self._parts.peers.inventory(wide=request.wide))

    def _status(self, _: Connection, request: messages.AskStatus) -> messages.StatusReply:
        return messages.StatusReply(id=request.id, status=messages.pack(self._parts.status()))

    def _inside(self, _: Connection, request: messages.AskInside) -> messages.InsideReply:
        return messages.InsideReply(id=request.id, inside=messages.pack(describe_job.describe(self._parts.state)))

    # --- coming back

    def _obtain(self, connection: Connection, request: messages.Obtain) -> Answer:
        """Bundles, wherever they are, present and pinned."""
        with self._parts.state.lock:
            trainer = self._parts.trainers.of(connection)
        by_chunks = any(fetch.chunks is not None for fetch in request.fetches)
        source = self._parts.pieces if by_chunks else self._parts.bundle_fetcher
        present = source.obtain(trainer.rank, request.version, request.fetches, request.timeout_s)
        with self._parts.state.lock:
            trainer.reading += [item.held for item in present]
            for item in present:
                trainer.brought(request.version, item.source, _length(item.place))
            if not self._parts.trainers.has(trainer):  # it went while we fetched
                self._let_go(trainer)
        return _pack(request.id, present, request.mapped)

    def _release(self, connection: Connection, _: messages.Release) -> None:
        with self._parts.state.lock:
            self._let_go(self._parts.trainers.of(connection))

    def _let_go(self, trainer: Trainer) -> None:
        held, trainer.reading = trainer.reading, []
        self._parts.bundle_fetcher.release(held)


def require_role(role: str, principal: Principal | None, *, has_secret: bool) -> None:
    """Refuse a client unless the transport lets it be what it says it is.

    Raises:
        KeeperError: it does not.
    """
    if principal is not None and role != principal.role:
        raise KeeperError(f"the certificate is of a {principal.role}, the greeting of a {role[:64]}")
    if principal is not None and role == RANK:
        raise KeeperError("a rank talks to the keeper of its own node")
    if principal is None and role == KEEPER and has_secret:
        raise KeeperError("a keeper of this job proves itself with the job's secret", remedy=SHARE)


def _length(place: ImagePlace | PieceOf) -> int:
    return place.length if isinstance(place, PieceOf) else place.seal.length


def _pack(request: int, present: list[PresentBundle], mapped: tuple[int, ...]) -> Answer:
    """Return where the bundles are; a slot that the trainer has not mapped is sent read-only."""
    fds: dict[int, tuple[int, int]] = {}
    found = []
    for item in present:
        slot, number, place = item.held.slot, -1, item.place
        piece = place if isinstance(place, PieceOf) else None
        if slot.slot_id not in mapped:
            number, _ = fds.setdefault(slot.slot_id, (len(fds), slot.readonly_fd))
        found.append(
            Found(
                bundle_id=place.ref.bundle_id,
                slot_id=slot.slot_id,
                fd=number,
                start=slot.header_bytes + place.offset,
                length=_length(place),
                seal=place.seal,
                source=item.source,
                seconds=item.seconds,
                chunks=(piece.first, piece.end) if piece else None,
            )
        )
    return Answer(Obtained(id=request, found=tuple(found)), tuple(fd for _, fd in fds.values()))
