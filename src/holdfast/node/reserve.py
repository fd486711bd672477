"""Memory for ranks: slots within the budget, and the slots that a dead keeper left with its trainers.

One request at a time, so that two ranks do not both count on the same free memory. Allocating takes about a second
per 2 GiB and happens outside the state's lock.
"""

from __future__ import annotations

import threading

from holdfast.base.errors import HoldfastError, KeeperError, UsageError
from holdfast.core.slots import SlotState
from holdfast.node import messages
from holdfast.node.arena import Held
from holdfast.node.messages import Slots
from holdfast.node.server import Answer, Connection
from holdfast.node.state import NodeState
from holdfast.node.trainers import Trainer, Trainers
from holdfast.tiers import format as image_format
from holdfast.tiers import memory
from holdfast.tiers.memory import Slot

MAX_SLOTS = 3


class Reserve:
    """Prepares and adopts slots."""

    def __init__(self, state: NodeState, trainers: Trainers) -> None:
        self._state = state
        self._trainers = trainers
        self._preparing = threading.Lock()

    def prepare(self, connection: Connection, request: messages.Prepare) -> Answer:
        """Slots for the rank; the ones it has, if they are large enough."""
        if not (1 <= request.num_slots <= MAX_SLOTS and request.num_bytes > 0):
            raise UsageError(f"{request.num_slots} slots of {request.num_bytes} bytes cannot be reserved")
        rank = connection.greeted.rank
        with self._preparing:
            with self._state.lock:
                self._trainers.of(connection)
                missing = self._make_room(rank, request)
            for _ in range(missing):
                slot = self._state.arena.allocate(request.num_bytes, f"a slot of rank {rank}")
                with self._state.lock:
                    self._state.arena.add(slot, rank)
            with self._state.lock:
                self._state.outlets.changed()
                return self._slots_reply(self._trainers.of(connection), request.id)

    def _make_room(self, rank: int, request: messages.Prepare) -> int:
        """Gives up slots that are too small, at once if empty, else later; returns how many must be made.

        All or nothing: if the new ones do not fit into the budget the old ones stay as they are.
        """
        arena = self._state.arena
        slots = arena.of_rank(rank)
        small = [held for held in slots if held.slot.num_bytes < request.num_bytes and not held.outgrown]
        missing = max(0, request.num_slots - sum(not held.outgrown and held not in small for held in slots))
        free = sum(held.slot.total_bytes for held in small if held.state is SlotState.EMPTY and not held.pins)
        needed = missing * memory.slot_bytes(request.num_bytes) - free
        arena.with_room(lambda: arena.budget.check(needed, f"reserving {missing} slots for rank {rank}"))
        for held in small:
            held.outgrown = True
        arena.collect(self._state.is_free)
        return missing

    def adopt(self, connection: Connection, request: messages.Adopt, fds: list[int]) -> Answer:
        """Slots that a dead keeper left with its trainer; each is proved before it counts as sealed."""
        if request.num_slots != len(fds):
            raise KeeperError(f"{request.num_slots} slots were announced and {len(fds)} descriptors came")
        rank = connection.greeted.rank
        adopted: list[Held] = []
        with self._preparing:
            while fds:
                slot = Slot.adopt(fds.pop(0))
                try:
                    self._state.arena.budget.reserve(slot.total_bytes, f"adopting a slot of rank {rank}")
                except BaseException:
                    slot.close()
                    raise
                header = self._proved(slot, rank)
                with self._state.lock:
                    held = self._state.arena.add(slot, rank)
                    if header is None:
                        held.clear()
                    else:
                        held.state, held.version = SlotState.SEALED, header.version
                        held.durable, held.layout = header.durable, header.layout
                        held.images = {image.ref.bundle_id: image for image in header.images}
                    adopted.append(held)
        with self._state.lock:
            trainer = self._trainers.of(connection)
            trainer.known.update(held.slot.slot_id for held in adopted)
            self._state.adopted()
        return Answer(Slots(id=request.id, slot_ids=tuple(held.slot.slot_id for held in adopted)))

    def _proved(self, slot: Slot, rank: int) -> memory.SlotHeader | None:
        """The header of an adopted slot if it and every image stand."""
        try:
            header = memory.read_header(slot)
            if header is None or header.job != self._state.place.job or header.rank != rank or header.replica:
                return None
            for image in header.images:
                view = slot.view[image.offset : image.offset + image.seal.length]
                image_format.verify(view, image.seal, f"slot of rank {rank}, {header.version}")
        except HoldfastError as error:
            self._state.alarm(f"adopted slot of rank {rank}", f"a slot was not adopted: {error}")
            return None
        return header

    def _slots_reply(self, trainer: Trainer, request: int) -> Answer:
        slots = [held.slot for held in self._state.arena.of_rank(trainer.rank)]
        new = tuple(slot.fd for slot in slots if slot.slot_id not in trainer.known)
        trainer.known = {slot.slot_id for slot in slots}
        return Answer(Slots(id=request, slot_ids=tuple(slot.slot_id for slot in slots)), new)
