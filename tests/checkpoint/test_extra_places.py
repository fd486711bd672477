"""`save(also_to=...)`: a version is held while it is copied, no place waits for another, and what does not arrive is told."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forked
from holdfast.base.errors import HoldfastError, LevelNotReached
from holdfast.base.events import Events
from holdfast.checkpoint.checkpointer import checkpointer as checkpointers
from holdfast.checkpoint.save import durable_tracker as durables_module
from holdfast.checkpoint.save import extra_places
from holdfast.checkpoint.save.durable_tracker import DurableTracker
from holdfast.checkpoint.save.extra_places import MAX_WAITING, ExtraPlaces
from holdfast.core.model import Version
from holdfast.tiers.storage.stored_bundles import StoredBundles
from holdfast.tiers.storage.version_store import open_storage
from keeper.rig import eventually
from kit.checkpointers import Make, Trainee, leave
from sample_kit import MORE

DEADLINE_S = 60.0
Hold = Callable[[str], threading.Event]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Makes places of a name slow: nothing is written there until the event is set."""
    gates: dict[str, threading.Event] = {}
    write = StoredBundles.write

    def slowly(self: StoredBundles, *args: Any, **kwargs: Any) -> Any:
        gate = gates.get(Path(self._backend.properties.where).name)
        assert gate is None or gate.wait(60)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(StoredBundles, "write", slowly)

    def make_slow(name: str) -> threading.Event:
        return gates.setdefault(name, threading.Event())

    return make_slow


def versions(path: Path) -> list[Version]:
    return open_storage(path, Events()).versions() if path.exists() else []


def held(path: Path) -> list[Version]:
    return sorted(open_storage(path, Events()).marks.held())


def durable(checkpointer: Any, trainee: Trainee, *steps: int) -> None:
    for step in steps:
        trainee.train()
        checkpointer.save(step, "durable").wait()


def test_a_version_stays_while_it_waits_and_while_it_is_copied(make: Make, tmp_path: Path, slow: Hold) -> None:
    """Five more become durable meanwhile, of which retention keeps two; the second one waits for its turn all the time."""
    job, far, gate = tmp_path / "job", tmp_path / "far", slow("far")
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    for step in (0, 1):
        trainee.train()
        checkpointer.save(step, also_to=[str(far)]).wait()
    eventually(lambda: held(job) == [Version(1, 0), Version(1, 1)])
    durable(checkpointer, trainee, 2, 3, 4, 5, 6)
    eventually(lambda: versions(job) == [Version(1, step) for step in (0, 1, 5, 6)])
    gate.set()
    checkpointer.flush(DEADLINE_S)
    assert versions(far) == [Version(1, 0), Version(1, 1)]
    for version in versions(far):
        storage = open_storage(far, Events())
        for file in storage.manifest(version).bundles:
            storage.bundles.verify(version, file)
    assert held(job) == []
    durable(checkpointer, trainee, 7)
    eventually(lambda: versions(job) == [Version(1, 6), Version(1, 7)])
    leave(checkpointer)


def test_a_slow_place_dooms_no_other_and_a_restart_in_between_neither(
    make: Make,
    tmp_path: Path,
    slow: Hold,
) -> None:
    """After the restart another incarnation removes what is old; what is held is held for it too."""
    job, gate = tmp_path / "job", slow("slow")
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0, also_to=[str(tmp_path / "slow"), str(tmp_path / "quick")]).wait()
    eventually(lambda: versions(tmp_path / "quick") == [Version(1, 0)])
    trainee.train()
    checkpointer.save(1, also_to=[str(tmp_path / "quick")])
    eventually(lambda: versions(tmp_path / "quick") == [Version(1, 0), Version(1, 1)])
    assert checkpointer.restore() == 2
    marks = os.listdir(job / "held")  # perhaps of the second version too, whose copy has just ended
    assert marks
    assert all(".i000002-" in name for name in marks), "before anything of it is committed"
    durable(checkpointer, trainee, 2, 3, 4, 5)
    eventually(lambda: versions(job) == [Version(1, 0), Version(2, 4), Version(2, 5)])
    gate.set()
    checkpointer.flush(DEADLINE_S)
    assert versions(tmp_path / "slow") == [Version(1, 0)]
    assert held(job) == []
    leave(checkpointer)


