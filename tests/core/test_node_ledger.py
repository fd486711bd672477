"""What a node knows of its versions: bounded, without forgetting what people and rules ask for."""

from __future__ import annotations

from holdfast.core.model import Level, Topology, Version
from holdfast.core.versions import coordinator_board
from holdfast.core.versions.coordinator_board import Announcement, Kind
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger


def test_the_newest_of_each_level_is_known_however_many_versions_came_since() -> None:
    """A version in storage each minute and a save in each second leave many versions between."""
    ledger = NodeLedger(node=0, topology=Topology(("a", "b"), (0, 1)), incarnation=1, lineage=Lineage())
    many = 3 * coordinator_board.MAX_VERSIONS
    safe = Version(1, 0)
    for kind in (Kind.CAPTURED, Kind.REPLICATED, Kind.DURABLE):
        ledger.told(Announcement(kind, safe, "told"))
    for step in range(1, many):
        ledger.told(Announcement(Kind.CAPTURED, Version(1, step), "told"))

    assert ledger.newest(Level.CAPTURED) == Version(1, many - 1)
    assert ledger.newest(Level.REPLICATED) == safe
    assert ledger.newest(Level.DURABLE) == safe
    known = [step for step in range(many) if ledger.standing(Version(1, step))[0]]
    assert len(known) <= coordinator_board.MAX_VERSIONS + 1, "it is bounded all the same"
