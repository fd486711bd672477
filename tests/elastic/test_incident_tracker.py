"""When an incident is over, from what workers tell and what their pages show."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.elastic.escalation import EscalationPolicy, Failure, Fault, Limits, RecoveryAction
from holdfast.core.elastic.worker_facts import Phase
from holdfast.elastic.launch.incident_tracker import PROGRESS_S, RENEWED_S, IncidentTracker


def page(step: int, **spent: float) -> Any:
    """Of a worker that has finished so many steps, with seconds by phase."""
    seconds = Counter({Phase[name]: value for name, value in spent.items()})
    return SimpleNamespace(pid=1, beat=SimpleNamespace(step=step), spent_s=seconds, num_steps=step)


def died(rank: int = 1, step: int = -1) -> Failure:
    return Failure(Fault.PROCESS, rank=rank, step=step, first_error=f"rank {rank} died")


def over(cases: IncidentTracker, now: float, readings: dict[int, Any]) -> dict[str, Any] | None:
    """What is told of a recovery that is over at `now`: at the look after that."""
    assert cases.look(now, readings, all_run=True) is None
    return cases.look(now + 0.5, readings, all_run=True)


def test_it_is_over_when_every_rank_has_told_where_it_came_back_from() -> None:
    """The survivor's page shows the steps of before the fault until it trains again: that is no step made since."""
    cases = IncidentTracker(Limits())
    cases.judge(Failure(Fault.PROCESS, rank=1), 0.0, [page(9), page(9)], {"ranks": [1]})
    cases.ordered(1.0, [0])
    cases.restored(1, {"step": 8, "source": "its own slot"})
    assert cases.look(2.0, {0: page(9), 1: page(10)}, all_run=True) is None
    cases.restored(0, {"step": 8, "source": "its own slot"})
    assert cases.look(3.0, {0: page(9), 1: page(10)}, all_run=True) is None, "it has not made a step yet"
    told = over(cases, 4.0, {0: page(10), 1: page(10)})
    assert told is not None
    assert told["came_back"] == {"0": "its own slot", "1": "its own slot"}


def test_what_a_page_shows_before_its_word_is_heard_ends_nothing() -> None:
    """The ranks tell where they came back from and show it at once; a look may fall in between."""
    cases = IncidentTracker(Limits())
    cases.judge(died(), 0.0, [page(9), page(9)], {"ranks": [1]})
    cases.ordered(1.0, [0])
    shown = {0: page(7), 1: page(7)}
    assert cases.look(2.0, shown, all_run=True) is None
    for rank in range(2):
        cases.restored(rank, {"step": 6, "source": "its own slot"})
    assert cases.look(2.5, shown, all_run=True) is None, "it is where it came back to, no step made since"
    assert cases.look(3.0, {0: page(8), 1: page(8)}, all_run=True) is None
    told = cases.look(3.5, {0: page(8), 1: page(8)}, all_run=True)
    assert told is not None
    assert (told["steps_lost"], told["seconds"]["T3"]) == (2, 1.0)


def test_every_part_of_a_recovery_has_its_seconds() -> None:
    """Ten steps in five seconds before; found at 100, ordered at 101, running at 103, a step made at 110."""
    cases = IncidentTracker(Limits())
    before = [page(10, STEP=4.0, COLLECTIVE=0.5, DATA=0.5), page(10, STEP=5.0)]
    cases.judge(died(), 100.0, before, {"ranks": [1], "found_s": 0.25})
    assert cases.look(100.5, {}, all_run=False) is None
    cases.ordered(101.0, [0])
    for rank in range(2):
        cases.restored(rank, {"step": 6, "source": "its own slot"})
    assert cases.look(102.0, {0: page(10), 1: page(7)}, all_run=False) is None
    assert cases.look(103.0, {0: page(7), 1: page(7)}, all_run=True) is None
    told = over(cases, 110.0, {0: page(8, COMPILE=2.0), 1: page(8, COMPILE=1.5)})
    assert told is not None
    assert told["seconds"] == {"T0": 1.5, "T1": 1.0, "T2": 2.0, "T3": 5.0, "T4": 2.0}
    assert (told["steps_lost"], told["kept"], told["ranks"], told["found_s"]) == (3, [0], [1], 0.25)
    assert (told["first_error"], told["action"]) == ("rank 1 died", "replace the process")
    assert cases.look(111.0, {0: page(9), 1: page(9)}, all_run=True) is None, "it is told once"


def test_a_second_failure_belongs_to_the_same_incident() -> None:
    cases = IncidentTracker(Limits())
    cases.judge(died(1), 0.0, [page(9), page(9)], {"ranks": [1]})
    cases.ordered(1.0, [0])
    cases.judge(died(0), 2.0, [page(9), page(0)], {"ranks": [0]})
    cases.ordered(3.0, [])
    assert cases.look(4.0, {0: page(0), 1: page(0)}, all_run=True) is None
    told = over(cases, 5.0, {0: page(1), 1: page(1)})
    assert told is not None
    assert (told["ranks"], told["first_error"], told["kept"]) == ([1, 0], "rank 1 died", [])
    assert told["seconds"]["T1"] == 3.0


