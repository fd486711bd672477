"""Says which slots of this node may be overwritten: what `core.versions.slot_guard` allows, and no second copy is awaited of.

Held by the keeper's state; every question is asked under its lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from holdfast.core.layout.parity_groups import is_unprotected
from holdfast.core.model import Version
from holdfast.core.versions.node_ledger import NodeLedger
from holdfast.core.versions.replication_lag import ReplicationLag
from holdfast.core.versions.slot_guard import SlotView, reusable
from holdfast.keeper.slots.alarm_book import AlarmBook
from holdfast.keeper.slots.slot_pool import HeldSlot

logger = logging.getLogger(__name__)


class OverwriteGuard:
    """Guards the slots of one node.

    Args:
        ledger: of the incarnation; None as long as the job has not come together.
        alarms: told when replication takes too long.
        give_up: called with a version whose copies here are to count no more.

    Attributes:
        lag: how replication keeps up.
    """

    def __init__(
        self, ledger: Callable[[], NodeLedger | None], alarms: AlarmBook, give_up: Callable[[Version], None]
    ) -> None:
        self._ledger = ledger
        self._alarms = alarms
        self._give_up = give_up
        self.lag = ReplicationLag()

    def view(self, held: HeldSlot) -> SlotView:
        """A slot as the overwrite guard is to see it: pinned, while the loss of a node would need its version."""
        if held.preloaded or not self.awaits_replicas(held):
            return held.view
        return replace(held.view, pins=held.view.pins + 1)

    def is_free(self, held: HeldSlot) -> bool:
        """Return whether the guard lets a slot be overwritten."""
        return (ledger := self._ledger()) is not None and reusable(self.view(held), ledger.knowledge).value

    def awaits_replicas(self, held: HeldSlot) -> bool:
        """Return whether nothing newer than its version is known to be in two nodes, in a job that has two and uses them."""
        # Seen as the guard sees it: what all failed its digest is worth nothing and must not lock a slot.
        ledger, version = self._ledger(), held.view.version
        if ledger is None or version is None or is_unprotected(ledger.topology) or not ledger.awaits_copies(version):
            return False
        if self.lag.lasts(time.monotonic()):
            return True
        self._alarms.warn(
            "replication",
            f"the newest version has no second copy after {self.lag.limit_s:.0f} s; until replication "
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
