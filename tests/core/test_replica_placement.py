"""Backup nodes: never the home, never its rack, equal loads, few pairs; for any number of nodes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.layout import replica_placement
from holdfast.core.layout.bundles import plan_bundles, rank_layout
from holdfast.core.model import BundleRef, Extent, Shard, Topology

CASES = settings(max_examples=150, deadline=None)
MIB = 1 << 20


def job(
    sizes: list[list[int]], racks: tuple[str, ...] = (), named: tuple[int, ...] = ()
) -> tuple[list[BundleRef], Topology]:
    """One rank a node; `sizes[node]` are the bytes of the bundles that live there only."""
    topology = Topology(tuple(f"n{i}" for i in range(len(sizes))), tuple(range(len(sizes))), racks, named)
    refs = [
        BundleRef(f"b{node}-{index}", (node,), index, len(mine), size, "f")
        for node, mine in enumerate(sizes)
        for index, size in enumerate(mine)
    ]
    return refs, topology


def loads(refs: list[BundleRef], placed: dict[str, int], num_nodes: int) -> list[int]:
    kept = Counter()
    for ref in refs:
        kept[placed[ref.bundle_id]] += ref.num_bytes
    return [kept[node] for node in range(num_nodes)]


@pytest.mark.parametrize("num_nodes", [2, 3, 5, 7, 64])
def test_equal_nodes_keep_the_replicas_of_the_one_before(num_nodes: int) -> None:
    refs, topology = job([[4 * MIB] * 3] * num_nodes)
    placed = replica_placement.place(refs, topology)
    assert {placed[ref.bundle_id] - ref.ranks[0] for ref in refs} <= {1, 1 - num_nodes}
    assert len(set(loads(refs, placed, num_nodes))) == 1


def test_one_node_has_no_backup_and_twins_need_none() -> None:
    refs, topology = job([[1]])
    assert replica_placement.place(refs, topology) == {}
    topology = Topology(("a", "b"), (0, 1))
    assert replica_placement.place([BundleRef("twins", (0, 1), 0, 1, 9, "f")], topology) == {}


@CASES
@given(st.lists(st.integers(0, 60), min_size=2, max_size=12))
def test_loads_are_equal_wherever_they_can_be(counts: list[int]) -> None:
    """Nodes of any sizes, of bundles of 1 MiB: no load is above the mean by a tenth and a bundle of each pair."""
    refs, topology = job([[MIB] * count for count in counts])
    placed = replica_placement.place(refs, topology)
    assert all(placed[ref.bundle_id] != ref.ranks[0] for ref in refs)
    kept = loads(refs, placed, len(counts))
    mean, largest = sum(counts) * MIB / len(counts), max(counts) * MIB
    others = (sum(counts) * MIB - largest) / 1
    if len(counts) > 2 and largest + mean <= sum(counts) * MIB:  # else one node holds more than the rest has room for
        assert max(kept) <= 1.1 * mean + 2 * MIB
        assert min(kept) >= 0.9 * mean - 2 * MIB
    else:  # the largest keeps all of the others' bytes, and they share its
        assert kept[counts.index(max(counts))] >= others - 2 * MIB
    pairs = {(ref.ranks[0], placed[ref.bundle_id]) for ref in refs}
    assert len(pairs) <= 3 * len(counts)


@CASES
@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from("abcd")), min_size=2, max_size=12))
def test_no_two_copies_share_a_rack(nodes: list[tuple[int, str]]) -> None:
    racks = tuple(rack for _, rack in nodes)
    refs, topology = job([[MIB] * count for count, _ in nodes], racks)
    placed = replica_placement.place(refs, topology)
    for ref in refs:
        home, backup = ref.ranks[0], placed[ref.bundle_id]
        assert home != backup
        assert racks[home] != racks[backup] or len(set(racks)) == 1
    by_rack = Counter()
    for count, rack in nodes:
        by_rack[rack] += count
    kept, total = loads(refs, placed, len(nodes)), sum(by_rack.values())
    mean = total / len(nodes)
    if len(by_rack) > 1 and all(by_rack[r] + mean * racks.count(r) <= total for r in by_rack):
        assert max(kept) <= (1.1 * mean + 3) * MIB


def test_named_pairs_are_taken_and_the_others_even_it_out() -> None:
    refs, topology = job([[MIB] * 10] * 5, named=(1, 0, -1, -1, -1))
    placed = replica_placement.place(refs, topology)
    assert {placed[ref.bundle_id] for ref in refs if ref.ranks[0] == 0} == {1}
    assert {placed[ref.bundle_id] for ref in refs if ref.ranks[0] == 1} == {0}
    assert loads(refs, placed, 5) == [10 * MIB] * 5


def test_two_nodes_of_different_size_keep_each_others() -> None:
    refs, topology = job([[MIB] * 9, [MIB]])
    assert loads(refs, replica_placement.place(refs, topology), 2) == [MIB, 9 * MIB]


def test_everybody_finds_the_same_whatever_the_order() -> None:
    refs, topology = job([[3 * MIB] * 4, [MIB] * 40, [2 * MIB], [], [5 * MIB] * 7])
    assert replica_placement.place(refs, topology) == replica_placement.place(refs[::-1], topology)


def test_many_nodes_of_two_sizes_are_served_in_about_as_many_pairs() -> None:
    """512 nodes, 20,480 bundles."""
    num_nodes = 512
    refs, topology = job([[MIB] * (20 + 40 * (node % 2)) for node in range(num_nodes)])
    placed = replica_placement.place(refs, topology)
    kept = loads(refs, placed, num_nodes)
    assert max(kept) <= 1.1 * sum(kept) / num_nodes
    assert len({(ref.ranks[0], placed[ref.bundle_id]) for ref in refs}) <= 2 * num_nodes


def shared(mesh: list[tuple[int, ...]], num_ranks: int, per_node: int) -> tuple[list[BundleRef], Topology]:
    """One tensor of 64 MiB in shards, one for each group of `mesh`, cut as the trainers cut it."""
    num_nodes = num_ranks // per_node
    topology = Topology(tuple(f"n{i}" for i in range(num_nodes)), tuple(rank // per_node for rank in range(num_ranks)))
    rows = 16_384 // len(mesh)
    refs = {}
    for index, ranks in enumerate(mesh):
        shard = Shard("w", "F32", (16_384, 1024), Extent((index * rows, 0), (rows, 1024)), ranks)
        planned = plan_bundles([shard], values_of=(), topology=topology)
        refs.update({ref.bundle_id: ref for ref in rank_layout(planned, ranks[0], topology).bundles})
    return list(refs.values()), topology


@pytest.mark.parametrize(
    ("mesh", "num_ranks", "per_node"),
    [([(0, 1)], 2, 1), ([(0, 1, 2, 3)], 4, 2), ([(0, 2), (1, 3)], 4, 2)],
    ids=["ddp", "ddp-two-a-node", "hsdp-2-2"],
)
def test_twins_on_two_nodes_cost_no_replica_byte(mesh: list[tuple[int, ...]], num_ranks: int, per_node: int) -> None:
    refs, topology = shared(mesh, num_ranks, per_node)
    assert sum(ref.num_bytes for ref in refs) == 64 * MIB
    assert replica_placement.place(refs, topology) == {}


@pytest.mark.parametrize("num_nodes", [2, 3, 5])
@pytest.mark.parametrize("per_node", [1, 2])
def test_full_sharding_sends_exactly_what_is_unique_in_equal_loads(num_nodes: int, per_node: int) -> None:
    num_ranks = num_nodes * per_node
    refs, topology = shared([(rank,) for rank in range(num_ranks)], num_ranks, per_node)
    placed = replica_placement.place(refs, topology)
    assert placed.keys() == {ref.bundle_id for ref in refs}
    kept = loads(refs, placed, num_nodes)
    assert sum(kept) == sum(ref.num_bytes for ref in refs)
    assert max(kept) <= 1.1 * sum(kept) / num_nodes


@CASES
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from("ab")), min_size=3, max_size=9
    ),
    st.integers(0, 8),
)
def test_a_lost_node_is_filled_again_with_what_it_kept(nodes: list[tuple[list[int], str]], lost: int) -> None:
    """A replaced node has its own state back from its replicas; what it kept for others has one copy left."""
    sizes, racks = [[size * MIB for size in mine] for mine, _ in nodes], tuple(rack for _, rack in nodes)
    lost %= len(sizes)
    refs, topology = job(sizes, racks)
    placed = replica_placement.place(refs, topology)
    holders = {name: ref.ranks[0] for ref in refs if placed[name := ref.bundle_id] == lost}
    again = replica_placement.place_again(refs, holders, topology)
    assert again == dict.fromkeys(holders, lost), "at the same place, racks and loads as before"


def test_a_second_copy_goes_elsewhere_if_the_plan_names_its_only_holder() -> None:
    """Node 2 kept the replicas of node 0, which stays away for now: another rack than node 2's takes them, evenly."""
    refs, topology = job([[MIB] * 8, [MIB], [MIB] * 8, [MIB]], racks=("a", "a", "b", "a"))
    holders = {
        ref.bundle_id: 2
        for ref in refs
        if ref.ranks[0] == 0 and replica_placement.place(refs, topology)[ref.bundle_id] == 2
    }
    assert len(holders) == 8
    again = replica_placement.place_again(refs, holders, topology)
    assert again.keys() == holders.keys()
    taken = Counter(again.values())
    assert set(taken) <= {0, 1, 3}
    assert max(taken.values()) <= 3, "not all on the next node round"


