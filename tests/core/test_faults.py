"""V4 for any mixture of workers: every hang is found within its limit, and nobody healthy is ever to be replaced."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from faults_kit import Watching
from holdfast.core.faults import Kind, Watch
from holdfast.core.sight import Beat, Phase
from holdfast.core.watch_mode import MODES, QUICK

HEALTHY = ("steps", "waits", "moves", "reads", "traced", "device", "starved", "unheard")
STUCK = ("hangs", "stopped")


def verdicts(stage: Watching, seconds: float) -> list[tuple[Kind, int]]:
    """What is said of single ranks while time passes."""
    found: list[tuple[Kind, int]] = []
    look = stage.watch.look

    def listening(*args: object, **more: object) -> object:
        answer = look(*args, **more)  # type: ignore[arg-type]
        found.extend((v.kind, v.ranks[0]) for v in answer if len(v.ranks) == 1)
        return answer

    stage.watch.look = listening  # type: ignore[method-assign,assignment]
    stage.run("pass", {"seconds": str(seconds)})
    return found


@settings(max_examples=20, deadline=None)
@given(
    every=st.sampled_from([0.02, 0.1, 0.5, 1.5]),
    ways=st.lists(st.sampled_from(HEALTHY + STUCK), min_size=1, max_size=6),
    phase=st.sampled_from(["step", "data", "evaluation", "saving", "loading"]),
)
def test_the_stuck_are_found_and_the_healthy_are_left_alone(every: float, ways: list[str], phase: str) -> None:
    stage = Watching()
    stage.run("job", {"ranks": f"0-{len(ways) - 1}", "world": "64", "every": str(every)})
    stage.run("pass", {"seconds": str(30 * every)})
    slow = phase not in ("step", "data")
    for rank, way in enumerate(ways):
        more = {} if way in ("waits", "moves", "steps") else {"phase": phase}
        stage.run("ranks", {"who": str(rank), "way": way, **more})
    limit = max(2.8, 2.4 * every)
    found = verdicts(stage, limit + 1.0)
    condemned = {rank for kind, rank in found if kind is Kind.RESTART_RANK}
    expected = {r for r, way in enumerate(ways) if way == "stopped" or (way == "hangs" and not slow)}
    assert condemned == expected
    assert not [kind for kind, _ in found if kind in (Kind.RESTART_ALL, Kind.REPLACE_NODE)]


@settings(max_examples=100, deadline=None)
@given(
    ways=st.lists(st.sampled_from(HEALTHY), min_size=1, max_size=3)
    | st.lists(st.sampled_from(["waits", "waits", "moves"]), min_size=1, max_size=3),
    elsewhere=st.integers(0, 2),
    told=st.integers(0, 2),
)
def test_all_are_interrupted_only_if_each_stands_and_nobody_moves_bytes(
    ways: list[str], elsewhere: int, told: int
) -> None:
    """Ranks on other nodes count as standing only when their launcher says so."""
    stage, here = Watching(), len(ways)
    stage.run("job", {"ranks": f"0-{here - 1}", "world": str(here + elsewhere)})
    if elsewhere and told:
        stage.run("node", {"stuck": "1", "ranks": f"{here}-{here + min(told, elsewhere) - 1}"})
    stage.run("pass", {"seconds": "3"})
    for rank, way in enumerate(ways):
        stage.run("ranks", {"who": str(rank), "way": way})
    said = any("restart_all" in line for line in stage.run("pass", {"seconds": "12"}))
    assert said == (set(ways) == {"waits"} and told >= elsewhere)


@given(
    st.sampled_from(sorted(MODES)), st.floats(0, 100), st.floats(0, 9), st.integers(0, 40), st.sampled_from(list(Phase))
)
def test_a_limit_is_never_below_its_floor_and_follows_what_was_measured(
    name: str, p99: float, longer: float, samples: int, phase: Phase
) -> None:
    mode, longest = MODES[name], p99 * (1 + longer)
    beat = Beat(1, 1, phase, p99_s={phase: p99}, samples={phase: samples}, longest_s={phase: longest})
    limit = mode.limit_s(beat, phase)
    assert limit >= mode.floors_s[phase][0]
    assert limit >= (2 * p99 if samples >= 8 else mode.floors_s[phase][0])
    assert limit >= (1.5 * longest if name == "careful" else 0)


def test_a_replaced_rank_starts_with_a_clean_record() -> None:
    """What the old process did last is no reason to suspect the new one, which is still importing."""
    stage = Watching()
    stage.run("job", {"ranks": "0"})
    stage.run("pass", {"seconds": "2"})
    stage.run("ranks", {"who": "0", "way": "stopped"})
    assert verdicts(stage, 4)[-1] == (Kind.RESTART_RANK, 0)
    stage.watch = Watch(QUICK)
    stage.watch.started(0, stage.now_s)
    stage.workers[0].sight = type(stage.workers[0].sight)(0, Beat())
    stage.workers[0].way = "hangs"
    assert verdicts(stage, 60) == []
