"""What a trainer may ask of its keeper: memory, a slot for a version, sealing, copies to come back from.

One Desk per keeper, called from the threads of the connections. A save that must wait for a slot does not hold up its
connection: it waits in a list that is looked at whenever something changed. A trainer that dies leaves its sealed
slots; what it was writing becomes empty, and that is announced.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from holdfast.base.errors import Fenced, HoldfastError, InUse, KeeperError, LevelNotReached, UsageError
from holdfast.core.model import Version
from holdfast.core.slots import SlotState
from holdfast.node import messages
from holdfast.node.arena import Held
from holdfast.node.messages import Begin, Begun, Found, Hello, Message, Obtained, Ok, Slots, refusal
from holdfast.node.obtain import Obtainer
from holdfast.node.seal import Sealer
from holdfast.node.server import Answer, Connection
from holdfast.node.state import NodeState
from holdfast.tiers import format as image_format
from holdfast.tiers import memory
from holdfast.tiers.memory import Slot
from holdfast.tiers.procs import start_time

logger = logging.getLogger(__name__)

# How long a new trainer of a rank waits for the old one to be gone; a killed one frees its memory first.
PREDECESSOR_TIMEOUT_S = 5.0
MAX_SLOTS = 3
MAX_BEGIN_WAIT_S = 600.0


@dataclass(slots=True, eq=False)
class _Trainer:
    """A connected rank.

    Attributes:
        known: slots that it has mapped.
        reading: slots that are pinned because it restores from them, once per bundle.
    """

    rank: int
    connection: Connection
    known: set[int] = field(default_factory=set)
    reading: list[Held] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A save that waits for a slot."""

    trainer: _Trainer
    request: Begin
    since_s: float
    reason: str = ""

    @property
    def deadline_s(self) -> float:
        return self.since_s + min(self.request.timeout_s, MAX_BEGIN_WAIT_S)