def test_named_pairs_hold_for_second_copies_and_twins_are_spread() -> None:
    refs, topology = job([[MIB]] * 4, named=(2, -1, -1, -1))
    holders = {ref.bundle_id: ref.ranks[0] for ref in refs if ref.ranks[0] == 0}
    assert replica_placement.place_again(refs, holders, topology) == {"b0-0": 2}
    twins = [BundleRef(f"t{i}", (0, 1), i, 6, MIB, "f") for i in range(6)]
    flat = Topology(tuple("abcd"), (0, 1, 2, 3))
    again = replica_placement.place_again(twins, {ref.bundle_id: 0 for ref in twins}, flat)
    assert sorted(Counter(again.values()).values()) == [2, 2, 2]
    assert 0 not in again.values()


def layouts(num_nodes: int) -> dict[str, tuple[list[Shard], Topology, int]]:
    """Shards of one weight and its moment under three strategies, one rank a node (hybrid: two), and the bytes of one node only."""
    rows, one = 240 * num_nodes, Topology(tuple(f"n{i}" for i in range(num_nodes)), tuple(range(num_nodes)))
    names, ranks = ("weight", "moment"), tuple(range(num_nodes))
    two = Topology(one.nodes, tuple(node for node in ranks for _ in range(2)))

    def part(name: str, index: int, count: int, holders: tuple[int, ...]) -> Shard:
        size = rows // count
        return Shard(name, "F32", (rows, 1024), Extent((index * size, 0), (size, 1024)), holders)

    return {
        "data parallel": ([part(name, 0, 1, ranks) for name in names], one, 0),
        "fully sharded": (
            [part(name, rank, num_nodes, (rank,)) for name in names for rank in ranks], one, 2 * rows * 4096,
        ),
        "hybrid": ([part(name, i, 2, tuple(range(i, 2 * num_nodes, 2))) for name in names for i in (0, 1)], two, 0),
    }  # fmt: skip


@pytest.mark.parametrize("num_nodes", [2, 3, 5])
def test_what_is_sent_is_what_one_node_alone_holds_under_every_strategy(num_nodes: int) -> None:
    for name, (shards, topology, unique) in layouts(num_nodes).items():
        world = range(len(topology.node_of))
        mine = {r: plan_bundles([s for s in shards if r in s.ranks], values_of=[], topology=topology) for r in world}
        refs = {ref.bundle_id: ref for r in world for ref in rank_layout(mine[r], r, topology).bundles}
        placed = replica_placement.place(list(refs.values()), topology)
        sent = Counter()
        for bundle_id, node in placed.items():
            sent[node] += refs[bundle_id].num_bytes
            assert node not in {topology.node_of[rank] for rank in refs[bundle_id].ranks}
        assert sum(sent.values()) == unique, name
        assert all(abs(kept - unique / num_nodes) <= 0.1 * unique / num_nodes for kept in sent.values()), name
