"""Memory for ranks: slots within the budget, and the slots that a dead keeper left with its trainers.

Only the budget is asked under the state's lock, so that two ranks do not both count on the same free memory. The pages
are made by the threads of the slot pool, for all ranks at once, the first slot of each rank before any second; where a rank
wants the cores for a restore, only once somebody waits for a slot of it. A request is
answered when as many slots are there as it waits for, so no connection is held up; a slot that is not complete is
offered to nobody, neither to a save nor to a restore.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial

from holdfast.base.config import MAX_SLOTS
from holdfast.base.errors import HoldfastError, KeeperError, MemoryRefused, UsageError
from holdfast.core.versions.slot_guard import SlotState
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.messages import Slots, refusal
from holdfast.keeper.rpc.server import Answer, Connection
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.sessions import Trainer, Trainers
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory import slots as slot_memory
from holdfast.tiers.memory.slots import Slot

logger = logging.getLogger(__name__)

# The budget has room for so many of a slot that is spare, for what comes later: replicas of a node that is lost.
SPARE_TIMES = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request whose slots are being made."""

    trainer: Trainer
    request: messages.Prepare


class SlotAllocator:
    """Prepares and adopts slots."""

    def __init__(self, state: NodeState, trainers: Trainers) -> None:
        self._state = state
        self._trainers = trainers
        self._waiting: list[_Waiting] = []
        self._came = threading.Condition(state.lock)

    def prepare(self, connection: Connection, request: messages.Prepare) -> Answer | None:
        """Slots for the rank; the ones it has, if they are large enough. None: the answer comes later.

        Raises:
            MemoryRefused: they do not fit into the budget; with the numbers.
        """
        wanted = request.num_slots if request.num_ready is None else request.num_ready
        if not (1 <= request.num_slots <= MAX_SLOTS and 0 <= wanted <= request.num_slots and request.num_bytes > 0):
            raise UsageError(f"{request.num_slots} slots of {request.num_bytes} bytes cannot be reserved")
        slot_pool = self._state.slot_pool
        with self._state.lock:
            trainer = self._trainers.of(connection)
            missing = self._make_room(trainer.rank, request)
            slot_pool.promise(trainer.rank, request.num_bytes, missing, f"a slot of rank {trainer.rank}")
            if wanted or not request.put_off:
                self._populate(trainer.rank)
            self._state.callbacks.changed()
            waiting = _Waiting(trainer, request)
            reply = self._answer(waiting)
            if reply is None:
                self._waiting.append(waiting)
            return reply

    def await_slot(self, rank: int, num_bytes: int, deadline: float) -> None:
        """Wait until a slot of the rank with so many bytes is there, while one is being made; at most until `deadline`.

        The deadline is by `time.monotonic`.
        """
        with self._came:
            self._populate(rank)
            while True:
                own = [held for held in self._state.slot_pool.in_use(rank) if held.slot.num_bytes >= num_bytes]
                made = [held for held in own if held.state is SlotState.UNPOPULATED]
                left = deadline - time.monotonic()
                if not made or len(made) < len(own) or left <= 0:
                    return
                self._came.wait(left)

    def _populate(self, rank: int) -> None:
        """Begin to make the pages of the rank's slots that were promised. Under the lock."""
        slot_pool = self._state.slot_pool
        for turn, held in enumerate(slot_pool.in_use(rank)):
            if held.is_put_off:
                slot_pool.populate(held, turn, partial(self._populated, held, time.monotonic()))

    def _populated(self, held: HeldSlot, since_s: float, fault: MemoryRefused | None) -> None:
        """The pages of a slot are there, or will never be. In a thread of the slot pool."""
        state, size, seconds = self._state, held.slot.total_bytes, time.monotonic() - since_s
        with self._came:
            state.slot_pool.populated(held, fault)
            if fault is None:
                logger.info("a slot of rank %d: %d bytes in %.2f s", held.rank, size, seconds)
            else:
                state.alarms.warn(f"memory of rank {held.rank}", f"a slot of {size} bytes is not to be had: {fault}")
            state.slot_pool.collect(state.guard.is_free)
            for waiting in tuple(self._waiting):
                if waiting.trainer.rank == held.rank:
                    self._settle(waiting, fault)
            self._came.notify_all()
            state.callbacks.changed()

    def _settle(self, waiting: _Waiting, fault: MemoryRefused | None) -> None:
        """Answers a request that waits, if it can be answered now. Under the lock."""
        connection, reply = waiting.trainer.connection, None
        if self._trainers.has(waiting.trainer):
            reply = self._answer(waiting)
            if reply is not None:
                connection.send(reply.message, reply.fds)
            elif fault is not None:
                connection.send(refusal(waiting.request.id, fault))
        if reply is not None or fault is not None or not self._trainers.has(waiting.trainer):
            self._waiting.remove(waiting)

    def _answer(self, waiting: _Waiting) -> Answer | None:
        """The reply, once as many slots are there as it asks for. Under the lock."""
        request = waiting.request
        if request.num_ready == 0:
            return Answer(Slots(id=request.id, slot_ids=()))
        there = [
            held
            for held in self._state.slot_pool.of_rank(waiting.trainer.rank)
            if held.state is not SlotState.UNPOPULATED
        ]
        fitting = [held for held in there if not held.outgrown and held.slot.num_bytes >= request.num_bytes]
        if len(fitting) < (request.num_ready or request.num_slots):
            return None
        new = [held.slot for held in there if held.slot.slot_id not in request.mapped]
        slot_ids = tuple(held.slot.slot_id for held in there)
        slots = Slots(id=request.id, slot_ids=slot_ids, sent=tuple(slot.slot_id for slot in new))
        return Answer(slots, tuple(slot.fd for slot in new))

    def _make_room(self, rank: int, request: messages.Prepare) -> int:
        """Gives up slots that are too small, at once if empty, else later; returns how many must be made.

        All or nothing: if the new ones do not fit into the budget the old ones stay as they are.
        """
        slot_pool = self._state.slot_pool
        slots = slot_pool.of_rank(rank)
        small = [held for held in slots if held.slot.num_bytes < request.num_bytes and not held.outgrown]
        missing = max(0, request.num_slots - sum(not held.outgrown and held not in small for held in slots))
        free = sum(held.slot.total_bytes for held in small if held.is_empty)
        needed = missing * slot_memory.slot_bytes(request.num_bytes) * (SPARE_TIMES if request.spare else 1) - free
        slot_pool.with_room(lambda: slot_pool.budget.check(needed, f"reserving {missing} slots for rank {rank}"))
        for held in small:
            held.outgrown = True
        slot_pool.collect(self._state.guard.is_free)
        return missing

    def adopt(self, connection: Connection, request: messages.Adopt, fds: list[int]) -> Answer:
        """Slots that a dead keeper left with its trainer; each is proved before it counts as sealed."""
        if request.num_slots != len(fds):
            raise KeeperError(f"{request.num_slots} slots were announced and {len(fds)} descriptors came")
        rank = connection.greeted.rank
        adopted: list[HeldSlot] = []
        while fds:
            adopted.append(self._adopt(Slot.adopt(fds.pop(0)), rank))
        with self._state.lock:
            self._trainers.of(connection)  # refuses one that is gone
            self._state.adopted()
        return Answer(Slots(id=request.id, slot_ids=tuple(held.slot.slot_id for held in adopted)))

    def _adopt(self, slot: Slot, rank: int) -> HeldSlot:
        """One of them. Who did not get our answer hands it over again: the same memory under two numbers would hold two versions."""
        with self._state.lock:
            known = self._state.slot_pool.same_memory(slot, rank)
        if known is not None:
            slot.close()
            return known
        try:
            self._state.slot_pool.budget.reserve(slot.total_bytes, f"adopting a slot of rank {rank}")
        except BaseException:
            slot.close()
            raise
        header = self._proved(slot, rank)
        with self._state.lock:
            known = self._state.slot_pool.same_memory(slot, rank)
            if known is not None:  # by another connection, meanwhile
                self._state.slot_pool.budget.release(slot.total_bytes)
                slot.close()
                return known
            held = self._state.slot_pool.add(slot, rank)
            if header is None:
                held.clear()
            else:
                held.state, held.version = SlotState.SEALED, header.version
                held.durable, held.layout = header.durable, header.layout
                held.images = {image.ref.bundle_id: image for image in header.images}
        return held

    def _proved(self, slot: Slot, rank: int) -> slot_memory.SlotHeader | None:
        """The header of an adopted slot if it and every image stand."""
        try:
            header = slot_memory.read_header(slot)
            if header is None or header.job != self._state.place.job or header.rank != rank or header.replica:
                return None
            for image in header.images:
                view = slot.view[image.offset : image.offset + image.seal.length]
                image_format.verify(view, image.seal, f"slot of rank {rank}, {header.version}")
        except HoldfastError as error:
            self._state.alarms.warn(f"adopted slot of rank {rank}", f"a slot was not adopted: {error}")
            return None
        return header
