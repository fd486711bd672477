"""Which bundles ranks of one node read together, and in which order."""

from __future__ import annotations

import pytest

from holdfast.core.model import BundleRef, Seal
from holdfast.core.recovery.shared_reading import OWN_AT_ONCE, chunks_of_all, is_read_together, plan_reading
from holdfast.core.recovery.version_choice import Fetch, Source


def fetch(ranks: tuple[int, ...], source: Source = Source.STORAGE, **more: object) -> Fetch:
    ref = BundleRef("b", ranks, 0, 1, 10, "f")
    return Fetch(ref, Seal("b", 10, "d", ("d",)), source, None, file="b.safetensors", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "node_of", "together"),
    [
        (fetch((0, 1)), (0, 0), True),
        (fetch((0, 1)), (0, 0, 1, 1), True),
        (fetch((0, 1)), (0, 1), False),
        (fetch((0, 1, 2)), (0, 0, 1), False),
        (fetch((0,)), (0, 0), False),
        (fetch((0, 1), Source.NODE), (0, 0), False),
        (fetch((0, 1), Source.PRELOADED), (0, 0), False),
        (fetch((0, 1), Source.PEER), (0, 0), False),
        (fetch((0, 1), via=1), (0, 0), False),
        (fetch((0, 1), chunks=((0, 1),)), (0, 0), False),
        (fetch((0, 5)), (0, 0), False),
    ],
)
def test_only_what_several_ranks_of_one_node_and_no_others_want_of_storage(
    wanted: Fetch, node_of: tuple[int, ...], together: bool
) -> None:
    assert is_read_together(wanted, node_of) is together


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_rank_begins_with_chunks_of_its_own_and_reads_all(world: int) -> None:
    sizes = chunks_of_all({"a": Seal("a", 3 * (8 << 20) + 1, "", ()), "b": Seal("b", 100 * (8 << 20), "", ())}, 8 << 20)
    assert sizes == {"a": 4, "b": 100}
    plans = [plan_reading(rank, (0,) * world, sizes) for rank in range(world)]
    for name, count in sizes.items():
        orders = [plan.order(name, list(range(count))) for plan in plans]
        assert all(sorted(order) == list(range(count)) for order in orders)
        firsts = [order[: min(OWN_AT_ONCE, count // world)] for order in orders]
        assert len({chunk for first in firsts for chunk in first}) == sum(map(len, firsts)), "each its own"


def test_no_rank_reads_far_ahead_of_what_another_has_not_begun() -> None:
    order = plan_reading(1, (0, 0), {"b": 1000}).order("b", list(range(1000)))
    window = 2 * OWN_AT_ONCE
    assert all(abs(place - chunk) < window for place, chunk in enumerate(order))


def test_chunks_of_all_bundles_are_counted_through_alike_on_every_rank_of_a_node() -> None:
    node_of, sizes = (0, 1, 1, 0, 1), {"b": 2, "a": 3, "c": 1}
    plans = [plan_reading(rank, node_of, sizes) for rank in range(5)]
    assert all(plan.first == {"a": 0, "b": 3, "c": 5} for plan in plans)
    assert [(plan.turn, plan.num_ranks) for plan in plans] == [(0, 2), (0, 3), (1, 3), (1, 2), (2, 3)]