class TrainerDesk:
    """The requests of trainers. Several threads."""

    def __init__(self, state: NodeState, sealer: Sealer, obtainer: Obtainer) -> None:
        self._state = state
        self._sealer = sealer
        self._obtainer = obtainer
        self._came_or_went = threading.Condition(state.lock)
        self._preparing = threading.Lock()
        self._trainers: dict[int, _Trainer] = {}
        self._waiting: list[_Waiting] = []
        self.last_seen_s = time.monotonic()

    # --- who is there

    def attach(self, connection: Connection, hello: Hello) -> None:
        """A trainer greets as a rank.

        Raises:
            InUse: another living process is that rank.
        """
        deadline = time.monotonic() + PREDECESSOR_TIMEOUT_S
        with self._came_or_went:
            while (old := self._trainers.get(hello.rank)) is not None and _is_other(old.connection, connection):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise InUse(
                        f"process {old.connection.pid} is rank {hello.rank} of this job and lives",
                        where=f"node {self._state.place.node}",
                        remedy="stop it, or give this run another path or run id",
                    )
                self._came_or_went.wait(min(left, 0.1))
            if old is not None:
                self._leave(old)
            connection.hello = hello
            self._trainers[hello.rank] = _Trainer(hello.rank, connection)
            for progress in self._state.progress():
                connection.push(f"progress {progress.version}", progress)

    def gone(self, connection: Connection) -> None:
        """A trainer's connection ended."""
        with self._came_or_went:
            trainer = self._trainers.get(connection.greeted.rank)
            if trainer is not None and trainer.connection is connection:
                self._leave(trainer)

    def reap(self) -> None:
        """Cuts off trainers whose process is dead while a child of theirs still holds the connection open."""
        with self._state.lock:
            for trainer in tuple(self._trainers.values()):
                pid = trainer.connection.pid
                if pid > 0 and start_time(pid) is None:
                    trainer.connection.channel.abort()
                    self._leave(trainer)

    @property
    def num_trainers(self) -> int:
        return len(self._trainers)

    @property
    def ranks(self) -> dict[int, int]:
        """Rank -> process id of those that are connected."""
        with self._state.lock:
            return {rank: trainer.connection.pid for rank, trainer in self._trainers.items()}

    def push(self, key: str, message: Message) -> None:
        """To all local trainers."""
        for trainer in self._trainers.values():
            trainer.connection.push(key, message)

    def _leave(self, trainer: _Trainer) -> None:
        """Under the lock: what it was doing ends, what it sealed stays."""
        del self._trainers[trainer.rank]
        self.last_seen_s = time.monotonic()
        self._waiting = [waiting for waiting in self._waiting if waiting.trainer is not trainer]
        self._release(trainer)
        for held in self._state.arena.of_rank(trainer.rank):
            version = held.version
            if held.state is SlotState.WRITING and not held.copied and not held.pins and version is not None:
                held.clear()
                self._state.abandon(trainer.rank, version, "its process ended before the copy was complete")
        trainer.connection.channel.abort()
        self._came_or_went.notify_all()
        self._state.outlets.changed()

    def _trainer(self, connection: Connection) -> _Trainer:
        trainer = self._trainers.get(connection.greeted.rank)
        if trainer is None or trainer.connection is not connection:
            raise InUse(f"rank {connection.greeted.rank} is now another process")
        return trainer

    # --- memory

    def prepare(self, connection: Connection, request: messages.Prepare) -> Answer:
        """Slots for the rank; the ones it has, if they are large enough."""
        if not (1 <= request.num_slots <= MAX_SLOTS and request.num_bytes > 0):
            raise UsageError(f"{request.num_slots} slots of {request.num_bytes} bytes cannot be reserved")
        rank = connection.greeted.rank
        with self._preparing:  # one at a time, so that two ranks do not both count on the same free memory
            with self._state.lock:
                self._trainer(connection)
                missing = self._retire_small(rank, request)
            fresh: list[Slot] = []
            try:
                for _ in range(missing):
                    fresh.append(self._state.arena.allocate(request.num_bytes, f"a slot of rank {rank}"))
            except BaseException:
                for slot in fresh:
                    slot.close()
                    self._state.arena.budget.release(slot.total_bytes)
                raise
            with self._state.lock:
                for slot in fresh:
                    self._state.arena.add(slot, rank)
                self._state.outlets.changed()
                return self._slots_reply(self._trainer(connection), request.id)

    def _retire_small(self, rank: int, request: messages.Prepare) -> int:
        """Marks slots that are too small; returns how many must be made."""
        arena = self._state.arena
        for held in arena.of_rank(rank):
            held.outgrown |= held.slot.num_bytes < request.num_bytes
        arena.collect(self._state.knowledge)
        return max(0, request.num_slots - sum(not held.outgrown for held in arena.of_rank(rank)))

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
            trainer = self._trainer(connection)
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

    def _slots_reply(self, trainer: _Trainer, request: int) -> Answer:
        slots = [held.slot for held in self._state.arena.of_rank(trainer.rank)]
        new = tuple(slot.fd for slot in slots if slot.slot_id not in trainer.known)
        trainer.known = {slot.slot_id for slot in slots}
        return Answer(Slots(id=request, slot_ids=tuple(slot.slot_id for slot in slots)), new)

    # --- saving

    def begin(self, connection: Connection, request: Begin) -> None:
        """A slot for a version; the reply comes when there is one, or when time is over."""
        with self._state.lock:
            trainer, ledger = self._trainer(connection), self._state.need_ledger()
            if request.version.incarnation != ledger.incarnation:
                raise Fenced(f"{request.version} is not of incarnation {ledger.incarnation}")
            if trainer.rank not in self._state.layouts:
                raise UsageError(f"rank {trainer.rank} has not registered its layout")
            self._release(trainer)
            waiting = _Waiting(trainer, request, time.monotonic())
            if not self._try(waiting):
                self._waiting.append(waiting)
                self._state.outlets.changed()

    def _try(self, waiting: _Waiting) -> bool:
        """Gives the slot if the guard allows; else notes why not."""
        state, request, rank = self._state, waiting.request, waiting.trainer.rank
        slots = [h for h in state.arena.of_rank(rank) if not h.outgrown and h.slot.num_bytes >= request.num_bytes]
        decision = state.need_ledger().begin(rank, request.version, [held.view for held in slots])
        held = state.arena.get(decision.value) if decision.value is not None else None
        if held is None:
            waiting.reason = decision.reason
            return False
        held.start(request.version, layout=state.layouts[rank].fingerprint, durable=request.durable)
        fds = () if held.slot.slot_id in waiting.trainer.known else (held.slot.fd,)
        waiting.trainer.known.add(held.slot.slot_id)
        begun = Begun(id=request.id, slot_id=held.slot.slot_id, reason=decision.reason)
        waiting.trainer.connection.send(begun, fds)
        return True

    def retry(self) -> float:
        """Looks at every save that waits; returns seconds until the next one's time is over."""
        with self._state.lock:
            now = time.monotonic()
            still: list[_Waiting] = []
            for waiting in self._waiting:
                if self._state.ledger is not None and self._try(waiting):
                    continue
                if now < waiting.deadline_s:
                    still.append(waiting)
                else:
                    self._give_up(waiting)
            self._waiting = still
            return min((waiting.deadline_s - now for waiting in still), default=float("inf"))

    def starved(self) -> list[int]:
        """Ranks whose save has waited for half of its time; whoever is only sent bytes from their slots must yield."""
        now = time.monotonic()
        with self._state.lock:
            return [w.trainer.rank for w in self._waiting if now - w.since_s >= w.request.timeout_s / 2]

    def _give_up(self, waiting: _Waiting) -> None:
        version, rank = waiting.request.version, waiting.trainer.rank
        reason = f"no slot became free within {waiting.request.timeout_s:g} s: {waiting.reason}"
        self._state.abandon(rank, version, reason)
        remedy = "save less often, or reserve a third slot (num_slots = 3)"
        error = LevelNotReached(f"{version} is abandoned: {reason}", where=f"rank {rank}", remedy=remedy)
        waiting.trainer.connection.send(refusal(waiting.request.id, error))

    def copied(self, connection: Connection, request: messages.Copied) -> None:
        """The images lie in the slot."""
        with self._state.lock:
            rank, version = self._trainer(connection).rank, request.version
            held = self._state.arena.writing(rank, version)
            if held is None or held.copied:
                logger.warning("rank %d copied %s, but is not writing it", rank, version)
                return
            try:
                self._sealer.put(held, version, request.images)
            except HoldfastError as error:
                held.clear()
                self._state.alarm(f"images of rank {rank}", f"{version} is abandoned: {error}")
                self._state.abandon(rank, version, error.what)

    def abandon(self, connection: Connection, version: Version, reason: str) -> None:
        """The rank gives a version up. The bytes of one that is being hashed stay until that ends."""
        with self._state.lock:
            rank = self._trainer(connection).rank
            held = self._state.arena.writing(rank, version)
            if held is not None:
                held.clear()
            self._state.abandon(rank, version, reason[:1000])

    # --- coming back

    def obtain(self, connection: Connection, request: messages.Obtain) -> Answer:
        """Bundles, wherever they are, present and pinned."""
        with self._state.lock:
            trainer = self._trainer(connection)
        present = self._obtainer.obtain(trainer.rank, request.version, request.fetches, request.timeout_s)
        fds: dict[int, int] = {}
        found = []
        for item in present:
            slot = item.held.slot
            number = -1 if slot.slot_id in trainer.known else fds.setdefault(slot.slot_id, len(fds))
            found.append(
                Found(
                    bundle_id=item.place.ref.bundle_id,
                    slot_id=slot.slot_id,
                    fd=number,
                    start=slot.header_bytes + item.place.offset,
                    length=item.place.seal.length,
                    seal=item.place.seal,
                    source=item.source,
                    seconds=item.seconds,
                )
            )
        with self._state.lock:
            trainer.reading += [item.held for item in present]
            if trainer.connection.ended:  # it went while we fetched
                self._release(trainer)
        slots = {item.held.slot.slot_id: item.held.slot for item in present}
        return Answer(Obtained(id=request.id, found=tuple(found)), tuple(slots[number].readonly_fd for number in fds))

    def release(self, connection: Connection) -> None:
        """The rank no longer reads what it obtained."""
        with self._state.lock:
            self._release(self._trainer(connection))

    def _release(self, trainer: _Trainer) -> None:
        held, trainer.reading = trainer.reading, []
        self._obtainer.release(held)

    def goodbye(self, connection: Connection, *, finished: bool, request: int) -> Ok:
        """The rank leaves."""
        with self._state.lock:
            if finished:
                self._state.finished.add(self._trainer(connection).rank)
            self._state.outlets.changed()
        return Ok(id=request)


def _is_other(old: Connection, new: Connection) -> bool:
    """Whether another living process holds the rank; a process may connect again."""
    return old.pid != new.pid and not old.ended and (old.pid <= 0 or start_time(old.pid) is not None)
