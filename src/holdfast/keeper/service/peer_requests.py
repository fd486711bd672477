"""Answers what the keeper of another node may ask of this one: seals and bytes of what it holds, and to be coordinated.

Also the questions that anybody may ask: inventory and status. A slot that is being sent is pinned for the connection that
asked for its seals; the pins go when that one ends, when nothing moves on it and on the further lines of its transfer, or
when a local save is starved of a slot that the guard would give it then: a slow peer never slows training, and what is
awaited of it is not cut off in vain. While replicas leave, the coordinator is given a sign of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from holdfast.base.errors import AnswerTooLong, Fenced, HoldfastError, KeeperError, KeeperLost, VersionNotFound
from holdfast.core.model import Seal, Version
from holdfast.core.rank_runs import runs_of, spread
from holdfast.core.recovery.parity_choice import REBUILT
from holdfast.core.versions.node_ledger import Reports
from holdfast.keeper.coordination.coordinator import Coordinator
from holdfast.keeper.replication.rate_limit import Pace
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.caller import dial
from holdfast.keeper.rpc.messages import AnyMessage, Bulk, Held, Hello, Inventory, Ok, Seals
from holdfast.keeper.rpc.server import Connection
from holdfast.keeper.slots.idle_windows import Turns, Windows
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.node_report import greeting, inventory
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.tiers.format.image import CHUNK_BYTES

logger = logging.getLogger(__name__)

PIN = "sending"
SEND_BLOCK_TIMEOUT_S = 10.0
# A peer that pinned a slot and takes nothing this long has its pins taken off. At 1 Mbit/s a block takes 2 s.
STALL_S = 3.0
ASK_PEER_TIMEOUT_S = 3.0
# A sign that replicas leave is given so often, and while a block left within the second time. At 1 Mbit/s one takes 2 s.
SIGN_EVERY_S, SIGN_FOR_S = 1.0, 3.0
# All are asked within this time, for who asked waits 10 s. Who was not reached by then is told as silent, and asked again.
SURVEY_TIMEOUT_S = 8.0
SURVEY = "holdfast survey"
MAX_AT_ONCE = 32
# Lines beside the first of each transfer, for all peers together: each has a descriptor, and a thread while it sends.
MAX_FURTHER_LINES = 32


@dataclass(slots=True, eq=False)
class _Transfer:
    """Holds what one peer is being sent, by one line or several.

    Attributes:
        lines: the connections, the first of which asks for seals; each with its turns once it sends what is paced.
        held: pinned for it.
        moved_s: when a block left last, on any line.
        paced: of blocks of replicas: how many bytes left, when the first of them did, and the last.
    """

    lines: dict[Connection, Turns | None]
    held: list[HeldSlot] = field(default_factory=list)
    moved_s: float = 0.0
    paced: tuple[int, float, float] = (0, 0.0, 0.0)

    def sends(self, num_bytes: int, now_s: float) -> None:
        """A block of a replica leaves."""
        sent, since_s, _ = self.paced
        self.paced = sent + num_bytes, since_s or now_s, now_s

    @property
    def first(self) -> Connection:
        return next(iter(self.lines))

    def cut(self) -> None:
        for line in self.lines:
            line.channel.abort()


class PeerRequests:
    """The requests of other keepers. Several threads.

    Args:
        coordinator: gives the coordinator while this node is it.
        pace: of what is sent as replicas.
        windows: the waits of local ranks, which replicas keep to.
    """

    def __init__(
        self, state: NodeState, coordinator: Callable[[], Coordinator | None], pace: Pace, windows: Windows
    ) -> None:
        self.sent_bytes = 0
        self._state = state
        self._pace = pace
        self._windows = windows
        self._coordinator = coordinator
        self._transfers: dict[Connection, _Transfer] = {}
        self._signed_s = 0.0
        self._speaks: dict[int, int] = {}  # node -> the number of the connection on which it reports

    def attach(self, connection: Connection, hello: Hello) -> None:
        """A keeper greets.

        Raises:
            Fenced: it belongs to an incarnation that is over. KeeperError: it serves another job, or it is one more
                line of a transfer, and there are enough.
        """
        self._require_present(hello)
        with self._state.lock:
            if hello.transfer:
                self._join(connection, hello)
            connection.hello = hello

    def _join(self, connection: Connection, hello: Hello) -> None:
        """A line of a transfer greets: the first one, or one more. Under the state's lock."""
        for line, transfer in self._transfers.items():
            if (line.greeted.node, line.greeted.transfer) == (hello.node, hello.transfer):
                if len(self._transfers) - len(set(self._transfers.values())) >= MAX_FURTHER_LINES:
                    raise KeeperError(f"this keeper sends by {MAX_FURTHER_LINES} further lines already")
                transfer.lines[connection] = None
                self._transfers[connection] = transfer
                return
        self._transfers[connection] = _Transfer({connection: None})

    def _transfer_of(self, connection: Connection) -> _Transfer:
        return self._transfers.setdefault(connection, _Transfer({connection: None}))

    def leave(self) -> None:
        """The job is over: whoever is being sent its bytes is cut off. Under the state's lock."""
        self._speaks.clear()
        for transfer in self._transfers.values():
            transfer.cut()
            self._unpin(transfer)

    def _require_same_job(self, hello: Hello) -> None:
        """Versions of another job may bear the same names; a keeper that served it may not have heard of its end."""
        assembly = self._state.assembly
        if assembly is not None and hello.job_id != assembly.job_id:
            raise KeeperError(f"this keeper serves job {assembly.job_id}, the other one job {hello.job_id[:64]}")

    def _require_present(self, hello: Hello) -> None:
        """Refuses ranks of an incarnation that is over, however late their bytes arrive (S7)."""
        self._require_same_job(hello)
        if hello.incarnation < self._state.incarnation:
            raise Fenced(f"incarnation {hello.incarnation} is over; {self._state.incarnation} has begun")

    def gone(self, connection: Connection) -> None:
        """A keeper's connection ended."""
        with self._state.lock:
            self._leave(connection)
            coordinator = self._coordinator()
            if coordinator is not None:
                coordinator.leave(connection)

    def report(self, connection: Connection, request: messages.Report) -> Ok:
        """Facts for the coordinator."""
        with self._state.lock:
            self._require_same_job(connection.greeted)
            if request.incarnation < self._state.incarnation:
                raise Fenced(f"incarnation {request.incarnation} is over; {self._state.incarnation} has begun")
            coordinator = self._coordinator()
            if coordinator is None or request.incarnation > self._state.incarnation:
                raise KeeperError("this keeper does not coordinate that incarnation (yet)")
            # What a node sent before it gave a connection up may be read after what it said on the next one (we were
            # frozen, it waits in the socket). The board takes later words for newer facts.
            if connection.number < self._speaks.get(request.node, 0):
                raise KeeperError(f"node {request.node} reports on a newer connection by now")
            if request.whole:
                self._speaks[request.node] = connection.number
                coordinator.join(request.node, connection)
            coordinator.report(request.node, request.incarnation, request.facts)
        return Ok(id=request.id)

    def propose(self, connection: Connection, request: messages.Propose) -> Ok:
        """A rank of that node asks for an appointment."""
        with self._state.lock:
            self._require_same_job(connection.greeted)
            coordinator = self._coordinator()
            if coordinator is None:
                raise KeeperError("this keeper does not coordinate")
            coordinator.propose(request.proposal)
        return Ok(id=request.id)

    # --- bytes

    def seals(self, connection: Connection, request: messages.AskSeals) -> Seals:
        """Seals of what is held; its slots are pinned for the transfer that follows."""
        found = []
        with self._state.lock:
            self._require_present(connection.greeted)
            transfer = self._transfer_of(connection)
            self._unpin(transfer)
            transfer.moved_s = time.monotonic()
            for bundle_id in request.bundle_ids:
                copy = self._state.slot_pool.find(request.version, bundle_id)
                copies = [copy] if copy else self._state.slot_pool.find_pieces(request.version, Seal(bundle_id, 0, ""))
                found += [place.seal for _, place in copies[:1]]
                for held, _ in copies:
                    held.pins[PIN] += 1
                    transfer.held.append(held)
        return Seals(id=request.id, seals=tuple(found))

    def parity(self, connection: Connection, request: messages.AskParity) -> messages.ParityOf:
        """A piece of parity, and the seal of a bundle that is in it.

        Raises:
            VersionNotFound: there is none (any more).
        """
        with self._state.lock:
            self._require_present(connection.greeted)
            piece = self._state.slot_pool.piece(request.version, request.name)
        seals = (seal for seals in piece.covers for seal in seals) if piece is not None else iter(())
        seal = next((seal for seal in seals if seal.bundle_id == request.bundle_id), None)
        if piece is None or seal is None:
            raise VersionNotFound(f"no parity of bundle {request.bundle_id} of {request.version} is here (any more)")
        return messages.ParityOf(id=request.id, piece=None if request.known else piece.brief, seal=seal)

    def pull(self, connection: Connection, request: messages.Pull) -> None:
        """Sends a piece of an image; the reply and the bytes leave from the reader's own thread.

        Raises:
            VersionNotFound: it is not held (any more). KeeperError: no such piece.
        """
        with self._state.lock:
            self._require_present(connection.greeted)
            held, at, length = self._part(request)
            end = request.start + request.length
            if not (0 <= request.start < end <= length) or request.length > CHUNK_BYTES:
                raise KeeperError(f"bytes {request.start} to {end} are not a piece of bundle {request.bundle_id}")
            held.pins[PIN] += 1
            transfer = self._transfer_of(connection)
            turns = None if request.urgent else self._turns(transfer, connection)

        def moves() -> None:
            transfer.moved_s = time.monotonic()

        def before(num_bytes: int) -> None:
            """A block leaves: the line moves, and pace and windows are kept."""
            if turns is not None:
                self._pace.wait(num_bytes)
                turns.wait(held.rank, num_bytes, moves)
                transfer.sends(num_bytes, time.monotonic())
            moves()

        try:
            connection.channel.send_bulk(
                messages.encode(Bulk(id=request.id, length=request.length)),
                held.slot.view[at : at + request.length],
                timeout_s=SEND_BLOCK_TIMEOUT_S,
                before=before,
            )
            self.sent_bytes += request.length
        finally:
            if turns is not None:
                turns.done()
            self._state.unpin(held, PIN)

    def _turns(self, transfer: _Transfer, connection: Connection) -> Turns:
        """The turns of a line. One that comes later begins as patient as the transfer is by then. Under the state's lock."""
        turns = transfer.lines.get(connection)
        if turns is None:
            held_s = max((other.held_s for other in transfer.lines.values() if other is not None), default=0.0)
            turns = transfer.lines[connection] = self._windows.turns(held_s)
        return turns

    def _part(self, request: messages.Pull) -> tuple[HeldSlot, int, int]:
        """The slot, where in it the bytes begin, and the length of the image; a chunk may be here without the rest.

        Raises:
            VersionNotFound: it is not held (any more).
        """
        slot_pool = self._state.slot_pool
        copy = slot_pool.find(request.version, request.bundle_id)
        if copy is not None:
            return copy[0], copy[1].offset + request.start, copy[1].seal.length
        for held, piece in slot_pool.find_pieces(request.version, Seal(request.bundle_id, 0, "")):
            begin = piece.first * CHUNK_BYTES
            if begin <= request.start and request.start + request.length <= begin + piece.length:
                return held, piece.offset + request.start - begin, piece.seal.length
        raise VersionNotFound(f"bundle {request.bundle_id} of {request.version} is not held here (any more)")

    def yield_slots(self, starved: Iterable[int]) -> None:
        """Takes pins off transfers that stall, and off those from slots of ranks whose save waits too long."""
        now, ranks = time.monotonic(), set(starved)
        with self._state.lock:
            for transfer in self._transfers.values():
                needed = any(self._would_be_free(held) for held in transfer.held if held.rank in ranks)
                if transfer.held and (needed or now - transfer.moved_s > STALL_S):
                    logger.info("a transfer to node %d yields its slots", transfer.first.greeted.node)
                    transfer.cut()
                    self._unpin(transfer)

    def _would_be_free(self, held: HeldSlot) -> bool:
        return not held.replica and self._state.guard.is_free(held, but=PIN)

    def give_sign(self) -> None:
        """Says every second which versions leave this node to be replicas: whoever waits for them has patience."""
        now = time.monotonic()
        with self._state.lock:
            if now - self._signed_s < SIGN_EVERY_S:
                return
            sent = {
                held.version
                for transfer in self._transfers.values()
                if now - transfer.paced[2] <= SIGN_FOR_S
                for held in transfer.held
                if not held.replica and held.version is not None
            }
            if sent:
                self._signed_s = now
                self._state.callbacks.report(Reports(sending=tuple(sorted(sent))))

    def rate(self) -> float:
        """Return at how many bytes per second replicas leave now, of all peers together."""
        now = time.monotonic()
        with self._state.lock:
            paced = [transfer.paced for transfer in set(self._transfers.values())]
        return sum(
            sent / (now - since_s)
            for sent, since_s, last_s in paced
            if now - since_s >= SIGN_EVERY_S and now - last_s <= SIGN_FOR_S
        )

    def _unpin(self, transfer: _Transfer) -> None:
        held, transfer.held = transfer.held, []
        for slot in held:
            self._state.unpin(slot, PIN)

    def _leave(self, connection: Connection) -> None:
        """A line ended; with the first one its transfer does."""
        transfer = self._transfers.pop(connection, None)
        if transfer is None:
            return
        if connection is transfer.first:
            transfer.cut()
            self._unpin(transfer)
        del transfer.lines[connection]

    # --- questions

    def inventory(self, *, wide: bool) -> Inventory:
        """Return what this keeper holds; `wide`: and all that can be reached, asked side by side."""
        assembly = self._state.assembly
        return self.survey(assembly, self._state.node) if wide and assembly is not None else inventory(self._state)

    def survey(self, assembly: messages.Assembly, node: int) -> Inventory:
        """Return what this keeper, which is `node`, and all others of the job hold."""
        own = inventory(self._state)
        found: dict[int, Inventory | HoldfastError] = {}
        known: dict[bytes, bytes] = {}
        num_nodes = len(assembly.addresses)
        others = [(node + step) % num_nodes for step in range(1, num_nodes)]  # not all keepers at one door at a time
        waiting, deadline = iter(others), time.monotonic() + SURVEY_TIMEOUT_S

        def ask() -> None:
            for index in waiting:  # one after the other for all threads: who is silent holds up one of them
                if time.monotonic() < deadline:
                    self._ask(index, assembly, found, known)

        threads = [threading.Thread(target=ask, name=SURVEY, daemon=True) for _ in others[:MAX_AT_ONCE]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late, answered = KeeperLost("did not answer in time"), dict(found)
        return _merge(node, own, {index: answered.get(index, late) for index in others})

    def _ask(
        self,
        index: int,
        assembly: messages.Assembly,
        found: dict[int, Inventory | HoldfastError],
        known: dict[bytes, bytes],
    ) -> None:
        try:
            reply = self._call(index, assembly, messages.TakeInventory(wide=False))
        except HoldfastError as error:
            found[index] = error
            return
        strange = KeeperError("answered something else")
        found[index] = _sharing(reply.inventory, known) if isinstance(reply, messages.InventoryReply) else strange

    def _call(self, index: int, assembly: messages.Assembly, request: messages.AnyMessage) -> messages.AnyMessage:
        """Returns what another keeper answers, by a connection for this alone."""
        caller = dial(
            assembly.addresses[index],
            greeting(self._state, assembly),
            timeout_s=ASK_PEER_TIMEOUT_S,
            on_push=_ignore,
            on_lost=_ignore,
            security=self._state.security,
        )
        try:
            return caller.call(request, timeout_s=ASK_PEER_TIMEOUT_S)[0]
        finally:
            caller.close()

    def condemn(self, request: messages.Condemn) -> None:
        """A copy failed its digest: it is not offered any more. Another node's is passed on to it."""
        state, assembly = self._state, self._state.assembly
        if request.node == -1:
            state.alarms.quarantined(request.version, request.bundle_id, "storage", request.reason)
        elif request.node == REBUILT:
            state.alarms.quarantined(request.version, request.bundle_id, "parity", request.reason)
        elif request.node == state.node:
            state.condemn(request.version, request.bundle_id, request.reason)
        elif assembly is not None and 0 <= request.node < len(assembly.addresses):
            self._call(request.node, assembly, request)
        else:
            raise KeeperError(f"node {request.node} is not part of the job")


def _sharing(found: Inventory, known: dict[bytes, bytes]) -> Inventory:
    """An inventory that keeps no bytes of its own where `known` has them: of 512 twins they are a gigabyte."""
    held = tuple(replace(row, seals=known.setdefault(row.seals, row.seals)) for row in found.held)
    return replace(found, held=held, packed=tuple((vs, known.setdefault(body, body)) for vs, body in found.packed))


def _merge(node: int, own: Inventory, others: dict[int, Inventory | HoldfastError]) -> Inventory:
    """One inventory of all that answered; a keeper's copies are named by the index it was asked under.

    What twins hold is told once, with the nodes as runs: a job of 512 of them has millions of copies.

    Raises:
        AnswerTooLong: one holds more than it can tell, so nobody knows what.
    """
    holders: dict[tuple[Version, bool, bytes], tuple[set[int], set[int]]] = {}
    for index, one in {node: own, **others}.items():
        for row in () if isinstance(one, HoldfastError) else one.held:
            nodes, ranks = holders.setdefault((row.version, row.preloaded, row.seals), (set(), set()))
            nodes.add(index)
            ranks.update(spread(row.ranks))
    parity, condemned = list(own.parity), {*own.condemned}
    tables: dict[Version, bytes] = {version: body for versions, body in own.packed for version in versions}
    suspects, levels = dict(own.suspects), dict(own.levels)
    reachable, silent, unheard = list(own.reachable), [], []
    for index, found in sorted(others.items()):
        if isinstance(found, AnswerTooLong):
            raise found
        if isinstance(found, HoldfastError):
            silent.append((index, found.what))
            if found.retryable and not found.condemns:
                unheard.append(index)
            continue
        reachable.append(index)
        parity += [replace(piece, node=index) for piece in found.parity]
        condemned.update(found.condemned)
        tables.update((version, body) for versions, body in found.packed for version in versions)
        suspects.update(found.suspects)
        for version, level in found.levels:
            levels[version] = max(level, levels.get(version, level))
    return replace(
        own,
        held=tuple(
            Held(version, runs_of(sorted(nodes)), runs_of(sorted(ranks)), preloaded, seals)
            for (version, preloaded, seals), (nodes, ranks) in holders.items()
        ),
        packed=messages.together(tables),
        suspects=tuple(suspects.items()),
        levels=tuple(levels.items()),
        reachable=tuple(sorted(reachable)),
        silent=tuple(silent),
        unheard=tuple(unheard),
        parity=tuple(parity),
        condemned=tuple(sorted(condemned)),
    )


def _ignore(_: AnyMessage | str) -> None:
    """One question, one answer: pushes and the end of the line mean nothing."""
