"""The algebra of boxes: whatever was saved and whatever is wanted, each element comes from one place, each chunk is read once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.layout import reshard
from holdfast.core.layout.bundles import plan_bundles, rank_layout
from holdfast.core.model import Extent, Shard, Topology

Shape = tuple[int, ...]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))


@st.composite
def cuts(draw: st.DrawFn, shape: Shape) -> list[Extent]:
    """One mesh: every dimension cut into uneven, perhaps empty parts, several mesh axes on one dimension included."""
    edges = []
    for length in shape:
        inner = draw(st.lists(st.integers(0, length), max_size=4))
        edges.append([0, *sorted(inner), length])
    boxes = []
    for corner in product(*(range(len(e) - 1) for e in edges)):
        starts = tuple(e[i] for e, i in zip(edges, corner, strict=True))
        ends = tuple(e[i + 1] for e, i in zip(edges, corner, strict=True))
        boxes.append(Extent(starts, tuple(b - a for a, b in zip(starts, ends, strict=True))))
    return boxes


@st.composite
def moves(draw: st.DrawFn) -> tuple[Shape, list[Extent], list[Extent]]:
    """A shape, what was saved (with twins, in any order) and what is wanted."""
    shape = draw(shapes())
    saved = draw(cuts(shape))
    twins = draw(st.lists(st.sampled_from(saved), max_size=3))
    return shape, draw(st.permutations(saved + twins)), draw(cuts(shape))


def within(box: Extent) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))


@given(moves())
@settings(max_examples=120, deadline=None)
def test_every_wanted_element_comes_from_exactly_one_piece_bit_for_bit(
    move: tuple[Shape, list[Extent], list[Extent]],
) -> None:
    shape, saved, wanted = move
    whole = np.asarray(np.random.default_rng(0).integers(0, 1 << 30, size=shape))
    stored = [np.array(whole[within(box)]) for box in saved]
    for box in wanted:
        parts = reshard.cover(box, saved)
        assert parts is not None
        filled = np.full(box.lengths, -1, dtype=whole.dtype)
        times = np.zeros(box.lengths, dtype=int)
        for part in parts:
            piece = saved[part.piece]
            there = Extent(tuple(a - b for a, b in zip(part.box.offsets, piece.offsets, strict=True)), part.box.lengths)
            here = Extent(tuple(a - b for a, b in zip(part.box.offsets, box.offsets, strict=True)), part.box.lengths)
            filled[within(here)] = stored[part.piece][within(there)]
            times[within(here)] += 1
        assert (times == 1).all()
        assert np.array_equal(filled, whole[within(box)])


@given(moves())
@settings(max_examples=50, deadline=None)
def test_a_gap_is_never_papered_over(move: tuple[Shape, list[Extent], list[Extent]]) -> None:
    shape, saved, _ = move
    lost = next((box for box in saved if box.num_elements), None)
    if lost is None:
        return
    rest = [box for box in saved if box != lost]
    assert reshard.cover(Extent((0,) * len(shape), shape), rest) is None


@given(shapes(), st.data())
@settings(max_examples=120, deadline=None)
def test_a_run_of_elements_is_a_few_boxes(shape: Shape, data: st.DataObject) -> None:
    total = prod(shape)
    first = data.draw(st.integers(0, total))
    last = data.draw(st.integers(first, total))
    flat = np.arange(total).reshape(shape)
    found = list(reshard.blocks(shape, first, last))
    assert len(found) <= max(1, 2 * len(shape))
    listed: list[int] = []
    for number, box in found:
        elements = flat[within(box)].reshape(-1).tolist()
        assert elements == list(range(number, number + box.num_elements)), "a block is a run of its own"
        listed += elements
    assert listed == list(range(first, last))


@given(shapes(), st.integers(1, 8), st.integers(1, 40), st.data())
@settings(max_examples=120, deadline=None)
def test_chunks_are_those_that_hold_a_wanted_byte(shape: Shape, item: int, chunk: int, data: st.DataObject) -> None:
    piece = Extent(tuple(data.draw(st.integers(0, 5)) for _ in shape), shape)
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    lengths = tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, starts, strict=True))
    box = Extent(tuple(o + s for o, s in zip(piece.offsets, starts, strict=True)), lengths)
    numbers = np.arange(prod(shape)).reshape(shape)
    inside = numbers[within(Extent(tuple(starts), lengths))].reshape(-1)
    wanted = {byte // chunk for number in inside.tolist() for byte in range(number * item, (number + 1) * item)}
    runs = reshard.chunk_runs(reshard.spans(piece, box, item, chunk), chunk)
    got = {number for first, end in runs for number in range(first, end)}
    assert wanted <= got
    # With gaps of less than a chunk left in, what lies between two wanted chunks may come along, and never more.
    assert all(number - 1 in got or number in wanted for number in got - wanted)
    assert list(runs) == sorted(runs)
    assert all(a[1] < b[0] for a, b in pairwise(runs))


needs_of = st.dictionaries(
    st.integers(0, 7),
    st.dictionaries(st.sampled_from("abc"), st.sets(st.integers(0, 30)), max_size=3),
    min_size=1,
    max_size=8,
)


@given(needs_of, st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_each_chunk_is_read_once_by_somebody_who_needs_it(needs: dict[int, dict[str, set[int]]], per_node: int) -> None:
    node_of = [rank // per_node for rank in range(8)]
    runs = {
        rank: {name: reshard.merged((c, c + 1) for c in chunks) for name, chunks in rows.items()}
        for rank, rows in needs.items()
    }
    found = reshard.readers(runs, node_of, {})
    read = {(bundle, chunk) for bundle, rows in found.items() for chunk in rows}
    assert read == {(bundle, chunk) for rows in needs.values() for bundle, chunks in rows.items() for chunk in chunks}
    assert all(chunk in needs[rank][bundle] for bundle, rows in found.items() for chunk, rank in rows.items())


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
def test_what_all_need_is_read_in_equal_shares(nodes: int) -> None:
    needs = {rank: {"a": ((0, 100),), f"own{rank}": ((0, 10),)} for rank in range(2 * nodes)}
    node_of = [rank // 2 for rank in range(2 * nodes)]
    load = Counter(node_of[rank] for rows in reshard.readers(needs, node_of, {}).values() for rank in rows.values())
    assert max(load.values()) <= 1.1 * sum(load.values()) / nodes


def test_what_was_read_before_is_not_read_again() -> None:
    found = reshard.readers({0: {"a": ((0, 3),)}, 1: {"a": ((0, 3),)}}, [0, 1], {"a": {0: 1}})
    assert found["a"][0] == 1
    assert sorted(found["a"].values()) == [0, 0, 1]


def test_runs_are_taken_away() -> None:
    assert reshard.minus(((0, 5), (7, 9)), ((1, 2), (4, 8))) == ((0, 1), (2, 4), (8, 9))
    assert reshard.deal({"a": 5, "b": 3, "c": 3}, 2) == {"a": 0, "b": 1, "c": 1}


def shards_of(rank: int, cut: int) -> list[Shard]:
    """Rows of its own, something that pairs share, and an empty shard."""
    own = Extent((rank * cut, 0), (cut, 4096))
    return [
        Shard("big", "F32", (4 * cut, 4096), own, (rank,)),
        Shard("shared", "F32", (300, 512), Extent((0, 0), (300, 512)), (rank // 2 * 2, rank // 2 * 2 + 1)),
        Shard("none", "F32", (3, 8), Extent((3, 0), (0, 8)), (rank,)),
    ]


@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)])
def test_the_saved_layout_is_known_by_its_bundles_however_they_were_cut(nodes: tuple[int, ...]) -> None:
    topology = Topology(tuple(f"n{n}" for n in sorted(set(nodes))), nodes)
    shards = shards_of(1, 700)
    groups = [(1,), (0, 1), (1, 2, 3)]  # the last has values only
    refs = rank_layout(plan_bundles(shards, values_of=groups, topology=topology), 1, topology).bundles
    assert reshard.is_layout(refs, shards)
    assert not reshard.is_layout(refs, shards_of(1, 701))
    assert not reshard.is_layout(refs, shards_of(2, 700))
    assert not reshard.is_layout(refs, shards[:2])
    assert not reshard.is_layout(refs[:-1], [*shards, Shard("new", "F32", (2,), Extent((0,), (2,)), (1, 3))])
    assert not reshard.is_layout([ref for ref in refs if ref.ranks != (1,)], shards)


def test_pieces_come_apart_by_how_often_they_make_up_the_whole() -> None:
    rows = [Extent((0, 0), (2, 3)), Extent((2, 0), (3, 3))]
    columns = [Extent((0, 0), (5, 1)), Extent((0, 1), (5, 2))]
    assert reshard.layers((5, 3), rows) == [[0, 1]]
    assert reshard.layers((5, 3), [*rows, rows[0]]) == [[0, 1, 2]], "what makes up no whole is an alternative"
    assert reshard.layers((5, 3), [*rows, *columns, *rows]) == [[0, 1], [2, 3], [4, 5]]
    assert reshard.layers((), [Extent((), ())] * 3) == [[0], [1], [2]]
    assert reshard.layers((0, 4), [Extent((0, 0), (0, 4))] * 2) == [[0, 1]]
