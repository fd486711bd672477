"""A run's seconds add up, whatever happened in it; incidents read as boxes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.elastic.goodput import goodput
from holdfast.core.elastic.incident import WIDTH, box, from_facts
from sample_kit import MORE


def sample(t: float, step: int, **spent: float) -> dict[str, Any]:
    return {"event": "progress", "t": t, "step": step, "spent": spent}


INCIDENT = {
    "event": "incident", "number": 1, "ranks": [1], "nodes": ["n0"], "first_error": "rank 1 killed by signal 9 (SIGKILL)",
    "found_by": "its process ended", "found_s": 1.0, "action": "replace", "why": "one process failed",
    "seconds": {"T0": 0.5, "T1": 1.0, "T2": 0.25, "T3": 0.75, "T4": 0.5}, "steps_lost": 2,
    "came_back": {"0": "slot", "1": "twin", "2": "slot"}, "kept": [0, 2],
}  # fmt: skip


def test_a_run_with_one_incident() -> None:
    """Ten seconds of start, thirty of steps with two of saving in them, four of an incident, two steps made again."""
    found = goodput(
        [
            {"event": "run", "t": 0.0},
            sample(10.0, 0, START=4.0),
            sample(40.0, 30, START=4.0, STEP=22.0, COLLECTIVE=4.0, SAVING=2.0, DATA=2.0),
            {**INCIDENT, "t": 44.0},
            sample(46.0, 29, STEP=1.5, COLLECTIVE=0.5),
            sample(56.0, 40, STEP=9.5, COLLECTIVE=2.5),
            {"event": "end", "t": 60.0, "code": 0},
        ]
    )
    assert found is not None
    seconds = {name: round(value, 6) for name, value in found.seconds.items() if value}
    assert seconds == {
        "start-up": 10.0, "steps": 36.0, "data": 2.0, "stalls": 2.0, "recomputed": 2.0, "idle": 4.0,
        "detection": 1.0, "restart": 1.75, "reload": 0.75, "compile": 0.5,
    }  # fmt: skip
    assert abs(sum(found.seconds.values()) - 60.0) < 1e-6
    assert (found.wall_s, found.steps, found.finished, len(found.incidents)) == (60.0, 40, True, 1)


def test_steps_that_were_made_before_are_recomputed() -> None:
    found = goodput(
        [{"event": "run", "t": 0.0}, sample(10, 10, STEP=10.0), sample(12, 6, STEP=2.0), sample(20, 14, STEP=10.0)]
    )
    assert found is not None
    assert found.seconds["recomputed"] == 2.0


def restored(t: float, step: int) -> dict[str, Any]:
    return {"event": "restored", "t": t, "step": step}


def test_a_run_that_goes_on_counts_its_own_steps() -> None:
    """128 steps were made before; this run makes 68, eight of them twice."""
    lines = [
        {"event": "run", "t": 0.0},
        restored(3.0, 128),
        sample(4.0, 128, LOADING=1.0),
        sample(40.0, 178, LOADING=1.0, STEP=30.0),
        {**INCIDENT, "t": 44.0},
        restored(44.0, 170),
        sample(45.0, 172, STEP=1.0),
        sample(60.0, 196, STEP=20.0),
    ]
    found = goodput(lines)
    assert found is not None
    assert (found.steps, found.made, found.again) == (196, 68, 8)
    lines.append(restored(61.0, 190))
    found = goodput(lines)
    assert found is not None
    assert (found.steps, found.made, found.again) == (196, 68, 8), "nothing was made after it"
    fresh = goodput([{"event": "run", "t": 0.0}, restored(1.0, 0), sample(4.0, 30, STEP=2.0)])
    assert fresh is not None
    assert (fresh.steps, fresh.made, fresh.again) == (30, 30, 0)
    unsaid = goodput([{"event": "run", "t": 0.0}, sample(10, 10, STEP=10.0), sample(12, 6, STEP=2.0)])
    assert unsaid is not None
    assert (unsaid.steps, unsaid.made, unsaid.again) == (10, 10, 6)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.01, 50), st.integers(0, 100), st.floats(0, 60), st.floats(0, 60), st.booleans()),
        min_size=1,
    )
)
def test_the_seconds_always_sum_to_the_time(parts: list[tuple[float, int, float, float, bool]]) -> None:
    now, lines = 0.0, [{"event": "run", "t": 0.0}]
    for passed, step, stepping, saving, failed in parts:
        now += passed
        lines.append(sample(now, step, STEP=stepping, SAVING=saving))
        if failed:
            now += 2.0
            lines.append({**INCIDENT, "t": now, "found_s": stepping})
    found = goodput(lines)
    assert found is not None
    assert abs(sum(found.seconds.values()) - found.wall_s) <= 0.01 * found.wall_s
    assert min(found.seconds.values()) >= 0


def test_a_box_tells_all_of_it_and_is_a_box() -> None:
    text = box(from_facts({**INCIDENT, "first_error": "x" * 300 + "\n\x1b[31m"}))
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= WIDTH
    for part in ("incident 1", "rank 1 on n0", "after 1.00 s: its process ended", "the processes of ranks 0, 2", "steps lost   2",
                 "T3 load 0.75", "3.00 in all", "ranks 0, 2 from slot; rank 1 from twin", "replace: one process failed"):  # fmt: skip
        assert part in text
    assert "\x1b" not in text
    assert "steps lost   0" in box(from_facts({**INCIDENT, "steps_lost": 0})), "that nothing was lost is told too"
    assert "steps lost" not in box(from_facts({**INCIDENT, "steps_lost": None})), "nobody knows"


@MORE
@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["number", "ranks", "seconds", "found_s", "came_back", "steps_lost", "kept", "action"]),
        st.none() | st.text() | st.integers() | st.floats() | st.lists(st.text(max_size=9), max_size=3),
    )
)
def test_an_odd_report_is_shown_all_the_same(facts: dict[str, Any]) -> None:
    assert "incident" in box(from_facts(facts))
