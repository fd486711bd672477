"""The lines of writers, carried out: what this node writes of a version, what it keeps to be able to take over.

Feeds core.versions.writer_failover.Watch with what the coordinator passes on and with the clock, and hands its orders to the persister.
A slot that this node writes from is pinned from the moment it is found (`WriteAttempt`). One that it may have to write from,
because another node is slower or fails, is kept too, but yields to a save that finds no other slot: a checkpoint that is
being written must not be the reason that newer ones are not taken. All methods run under the state's lock and only queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Level, Version
from holdfast.core.versions.coordinator_board import Announcement, Kind, PartReport, WriteFailure
from holdfast.core.versions.node_ledger import Reports
from holdfast.core.versions.slot_guard import SlotState
from holdfast.core.versions.writer_failover import Order, Watch
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.slot_pool import HeldSlot, SlotPool
from holdfast.tiers.memory.slots import ImagePlace

logger = logging.getLogger(__name__)

WRITING_PIN = "persisting"
WATCHING_PIN = "watching"


@dataclass(slots=True, eq=False)
class WriteAttempt:
    """One attempt at an order. Its slots stay as they are from the moment they are found until `WriterFailover.done`.

    Attributes:
        held: the slots that are pinned for it, each once.
    """

    order: Order
    held: list[HeldSlot] = field(default_factory=list)

    def find(self, slot_pool: SlotPool, ref: BundleRef) -> tuple[HeldSlot, ImagePlace] | None:
        """Returns a sealed copy of a bundle, pinned; None if there is none here. Under the state's lock."""
        found = slot_pool.find(self.order.version, ref.bundle_id)
        if found is not None:
            self._pin(found[0])
        return found

    def _pin(self, held: HeldSlot) -> None:
        if held not in self.held:
            held.pins[WRITING_PIN] += 1
            self.held.append(held)


class WriterFailover:
    """One keeper's place in all lines. `put` hands an order to the persister."""

    def __init__(self, state: NodeState, events: Events, put: Callable[[WriteAttempt], None]) -> None:
        self._state = state
        self._events = events
        self._put = put
        self._watch = Watch(-1)

    def begin(self) -> None:
        """Forgets what was watched: a new incarnation begins, or the job is over."""
        self._watch = Watch(self._state.node)
        self._keep_no_more(None)

    def hear(self, told: Announcement) -> None:
        """Hear what the coordinator said of a version that is on its way to storage."""
        now, version = time.monotonic(), told.version
        if told.kind is Kind.PERSIST:
            parts = self._state.need_ledger().bundles_of(version).parts
            orders = self._watch.persist(version, parts, now)
            self._keep_watched(version)
            self._carry_out(orders)
        elif told.kind is Kind.DURABLE:
            self._watch.forget(version)
            self._keep_no_more(version)
        elif told.kind is Kind.AT_WORK:
            self._watch.sign(version, told.node, now)
        elif told.kind is Kind.WRITTEN:
            self._watch.written(version, told.node, told.parts)
            if told.report is not None:
                self._state.need_ledger().wrote(told.report)
        elif told.kind is Kind.FAILED and told.node != self._state.node:
            self._carry_out(self._watch.failed(version, told.node, told.parts, told.reason, now))

    def tick(self) -> None:
        """Ends leases."""
        self._carry_out(self._watch.tick(time.monotonic()))

    def again(self, order: Order) -> bool:
        """Has an order carried out that failed, if it is still wanted and its bytes are here. False: they may still come."""
        ledger = self._state.ledger
        if ledger is None or order.version.incarnation != ledger.incarnation:
            return True
        standing = ledger.standing(order.version)
        if Level.DURABLE in standing.reached:
            return True
        if not self._holds(order):
            return standing.passed  # what a newer durable version has passed is not waited for
        self._submit(order)
        return True

    def _holds(self, order: Order) -> bool:
        """Returns whether a good copy of everything that the order is to write is here."""
        return all(
            self._state.slot_pool.find(order.version, ref.bundle_id) for part in order.parts for ref in part.refs
        )

    def wrote(self, part: PartReport) -> None:
        """This node wrote a part."""
        state = self._state
        if state.ledger is not None and part.version.incarnation == state.ledger.incarnation:
            self._watch.written(part.version, part.node, (part.index,))
            state.ledger.wrote(part)
            state.callbacks.report(Reports(parts=(part,)))

    def failed(self, order: Order, reason: str) -> None:
        """Tells those behind this node at once that it could not carry an order out."""
        gone = not self._holds(order)
        state, indices = self._state, tuple(part.index for part in order.parts)
        if state.ledger is not None and order.version.incarnation == state.ledger.incarnation:
            self._watch.failed(order.version, state.node, indices, reason, time.monotonic())
            state.callbacks.report(Reports(failures=(WriteFailure(order.version, indices, reason[:1000], gone),)))

    def at_work(self, version: Version) -> None:
        """This node is writing: a sign for those who watch it."""
        state = self._state
        if state.ledger is not None and version.incarnation == state.ledger.incarnation:
            state.callbacks.report(Reports(at_work=(version,)))

    def done(self, writing: WriteAttempt) -> None:
        """Frees the slots of an order that is carried out, failed or dropped; those that another needs stay pinned."""
        held, writing.held = writing.held, []
        for slot in held:
            self._state.unpin(slot, WRITING_PIN)

    def yield_slots(self, rank: int) -> bool:
        """Lets go of what is only kept in case somebody fails; True if that freed a slot of this rank."""
        held = [held for held in self._state.slot_pool.of_rank(rank) if WATCHING_PIN in held.pins]
        for slot in held:
            del slot.pins[WATCHING_PIN]
        return bool(held)

    def _carry_out(self, orders: Iterable[Order]) -> None:
        for order in orders:
            if order.term:
                self._events.count("takeovers")
                self._events.emit("node.takeover", version=str(order.version), term=order.term, reason=order.reason)
                logger.warning(
                    "%s: writing %d parts in term %d: %s", order.version, len(order.parts), order.term, order.reason
                )
            self._submit(order)

    def _submit(self, order: Order) -> None:
        """Queues an order. What it needs and is here stays; what is still on its way here is looked for when its turn comes."""
        writing = WriteAttempt(order)
        for part in order.parts:
            for ref in part.refs:
                writing.find(self._state.slot_pool, ref)
        self._put(writing)

    def _keep_watched(self, version: Version) -> None:
        """Keeps the slots of local ranks that hold a bundle which this node may have to take over."""
        ids = {ref.bundle_id for part in self._watch.watched(version) for ref in part.refs}
        for held in self._state.slot_pool:
            # Replicas of what is not replicated anew are kept anyway, and one slot more would stop replication.
            here = held.version == version and held.state is SlotState.SEALED and not held.replica
            if here and not ids.isdisjoint(held.images):
                held.pins[WATCHING_PIN] = 1

    def _keep_no_more(self, version: Version | None) -> None:
        for held in self._state.slot_pool:
            if WATCHING_PIN in held.pins and version in (None, held.version):
                del held.pins[WATCHING_PIN]
