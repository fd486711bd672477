"""Where launchers meet when their store is gone: each decides alone, all come to the same place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.elastic.rendezvous_failover import PATIENCE_S, Answer, host_yields, is_whole, where

END = "end:1"
ADDRESSES = {rank: f"n{rank}:1" for rank in range(4)}


def go(me: int, answers: dict[str, str], *, waited_s: float = 0.0) -> str:
    """`answers`: which address every store that answers says is used."""
    found = {address: Answer(address, uses) for address, uses in answers.items()}
    return where(found, endpoint=END, members=ADDRESSES, me=me, waited_s=waited_s).value


@pytest.mark.parametrize(
    ("me", "answers", "waited_s", "place"),
    [
        (2, {END: ""}, 0.0, END),  # somebody opened it again
        (1, {"n1:1": END, "n2:1": END}, 0.0, "n1:1"),  # the lowest that lives opens its own
        (2, {"n1:1": END, "n2:1": END}, 0.0, ""),  # and is waited for,
        (2, {"n1:1": END, "n2:1": END}, PATIENCE_S + 1, "n2:1"),  # but not for ever
        (2, {"n1:1": "n1:1", "n2:1": END}, 0.0, "n1:1"),
        (1, {"n1:1": END, "n2:1": "n2:1"}, 0.0, "n2:1"),  # who comes late opens no second one
        (0, {END: "n2:1", "n2:1": "n2:1", "n0:1": END}, 0.0, "n2:1"),  # the endpoint is open again and says where
        (0, {END: "n2:1", "n0:1": END}, 0.0, "n0:1"),  # to somebody who is gone as well
        (-1, {"n1:1": END}, PATIENCE_S + 1, ""),  # no member: opens nothing
        (-1, {END: "x:9", "x:9": "x:9"}, 0.0, "x:9"),
    ],
)
def test_one_launcher(me: int, answers: dict[str, str], waited_s: float, place: str) -> None:
    assert go(me, answers, waited_s=waited_s) == place


def test_a_lower_member_that_neither_answers_nor_refuses_is_waited_for_a_while() -> None:
    """On a busy machine it answers later; if each opened a store of its own meanwhile they would not meet."""
    found = {"n1:1": Answer("n1:1", END)}
    after = [
        where(found, endpoint=END, members=ADDRESSES, me=1, waited_s=s, unsure=["n0:1", "n3:1"]).value for s in (0, 6)
    ]
    assert after == ["", "n1:1"]


def test_a_rendezvous_with_a_gap_in_its_ranks_lost_somebody() -> None:
    assert is_whole([0], 1)
    assert is_whole([2, 0, 1], 2)
    assert not is_whole([1, 2], 1)
    assert not is_whole([0, 2], 2)
    assert not is_whole([0], 2), "who was dropped had the highest rank"


def test_what_a_host_does_about_another_store() -> None:
    assert host_yields(Answer(END, ""), "n1:1", met=True) is False, "whoever is there is brought here"
    assert host_yields(Answer(END, ""), "n1:1", met=False) is True, "nobody is here yet"
    assert host_yields(Answer(END, "n1:1"), "n1:1", met=True) is None
    assert host_yields(Answer("n2:1", END), "n1:1", met=False) is None, "it is in use by nobody"


@settings(max_examples=300, deadline=None)
@given(
    st.sets(st.integers(0, 3), min_size=1),
    st.sampled_from(["gone", "empty", *(ADDRESSES[rank] for rank in range(4))]),
    st.lists(st.integers(0, 3), min_size=60, max_size=60),
)
def test_all_that_live_come_to_one_place(live: set[int], endpoint: str, order: list[int]) -> None:
    """They notice in any order; nothing dies meanwhile. The endpoint: gone, open and empty, or open and pointing."""
    uses = {ADDRESSES[rank]: END for rank in live}
    if endpoint != "gone":
        uses[END] = "" if endpoint == "empty" else endpoint
    place: dict[int, str] = {}
    for rank in [*order, *sorted(live), *sorted(live)]:
        if rank in live and rank not in place and (found := go(rank, uses)):
            place[rank] = uses[ADDRESSES[rank]] = found
    assert set(place) == live
    assert len(set(place.values())) == 1
