"""Groups of ranks as runs: short, canonical, and the same group is the same object."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.layout import bundles
from holdfast.core.model import BundleRef, RankLayout
from holdfast.core.rank_runs import MAX_RANKS, Runs, is_in, runs_of, spread
from holdfast.core.recovery.broadcast_tree import upstreams
from holdfast.core.versions import bundle_table
from holdfast.core.versions.coordinator_board import Board
from kit.large_jobs import WORLD, state_of, topology
from sample_kit import MORE


@given(st.sets(st.integers(0, 300)))
def test_ranks_come_back(ranks: set[int]) -> None:
    group = tuple(sorted(ranks))
    runs = runs_of(group)
    assert spread(runs) == group
    assert [rank for rank in range(301) if is_in(rank, runs)] == list(group)


def test_a_group_is_spread_out_once() -> None:
    assert spread(((0, WORLD - 1, 1),)) is spread(((0, WORLD - 1, 1),))


@pytest.mark.parametrize(
    "runs",
    [((0, 3, 0),), ((5, 5, 1), (1, 1, 1)), ((0, 0, 1), (1, 1, 1)), ((0, MAX_RANKS, 1),), ((-1, 1, 1),), ((3, 1, 1),)],
)
def test_what_no_group_looks_like_is_refused(runs: Runs) -> None:
    with pytest.raises(ValueError, match="ranks"):
        spread(runs)


def test_a_reference_is_the_same_however_its_group_is_given() -> None:
    by_ranks, by_runs = BundleRef("b", (0, 2, 4), 1, 2, 3, "f"), BundleRef("b", (), 1, 2, 3, "f", runs=((0, 4, 2),))
    assert by_ranks == by_runs
    assert hash(by_ranks) == hash(by_runs)
    assert by_runs.ranks == (0, 2, 4)
    assert [rank for rank in range(6) if by_runs.has(rank)] == [0, 2, 4]


@MORE
def test_planning_a_group_of_16384_ranks_grows_as_the_nodes_do() -> None:
    """14 GB alike on 2,048 nodes: bundles, what this rank copies, who writes what, and who reads it back."""
    seconds: dict[int, float] = {}
    for world_size in (WORLD // 8, WORLD // 8, WORLD // 8, WORLD):
        shards, where = state_of(14 * 10**9, world_size), topology(world_size)
        began = time.thread_time()
        found = bundles.plan_bundles(shards, values_of=[shards[0].ranks], topology=where)
        layout = bundles.rank_layout(found, 5, where)
        seconds[world_size] = min(time.thread_time() - began, seconds.get(world_size, 60))
    table = bundle_table.new_table({ref.bundle_id: ref for ref in layout.bundles}, where)
    assert len(upstreams(layout.bundles, where.node_of)) == len(table.refs) == len(found) > 2_000
    assert {ref.ranks for ref in layout.bundles} == {tuple(range(WORLD))}
    assert seconds[WORLD] < 40 * seconds[WORLD // 8]  # about 10; what is made for each pair of ranks grows by 64


def test_the_board_keeps_one_list_of_bundles_for_all_twins() -> None:
    world_size = 64
    where = topology(world_size)
    found = bundles.plan_bundles(state_of(10**9, world_size), values_of=(), topology=where)
    board = Board(where)
    for rank in range(world_size):
        board.register(bundles.rank_layout(found, rank, where))  # as if each had come in a message
    layouts = {rank: layout for (rank, _), layout in board._layouts.items()}

    assert [num_ranks for _, num_ranks in bundles.distinct(layouts.values())] == [world_size]
    table = {ref.bundle_id: ref for ref in layouts[0].bundles}
    assert bundle_table.disagreement(table, layouts) == ""
    layouts[3] = RankLayout(3, layouts[3].bundles[1:], layouts[3].captures)
    assert "do not all have it" in bundle_table.disagreement(table, layouts)