def test_whose_process_was_replaced_at_an_earlier_order_of_an_incident_was_not_kept() -> None:
    cases = IncidentTracker(Limits())
    for time_s, rank, kept in ((0.0, 1, [0, 2]), (1.0, 2, [0, 1])):
        cases.judge(died(rank), time_s, [page(9), page(9)], {"ranks": [rank]})
        cases.ordered(time_s + 0.5, kept)
    told = over(cases, 4.0, {rank: page(10) for rank in range(3)})
    assert told is not None
    assert (told["ranks"], told["kept"]) == ([1, 2], [0])


def mended(cases: IncidentTracker, now: float, step: int) -> RecoveryAction:
    """A failure of rank 1 before `step` was finished, and its end without a new step."""
    action = cases.judge(died(1, step or -1), now, [page(step)], {}).action
    cases.ordered(now, [])
    return action


def test_a_step_that_was_never_made_before_is_progress_and_health_gives_all_back() -> None:
    cases = IncidentTracker(Limits(failures=4))
    assert [mended(cases, 0.0, 5), mended(cases, 1.0, 6)] == [RecoveryAction.REPLACE, RecoveryAction.REPLACE], (
        "a step was made in between"
    )
    cases.look(2.0, {1: page(6)}, all_run=True)
    assert [mended(cases, 3.0, 6), mended(cases, 4.0, 6)] == [RecoveryAction.REPLACE, RecoveryAction.REPLACE]
    assert mended(cases, 5.0, 6) is RecoveryAction.STOP, "four were mended"
    cases = IncidentTracker(Limits(failures=1))
    assert mended(cases, 0.0, 5) is RecoveryAction.REPLACE
    cases.saved(8)
    cases.look(RENEWED_S + 1.0, {1: page(9)}, all_run=True)
    assert mended(cases, RENEWED_S + 2.0, 9) is RecoveryAction.REPLACE


@pytest.mark.parametrize("step", [9, 0])
def test_health_without_saved_progress_gives_nothing_back(step: int) -> None:
    """Else a script that fails after ten minutes and a bit would be restarted for ever. `step` 0: it tells none."""
    cases = IncidentTracker(Limits(failures=1))
    cases.saved(5)
    assert mended(cases, 0.0, step) is RecoveryAction.REPLACE
    cases.saved(5)
    cases.look(RENEWED_S + 1.0, {1: page(step)}, all_run=True)
    assert mended(cases, RENEWED_S + 2.0, step) is RecoveryAction.STOP


def test_what_the_job_comes_back_to_counts_as_saved() -> None:
    cases = IncidentTracker(Limits(failures=1))
    assert mended(cases, 0.0, 5) is RecoveryAction.REPLACE
    cases.restored(1, {"step": 4, "source": "its own slot"})
    cases.look(RENEWED_S + 1.0, {1: page(9)}, all_run=True)
    assert mended(cases, RENEWED_S + 2.0, 9) is RecoveryAction.REPLACE


def test_steps_that_were_made_before_are_no_progress() -> None:
    """A script that begins at its first step again and fails ever earlier."""
    cases = IncidentTracker(Limits(failures=99))
    actions = []
    for number, step in enumerate([9, 5, 7, 8, 8]):
        cases.look(float(number), {1: page(step)}, all_run=True)
        actions.append(cases.judge(died(1, step), float(number), [page(step)], {}).action)
        cases.ordered(float(number), [])
    assert actions[:4] == [
        RecoveryAction.REPLACE,
        RecoveryAction.REPLACE,
        RecoveryAction.RESTART_ALL,
        RecoveryAction.RESTART_ALL,
    ]
    assert actions[4] is RecoveryAction.STOP


def old_steps(cases: IncidentTracker, steps: list[int], ran_s: float) -> list[RecoveryAction]:
    """Failures at steps that were made before, each after so long of health; somebody gave a number of restarts."""
    actions, now = [], 0.0
    cases.look(now, {1: page(99)}, all_run=True)
    for step in steps:
        cases.ordered(now, [])
        cases.look(now + 1.0, {1: page(1)}, all_run=True)  # they tell steps at once
        now += ran_s
        cases.look(now, {1: page(step)}, all_run=True)
        actions.append(cases.judge(died(1, step), now, [page(step)], {}).action)
    return actions


def test_long_health_gives_attempts_back_also_while_old_steps_are_made_again() -> None:
    actions = old_steps(IncidentTracker(Limits(failures=99, renewed=False)), list(range(50, 70)), RENEWED_S + 1.0)
    assert set(actions) == {RecoveryAction.REPLACE}
    assert old_steps(IncidentTracker(Limits(failures=99)), list(range(50, 55)), 60.0)[-1] is RecoveryAction.STOP


