"""What the core costs at 1,024 ranks: no step of a save may grow faster than the job.

What is counted is the interpreter's instructions, not seconds, so that a busy machine changes nothing; and only growth is
judged: four times the ranks may cost eight times as much, where a quadratic step costs sixteen. `-rP` for the figures.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from holdfast.core.layout import bundles
from holdfast.core.model import BundleRef, Extent, RankLayout, Seal, Shard, Topology, Version
from holdfast.core.versions.coordinator_board import Announcement, Board, Kind, RankReport
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger
from sample_kit import MORE

PER_NODE = 8


def topology_of(num_ranks: int) -> Topology:
    nodes = tuple(f"n{node}" for node in range(num_ranks // PER_NODE))
    return Topology(nodes, tuple(rank // PER_NODE for rank in range(num_ranks)))


def cost(work: Callable[[], object]) -> int:
    """Instructions of the interpreter."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def entries(count: int, rank: int, world_size: int) -> list[Shard]:
    """FSDP: every rank holds rows of its own of each entry, and small things are the same everywhere."""
    everyone = tuple(range(world_size))
    own = Extent((rank * 64, 0), (64, 1024))
    big = [Shard(f"w{n}", "F32", (64 * world_size, 1024), own, (rank,)) for n in range(count * 9 // 10)]
    small = [Shard(f"s{n}", "F32", (1024,), Extent((0,), (1024,)), everyone) for n in range(count // 10)]
    return big + small


def plan(count: int, num_ranks: int) -> RankLayout:
    topology = topology_of(num_ranks)
    planned = bundles.plan_bundles(entries(count, 3, num_ranks), values_of=[(3,)], topology=topology)
    return bundles.rank_layout(planned, 3, topology)


def test_planning_grows_with_the_entries_and_hardly_with_the_ranks() -> None:
    base, more_entries = cost(lambda: plan(1000, 256)), cost(lambda: plan(4000, 256))
    more_ranks = cost(lambda: plan(1000, 1024))
    print(f"plan of 1,000 entries: {base} instructions at 256 ranks, {more_ranks} at 1,024")
    print(f"plan of 4,000 entries: {more_entries} instructions at 256 ranks")
    assert more_entries < 8 * base
    assert more_ranks < 2 * base


class Fleet:
    """A job in which every rank has a bundle of its own and all share `shared` more."""

    def __init__(self, num_ranks: int, shared: int) -> None:
        self.topology = topology_of(num_ranks)
        everyone = tuple(range(num_ranks))
        common = [BundleRef(f"all-{i}", everyone, i, shared, 1 << 22, "f") for i in range(shared)]
        self.layouts = []
        for rank in everyone:
            refs = (*common, BundleRef(f"own-{rank}", (rank,), 0, 1, 1 << 22, "f"))
            self.layouts.append(RankLayout(rank, refs, bundles.captures(refs, rank, self.topology)))
        self.names = [layout.fingerprint for layout in self.layouts]
        self.board = Board(self.topology)
        for layout in self.layouts:
            self.board.register(layout)
        self.step = 0

    def save(self) -> list[Kind]:
        """One version from the first report to the last; what was announced."""
        self.step += 1
        version = Version(1, self.step)
        said: list[Kind] = []
        for node in range(len(self.topology.nodes)):
            ranks = self.topology.ranks_on(node)
            actions = self.board.sealed([self._report(rank, version) for rank in ranks])
            said += [action.kind for action in actions if isinstance(action, Announcement)]
        for node in range(len(self.topology.nodes)):
            held = (node - 1) % len(self.topology.nodes)
            actions = self.board.replicated(version, node, [f"own-{rank}" for rank in self.topology.ranks_on(held)])
            said += [action.kind for action in actions if isinstance(action, Announcement)]
        return said

    def _report(self, rank: int, version: Version) -> RankReport:
        seals = tuple(Seal(bundle_id, 1, "d") for bundle_id in self.layouts[rank].captures)
        return RankReport(version, rank, self.names[rank], seals, False)


@MORE
def test_a_version_costs_the_coordinator_work_in_proportion_to_the_ranks() -> None:
    figures = {}
    for num_ranks in (256, 1024):
        fleet = Fleet(num_ranks, shared=32)
        assert fleet.save() == [Kind.CAPTURED, Kind.REPLICATED]
        for _ in range(40):
            fleet.save()
        figures[num_ranks] = cost(fleet.save)
        print(f"{num_ranks} ranks: {figures[num_ranks]} instructions for a version after 40 others")
    assert figures[1024] < 8 * figures[256]


def test_a_version_costs_a_keeper_work_in_proportion_to_its_own_ranks() -> None:
    spent = {}
    for num_ranks in (256, 1024):
        fleet = Fleet(num_ranks, shared=32)
        ledger = NodeLedger(node=0, topology=fleet.topology, incarnation=1, lineage=Lineage())
        ledger.tables.learn("layout", [ref for layout in fleet.layouts for ref in layout.bundles[-1:]])

        steps = itertools.count()

        def hear(ledger: NodeLedger = ledger, steps: Iterator[int] = steps) -> None:
            version = Version(1, next(steps))
            ledger.told(Announcement(Kind.CAPTURED, version, "sealed", "layout"))
            assert len(ledger.bundles_of(version).to_replicate) == PER_NODE

        hear()
        spent[num_ranks] = cost(lambda hear=hear: [hear() for _ in range(20)])  # type: ignore[misc]
        print(f"{num_ranks} ranks: {spent[num_ranks] // 20} instructions per version and node")
    assert spent[1024] < 3 * spent[256]
