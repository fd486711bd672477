"""Says which slots of this node may be overwritten: what `core.versions.slot_guard` allows, and no second copy is awaited of.

Held by the keeper's state; every question is asked under its lock.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from holdfast.core.layout.parity_groups import is_unprotected
from holdfast.core.model import Version
from holdfast.core.versions.node_ledger import NodeLedger
from holdfast.core.versions.replication_lag import LEAST_PATIENCE_S, SIGN_S, ReplicationLag
from holdfast.core.versions.slot_guard import SlotView, reusable
from holdfast.keeper.slots.alarm_book import AlarmBook
from holdfast.keeper.slots.slot_pool import HeldSlot

logger = logging.getLogger(__name__)

# Of alarms: there is no second copy, and it comes late.
MISSING, LATE = "replication", "slow replication"


class OverwriteGuard:
    """Guards the slots of one node.

    Args:
        ledger: of the incarnation; None as long as the job has not come together.
        alarms: told when replication takes too long.
        give_up: called with a version whose copies here are to count no more.

    Attributes:
        lag: how replication keeps up.
        rate: asked for the bytes per second at which replicas leave this node; 0 where none do.
    """

    def __init__(
        self, ledger: Callable[[], NodeLedger | None], alarms: AlarmBook, give_up: Callable[[Version], None]
    ) -> None:
        self._ledger = ledger
        self._alarms = alarms
        self._give_up = give_up
        self.lag = ReplicationLag()
        self._sent_s: dict[Version, float] = {}
        self.rate: Callable[[], float] = lambda: 0.0

    def view(self, held: HeldSlot) -> SlotView:
        """A slot as the overwrite guard is to see it: pinned, while the loss of a node would need its version."""
        # What is pinned is not asked about: a version that is being sent is given up only for who would get its slot.
        return self._seen(held, held.view)

    def _seen(self, held: HeldSlot, view: SlotView) -> SlotView:
        if held.preloaded or view.pins or not self._awaits_replicas(held):
            return view
        return replace(view, pins=view.pins + 1)

    def is_free(self, held: HeldSlot, *, but: str = "") -> bool:
        """Return whether the guard lets a slot be overwritten; or would, `but` for the pins of that name."""
        ledger, view = self._ledger(), replace(held.view, pins=held.view.pins - held.pins[but])
        return ledger is not None and reusable(self._seen(held, view), ledger.knowledge).value

    def sent(self, version: Version) -> None:
        """Some node says that it sends a version that is awaited."""
        now = time.monotonic()
        self.lag.moved(now)
        self._sent_s = {v: at for v, at in self._sent_s.items() if now - at <= SIGN_S} | {version: now}

    def is_sent(self, version: Version) -> bool:
        """Return whether some node sends that version now, as far as is known."""
        return time.monotonic() - self._sent_s.get(version, -math.inf) <= SIGN_S

    def replicated(self, *, newest: bool) -> None:
        """A version was replicated; `newest`: none that was captured later is outstanding."""
        self.lag.replicated(time.monotonic(), newest=newest)
        self._alarms.calm(MISSING)
        if self.lag.keeps_up:
            self._alarms.calm(LATE)

    def say_slow(self) -> None:
        """A save finds no slot because of second copies. One alarm as long as replication is slower than the steps."""
        waited_s = self.lag.waited_s(time.monotonic())
        if waited_s <= LEAST_PATIENCE_S or self._alarms.is_raised(LATE):
            return
        rate = f", at {self.rate() / 1e6:.3g} MB/s from this node" if self.rate() else ""
        self._alarms.warn(
            LATE,
            f"replication is slower than the steps: the newest version has waited {waited_s:.0f} s for its second copy{rate}. "
            "Saves find no slot meanwhile: a lost process costs what was trained since one transfer began, a lost node two. Save less "
            "often (`every`), give the nodes a faster line, or leave lost nodes to storage (`redundancy`)",
        )

    def awaits_replicas(self, held: HeldSlot) -> bool:
        """Return whether nothing newer than its version is known to be in two nodes, in a job that has two and uses them."""
        # Seen as the guard sees it: what all failed its digest is worth nothing and must not lock a slot.
        ledger, version = self._ledger(), held.view.version
        return (
            ledger is not None
            and version is not None
            and not is_unprotected(ledger.topology)
            and ledger.awaits_copies(version)
        )

    def _awaits_replicas(self, held: HeldSlot) -> bool:
        """The same while there is patience; then such copies are given up."""
        ledger, version, now = self._ledger(), held.view.version, time.monotonic()
        if ledger is None or version is None or not self.awaits_replicas(held):
            return False
        if self.lag.lasts(now):
            return True
        self._alarms.warn(
            MISSING,
            f"the newest version has no second copy after {self.lag.patience_s(now):.0f} s; until replication "
            "catches up the loss of a node may cost everything since the last durable version",
        )
        return not self.may_drop(ledger, version)

    def may_drop(self, ledger: NodeLedger, version: Version) -> bool:
        """Return whether copies that are awaited may be overwritten; the coordinator is asked the first time."""
        decision = ledger.give_up_copies(version)
        if decision.reason:
            logger.info("%s: its copies here are to count no more", decision.reason)
            self._give_up(version)
        return decision.value
