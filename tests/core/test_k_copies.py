"""The share table: every slice as often as was asked for, shares equal by bytes, the same table on every rank."""

from __future__ import annotations

import random
from collections import Counter
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.errors import UsageError
from holdfast.core.layout.job_layout import JobLayout, Mesh, Tensor
from holdfast.core.layout.k_copies import share_table
from holdfast.core.layout.placement import REPLICATE, shard
from holdfast.core.model import Extent, Shard

CASES = settings(max_examples=50, deadline=None)


def shares(table: dict[Shard, tuple[int, ...]], num_ranks: int) -> list[int]:
    found = Counter(dict.fromkeys(range(num_ranks), 0))
    for piece, holders in table.items():
        for rank in holders:
            found[rank] += piece.num_bytes
    return [found[rank] for rank in range(num_ranks)]


@st.composite
def jobs(draw: st.DrawFn) -> list[Shard]:
    """Tensors on a mesh, each replicated on some axes and cut on others; the cuts come out even."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    mesh = Mesh(tuple("abc"[: len(sizes)]), sizes)
    tensors = []
    for kind in range(draw(st.integers(1, 5))):
        cut = draw(st.tuples(*(st.booleans() for _ in sizes)))
        placements = tuple(shard(0) if on else REPLICATE for on in cut)
        rows = draw(st.integers(1, 9)) * (2**6 * 3**3)
        count = draw(st.integers(1, 40))
        tensors += [Tensor(f"t{kind}.{index}", "F32", (rows,), placements) for index in range(count)]
    layout = JobLayout(prod(sizes), [mesh], tensors)
    return [piece for tensor in tensors for piece in layout.slices(tensor)]


@CASES
@given(jobs(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_slice_has_its_copies_and_every_rank_makes_the_same_table(
    slices: list[Shard], copies: int, order: random.Random
) -> None:
    table = share_table(slices, copies)
    assert table.keys() == set(slices)
    for piece, holders in table.items():
        assert len(set(holders)) == len(holders) == min(copies, len(piece.ranks))
        assert set(holders) <= set(piece.ranks)
    shuffled = [*slices, *slices[:3]]
    order.shuffle(shuffled)
    assert share_table(shuffled, copies) == table


@CASES
@given(jobs(), st.integers(1, 4))
def test_no_share_is_a_tenth_above_the_mean_and_a_slice(slices: list[Shard], copies: int) -> None:
    num_ranks = max(rank for piece in slices for rank in piece.ranks) + 1
    found = shares(dict(share_table(slices, copies)), num_ranks)
    mean = sum(found) / num_ranks
    largest = max(piece.num_bytes for piece in slices)
    # Two slices: seven of one size for eight ranks, each of which only some may hold, have been seen to give one rank two.
    assert max(found) <= max(1.1 * mean, mean + largest, 2 * largest)


@CASES
@given(st.lists(st.integers(0, 60), min_size=2, max_size=6), st.integers(1, 3))
def test_what_all_ranks_hold_evens_out_what_the_stages_left(counts: list[int], copies: int) -> None:
    """Stages of four ranks with different numbers of layers, and as much again that every rank holds."""
    stages = [
        Shard(f"stage{stage}.{i}", "F32", (64,), Extent((0,), (64,)), tuple(range(4 * stage, 4 * stage + 4)))
        for stage, count in enumerate(counts)
        for i in range(count)
    ]
    world = tuple(range(4 * len(counts)))
    tied = [Shard(f"tied.{i}", "F32", (64,), Extent((0,), (64,)), world) for i in range(60 * len(counts))]
    found = shares(dict(share_table([*stages, *tied], copies)), len(world))
    mean = sum(found) / len(found)
    assert max(found) <= max(1.1 * mean, mean + 256)


def test_groups_that_overlap_are_dealt_until_shares_are_equal() -> None:
    """Ranks 0 and 1 share a hundred slices, 1 and 2 another hundred: 1 must leave most of both to the others."""
    slices = [
        Shard(f"{group}.{i}", "F32", (64,), Extent((0,), (64,)), group)
        for group in ((0, 1), (1, 2))
        for i in range(100)
    ]
    found = shares(dict(share_table(slices, 1)), 3)
    assert max(found) <= 1.1 * sum(found) / 3


def test_no_copy_is_refused_and_no_slice_is_no_table() -> None:
    assert share_table([], 2) == {}
    with pytest.raises(UsageError, match="0 copies"):
        share_table([], 0)