def test_failures_at_one_step_add_up_however_long_the_health_before() -> None:
    """A bug of the script: once more with an older version, then stop."""
    actions = old_steps(IncidentTracker(Limits(failures=99)), [50] * 4, RENEWED_S + 1.0)
    assert actions[-1] is RecoveryAction.STOP


def test_health_that_saved_gives_attempts_back_with_the_failures() -> None:
    ladder = EscalationPolicy(Limits())
    for step in range(2):
        ladder.failed(died(1, step))
    ladder.renew()
    assert ladder.failed(died(1, 7)).action is RecoveryAction.REPLACE
    assert ladder.num_failures == 1


def test_repeated_error_without_progress_stops_the_job() -> None:
    def fail(cases: IncidentTracker, now: float, text: str = "ValueError: a bug") -> RecoveryAction:
        cases.look(now, {1: page(0)}, all_run=True)
        failure = Failure(Fault.PROCESS, rank=1, first_error=text, said=True)
        action = cases.judge(failure, now, [page(0)], {"ranks": [1]}).action
        cases.ordered(now, [])
        return action

    cases = IncidentTracker(Limits(failures=99))
    assert [fail(cases, 10.0 * number) for number in range(3)] == [
        RecoveryAction.REPLACE,
        RecoveryAction.REPLACE,
        RecoveryAction.STOP,
    ]
    cases = IncidentTracker(Limits(failures=99))
    assert RecoveryAction.STOP not in [fail(cases, 10.0 * number, f"ValueError: {number}") for number in range(5)]
    cases, actions = IncidentTracker(Limits(failures=99)), []
    for number in range(5):
        cases.saved(number)
        actions.append(fail(cases, 10.0 * number))
    assert RecoveryAction.STOP not in actions


def test_of_workers_that_tell_no_steps_running_for_a_while_is_progress() -> None:
    cases = IncidentTracker(Limits(failures=99))
    assert [mended(cases, float(n), 0) for n in range(3)] == [
        RecoveryAction.REPLACE,
        RecoveryAction.REPLACE,
        RecoveryAction.RESTART_ALL,
    ]
    cases.look(3.0 + PROGRESS_S, {1: page(0)}, all_run=True)
    assert mended(cases, 9.0, 0) is RecoveryAction.REPLACE


def test_a_start_that_takes_long_is_no_progress_of_a_job_that_tells_steps() -> None:
    """Else a step that always fails never got the older version: a large job loads for longer than that every time."""
    cases, answers, now = IncidentTracker(Limits(failures=99)), [], 0.0
    for _ in range(4):
        answers.append(cases.judge(died(1, 6), now, [page(6)], {}))
        cases.ordered(now, [0])
        now += 3 * PROGRESS_S
        cases.look(now, {0: page(0), 1: page(0)}, all_run=True)
        cases.look(now + 1.0, {0: page(6), 1: page(6)}, all_run=True)
        now += 2.0
    assert [answer.older for answer in answers] == [False, False, True, False]
    assert answers[-1].action is RecoveryAction.STOP


def test_failures_at_other_steps_behind_a_long_start_are_attempts_of_their_own() -> None:
    """A job that does many steps again is not stopped by a few failures that have nothing to do with each other."""
    cases, actions, now = IncidentTracker(Limits(failures=99)), [], 0.0
    for step in (90, 40, 50, 60, 70, 80):
        actions.append(cases.judge(died(1, step), now, [page(step)], {}).action)
        cases.ordered(now, [0])
        now += 3 * PROGRESS_S
        cases.look(now, {0: page(0), 1: page(0)}, all_run=True)
    assert set(actions) == {RecoveryAction.REPLACE}


def test_recovery_cut_short_by_job_end_is_reported() -> None:
    cases = IncidentTracker(Limits())
    cases.judge(died(), 100.0, [page(9), page(9)], {"ranks": [1]})
    cases.ordered(101.0, [0])
    cases.restored(1, {"step": 8, "source": "its own slot"})
    assert cases.look(103.0, {0: page(9), 1: page(9)}, all_run=True) is None, "no step was made since"
    told = cases.ended(104.5)
    assert told is not None
    assert told["seconds"] == {"T1": 1.0, "T2": 2.0, "T3": 1.5}
    assert (told["first_error"], told["came_back"]) == ("rank 1 died", {"1": "its own slot"})
    assert cases.ended(105.0) is None, "it is told once"


def test_a_failure_that_stops_the_job_is_told() -> None:
    cases = IncidentTracker(Limits(failures=0))
    assert cases.judge(died(), 100.0, [page(9)], {"ranks": [1]}).action is RecoveryAction.STOP
    told = cases.ended(100.0)
    assert told is not None
    assert (told["action"], told["seconds"]) == (RecoveryAction.STOP.value, {"T1": 0.0})