def test_a_place_that_is_asked_for_while_a_copy_runs_is_not_lost(make: Make, tmp_path: Path, slow: Hold) -> None:
    gate, told = slow("slow"), []
    checkpointer = make(Trainee(), on_durable=lambda version, error: told.append((version, error)))
    checkpointer.restore()
    checkpointer.save(0, also_to=[str(tmp_path / "slow")]).wait()
    eventually((tmp_path / "slow" / "holdfast.json").exists)  # it runs
    checkpointer.save(0, also_to=[str(tmp_path / "later")])
    gate.set()
    checkpointer.flush(DEADLINE_S)
    assert versions(tmp_path / "slow") == versions(tmp_path / "later") == [Version(1, 0)]
    assert told == [(Version(1, 0), None)]
    leave(checkpointer)


def test_close_says_what_it_waits_for_and_what_did_not_arrive(
    make: Make,
    tmp_path: Path,
    slow: Hold,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is no error: at its own place the version is durable, and the others that it was wanted at have it."""
    gate, told = slow("slow"), []
    monkeypatch.setattr(checkpointers, "MIN_COPY_S", 0.6)
    monkeypatch.setattr(durables_module, "PROGRESS_S", 0.1)
    place = str(tmp_path / "slow")
    checkpointer = make(Trainee(), close_timeout_s=0.6, on_durable=lambda v, error: told.append((v, str(error))))
    checkpointer.restore()
    checkpointer.save(0, also_to=[place, str(tmp_path / "quick")]).wait(timeout_s=DEADLINE_S)
    with caplog.at_level(logging.INFO, "holdfast.checkpoint.save.durable_tracker"):
        checkpointer.close()
    gate.set()
    assert f"copies: i000001-s0000000000 at {place} (10.7 KiB of 21.4 KiB, " in caplog.text, "it is read"
    missing = f"i000001-s0000000000 is durable, but not at {place}: {extra_places.LEFT}"
    assert missing in caplog.text
    ((version, error),) = told
    assert version == Version(1, 0)
    assert error.startswith(missing)
    assert versions(tmp_path / "quick") == [Version(1, 0)]
    assert held(tmp_path / "job") == []


@MORE
def test_close_waits_for_a_copy_that_arrives(make: Make, tmp_path: Path, slow: Hold) -> None:
    gate = slow("slow")
    checkpointer = make(Trainee())
    checkpointer.restore()
    checkpointer.save(0, also_to=[str(tmp_path / "slow")]).wait()
    closing = threading.Thread(target=checkpointer.close)
    closing.start()
    eventually(lambda: checkpointer._closed or not checkpointer._run or checkpointer._run.durables._awaited)
    gate.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert versions(tmp_path / "slow") == [Version(1, 0)]


def test_an_interrupted_job_ends_its_copies_and_holds_nothing(make: Make, tmp_path: Path, slow: Hold) -> None:
    gate, told = slow("slow"), []
    checkpointer = make(Trainee(), on_durable=lambda version, error: told.append((version, str(error))))
    checkpointer.restore()
    checkpointer.save(0, also_to=[str(tmp_path / "slow")]).wait()
    eventually(lambda: held(tmp_path / "job") == [Version(1, 0)])
    looking = checkpointer._run.durables._thread
    checkpointer.interrupted()
    assert not looking.is_alive()
    assert held(tmp_path / "job") == []
    assert extra_places.LEFT in told[0][1]
    gate.set()
    assert checkpointer.restore() == 1
    checkpointer.save(1, also_to=[str(tmp_path / "quick")])
    checkpointer.flush(DEADLINE_S)
    assert versions(tmp_path / "quick") == [Version(2, 1)]
    leave(checkpointer)


SCRIPT = """
import os, signal, sys
import holdfast, torch
from holdfast.checkpoint.save import extra_places
extra_places.duplicate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
model = torch.nn.Linear(4, 4)
config = holdfast.Config(runtime_dir=sys.argv[2], every="0", durable_every="0", linger_s=1.0)
checkpointer = holdfast.Checkpointer(sys.argv[1], model=model, config=config)
checkpointer.restore()
checkpointer.save(0, also_to=[sys.argv[1] + "-far"]).wait()
signal.pause()
"""


def test_what_a_killed_process_held_goes_when_the_next_incarnation_commits(
    make: Make,
    tmp_path: Path,
    runtime_dir: Path,
) -> None:
    job = tmp_path / "job"
    command = [sys.executable, "-c", SCRIPT, str(job), str(runtime_dir)]
    ended = forked.run(command, timeout=60, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert held(job) == [Version(1, 0)]
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore(strict=False)
    durable(checkpointer, trainee, 1, 2)
    eventually(lambda: versions(job) == [Version(2, 1), Version(2, 2)])
    assert held(job) == []
    leave(checkpointer)


class Handle(SimpleNamespace):
    given_up = ""

    def ask_again(self) -> None:
        """Its keeper lives."""


def test_places_are_collected_until_the_version_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    monkeypatch.setattr(extra_places, "duplicate", lambda _, place, *__: copied.append(place))
    handle = Handle(version=Version(1, 4), durable=(False, "on its way"))
    source: Any = SimpleNamespace(marks=SimpleNamespace(hold=lambda *_: None, release=lambda *_: None))
    opened: Any = lambda place: place  # noqa: E731
    durables = DurableTracker(None, ExtraPlaces(source, opened, 1), timeout_s=DEADLINE_S)
    for places in (["a"], [], ["b", "a"]):
        durables.add(handle, places)
    handle.durable = (True, "")
    durables.flush(DEADLINE_S)
    durables.close()
    assert sorted(copied) == ["a", "b"]


def test_a_place_that_falls_behind_gets_the_newest_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits takes space at its own place, so no more than a few wait; the oldest gives way, and that is told."""
    running, gate, copied, told = threading.Event(), threading.Event(), [], []

    def copy(_: Any, __: Any, version: Version, ___: Any) -> None:
        running.set()
        assert gate.wait(DEADLINE_S)
        copied.append(version.step)

    def tell(version: Version, error: HoldfastError | None) -> None:
        told.append((version.step, error))

    monkeypatch.setattr(extra_places, "duplicate", copy)
    source: Any = SimpleNamespace(marks=SimpleNamespace(hold=lambda *_: None, release=lambda *_: None))
    opened: Any = lambda place: place  # noqa: E731
    durables = DurableTracker(tell, ExtraPlaces(source, opened, 1), timeout_s=DEADLINE_S)
    handle: Any = Handle(version=Version(1, 0), durable=(True, ""))
    durables.add(handle, ["slow"])
    assert running.wait(DEADLINE_S)
    for step in range(1, MAX_WAITING + 2):
        handle = Handle(version=Version(1, step), durable=(True, ""))
        durables.add(handle, ["slow"])
    eventually(lambda: bool(told))
    gate.set()
    with pytest.raises(LevelNotReached, match="i000001-s0000000001 is durable, but not at slow: 8 newer versions wait"):
        durables.flush(DEADLINE_S)
    durables.close()
    assert copied == [0, *range(2, MAX_WAITING + 2)]
    assert [step for step, error in told if error is not None] == [1]


def test_a_keeper_that_dies_while_a_version_is_copied_makes_it_no_less_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    running, gate, told = threading.Event(), threading.Event(), []

    def copy(*_: Any) -> None:
        running.set()
        assert gate.wait(DEADLINE_S)

    monkeypatch.setattr(extra_places, "duplicate", copy)
    source: Any = SimpleNamespace(marks=SimpleNamespace(hold=lambda *_: None, release=lambda *_: None))
    opened: Any = lambda place: place  # noqa: E731
    durables = DurableTracker(lambda *said: told.append(said), ExtraPlaces(source, opened, 1), timeout_s=0.2)
    handle: Any = Handle(version=Version(1, 0), durable=(True, ""))
    durables.add(handle, ["slow"])
    assert running.wait(DEADLINE_S)
    handle.durable = (False, "the keeper is lost")
    with pytest.raises(LevelNotReached, match=r"is durable, but after 0\.5 s not at all places"):
        durables.flush(0.5)
    gate.set()
    durables.flush(DEADLINE_S)
    durables.close()
    assert told == [(Version(1, 0), None)]
