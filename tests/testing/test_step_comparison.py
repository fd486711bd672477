"""Where a life behind a restart begins, and what differs there: steps in, verdict out."""

from __future__ import annotations

import pytest

from holdfast.testing.prove.prove import draw
from holdfast.testing.prove.run_notes import BEFORE, BEHIND
from holdfast.testing.prove.step_comparison import Difference, Step, compare_undisturbed, judge


def step(state: int, *, buffer: int = 0, random: int = 0, label: str = "SGD") -> Step:
    digests = state.to_bytes(8, "big") + buffer.to_bytes(8, "big")
    return Step(label, ("weight", "buffer mean"), digests, random.to_bytes(8, "big"))


WHOLE = [step(number) for number in range(10)]


def judged(*lives: list[Step], ended: bool = True) -> tuple[Difference | None, int | None, int]:
    found = judge({0: WHOLE}, {0: lives}, killed=0, ended=ended)
    return found.difference, found.resumed_at, found.again


@pytest.mark.parametrize("seen", range(1, 11))
@pytest.mark.parametrize("place", range(11))
def test_a_restart_may_begin_anywhere_up_to_the_step_behind_the_last_one(seen: int, place: int) -> None:
    difference, resumed_at, again = judged(WHOLE[:seen], WHOLE[place:])
    assert resumed_at == place + 1
    if place <= seen:
        assert (difference, again) == (None, seen - place)
    else:
        assert difference is not None
        assert (difference.step, difference.life) == (seen + 1, 1)
        assert "left out" in difference.what


def test_a_step_that_is_made_otherwise_is_named_with_its_part() -> None:
    other = [*WHOLE[4:6], step(6, buffer=7), *(step(n, buffer=9) for n in range(7, 10))]
    assert judged(WHOLE[:5], other)[0] == Difference(0, 7, "buffer mean", 1)


def test_a_step_that_differs_before_the_kill_is_told_first() -> None:
    assert judged([*WHOLE[:2], step(99)], [step(98), *WHOLE[5:]])[0] == Difference(0, 3, "weight", 0)


@pytest.mark.parametrize(
    ("made", "told"), [(WHOLE[3:8], "8 steps in all"), ([*WHOLE[3:], step(77)], "11 steps in all")]
)
def test_a_run_that_makes_another_number_of_steps_is_not_equal(made: list[Step], told: str) -> None:
    difference, resumed_at, _ = judged(WHOLE[:5], made)
    assert resumed_at == 4
    assert difference is not None
    assert told in difference.what


def test_a_life_that_was_interrupted_is_placed_by_what_it_holds() -> None:
    assert judged(WHOLE[:6], WHOLE[4:7], WHOLE[7:]) == (None, 8, 0)
    difference, *_ = judged(WHOLE[:6], [*WHOLE[4:6], step(99)], WHOLE[7:])
    assert difference == Difference(0, 7, "weight", 1)


def test_a_run_that_did_not_end_is_compared_as_far_as_it_came() -> None:
    assert judged(WHOLE[:6], WHOLE[5:7], ended=False) == (None, 6, 1)
    difference, *_ = judged(WHOLE[:6], [*WHOLE[5:7], step(99)], ended=False)
    assert difference == Difference(0, 8, "weight", 1)


def test_states_that_repeat_are_placed_by_the_length_of_the_last_life() -> None:
    """A schedule that ends at zero leaves one state again and again: a step too few or too many must be seen all the same."""
    still = [step(0)] * 10
    for seen in range(1, 11):
        for left in range(12):
            found = judge({0: still}, {0: [still[:seen], [step(0)] * left]}, killed=0, ended=True)
            assert (found.difference is None) is (10 - seen <= left <= 10), (seen, left)


def test_a_survivor_may_have_made_a_step_that_the_killed_rank_did_not_see() -> None:
    lives = {0: [WHOLE[:6], WHOLE[6:]], 1: [WHOLE[:5], WHOLE[6:]]}
    assert judge({0: WHOLE, 1: WHOLE}, lives, killed=1, ended=True).difference is None
    assert judge({1: WHOLE}, {1: lives[1]}, killed=1, ended=True).difference is not None


def test_another_optimizer_in_the_place_of_one_is_told() -> None:
    two = [step(number, label=("G", "D")[number % 2]) for number in range(6)]
    swapped = [*two[3:4], step(4, label="D"), two[5]]
    found = judge({0: two}, {0: [two[:4], swapped]}, killed=0, ended=True)
    assert found.difference == Difference(0, 5, "a step of G was made by D", 1)


def test_random_numbers_alone_are_no_difference() -> None:
    found = judge({0: WHOLE}, {0: [WHOLE[:5], [step(n, random=n == 8) for n in range(5, 10)]]}, killed=0, ended=True)
    assert (found.difference, found.random_from) == (None, 9)


def test_undisturbed_runs_are_compared_on_every_rank() -> None:
    other = [*WHOLE[:4], step(99), *WHOLE[5:]]
    assert compare_undisturbed({0: [WHOLE], 1: [WHOLE]}, {0: [WHOLE], 1: [WHOLE]}) is None
    assert compare_undisturbed({0: [WHOLE], 1: [WHOLE]}, {0: [WHOLE], 1: [other]}) == Difference(1, 5, "weight")
    found = compare_undisturbed({0: [WHOLE]}, {0: [[]]})
    assert found is not None
    assert found.what == "one run made 10 steps, the other 0"


def test_kills_are_drawn_without_repetition_over_all_steps_ranks_and_moments() -> None:
    drawn = draw({0: 3, 1: 3, 2: 0}, 100, seed=1)
    assert len(drawn) == len(set(drawn)) == 12
    assert {kill.rank for kill in drawn} == {0, 1}
    assert {kill.step for kill in drawn} == {1, 2, 3}
    assert {kill.moment for kill in drawn} == {BEFORE, BEHIND}
    assert draw({0: 3, 1: 3}, 5, seed=1) == drawn[:5]
    assert draw({0: 50}, 5, seed=1) != draw({0: 50}, 5, seed=2)
