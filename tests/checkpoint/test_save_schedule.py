"""Cadence, appointments and the stop of all ranks after one step."""

from __future__ import annotations

import itertools
import sys
import threading

import pytest

from holdfast.base.config import Config
from holdfast.base.errors import ConfigError
from holdfast.checkpoint.save.save_schedule import Schedule, parse_cadence
from holdfast.core.scheduling.step_agreement import Appointment, Purpose


def schedule(rank: int = 0, world_size: int = 1, **settings: str) -> tuple[Schedule, list[int]]:
    """A schedule whose clock goes on by a second at every look, and the steps that it reported as missed."""
    missed: list[int] = []
    config = Config(**settings)  # type: ignore[arg-type]
    ticks = itertools.count()
    clock = Schedule(config, rank=rank, world_size=world_size, missed=missed.append, clock=lambda: float(next(ticks)))
    return clock, missed


def saves(clock: Schedule, steps: range) -> list[tuple[int, bool]]:
    """(step, durable) of the saves that were due."""
    found = []
    for step in steps:
        due = clock.after(step, stop_wanted=False)
        if due.save:
            clock.saved(step, durable=due.durable)
            found.append((step, due.durable))
    return found


def test_cadences_in_steps_are_the_same_on_every_rank_and_durable_ones_save_too() -> None:
    expected = [(1, False), (3, True), (5, False), (7, True)]
    for rank in (0, 1):
        assert saves(schedule(rank, 2, every="2", durable_every="4")[0], range(9)) == expected
    assert saves(schedule(every="0", durable_every="3")[0], range(7)) == [(2, True), (5, True)]
    assert saves(schedule(every="0", durable_every="0")[0], range(7)) == []


def test_seconds_are_decided_by_rank_0_and_steps_win_over_them() -> None:
    alone, _ = schedule(every="2s", durable_every="0")
    assert saves(alone, range(9)) == [(1, False), (3, False), (5, False), (7, False)]
    both, _ = schedule(every="2,1s", durable_every="0")
    assert saves(both, range(4)) == [(1, False), (3, False)]

    first, _ = schedule(0, 2, every="2s", durable_every="0")
    other, _ = schedule(1, 2, every="2s", durable_every="0")
    assert [other.after(step, stop_wanted=False).propose for step in (0, 1)] == [(), ()]
    assert first.after(0, stop_wanted=False).propose == ()
    due = first.after(1, stop_wanted=False)
    assert not due.save
    assert [(p.purpose, p.step) for p in due.propose] == [(Purpose.SAVE, 1)]
    for clock in (first, other):
        clock.take(Appointment(Purpose.SAVE, 3))
        assert [clock.after(step, stop_wanted=False).save for step in (2, 3, 4)] == [False, True, False]


def test_a_rank_past_the_appointed_step_says_so_at_once_and_a_stop_is_proposed_again() -> None:
    late, missed = schedule(1, 2, every="0", durable_every="0")
    due = late.after(5, stop_wanted=True)
    assert [(p.purpose, p.step) for p in due.propose] == [(Purpose.STOP, 5)]
    late.after(6, stop_wanted=True)
    late.after(7, stop_wanted=True)
    late.take(Appointment(Purpose.STOP, 7))
    assert missed == [7], "the others wait at step 7; they must hear before our next step ends"
    due = late.after(8, stop_wanted=True)
    assert not due.stop
    assert [p.purpose for p in due.propose] == [Purpose.STOP]
    late.take(Appointment(Purpose.STOP, 10))
    assert [late.after(step, stop_wanted=True).stop for step in (9, 10)] == [False, True]


def hears_at(clock: Schedule, moment: int, appointed: int) -> tuple[bool, list[bool]]:
    """Ends step 4 and hears of an appointment meanwhile; whether the step is saved, and whether it was heard at once, if it was."""
    left, heard = moment, list[bool]()

    def look(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            sys.setprofile(None)
            hears = threading.Thread(target=clock.take, args=(Appointment(Purpose.SAVE, appointed),), daemon=True)
            hears.start()
            hears.join(10.0)
            heard.append(not hears.is_alive())

    sys.setprofile(look)
    due = clock.after(4, stop_wanted=False)
    sys.setprofile(None)
    return due.save, heard


@pytest.mark.parametrize("appointed", [4, 5])
def test_what_is_heard_at_any_moment_of_a_step_waits_for_nothing_and_is_kept_or_missed(appointed: int) -> None:
    """A signal's handler may strike there, and wait for the thread that hears it."""
    outcomes = set()
    for moment in itertools.count(1):
        clock, missed = schedule(1, 2, every="0", durable_every="0")
        clock.after(3, stop_wanted=False)
        is_due, heard = hears_at(clock, moment, appointed)
        if not heard:
            break
        assert heard == [True], f"moment {moment}"
        is_missed = missed == [4]
        outcomes.add((is_due, is_missed, clock.after(5, stop_wanted=False).save))
    assert moment > 5
    assert outcomes == ({(True, False, False), (False, True, False)} if appointed == 4 else {(False, False, True)})


def test_a_stop_alone_is_immediate_and_durable() -> None:
    clock, _ = schedule(every="0", durable_every="0")
    assert not clock.after(0, stop_wanted=False).stop
    due = clock.after(1, stop_wanted=True)
    assert (due.stop, due.save, due.durable) == (True, True, True)


class Job:
    """One rank whose steps take a second; `writing` says what storage does."""

    def __init__(self, every: str) -> None:
        self.now_s, self.writing = 0.0, False
        config = Config(every=every, durable_every="10s")
        self.schedule = Schedule(
            config, rank=0, world_size=1, missed=lambda _: None, clock=lambda: self.now_s, writing=lambda: self.writing
        )

    def durables(self, count: int) -> list[float]:
        """When versions were due for storage, in so many steps."""
        found = []
        for _ in range(count):
            self.now_s += 1.0
            due = self.schedule.after(int(self.now_s), stop_wanted=False)
            if due.save:
                self.schedule.saved(int(self.now_s), durable=due.durable)
            found += [self.now_s] if due.durable else []
        return found


@pytest.mark.parametrize("every", ["1", "0"])
def test_nothing_is_due_by_the_clock_while_storage_writes_but_not_for_ever(every: str) -> None:
    """Two versions that are written at once take two slots, and each of them takes as long."""
    job = Job(every)
    assert job.durables(12) == [10.0]
    job.writing = True
    assert job.durables(13) == []
    job.writing = False
    assert job.durables(1) == [26.0], "as soon as storage is done"
    job.writing = True
    assert job.durables(60) == [56.0, 86.0], "storage that refuses for long does not end it"


def test_a_rank_whose_clock_was_second_does_not_make_the_next_version_due_as_well() -> None:
    job = Job("1")
    assert job.durables(9) == []
    job.schedule.stored()
    assert job.durables(10) == [19.0]


@pytest.mark.parametrize("text", ["", "often", "10,20", "-3", "0s"])
def test_a_wrong_cadence_names_the_setting(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cadence("durable_every", text)
    assert caught.value.where == "durable_every"
    assert "30s" in caught.value.remedy
