"""The event model against closed forms, and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.pipeline.event_model import Action, Costs, Kind, Order, gpipe, one_f_one_b, simulate


def even(num_stages: int, forward: float, backward: float) -> Costs:
    rows = {(s, k): t for s in range(num_stages) for k, t in ((Kind.FORWARD, forward), (Kind.BACKWARD, backward))}
    return Costs(rows)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 1), (2, 4), (4, 4), (4, 8), (8, 32), (5, 7)])
def test_equal_stages_are_idle_as_the_closed_form_says(make, num_stages: int, num_microbatches: int) -> None:
    timeline = simulate(make(num_stages, num_microbatches), even(num_stages, 1.0, 2.0))
    share = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert timeline.period == (num_microbatches + num_stages - 1) * 3.0
    for rank in range(num_stages):
        assert timeline.idle_share(rank) == pytest.approx(share, abs=1e-12)
        assert timeline.ranks[rank].idle == pytest.approx((num_stages - 1) * 3.0, abs=1e-9)


def test_the_slowest_stage_sets_the_pace_and_the_others_wait_for_it() -> None:
    costs = Costs({(s, k): (3.0 if s == 1 else 1.0) for s in range(3) for k in (Kind.FORWARD, Kind.BACKWARD)})
    timeline = simulate(gpipe(3, 10), costs)
    assert timeline.ranks[1].idle < timeline.ranks[0].idle
    assert timeline.period >= 10 * 6.0


def test_a_step_is_as_long_as_that_of_the_slowest_rank() -> None:
    """Forwards alone: nothing comes back, so the first rank runs ahead of the others at every step."""
    orders = tuple((Action(rank, Kind.FORWARD, 0),) for rank in range(3))
    timeline = simulate(orders, Costs({(rank, Kind.FORWARD): 1.0 + rank for rank in range(3)}))
    assert timeline.period == 3.0


def test_hops_and_endings_lengthen_the_step() -> None:
    plain = simulate(gpipe(2, 2), even(2, 1.0, 1.0))
    slow = simulate(gpipe(2, 2), Costs(even(2, 1.0, 1.0).compute, hop=0.5, ending={0: 2.0, 1: 2.0}))
    assert slow.period == plain.period + 2 * 0.5 + 2.0
    # The first rank waits for the gradient; its optimizer is work, not a wait.
    assert slow.ranks[0].idle == plain.ranks[0].idle + 2 * 0.5


def test_neighbours_on_one_rank_hand_over_at_once() -> None:
    """A V: the second rank has the two stages in the middle."""
    first = tuple(
        Action(stage, kind, 0)
        for stage, kind in ((0, Kind.FORWARD), (3, Kind.FORWARD), (3, Kind.BACKWARD), (0, Kind.BACKWARD))
    )
    second = tuple(
        Action(stage, kind, 0)
        for stage, kind in ((1, Kind.FORWARD), (2, Kind.FORWARD), (2, Kind.BACKWARD), (1, Kind.BACKWARD))
    )
    compute = {(stage, kind): 1.0 for stage in range(4) for kind in Kind}
    timeline = simulate((first, second), Costs(compute, hop=10.0))
    assert timeline.ranks[0].idle == 2 * (2 * 1.0 + 2 * 10.0), "there and back, twice"


def test_split_backwards_wait_for_the_input_gradient_only() -> None:
    first = tuple(Action(0, k, 0) for k in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT))
    second = tuple(Action(1, k, 0) for k in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT))
    costs = Costs({(s, k): 1.0 for s in (0, 1) for k in Kind})
    timeline = simulate((first, second), costs)
    starts = {str(span.action): span.start for rank in timeline.ranks for span in rank.spans}
    assert starts["0I0"] == starts["1W0"] == starts["1I0"] + 1.0


def test_joined_pair_sends_both_results_at_its_end() -> None:
    """A V of three stages: forwards of the second micro-batch beside backwards of the first, on the rank with the ends."""
    joined, forward, backward = Action(0, Kind.FORWARD, 1, joined=True), Kind.FORWARD, Kind.BACKWARD
    first = (Action(0, forward, 0), joined, Action(2, forward, 0), Action(2, backward, 0))
    second = (Action(1, forward, 0), Action(1, forward, 1))
    costs = Costs({(stage, kind): 1.0 for stage in range(3) for kind in Kind}, hop=0.25)
    plain = simulate(((first[0], Action(0, forward, 1), *first[2:]), second), costs)
    step = simulate((first, second), costs)
    for timeline, starts in ((plain, [1.25, 2.25]), (step, [1.25, 3.75])):
        begun = timeline.ranks[0].spans[0].start
        assert timeline.ranks[0].spans[2].start - begun == 2.5, "what the rank waits for itself is not held back"
        assert [span.start - begun for span in timeline.ranks[1].spans] == starts


def test_an_order_that_never_ends_is_refused_by_name() -> None:
    backward_first = (Action(0, Kind.BACKWARD, 0), Action(0, Kind.FORWARD, 0))
    with pytest.raises(ValueError, match=r"never ends: 0B0"):
        simulate((backward_first,), Costs({}))
    weights_first = tuple(Action(0, kind, 0) for kind in (Kind.FORWARD, Kind.WEIGHT, Kind.INPUT))
    with pytest.raises(ValueError, match=r"never ends: 0W0"):
        simulate((weights_first,), Costs({}))
    with pytest.raises(ValueError, match=r"1F0 .* or its stage on two ranks"):
        simulate(((Action(1, Kind.FORWARD, 0),), (Action(1, Kind.FORWARD, 0),)), Costs({}))


def orders_of(data: st.DataObject) -> tuple[Order, ...]:
    make = data.draw(st.sampled_from([gpipe, one_f_one_b]))
    return make(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_rank_does_two_things_at_once_and_nothing_starts_before_its_input(data: st.DataObject) -> None:
    orders = orders_of(data)
    seconds = st.floats(0.001, 5.0)
    costs = Costs(
        {(s, k): data.draw(seconds) for s in range(len(orders)) for k in (Kind.FORWARD, Kind.BACKWARD)},
        hop=data.draw(st.floats(0.0, 1.0)),
        ending={r: data.draw(st.floats(0.0, 1.0)) for r in range(len(orders))},
    )
    timeline = simulate(orders, costs)
    ended = {span.action: span.end for rank in timeline.ranks for span in rank.spans}
    for rank, order in zip(timeline.ranks, orders, strict=True):
        assert tuple(span.action for span in rank.spans) == order
        assert all(a.end <= b.start + 1e-9 for a, b in zip(rank.spans, rank.spans[1:], strict=False))
        busy = sum(span.end - span.start for span in rank.spans)
        assert busy + rank.idle == pytest.approx(rank.ends - rank.start)
        for span in rank.spans:
            stage, m = span.action.stage, span.action.microbatch
            if span.action.kind is Kind.FORWARD and stage:
                assert span.start >= ended[Action(stage - 1, Kind.FORWARD, m)] + costs.hop - 1e-9
            if span.action.kind is Kind.BACKWARD and stage < len(orders) - 1:
                assert span.start >= ended[Action(stage + 1, Kind.BACKWARD, m)] + costs.hop - 1e-9
