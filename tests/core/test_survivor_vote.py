"""Which step the survivors go on from, and who gives what to whom: from offers to one answer, the same on every rank."""

from __future__ import annotations

from holdfast.core.model import Version
from holdfast.core.recovery.survivor_vote import Offer, agree, giver
from holdfast.core.versions.lineage import Lineage

A, B, C = Version(1, 4), Version(1, 5), Version(1, 6)
EVER = Lineage()


def test_the_newest_step_that_all_noted_and_somebody_holds_is_taken() -> None:
    survivors = [Offer(C, (B, C)), Offer(B, (A, B))]
    new = Offer(None, (A, B), "its process is new")
    decision = agree([*survivors, new], newest=A, lineage=EVER)
    assert decision.value == B
    assert decision.reason == "live in the memory of rank 1"


def test_a_step_that_the_dead_did_not_finish_is_not_gone_on_from() -> None:
    decision = agree([Offer(B, (A, B)), Offer(None, (A,), "its process is new")], newest=A, lineage=EVER)
    assert decision.value is None
    assert "rank 1 left no note of it" in decision.reason


def test_nobody_who_was_inside_an_update_gives_anything() -> None:
    decision = agree([Offer(None, (A, B), "interrupted inside"), Offer(None, (B,))], newest=A, lineage=EVER)
    assert decision.value is None
    assert "rank 0: interrupted inside" in decision.reason


def test_what_was_saved_is_taken_if_it_is_as_new() -> None:
    for newest in (B, C):
        assert agree([Offer(B, (A, B))] * 2, newest=newest, lineage=EVER).value is None
    assert agree([Offer(B, (A, B))] * 2, newest=None, lineage=EVER).value == B


def test_a_dead_lineage_is_never_gone_back_to() -> None:
    resumed_before = Lineage({1: None, 2: A})
    assert agree([Offer(B, (A, B))] * 2, newest=A, lineage=resumed_before).value is None
    assert agree([Offer(Version(2, 5), (Version(2, 5),))] * 2, newest=A, lineage=resumed_before).value is not None


def test_twins_are_dealt_out_and_without_one_there_is_no_giver() -> None:
    group = (0, 1, 2, 3)
    assert [giver(group, {0, 1}, receiver) for receiver in (2, 3)] == [0, 1]
    assert giver(group, {4}, 2) is None
