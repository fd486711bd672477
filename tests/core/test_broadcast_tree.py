"""Who reads what from storage: every byte once, balanced, and everybody gets it from somebody who has it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.model import BundleRef, Seal, Topology, Version
from holdfast.core.recovery.broadcast_tree import BRANCHES, upstreams
from holdfast.core.recovery.version_choice import (
    Choice,
    Facts,
    Lineage,
    MemoryCopy,
    Source,
    Stored,
    choose_version,
    explain,
    fetches,
    way,
)


def ref(name: str, ranks: tuple[int, ...], num_bytes: int = 100) -> BundleRef:
    return BundleRef(name, ranks, 0, 1, num_bytes, "f")


@given(
    num_nodes=st.integers(1, 40),
    per_node=st.integers(1, 4),
    ranks_per_reader=st.sampled_from([1, 2, 8, 512]),
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=20),
)
def test_every_node_has_one_way_to_a_reader(
    num_nodes: int, per_node: int, ranks_per_reader: int, sizes: list[int]
) -> None:
    node_of = [rank // per_node for rank in range(num_nodes * per_node)]
    everybody = tuple(range(len(node_of)))
    bundles = [ref(f"b{i}", everybody[i % len(everybody) :], size) for i, size in enumerate(sizes)]
    found = upstreams(bundles, node_of, ranks_per_reader=ranks_per_reader)
    for bundle in bundles:
        tree = found[bundle.bundle_id]
        nodes = {node_of[rank] for rank in bundle.ranks}
        assert set(tree) == nodes
        readers = [node for node, parent in tree.items() if parent is None]
        assert len(readers) == min(len(nodes), -(-len(bundle.ranks) // ranks_per_reader))
        assert max(Counter(parent for parent in tree.values() if parent is not None).values(), default=0) <= BRANCHES
        for node in nodes:
            seen = set()
            while tree[node] is not None:
                assert node not in seen
                seen.add(node)
                node = tree[node]


def test_reading_is_balanced_by_bytes() -> None:
    node_of = list(range(8))
    bundles = [ref(f"b{i:03}", tuple(range(8)), 50 + i % 7) for i in range(400)]
    found = upstreams(bundles, node_of)
    load = Counter({node: sum(b.num_bytes for b in bundles if found[b.bundle_id][node] is None) for node in range(8)})
    assert max(load.values()) <= 1.1 * sum(load.values()) / 8


def test_a_plan_reads_storage_once_and_says_why() -> None:
    version, world = Version(1, 5), 4
    table = (ref("all", (0, 1, 2, 3)), ref("own", (2,)))
    seals = {b.bundle_id: Seal(b.bundle_id, 64, "0" * 32) for b in table}
    topology = Topology(tuple("abcd"), (0, 1, 2, 3))
    facts = Facts((), {}, {version: Stored(version, world, table, seals)}, Lineage(), topology)
    choice = choose_version(facts).value
    assert choice is not None
    plans = [fetches(choice, rank, facts) for rank in range(world)]
    of_all = [fetch for plan in plans for fetch in plan if fetch.ref.bundle_id == "all"]
    assert [fetch.source for fetch in of_all] == [Source.STORAGE] * 4
    assert sum(fetch.via is None for fetch in of_all) == 1
    ways = [{fetch.ref.bundle_id: way(fetch, topology.nodes) for fetch in plan} for plan in plans]
    said = [explain(found, {"all": 64, "own": 64}) for found in ways]
    assert sum("this node reads them for the others" in text for text in said) >= 1
    assert sum("so that storage is read once" in text for text in said) == 3


def test_what_some_memory_holds_is_not_read_from_storage() -> None:
    version = Version(1, 5)
    table = (ref("all", (0, 1)),)
    seal = Seal("all", 64, "0" * 32)
    topology = Topology(("a", "b"), (0, 1))
    stored = {version: Stored(version, 2, table, {"all": seal})}
    facts = Facts((MemoryCopy.at(version, 1, 1, seal),), {}, stored, Lineage(), topology)
    choice: Choice | None = choose_version(facts).value
    assert choice is not None
    (fetch,) = fetches(choice, 0, facts)
    assert (fetch.source, fetch.node, fetch.via) == (Source.PEER, 1, None)
    assert "memory of b" in way(fetch, topology.nodes)


@given(data=st.data())
def test_only_what_no_other_rank_wants_is_read_straight(data: st.DataObject) -> None:
    """Else storage would be read twice, or nothing would be handed on; and nothing that any memory holds is."""
    num_ranks = data.draw(st.integers(1, 6))
    node_of = tuple(sorted(data.draw(st.integers(0, 2)) for _ in range(num_ranks)))
    node_of = tuple(sorted(set(node_of)).index(node) for node in node_of)
    groups = data.draw(st.lists(st.sets(st.integers(0, num_ranks - 1), min_size=1), min_size=1, max_size=6))
    bundles = [ref(f"b{i}", tuple(sorted(group))) for i, group in enumerate(groups)]
    version = Version(1, 2)
    seals = {one.bundle_id: Seal(one.bundle_id, 100, "d") for one in bundles}
    held = data.draw(st.sets(st.sampled_from(range(len(bundles)))))
    memory = [MemoryCopy.at(version, node_of[groups[i].copy().pop()], None, seals[f"b{i}"]) for i in held]
    files = {one.bundle_id: f"{one.bundle_id}-d.safetensors" for one in bundles}
    stored = {version: Stored(version, num_ranks, tuple(bundles), seals, files)}
    topology = Topology(tuple(f"n{i}" for i in range(1 + max(node_of))), node_of)
    facts = Facts(memory, {}, stored, Lineage(), topology)
    choice = choose_version(facts).value
    assert isinstance(choice, Choice)
    for rank in range(num_ranks):
        for fetch in fetches(choice, rank, facts):
            index = int(fetch.ref.bundle_id[1:])
            assert fetch.is_straight == (groups[index] == {rank} and index not in held)
            assert fetch.file == files[fetch.ref.bundle_id], "without a keeper storage stands in for every source"
