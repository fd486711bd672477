"""Saving, seen from the keeper: a slot for a version, what was copied into it, what was given up.

The overwrite guard chooses the slot. A save that must wait for one does not hold up its connection: it waits in a list
that is looked at whenever something changed, and is refused, with the reason, when its time is over.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgspec

from holdfast.base.errors import Fenced, HoldfastError, LevelNotReached, UsageError
from holdfast.core.model import Version
from holdfast.core.versions.replication_lag import LEAST_PATIENCE_S
from holdfast.core.versions.slot_guard import SlotState
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.messages import FREE_SLOTS, NO_SLOT, Begin, Begun, ImageThere, refusal
from holdfast.keeper.rpc.server import Connection
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.sealer import Sealer
from holdfast.keeper.slots.sessions import Trainer, Trainers
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.keeper.storage.writer_failover import WriterFailover

logger = logging.getLogger(__name__)

MAX_BEGIN_WAIT_S = 600.0
# A save that waits for less, and may be left out, cuts nobody off: whatever is sent would begin anew with every save.
STARVED_S = 1.0
# A version that its rank may come back to is abandoned so many seconds after its time was over.
COME_BACK_S = 5.0


@dataclass(slots=True, eq=False)
class _Waiting:
    """A save that waits for a slot."""

    trainer: Trainer
    request: Begin
    since_s: float
    reason: str = ""

    @property
    def deadline_s(self) -> float:
        return self.since_s + min(self.request.timeout_s, MAX_BEGIN_WAIT_S)

    @property
    def in_vain(self) -> str:
        """Return the words for a wait that is over."""
        return f"no slot became free within {self.request.waited_s + self.request.timeout_s:.3g} s: {self.reason}"


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """A version that a rank found no slot for, and may come back to."""

    version: Version
    until_s: float
    reason: str


class SaveRequests:
    """Begins, takes over and abandons versions of local ranks."""

    def __init__(self, state: NodeState, trainers: Trainers, sealer: Sealer, failover: WriterFailover) -> None:
        self._state = state
        self._trainers = trainers
        self._sealer = sealer
        self._failover = failover
        self._waiting: list[_Waiting] = []
        self._left_out: dict[int, _LeftOut] = {}

    def begin(self, connection: Connection, request: Begin) -> None:
        """A slot for a version; the reply comes when there is one, or when time is over."""
        with self._state.lock:
            trainer, ledger = self._trainers.of(connection), self._state.need_ledger()
            if request.version.incarnation != ledger.incarnation:
                raise Fenced(f"{request.version} is not of incarnation {ledger.incarnation}")
            if trainer.rank not in self._state.layouts:
                raise UsageError(f"rank {trainer.rank} has not registered its layout")
            self._go_on(trainer.rank, request.version)
            self._skip(trainer.rank, request.version)
            waiting = _Waiting(trainer, request, time.monotonic())
            if not self._try(waiting):
                self._waiting.append(waiting)
                self._state.callbacks.changed()

    def _skip(self, rank: int, version: Version) -> None:
        """A rank that goes on to `version` will never save the earlier ones that its neighbours wait with.

        The coordinator concludes the same from reports, but a node reports a version only when all its ranks sealed.
        """
        own = {held.version for held in self._state.slot_pool.of_rank(rank)}
        for held in self._state.slot_pool:
            earlier = held.version
            if held.replica or earlier is None or earlier.incarnation != version.incarnation or earlier in own:
                continue
            if earlier < version:
                self._state.abandon(rank, earlier, f"it went on to {version} without it")

    def _try(self, waiting: _Waiting) -> bool:
        """Gives the slot if the guard allows; else notes why not."""
        state, request, rank = self._state, waiting.request, waiting.trainer.rank
        if request.durable and not request.comes_back and time.monotonic() - waiting.since_s > LEAST_PATIENCE_S:
            state.guard.lag.stored()  # or is about to be: the end of a job may have seconds
        slots = [h for h in state.slot_pool.of_rank(rank) if not h.outgrown and h.slot.num_bytes >= request.num_bytes]
        # Who did not get the answer in time asks again, and nothing was written there yet.
        unheard = next((held for held in slots if held.version == request.version and held.is_untouched), None)
        if unheard is not None and not state.need_ledger().standing(request.version).abandoned:
            self._give(waiting, unheard, "it is given once more")
            return True
        decision = state.need_ledger().begin(rank, request.version, [self._state.guard.view(held) for held in slots])
        if decision.value is None and self._failover.yield_slots(rank):
            decision = state.need_ledger().begin(
                rank, request.version, [self._state.guard.view(held) for held in slots]
            )
        held = state.slot_pool.get(decision.value) if decision.value is not None else None
        if held is None:
            kept = [str(slot.version) for slot in slots if state.guard.awaits_replicas(slot)]
            if kept:
                state.guard.say_slow()
            why = f"; nothing newer than {kept[0]} has a second copy yet" if kept else ""
            waiting.reason = decision.reason + why
            return False
        self._give(waiting, held, decision.reason)
        return True

    def _give(self, waiting: _Waiting, held: HeldSlot, reason: str) -> None:
        """The rank may write its version into this slot."""
        state, request, rank = self._state, waiting.request, waiting.trainer.rank
        before = held.version if held.state is SlotState.SEALED and held.layout else None  # not what was fetched
        held.start(request.version, layout=state.layouts[rank].fingerprint, durable=request.durable)
        fds = () if held.slot.slot_id in request.mapped else (held.slot.fd,)
        begun = Begun(id=request.id, slot_id=held.slot.slot_id, reason=reason)
        if before is not None:
            places = held.before.values()
            there = tuple(ImageThere(p.ref.bundle_id, p.offset, p.seal.length) for p in places)
            begun = msgspec.structs.replace(begun, version=before, there=there)
        waiting.trainer.connection.send(begun, fds)

    def retry(self) -> float:
        """Looks at every save that waits; returns seconds until the next one's time is over."""
        with self._state.lock:
            now = time.monotonic()
            # Giving up is a change too and leads back here: what is looked at now is not looked at twice.
            looked_at, self._waiting = self._waiting, []
            for waiting in looked_at:
                if self._state.ledger is not None and self._try(waiting):
                    continue
                request = waiting.request
                lost, over = self._is_lost(request.version), now >= waiting.deadline_s
                why = waiting.reason if lost else waiting.in_vain
                if not lost and not over:
                    self._waiting.append(waiting)
                elif request.final and request.comes_back:
                    if not lost:
                        self._left_out[waiting.trainer.rank] = _LeftOut(request.version, now + COME_BACK_S, why)
                    self._refuse(waiting, why)
                elif lost or request.final:
                    self._give_up(waiting, why)
                else:
                    self._refuse(waiting, waiting.reason)
            for rank, left in tuple(self._left_out.items()):
                if left.until_s <= now:
                    self._go_on(rank)
            deadlines = [waiting.deadline_s for waiting in self._waiting]
            deadlines += [left.until_s for left in self._left_out.values()]
            return min(deadlines, default=float("inf")) - now

    def starved(self) -> list[int]:
        """Ranks whose save has waited for half of its time, or for seconds; whoever is only sent bytes from their slots must
        yield.
        """
        now = time.monotonic()
        with self._state.lock:
            patient = [w for w in self._waiting if w.request.timeout_s >= STARVED_S or not w.request.comes_back]
            return [
                w.trainer.rank for w in patient if now - w.since_s >= min(w.request.timeout_s / 2, LEAST_PATIENCE_S)
            ]

    def waits(self, rank: int) -> bool:
        """Return whether a save of this rank waits for a slot."""
        with self._state.lock:
            return any(waiting.trainer.rank == rank for waiting in self._waiting)

    def _is_lost(self, version: Version) -> bool:
        """Return whether somebody gave it up, so that no slot will become free for it: there is nothing to wait for."""
        ledger = self._state.ledger
        return ledger is not None and ledger.standing(version).abandoned and version not in ledger.suspects()

    def _go_on(self, rank: int, version: Version | None = None) -> None:
        """A rank comes back to what it left out only if that is `version`; else all hear that it is abandoned."""
        left = self._left_out.pop(rank, None)
        if left is not None and left.version != version:
            self._state.abandon(rank, left.version, left.reason)

    @staticmethod
    def _refuse(waiting: _Waiting, reason: str) -> None:
        """There is no slot, and the version is not abandoned by that."""
        waiting.trainer.connection.send(Begun(id=waiting.request.id, slot_id=NO_SLOT, reason=reason))

    def _give_up(self, waiting: _Waiting, reason: str) -> None:
        version, rank = waiting.request.version, waiting.trainer.rank
        self._state.abandon(rank, version, reason)
        error = LevelNotReached(f"{version} is abandoned: {reason}", where=f"rank {rank}", remedy=FREE_SLOTS)
        waiting.trainer.connection.send(refusal(waiting.request.id, error))

    def copied(self, connection: Connection, request: messages.Copied) -> None:
        """The images lie in the slot."""
        with self._state.lock:
            rank, version = self._trainers.of(connection).rank, request.version
            held = self._state.slot_pool.writing(rank, version)
            if held is None or held.copied:
                logger.warning("rank %d copied %s, but is not writing it", rank, version)
                return
            differing = self._state.need_ledger().compare(rank, version, request.spots) if request.spots else ""
            if differing:
                held.clear()
                self._state.alarms.warn("ranks that should be equal", f"{version} is abandoned: {differing}")
                self._state.abandon(rank, version, differing)
                return
            try:
                self._sealer.put(held, version, request.images, request.kept)
            except HoldfastError as error:
                held.clear()
                self._state.alarms.warn(f"images of rank {rank}", f"{version} is abandoned: {error}")
                self._state.abandon(rank, version, error.what)

    def persist(self, connection: Connection, request: messages.Persist) -> None:
        """The rank asks for storage after the fact."""
        with self._state.lock:
            self._state.due(self._trainers.of(connection).rank, request.version)

    def abandon(self, connection: Connection, request: messages.Abandon) -> None:
        """The rank gives a version up. The bytes of one that is being hashed stay until that ends."""
        with self._state.lock:
            rank = self._trainers.of(connection).rank
            held = self._state.slot_pool.writing(rank, request.version)
            if held is not None:
                held.clear()
            self._state.abandon(rank, request.version, request.reason[:1000])

    def forget(self, trainer: Trainer) -> None:
        """A trainer goes. Under the state's lock."""
        self._waiting = [waiting for waiting in self._waiting if waiting.trainer is not trainer]
        self._go_on(trainer.rank)
