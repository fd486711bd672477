"""Placement of chunks into waits: none outside its window, none after the fence, every chunk once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.pipeline.bubble_placement import MAX_EVERY, Load, Window, highest_cadence, place
from holdfast.core.pipeline.wait_forecast import MEMORY, Waits

windows = st.lists(st.floats(0.0, 0.1), max_size=12).map(lambda rows: [Window(i, s) for i, s in enumerate(rows)])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.0001, 0.02), max_size=60), windows, st.floats(0.0, 0.5))
def test_every_chunk_is_placed_once_and_inside_its_window(chunks, where, guard) -> None:
    placement = place(chunks, where, guard=guard)
    room = {window.index: window.seconds * (1 - guard) for window in where}
    at = 0
    for placed in placement.windows:
        assert placed.first == at
        assert placed.end > placed.first
        assert sum(chunks[placed.first : placed.end]) == pytest.approx(placed.seconds)
        assert placed.seconds <= room[placed.index] + 1e-9
        at = placed.end
    assert placement.left == at
    assert placement.left_seconds == pytest.approx(sum(chunks[at:]))
    assert placement.hidden_seconds + placement.left_seconds == pytest.approx(sum(chunks))
    order = [placed.index for placed in placement.windows]
    assert order == sorted(order)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), windows)
def test_no_window_that_could_take_the_next_chunk_is_left_empty(count, where) -> None:
    placement = place([0.01] * count, where, guard=0.1)
    used = {placed.index: placed.end - placed.first for placed in placement.windows}
    if placement.left < count:
        assert all((used.get(w.index, 0) + 1) * 0.01 > w.seconds * 0.9 - 1e-12 for w in where)


def test_what_waits_were_like_is_forgotten_after_some_steps() -> None:
    waits = Waits()
    for seconds in [0.01] * 50 + [0.03] * MEMORY:
        waits.begin_step()
        waits.ended(seconds)
    assert waits.expected(0) == 0.03


def test_reasons_say_what_fits() -> None:
    assert place([], [Window(0, 1.0)]).reason == "nothing is to be copied"
    assert place([0.01] * 3, [Window(4, 0.05)]).reason == "all 3 chunks (30.0 ms) fit into 50.0 ms of waits"
    assert "no wait in a step" in place([0.01], []).reason
    assert place([0.01] * 9, [Window(4, 0.05)]).reason.startswith("4 of 9 chunks fit")


def test_the_cadence_is_the_highest_under_the_budget() -> None:
    loads = [Load(call=0.0001, left=0.0, period=0.1), Load(call=0.0001, left=0.002, period=0.1)]
    decision = highest_cadence(loads, budget=0.005)
    assert decision.value == 5
    assert "rank 1" in decision.reason
    assert highest_cadence(loads, budget=0.05).value == 1
    assert highest_cadence([Load(10.0, 0.0, 0.001)], budget=0.001).value == 0
    assert highest_cadence([], budget=0.01).value == 0
    assert highest_cadence(loads, budget=0.0).value == 0


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0001, 1.0), st.floats(0.001, 1.0), st.floats(0.001, 0.2))
def test_one_step_denser_would_break_the_budget(left, period, budget) -> None:
    every = highest_cadence([Load(0.0, left, period)], budget=budget).value
    if every:
        assert left / period / every <= budget * (1 + 1e-9)
        assert every == 1 or left / period / (every - 1) > budget * (1 - 1e-9)
    else:
        assert left / period / MAX_EVERY > budget * (1 - 1e-9)
