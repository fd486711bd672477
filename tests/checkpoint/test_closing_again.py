"""What a signal's handler raises while a Checkpointer leaves: the next call goes on there, and nothing of ours stays."""

from __future__ import annotations

import os
import threading
import typing
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn
from torch.autograd import grad_mode
from torch.utils import _contextlib

from holdfast.base.errors import LevelNotReached, UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.pipeline import bubbles, schedule_discovery
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.tiers.storage import run_lock
from keeper.rig import eventually
from kit.checkpointers import Make, Trainee
from kit.schedules import schedule_of
from kit.strikes import Strike, called, nth, strikes

# Threads and locks of the standard library may keep what is raised there, msgspec what is raised where it asks for a type; torch may
# stay in the mode that it was about to leave.
_SPARED = (threading.__file__, weakref.__file__, typing.__file__, grad_mode.__file__, _contextlib.__file__)


class Alarm(BaseException):
    """What scripts raise in a handler, as Ctrl-C does."""


def _raises() -> None:
    raise Alarm


def _ours() -> tuple[set[str], list[str]]:
    """Threads and open files of this process."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the list's own
            found.append(os.readlink(f"/proc/self/fd/{number}").partition(":[")[0])
    return {thread.name for thread in threading.enumerate()}, sorted(found)


def _behind(function: Any) -> Callable[[FrameType, str], bool]:
    """Whether a moment comes behind the first call of a function."""
    seen = list[bool]()

    def counts(frame: FrameType, event: str) -> bool:
        if event == "call" and frame.f_code is function.__code__:
            seen.append(True)
        # No handler runs where a lock is taken, which is a call of C.
        return bool(seen) and event in ("call", "return") and frame.f_code.co_filename not in _SPARED

    return counts


@pytest.mark.parametrize("every", [97, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"memory_budget": "1KB"}], ids=["memory", "storage"])
@pytest.mark.parametrize("way", ["close", "abandon"])
def test_the_next_call_goes_on_where_a_handler_broke_off_the_one_that_left(
    make: Make, tmp_path: Path, way: str, options: dict[str, Any], every: int
) -> None:
    """At drawn moments; every second time it is the other way that goes on."""
    before, number = _ours(), 0
    while True:
        number += 1
        trainee = Trainee()
        checkpointer: Any = make(trainee, path=tmp_path / f"job {number}", **options)
        checkpointer.restore()
        trainee.train()
        checkpointer.save(0, "durable" if options else "captured").wait()
        trainee.train()
        strike = Strike(_raises, nth(number * every, _behind(Checkpointer._leave)))
        with suppress(Alarm), strike:
            getattr(checkpointer, way)()
        (checkpointer.close if number % 2 else checkpointer.abandon)()
        if way == "close":
            assert checkpointer._run.recent[-1].is_stored(), number
        checkpointer.close()
        assert not run_lock._held, number
        with suppress(AssertionError):
            eventually(lambda: _ours() == before, 5.0)
        assert _ours() == before, number
        if not strike.came:
            break
    assert number > 3


def test_a_second_signal_while_it_leaves_breaks_it_off_again_and_the_third_call_goes_on(make: Make) -> None:
    trainee = Trainee()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    trainee.train()
    for struck in (Saver.close, run_lock.RunLock.release):
        with pytest.raises(Alarm), Strike(_raises, called(struck)):
            checkpointer.close()
        assert run_lock._held
    checkpointer.close()
    assert not run_lock._held


def test_what_close_could_not_tell_as_it_was_broken_off_is_told_by_the_next_call(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = Trainee()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    trainee.train()

    def fails(_: Any) -> bool:
        raise LevelNotReached("nothing of this run is durable: no disk")

    monkeypatch.setattr(checkpointer, "_finish", fails)
    with pytest.raises(Alarm), Strike(_raises, called(Saver.close)):
        checkpointer.close()
    with pytest.raises(LevelNotReached, match="close has failed before: nothing of this run is durable: no disk"):
        checkpointer.close()
    assert not run_lock._held
    checkpointer.close()


def test_nothing_is_saved_of_a_restore_that_failed_and_was_interrupted_behind_that(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects may hold a mixture."""
    trainee = Trainee()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.step(0)

    def fails(*_: Any) -> None:
        raise LevelNotReached("no")

    monkeypatch.setattr(checkpointer, "_laid_out", fails)
    with pytest.raises(Alarm), Strike(_raises, called(Saver.close)):
        checkpointer.restore()
    checkpointer.close()
    assert not checkpointer._storage.versions()
    assert not run_lock._held


def test_who_saves_behind_a_restore_that_failed_hears_that_it_did(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = Trainee()
    checkpointer: Any = make(trainee)
    with pytest.raises(UsageError, match="has not been called"):
        checkpointer.save(0)
    checkpointer.restore()

    def fails(*_: Any) -> None:
        raise LevelNotReached("no")

    monkeypatch.setattr(checkpointer, "_laid_out", fails)
    with pytest.raises(LevelNotReached):
        checkpointer.restore()
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"the last restore\(\) failed"):
        checkpointer.save(0)
    checkpointer.restore()
    assert checkpointer.save(0).given_up == ""


@pytest.mark.filterwarnings("ignore:unclosed (<socket|file):ResourceWarning")  # with what was being made
@pytest.mark.parametrize("every", [1499, pytest.param(101, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"memory_budget": "1KB"}], ids=["memory", "storage"])
def test_a_first_restore_that_a_handler_breaks_off_leaves_nothing_and_the_next_one_is_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], every: int
) -> None:
    """At drawn moments: no thread, no descriptor and no lock."""
    monkeypatch.setattr(schedule_discovery, "_schedules", lambda _: [])  # it looks at each object of the process
    saved = Trainee()
    checkpointer: Any = make(saved, **options)
    checkpointer.restore()
    saved.train()
    checkpointer.save(0, "durable").wait("durable")
    checkpointer.abandon()
    before = _ours()
    for number, strike in enumerate(strikes(_raises, counts=_behind(Checkpointer.restore), every=every)):
        trainee = Trainee()
        checkpointer = make(trainee, **options)
        with suppress(Alarm), strike:
            checkpointer.restore()
        if strike.came:
            with suppress(AssertionError):
                eventually(lambda: _ours() == before, 5.0)
            assert _ours() == before, f"{number}\n{strike._where}"
            assert not run_lock._held, number
            assert checkpointer.restore() == 1, number
        assert trainee.fingerprint() == saved.fingerprint(), number
        checkpointer.abandon()  # the keeper stays for the next one
    assert number > 3


def test_a_pipeline_is_put_back_though_a_handler_breaks_that_off() -> None:
    """At each moment; the second call goes on, and closes no descriptor twice."""
    schedule = schedule_of(nn.Identity())
    before, seam = {name: vars(each).copy() for name, each in _parts(schedule)}, bubbles._seams()
    waits, files = getattr(seam, bubbles._SEAM), _ours()[1]
    for moment, strike in enumerate(strikes(_raises, counts=lambda _, event: event in ("call", "return"))):
        watcher = bubbles.Bubbles(schedule, Events())
        watcher.attach()
        with suppress(Alarm), strike:
            watcher.detach()
        watcher.detach()
        assert {name: vars(each) for name, each in _parts(schedule)} == before, moment
        assert getattr(seam, bubbles._SEAM) is waits
        assert _ours()[1] == files
    assert moment > 10


def _parts(schedule: Any) -> list[tuple[str, Any]]:
    return [
        ("schedule", schedule),
        *((f"stage {number}", stage) for number, stage in enumerate(bubbles.stages_of(schedule))),
    ]
