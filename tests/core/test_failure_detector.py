"""V4 for any mixture of workers: every hang is found within its limit, and nobody healthy is ever to be replaced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults_kit import Watching
from holdfast.core.elastic.failure_detector import Kind, Verdict, Watch
from holdfast.core.elastic.watch_mode import MODES, QUICK
from holdfast.core.elastic.worker_activity import WINDOW_S, Activity
from holdfast.core.elastic.worker_facts import Beat, Phase, WorkerSample

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


def hung_at(step: int, watch: Watch, now_s: float, seconds: float, *, state: str = "S", **more: bool) -> list[Verdict]:
    """Rank 1 begins anew, makes so many steps, and hangs while rank 0 waits for it."""
    known = dict.fromkeys(Phase, 300)
    watch.started(1, now_s)
    said: list[Verdict] = []
    for look in range(round(seconds / 0.25)):
        hung = WorkerSample(1, Beat(step, step, Phase.STEP, samples=known), state=state, wakes=1)
        waits = WorkerSample(0, Beat(step, step, Phase.COLLECTIVE, "all_reduce", 3, True, samples=known), wakes=1)
        said += watch.look(now_s + 0.25 * look, [waits, hung], world_size=2, **more)
    return [verdict for verdict in said if verdict.kind not in (Kind.WAIT, Kind.LOOK)]


def test_a_rank_that_is_to_be_replaced_is_gone_and_its_evidence_stands() -> None:
    watch = Watch()
    (first,) = hung_at(30, watch, 0.0, 130)
    assert (first.kind, first.rank) == (Kind.RESTART_RANK, 1)
    zombie = WorkerSample(1, Beat(30, 30, Phase.STEP), state="Z", wakes=1)
    later = [verdict for look in range(4000) for verdict in watch.look(130 + look / 4, [zombie], world_size=2)]
    assert [verdict for verdict in later if verdict.rank == 1] == []


def test_a_rank_that_stops_at_the_same_step_again_is_reported_and_left_alone() -> None:
    """The first time may have been a false alarm; the second time proves that it was, and must not end the job."""
    watch = Watch()
    (first,) = hung_at(30, watch, 0.0, 250)
    again = hung_at(30, watch, 1000.0, 1200)
    assert (first.kind, [verdict.kind for verdict in again]) == (Kind.RESTART_RANK, [Kind.REPORT])
    assert "replaced at this step before: left alone" in again[0].reason


def test_each_verdict_doubles_the_limit_of_that_rank_in_that_phase() -> None:
    watch = Watch()
    found = [hung_at(step, watch, 10_000.0 * step, 1200)[0].found_after_s for step in (1, 2, 3)]
    assert [round(seconds / 120) for seconds in found] == [1, 2, 4]
    (stopped,) = hung_at(4, watch, 50_000.0, 10, state="T")
    assert stopped.found_after_s < 4, "a stop signal is proof by itself"


def test_the_last_failure_that_a_job_may_have_is_not_spent_on_a_verdict() -> None:
    assert [verdict.kind for verdict in hung_at(30, Watch(), 0.0, 500, may_replace=False)] == [Kind.REPORT]
    assert [verdict.kind for verdict in hung_at(30, Watch(QUICK), 0.0, 500, may_replace=False)] == [Kind.RESTART_RANK]
    stopped = hung_at(30, Watch(), 0.0, 500, state="T", may_replace=False)
    assert [verdict.kind for verdict in stopped] == [Kind.RESTART_RANK]


def test_who_waits_for_each_other_at_the_same_step_again_is_only_reported() -> None:
    watch, kinds = Watch(), []
    known = dict.fromkeys(Phase, 300)
    for began in (0.0, 1000.0):
        for rank in range(2):
            watch.started(rank, began)
        for look in range(400):
            beats = [Beat(9, 9, Phase.COLLECTIVE, "barrier", rank, True, samples=known) for rank in range(2)]
            sights = [WorkerSample(rank, beat, wakes=1) for rank, beat in enumerate(beats)]
            kinds += [v.kind for v in watch.look(began + 0.25 * look, sights, world_size=2)]
    assert [kind for kind in kinds if kind not in (Kind.WAIT, Kind.LOOK)] == [Kind.RESTART_ALL, Kind.REPORT]


def test_all_ranks_in_a_long_kernel_are_not_taken_for_a_collective_that_hangs() -> None:
    """A stack in `synchronize` tells nothing of a collective; a wait for a device has the patience of devices."""
    known, found = dict.fromkeys(Phase, 300), []
    for inside, seconds in ((False, 880), (False, 920), (True, 80)):
        watch, kinds = Watch(), set()
        beat = Beat(9, 9, Phase.STEP, samples=known, inside=inside)
        sights = [WorkerSample(rank, beat, wakes=1, device=True, stands=Phase.COLLECTIVE) for rank in range(2)]
        for look in range(4 * seconds):
            kinds |= {verdict.kind for verdict in watch.look(0.25 * look, sights, world_size=2)}
        found.append(Kind.RESTART_ALL in kinds)
    assert found == [False, True, True]


def test_ranks_that_all_may_hang_on_their_devices_are_told_of_once_and_left_alone() -> None:
    """In `.item()` behind a collective that hangs they spin, and no stack shows the collective."""
    known, watch = dict.fromkeys(Phase, 300), Watch()
    said: list[tuple[float, Verdict]] = []
    for look in range(4 * 2000):
        now_s, beat = 0.25 * look, Beat(9, 9, Phase.STEP, samples=known)
        sights = [WorkerSample(rank, beat, state="R", busy_s=1 + now_s, wakes=1, device=True) for rank in range(2)]
        said += [(now_s, verdict) for verdict in watch.look(now_s, sights, world_size=2)]
    orders = [(round(now_s), v.kind, v.ranks) for now_s, v in said if v.kind not in (Kind.WAIT, Kind.LOOK)]
    assert orders == [(900, Kind.REPORT, (0, 1))]


AT_A_LOCK = WorkerSample(
    0, Beat(9, 9, Phase.STEP, samples=dict.fromkeys(Phase, 300)), wakes=1, places=("acquire (job.py)",)
)
MAY_SAVE = {
    "computes": replace(AT_A_LOCK, places=("digest (job.py)",)),
    "waits for its keeper": replace(AT_A_LOCK, waits_in="a thread"),
    "waits in a call": replace(AT_A_LOCK, call="a system call (no. 45)"),
    "writes to a slow file system": replace(AT_A_LOCK, state="D"),
    "waits for its device": replace(AT_A_LOCK, device=True),
    "is not known to stand anywhere": replace(AT_A_LOCK, places=()),
    "saves": replace(AT_A_LOCK, beat=replace(AT_A_LOCK.beat, phase=Phase.SAVING)),
    "waits in a group with a limit of an hour": replace(
        AT_A_LOCK, beat=replace(AT_A_LOCK.beat, phase=Phase.COLLECTIVE, inside=True, group_s=3600.0)
    ),
}


def hopeless_s(watch: Watch, *sights: WorkerSample, busy: float = 0.0) -> float | None:
    """Seconds after which ranks that were told to end are not waited for any more; None: they have ten minutes."""
    for look in range(4 * 600):
        seen = [replace(sight, rank=rank, busy_s=1 + busy * look / 4) for rank, sight in enumerate(sights)]
        if watch.why_hopeless(look / 4, seen):
            return look / 4
    return None


@pytest.mark.parametrize("way", sorted(MAY_SAVE))
def test_in_careful_mode_a_rank_that_may_save_still_has_the_whole_grace(way: str) -> None:
    assert hopeless_s(Watch(), AT_A_LOCK, MAY_SAVE[way], busy=0.5 if way == "computes" else 0.0) is None


def test_stalled_job_is_judged_after_its_modes_limit() -> None:
    waits = replace(AT_A_LOCK, beat=replace(AT_A_LOCK.beat, phase=Phase.COLLECTIVE, inside=True))
    assert hopeless_s(Watch(), AT_A_LOCK, waits) == pytest.approx(120, abs=1)
    assert hopeless_s(Watch(QUICK), AT_A_LOCK, waits) == pytest.approx(8.4, abs=1)


@pytest.mark.parametrize(("family", "spent"), [(1.0, 0.0), (0.05, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_who_looks_after_others_that_compute_does_not_compute(family: float, spent: float) -> None:
    """`while child.poll() is None: time.sleep(0.01)` wakes a hundred times a second, and the child may work for an hour."""
    activity, now_s = Activity(0.0), 0.0
    while now_s < 60.0:
        now_s += 0.2
        counters = {"busy_s": 0.004 * now_s, "spent_s": (0.004 + spent) * now_s, "family_s": family * now_s}
        activity.take(WorkerSample(0, Beat(), wakes=1 + int(100 * now_s), **counters), now_s)
    assert (now_s - activity.main_s > 2 * WINDOW_S) is (family + spent > 0.0)
    assert activity.moved_s == now_s


def test_ranks_that_a_node_had_before_are_none_of_its_ranks() -> None:
    """A node that went shifts the ranks of those that stay: two of four are here, whatever numbers they had."""
    watch = Watch(QUICK)
    for rank in (2, 3):
        watch.started(rank, 0.0)
    watch.look(1.0, [waits_since(1, rank) for rank in (2, 3)], world_size=4)
    watch.begin_round()
    for rank in (0, 1):
        watch.started(rank, 2.0)
    said = [
        verdict
        for look in range(400)
        for verdict in watch.look(2.0 + 0.25 * look, [waits_since(1, rank) for rank in (0, 1)], world_size=4)
    ]
    assert watch.stuck, "all ranks of this node wait"
    assert Kind.RESTART_ALL not in {verdict.kind for verdict in said}, "the others may work"


def waits_since(step: int, rank: int) -> WorkerSample:
    return WorkerSample(
        rank, Beat(step, step, Phase.COLLECTIVE, "all_reduce", 3, True, samples=dict.fromkeys(Phase, 300))
    )


@pytest.mark.parametrize("may", ["may_lose_node", "may_replace"])
@pytest.mark.parametrize("is_left_alone", [False, True])
def test_a_silent_node_whose_loss_would_end_the_job_is_reported(may: str, is_left_alone: bool) -> None:
    """It may have stood still for a while, as a machine does that is moved."""
    watch, more, kinds = Watch(), {may: not is_left_alone}, []
    for look in range(80):
        now_s = look / 4
        waits = WorkerSample(0, Beat(1, 1, Phase.COLLECTIVE, "all_reduce", 3, True), wakes=1)
        kinds += [
            v.kind for v in watch.look(now_s, [waits], {1: (now_s, (1,))}, world_size=2, **more) if v.ranks == (1,)
        ]
    assert kinds[-1] == (Kind.REPORT if is_left_alone else Kind.REPLACE_NODE)
