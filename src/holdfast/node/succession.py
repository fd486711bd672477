"""The lines of writers, carried out: what this node writes of a version, what it keeps to be able to take over.

Feeds core.takeover.Watch with what the coordinator passes on and with the clock, and hands its orders to the persister.
A slot that this node writes from is pinned. One that it may have to write from, because another node is slower or
fails, is kept too, but yields to a save that finds no other slot: a checkpoint that is being written must not be the
reason that newer ones are not taken. All methods run under the state's lock and only queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from holdfast.base.events import Events
from holdfast.core.commit import Announcement, Kind, PartReport, WriteFailure
from holdfast.core.ledger import Reports
from holdfast.core.model import Level, Version
from holdfast.core.slots import SlotState
from holdfast.core.takeover import Order, Part, Watch
from holdfast.node.arena import Held
from holdfast.node.state import NodeState

logger = logging.getLogger(__name__)

WRITING_PIN = "persisting"
WATCHING_PIN = "watching"


class Succession:
    """One keeper's place in all lines. `put` hands an order to the persister."""

    def __init__(self, state: NodeState, events: Events, put: Callable[[Order], None]) -> None:
        self._state = state
        self._events = events
        self._put = put
        self._watch = Watch(-1)
        self._pinned: dict[Order, list[list[Held]]] = {}  # per order that waits or is carried out

    def begin(self) -> None:
        """A new incarnation, or none any more: what was watched is over."""
        self._watch = Watch(self._state.node)
        self._unpin(None)

    def hear(self, told: Announcement) -> None:
        """What the coordinator said of a version that is on its way to storage."""
        now, version = time.monotonic(), told.version
        if told.kind is Kind.PERSIST:
            parts = self._state.need_ledger().parts_of(version)
            orders = self._watch.persist(version, parts, now)
            self._pin(version, self._watch.watched(version), WATCHING_PIN)
            self._carry_out(orders)
        elif told.kind is Kind.DURABLE:
            self._watch.forget(version)
            self._unpin(version)
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

    def again(self, order: Order) -> None:
        """Has an order carried out that failed, if it is still wanted and its bytes are still held."""
        ledger = self._state.ledger
        if ledger is None or order.version.incarnation != ledger.incarnation:
            return
        held = all(self._state.arena.find(order.version, ref.bundle_id) for part in order.parts for ref in part.refs)
        if held and Level.DURABLE not in ledger.standing(order.version)[0]:
            self._submit(order)

    def wrote(self, part: PartReport) -> None:
        """This node wrote a part."""
        state = self._state
        if state.ledger is not None and part.version.incarnation == state.ledger.incarnation:
            self._watch.written(part.version, part.node, (part.index,))
            state.ledger.wrote(part)
            state.outlets.report(Reports(parts=(part,)))

    def failed(self, order: Order, reason: str, *, gone: bool) -> None:
        """This node could not carry an order out: those behind it are told at once."""
        state, indices = self._state, tuple(part.index for part in order.parts)
        if state.ledger is not None and order.version.incarnation == state.ledger.incarnation:
            self._watch.failed(order.version, state.node, indices, reason, time.monotonic())
            state.outlets.report(Reports(failures=(WriteFailure(order.version, indices, reason[:1000], gone),)))

    def at_work(self, version: Version) -> None:
        """This node is writing: a sign for those who watch it."""
        state = self._state
        if state.ledger is not None and version.incarnation == state.ledger.incarnation:
            state.outlets.report(Reports(at_work=(version,)))

    def done(self, order: Order) -> None:
        """The order is carried out, failed or dropped. Slots that another order of the version needs stay pinned."""
        attempts = self._pinned.get(order, [])
        for held in attempts.pop() if attempts else ():
            self._state.unpin(held, WRITING_PIN)
        if not attempts:
            self._pinned.pop(order, None)

    def yield_slots(self, rank: int) -> bool:
        """Lets go of what is only kept in case somebody fails; True if that freed a slot of this rank."""
        held = [held for held in self._state.arena.of_rank(rank) if WATCHING_PIN in held.pins]
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
        self._pinned.setdefault(order, []).append(self._pin(order.version, order.parts, WRITING_PIN))
        self._put(order)

    def _pin(self, version: Version, parts: Iterable[Part], why: str) -> list[Held]:
        """Pins the slots that hold any of these bundles; one pin per order that writes, one for all that is watched."""
        ids = {ref.bundle_id for part in parts for ref in part.refs}
        pinned = []
        for held in self._state.arena:
            # Replicas of what is not replicated anew are kept anyway, and one slot more would stop replication.
            kept = why is WRITING_PIN or not held.replica
            here = held.version == version and held.state is SlotState.SEALED
            if kept and here and not ids.isdisjoint(held.images):
                held.pins[why] = held.pins[why] + 1 if why is WRITING_PIN else 1
                pinned.append(held)
        return pinned

    def _unpin(self, version: Version | None) -> None:
        for held in self._state.arena:
            if WATCHING_PIN in held.pins and version in (None, held.version):
                del held.pins[WATCHING_PIN]
