"""Layouts to and from boxes per rank; MindSpore's own slices as the judge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.mindspore_kit import SAMPLES, golden, layout, layouts
from holdfast.adapters.mindspore import (
    Layout,
    OperatorStrategy,
    Strategy,
    extents_by_rank,
    layout_from_extents,
    load_checkpoint,
    read_strategy,
    shards_of_rank,
    slices_of,
    strategy_from_extents,
    to_numpy,
)
from holdfast.base.errors import UsageError
from holdfast.core.model import Extent


def shape_for(drawn: Layout) -> tuple[int, ...]:
    """The smallest shape that divides, times two."""
    rows, *rest = drawn.num_slices
    return (2 * rows * drawn.num_shards, *(2 * parts for parts in rest))


@pytest.mark.parametrize("number", range(len(golden("slices.json"))))
def test_slices_are_those_that_mindspore_cuts(number: int) -> None:
    row = golden("slices.json")[number]
    shape = tuple(row["shape"])
    for rank, extent in extents_by_rank(layout(row["layout"]), shape).items():
        first = 0
        for offset, length in zip(extent.offsets, shape, strict=True):
            first = first * length + offset
        assert [first, list(extent.lengths)] == row["slices"][rank]


def test_slices_of_a_real_checkpoint_lie_where_the_layout_says() -> None:
    numpy = pytest.importorskip("numpy")
    whole = numpy.load(SAMPLES / "ckpt" / "expected_full.npz")
    layouts_of_seed = read_strategy(SAMPLES / "seed" / "rank_0" / "strategy.ckpt").layouts
    for rank in (0, 4):
        stored = to_numpy(load_checkpoint(SAMPLES / "ckpt" / f"rank_{rank}" / "checkpoint-2_1875.ckpt"))
        for name, full in whole.items():
            extent = extents_by_rank(layouts_of_seed[name], full.shape)[rank]
            box = tuple(slice(o, o + n) for o, n in zip(extent.offsets, extent.lengths, strict=True))
            assert (stored[name] == full[box]).all()


@given(layouts(), st.integers(0, 5))
def test_slices_cover_the_tensor_once_and_their_ranks_all_ranks(drawn: Layout, first: int) -> None:
    shape = shape_for(drawn)
    slices = slices_of(drawn, shape, first)
    assert sum(piece.extent.num_elements for piece in slices) == Extent((0,) * len(shape), shape).num_elements
    assert len({piece.extent for piece in slices}) == len(slices)
    assert tuple(piece.ranks for piece in slices) == tuple(tuple(first + d for d in group) for group in drawn.groups())


@given(layouts(), st.integers(0, 5))
def test_a_layout_is_found_again_from_what_its_ranks_hold(drawn: Layout, first: int) -> None:
    shape = shape_for(drawn)
    extents = extents_by_rank(drawn, shape, first)
    try:
        found = layout_from_extents(extents, shape)
    except UsageError:  # optimizer shards that run across axes (three of six ranks in two pairs) are no axis
        assert drawn.opt_weight_shard_size > 1
        return
    assert extents_by_rank(found, shape, first) == extents
    assert sorted(found.groups()) == sorted(drawn.groups())


def test_uneven_and_irregular_pieces_are_no_layout() -> None:
    def rows(*pieces: tuple[int, int]) -> dict[int, Extent]:
        return {rank: Extent((start,), (length,)) for rank, (start, length) in enumerate(pieces)}

    for extents in (rows((0, 3), (3, 2)), rows((0, 1), (1, 1), (3, 1), (2, 1)), rows((2, 2), (0, 2)), {}):
        with pytest.raises(UsageError):
            layout_from_extents(extents, (sum(e.lengths[0] for e in extents.values()) or 4,))
    with pytest.raises(UsageError, match="consecutive"):
        layout_from_extents({0: Extent((0,), (4,)), 2: Extent((0,), (4,))}, (4,))
    with pytest.raises(UsageError) as caught:
        strategy_from_extents({"n.w": ((5,), rows((0, 3), (3, 2)))})
    assert caught.value.where == "n.w"


def test_ranks_that_count_columns_first_are_two_axes() -> None:
    extents = {rank: Extent((start,), (1,)) for rank, start in enumerate((0, 2, 1, 3))}
    assert layout_from_extents(extents, (4,)).axes == ((0, 1),)


def test_a_shape_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="not cut into"):
        slices_of(Layout((2, 2), (0,)), (3,))
    with pytest.raises(UsageError, match="optimizer shards"):
        slices_of(Layout((2, 2), (0,), 2, 2), (6,))


def test_shards_of_a_pipeline_are_those_of_the_ranks_stage() -> None:
    operators = (OperatorStrategy("a", 0, ()), OperatorStrategy("b", 1, ()))
    strategy = Strategy(1, operators, {"0-w": Layout((2, 2), (0,)), "1-v": Layout((2, 2), (-1, 1), 1, 2)})
    shapes, dtypes = {"w": (8,), "v": (6, 4)}, {"w": "F32", "v": "BF16"}
    (shard,) = shards_of_rank(strategy, 7, shapes, dtypes)
    assert (shard.name, shard.dtype, shard.global_shape, shard.ranks) == ("v", "BF16", (6, 4), (7,))
    assert shard.extent == Extent((3, 2), (3, 2))
    (shard,) = shards_of_rank(strategy, 1, shapes, dtypes)
    assert (shard.name, shard.ranks, shard.extent) == ("w", (1, 3), Extent((4,), (4,)))
    with pytest.raises(UsageError, match="not given"):
        shards_of_rank(strategy, 0, {}, dtypes)


def test_a_strategy_is_made_of_what_ranks_hold() -> None:
    halves = {4: Extent((0,), (2,)), 5: Extent((2,), (2,))}
    made = strategy_from_extents({"w": ((4,), halves)}, stage=2)
    assert made.operators[0].stage == 2
    assert extents_by_rank(made.layouts["w"], (4,), 4) == halves
