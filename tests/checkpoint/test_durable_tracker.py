"""What a save reaches and when that is told: flush, callbacks, further places, pins, stops, a keeper that is frozen."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import holdfast
from holdfast.base.errors import CorruptError, HoldfastError, KeeperLost, LevelNotReached, StorageError, UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.capture.copy_plan import Structure
from holdfast.checkpoint.job import keeper_link
from holdfast.checkpoint.job.keeper_link import ASK_S
from holdfast.checkpoint.job.slot_reservation import Reservation
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.restore.restorer import Restorer
from holdfast.checkpoint.save import save_handle
from holdfast.checkpoint.save.durable_tracker import DurableTracker
from holdfast.checkpoint.save.save_handle import SaveHandle, never
from holdfast.cli.stored import versions as look
from holdfast.core.model import Level, Topology, Version
from holdfast.core.versions.lineage import Lineage
from holdfast.keeper.rpc import announcements
from holdfast.keeper.rpc.announcements import PASSED_S, Announced
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.messages import Progress
from holdfast.keeper.rpc.viewer import CALL_TIMEOUT_S
from holdfast.tiers.storage.version_store import open_storage
from keeper.rig import eventually, start_hurtable
from kit.checkpointers import Make, Trainee, leave, wait_gone
from kit.strikes import Strike, exits
from sample_kit import MORE, sampled

DEADLINE_S = 60.0
SOURCES = str(Path(holdfast.__file__).parent)


class Told:
    """The calls of one `on_durable`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Version, HoldfastError | None]] = []
        self._changed = threading.Condition()

    def __call__(self, version: Version, error: HoldfastError | None) -> None:
        with self._changed:
            self.calls.append((version, error))
            self._changed.notify_all()
        raise ZeroDivisionError("a callback that fails costs nothing")

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, DEADLINE_S)


def versions(path: Path) -> list[Version]:
    return open_storage(path, Events()).versions()


def test_what_another_rank_made_due_for_storage_is_due_here_too(make: Make) -> None:
    """The clocks of ranks differ. Two neighbouring versions would be written, one for each of them."""
    trainee, told = Trainee(), Told()
    checkpointer = make(trainee, every="1", durable_every="1h", on_durable=told)
    checkpointer.restore()
    trainee.train()
    handle = checkpointer.step(0)
    handle.wait("captured", DEADLINE_S)
    client, began_s = checkpointer._run.link.client, checkpointer._run.schedule._durable_s
    client.persist(handle.version)  # as the other rank's keeper hears it
    eventually(lambda: client.announced.newest_due is not None)
    trainee.train()
    checkpointer.step(1)
    assert handle.level is Level.DURABLE
    assert checkpointer._run.schedule._durable_s > began_s
    checkpointer.flush(DEADLINE_S)
    told.wait(1)
    assert told.calls == [(handle.version, None)]
    assert not client.announced.newest_due[1].is_written


def test_flush_callbacks_pins_and_further_places(make: Make, tmp_path: Path) -> None:
    trainee, told = Trainee(), Told()
    checkpointer = make(trainee, on_durable=told)
    checkpointer.restore()
    checkpointer.pin("i000001-s0000000000")
    trainee.train()
    checkpointer.save(0, "durable")
    checkpointer.flush(DEADLINE_S)
    assert versions(tmp_path / "job") == [Version(1, 0)]
    kept = trainee.fingerprint()

    for step in (1, 2, 3):
        trainee.train()
        checkpointer.save(step, also_to=[str(tmp_path / "far")] if step == 1 else [])
        if step > 1:
            checkpointer.save(step, "durable")
        checkpointer.flush(DEADLINE_S)

    # What is no longer kept goes after the commit that flush waits for; the pinned one stays.
    eventually(lambda: versions(tmp_path / "job") == [Version(1, 0), Version(1, 2), Version(1, 3)])
    assert versions(tmp_path / "far") == [Version(1, 1)]
    told.wait(4)
    assert told.calls == [(Version(1, step), None) for step in range(4)]
    checkpointer.unpin(Version(1, 0))
    trainee.train()
    checkpointer.save(4, "durable").wait()
    # Retention runs after the word that the commit is durable.
    eventually(lambda: Version(1, 0) not in versions(tmp_path / "job"))
    leave(checkpointer)

    far = open_storage(tmp_path / "far", Events())
    for file in far.manifest(Version(1, 1)).bundles:
        far.bundles.verify(Version(1, 1), file)
    other = Trainee()
    elsewhere = make(other, path=tmp_path / "far")
    assert elsewhere.restore() == 2
    assert other.fingerprint() != kept
    leave(elsewhere)


def test_what_does_not_become_durable_is_said_by_flush_and_by_the_callback(make: Make, tmp_path: Path) -> None:
    trainee, told = Trainee(), Told()
    checkpointer = make(trainee, on_durable=told, close_timeout_s=1.0)
    checkpointer.restore()
    (tmp_path / "job" / ".tmp").rename(tmp_path / "elsewhere")
    (tmp_path / "job" / ".tmp").write_text("in the way")
    handle = checkpointer.save(0, "durable")
    assert handle.wait("captured", DEADLINE_S) == Level.CAPTURED
    with pytest.raises(LevelNotReached, match="captured, not durable"):
        handle.wait(timeout_s=0.2)  # for the level that was asked for

    with pytest.raises(LevelNotReached, match="i000001-s0000000000 is not durable"):
        checkpointer.flush(DEADLINE_S)

    told.wait(1)
    ((version, error),) = told.calls
    assert version == Version(1, 0)
    assert isinstance(error, LevelNotReached)
    checkpointer.flush(DEADLINE_S)  # it was said once
    (tmp_path / "job" / ".tmp").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "job" / ".tmp")
    checkpointer.save(1, also_to=["/proc/no/such/place"])
    with pytest.raises(LevelNotReached, match="i000001-s0000000001 is durable, but not at /proc/no/such/place"):
        checkpointer.flush(DEADLINE_S)
    assert Version(1, 1) in versions(tmp_path / "job")


def test_nobody_waits_for_a_version_whose_place_a_newer_one_took(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit fails once, and a newer version is due before it is tried again."""
    monkeypatch.setattr(announcements, "PASSED_S", 0.5)
    trainee, told = Trainee(), Told()
    checkpointer: Any = make(trainee, on_durable=told)
    checkpointer.restore()
    in_the_way = tmp_path / "job" / str(Version(1, 1)) / "manifest.json"
    in_the_way.mkdir(parents=True)
    trainee.train()
    older = checkpointer.save(1, "durable")
    announced = checkpointer._run.link.require().announced
    eventually(lambda: any("is not durable" in alarm for alarm in announced.alarms))
    trainee.train()
    newer = checkpointer.save(2, "durable")
    in_the_way.rmdir()
    assert newer.wait(timeout_s=DEADLINE_S) is Level.DURABLE
    if older.reached is not Level.DURABLE:  # it was not tried again first
        with pytest.raises(LevelNotReached, match=f"{newer.version} is durable, and took its place"):
            older.wait(timeout_s=DEADLINE_S)
        with pytest.raises(LevelNotReached, match="took its place"):
            checkpointer.flush(DEADLINE_S)
        told.wait(2)
        assert isinstance(dict(told.calls)[older.version], LevelNotReached)


def test_what_became_durable_so_long_ago_that_it_is_forgotten_is_looked_up_in_storage() -> None:
    announced = Announced(0, lambda: True)
    announced._stored_s[Version(1, 9)] = time.monotonic() - 2 * PASSED_S
    client = SimpleNamespace(announced=announced, alive=True, status=lambda **_: {"alarms": []})
    handle = SaveHandle(
        Version(1, 3), Level.DURABLE, link=SimpleNamespace(client=client, last_client=client),  # type: ignore[arg-type]
        in_storage=lambda _: True, settle=lambda _: None, topology=Topology(("a",), (0,)), timeout_s=600.0,
    )  # fmt: skip
    assert handle.wait() is Level.DURABLE


def test_what_became_durable_while_a_callback_ran_for_long_is_told_as_durable() -> None:
    """So many versions later the keeper's word of it is forgotten."""
    announced, told = Announced(0, lambda: True), Told()
    announced._stored_s[Version(1, 500)] = time.monotonic() - 2 * PASSED_S
    client = SimpleNamespace(announced=announced, alive=True, status=lambda **_: {"alarms": []})
    handles = [
        SaveHandle(
            Version(1, step),
            Level.DURABLE,
            link=SimpleNamespace(client=client, last_client=client),  # type: ignore[arg-type]
            in_storage=lambda version: version.step == 3,
            settle=lambda _: None,
            topology=Topology(("a",), (0,)),
            timeout_s=600.0,
        )
        for step in (3, 4)
    ]
    durables = DurableTracker(told, None, timeout_s=600.0)
    for handle in handles:
        durables.add(handle)
    told.wait(2)
    durables.close()
    assert told.calls[0] == (Version(1, 3), None)
    assert isinstance(told.calls[1][1], LevelNotReached)


def test_a_keeper_that_stands_still_does_not_make_a_version_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of work on it is heard once the keeper goes on; so too by a rank that stood still itself."""
    monkeypatch.setattr(announcements, "PASSED_S", 0.2)
    announced, older, asked = Announced(0, lambda: True), Version(1, 3), list[float]()
    announced.take(Progress(version=Version(1, 4), reached=(Level.DURABLE,), reason="", abandoned=False))

    def status(timeout_s: float) -> dict[str, Any]:
        asked.append(timeout_s)
        if len(asked) < 3:
            raise KeeperLost("it does not answer")
        if len(asked) == 3:  # of work on it, which was heard before the answer
            announced.take(Progress(version=older, reached=(Level.CAPTURED,), reason="", abandoned=False, due=True))
        return {"alarms": []}

    client = SimpleNamespace(announced=announced, alive=True, status=status)
    handle = SaveHandle(
        older, Level.DURABLE, link=SimpleNamespace(client=client, last_client=client),  # type: ignore[arg-type]
        in_storage=lambda _: False, settle=lambda _: None, topology=Topology(("a",), (0,)), timeout_s=600.0,
    )  # fmt: skip
    time.sleep(0.3)
    assert not handle.durable[0]
    with pytest.raises(LevelNotReached, match="took its place"):
        handle.wait(timeout_s=DEADLINE_S)
    assert len(asked) >= 4


def test_a_version_is_waited_for_as_long_as_work_on_it_goes_on_behind_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcements, "PASSED_S", 0.3)
    announced, older = Announced(0, lambda: True), Version(1, 3)
    announced.take(Progress(version=Version(1, 4), reached=(Level.DURABLE,), reason="", abandoned=False))
    for _ in range(6):
        announced.take(Progress(version=older, reached=(Level.CAPTURED,), reason="", abandoned=False, due=True))
        time.sleep(0.1)
        assert not announced.superseded(older)
    with pytest.raises(LevelNotReached, match="took its place"):
        announced.wait(older, Level.DURABLE, DEADLINE_S)


def test_threads_that_close_at_once_close_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a callback that closes, or flushes, waits for nobody who waits for it."""
    go, begun, ended = threading.Event(), list[int](), list[str]()

    def on_durable(version: Version, error: HoldfastError | None) -> None:
        eventually(lambda: len(begun) == 1)
        checkpointer.close()
        ended.append("closed")
        with pytest.raises(UsageError, match="wait for itself"):
            checkpointer.flush()
        ended.append("flushed")
        go.set()

    trainee = Trainee()
    checkpointer: Any = make(trainee, on_durable=on_durable)
    checkpointer.restore()
    trainee.train()
    finish = checkpointer._finish

    def slow(run: Any) -> bool:
        begun.append(1)
        assert go.wait(DEADLINE_S)
        return bool(finish(run))

    monkeypatch.setattr(checkpointer, "_finish", slow)
    checkpointer.save(1, "durable")
    threads = [threading.Thread(target=checkpointer.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert (begun, ended) == ([1], ["closed", "flushed"])


def test_a_handler_that_closes_within_a_save_keeps_the_version_before(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """As scripts close at SIGTERM: the save cannot go on meanwhile, and nobody waits for it."""

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            if armed and armed.pop():
                signal.raise_signal(signal.SIGUSR1)
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    armed, trainee = list[bool](), Trainee()
    checkpointer = make(trainee, odd=Odd())
    checkpointer.restore()

    def handle(*_: object) -> None:
        checkpointer.close()
        raise SystemExit(0)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        trainee.train()
        older = checkpointer.save(1)
        trainee.train()
        armed.append(True)
        began = time.monotonic()
        with pytest.raises(SystemExit):
            checkpointer.save(2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert older.reached is Level.DURABLE
    assert time.monotonic() - began < DEADLINE_S
    assert any("step 2 is not saved: close was called in the middle" in each.message for each in caplog.records)


@pytest.mark.parametrize(
    "where", [("_require_alive", "call"), pytest.param(("_framed", "call"), marks=MORE), ("saves", "return")]
)
def test_a_handler_that_closes_at_any_moment_of_a_save_waits_for_nothing_of_its_own(
    make: Make, where: tuple[str, str]
) -> None:
    """What a call to the keeper holds is needed by the call of the handler, and by the thread that reads the answer. What the
    save is was noted, and not yet that this thread makes it.
    """

    def here(frame: FrameType, event: str) -> bool:
        return (frame.f_code.co_name, event) == where and frame.f_code.co_filename.startswith(SOURCES)

    def handle() -> None:
        checkpointer.close()
        exits()

    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    older = checkpointer.save(1)
    older.wait()
    trainee.train()
    with pytest.raises(SystemExit), Strike(handle, here):
        checkpointer.save(2)
    assert older.reached is Level.DURABLE


def test_who_waited_for_a_thread_that_closed_hears_that_it_failed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainee, closing, go, lost = Trainee(), threading.Event(), threading.Event(), list[str]()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(1)

    def fails(_: object) -> bool:
        closing.set()
        assert go.wait(DEADLINE_S)
        raise LevelNotReached("no disk")

    def close() -> None:
        try:
            checkpointer.close()
        except LevelNotReached as error:
            lost.append(error.what)

    monkeypatch.setattr(checkpointer, "_finish", fails)
    first, second = (threading.Thread(target=close) for _ in range(2))
    first.start()
    assert closing.wait(DEADLINE_S)
    second.start()
    eventually(lambda: _waits_to_close(second))
    go.set()
    for thread in (first, second):
        thread.join(DEADLINE_S)
    assert lost[0] == "no disk"
    assert lost[1].startswith("another thread closed: no disk")
    checkpointer.close()  # again does nothing


def _waits_to_close(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name == "close"


def test_who_closes_while_its_thread_holds_the_tracker_waits_for_nothing() -> None:
    """As a handler does that strikes within a flush; what is durable is told of."""
    told = list[Version]()
    tracker = DurableTracker(lambda version, _: told.append(version), None, timeout_s=DEADLINE_S)
    handle = never(3, Level.DURABLE, "")
    tracker.add(handle)
    began = time.monotonic()
    with tracker._changed:
        handle.committed()
        tracker.close()
    assert time.monotonic() - began < 5.0
    assert told == [handle.version]


def test_a_callback_that_exits_does_not_end_those_to_come() -> None:
    told = list[int]()

    def on_durable(version: Version, error: HoldfastError | None) -> None:
        told.append(version.step)
        sys.exit(1)

    tracker = DurableTracker(on_durable, None, timeout_s=DEADLINE_S)
    for step in (1, 2):
        handle = never(step, Level.DURABLE, "")
        handle.committed()
        tracker.add(handle)
        tracker.flush(DEADLINE_S)
    assert told == [1, 2]
    tracker.close()


def test_flush_names_what_was_only_due_by_the_cadence_until_a_later_one_is_durable() -> None:
    """On a storage that is slower than the cadence most of these find no slot, and nobody lacks them."""
    told = Told()
    tracker = DurableTracker(told, None, timeout_s=DEADLINE_S)

    def ends(step: int, why: str, *, asked: bool) -> None:
        handle = never(step, Level.DURABLE, why)
        if not why:
            handle.committed()
        before = len(told.calls)
        tracker.add(handle, asked=asked)
        told.wait(before + 1)

    ends(0, "no slot", asked=False)
    ends(1, "no slot", asked=True)
    ends(2, "", asked=False)
    ends(3, "no slot", asked=False)
    with pytest.raises(LevelNotReached) as refused:
        tracker.flush(DEADLINE_S)
    assert (
        refused.value.what == "i000001-s0000000001 is not durable: no slot; i000001-s0000000003 is not durable: no slot"
    )
    ends(4, "no slot", asked=True)
    ends(4, "", asked=True)  # it is come back to
    tracker.flush(DEADLINE_S)
    tracker.close()


@MORE
def test_a_callback_that_does_not_return_is_no_reason_for_flush_to_fail(make: Make, tmp_path: Path) -> None:
    called, returns = threading.Event(), threading.Event()

    def told(version: Version, error: HoldfastError | None) -> None:
        called.set()
        assert returns.wait(DEADLINE_S)

    trainee = Trainee()
    checkpointer = make(trainee, on_durable=told)
    checkpointer.restore()
    checkpointer.save(0, "durable")
    assert called.wait(DEADLINE_S)
    checkpointer.flush(0.1)
    assert versions(tmp_path / "job") == [Version(1, 0)]

    returns.set()
    checkpointer.flush(DEADLINE_S)
    called.clear()
    returns.clear()
    checkpointer.save(1, also_to=["/proc/no/such/place"])
    assert called.wait(DEADLINE_S)
    with pytest.raises(LevelNotReached, match="is durable, but not at /proc/no/such/place"):
        checkpointer.flush(0.1)
    returns.set()
    leave(checkpointer)


def test_after_an_exception_the_last_whole_version_goes_to_storage(make: Make, tmp_path: Path) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, every=1, linger_s=5.0)
    checkpointer.restore()
    trainee.train()
    handle = checkpointer.step(0)
    assert handle is not None
    trainee.train()
    checkpointer.__exit__(ZeroDivisionError, ZeroDivisionError(), None)

    deadline = time.monotonic() + DEADLINE_S
    while versions(tmp_path / "job") != [Version(1, 0)]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stop_file_ends_the_job_after_the_step_with_its_state_in_storage(make: Make, tmp_path: Path) -> None:
    trainee, file = Trainee(), tmp_path / "stop.json"
    checkpointer = make(trainee, every=1, stop_file=str(file))
    checkpointer.restore()
    for step, text in enumerate(["", "{", "[1]", '{"stop": false}', json.dumps({"GracefulExit": 1})]):
        file.write_text(text)
        trainee.train()
        if step < 4:
            checkpointer.step(step)
    with pytest.raises(SystemExit) as ended:
        checkpointer.step(4)
    assert ended.value.code == 0
    assert versions(tmp_path / "job")[-1] == Version(1, 4)


def test_one_version_of_so_many_minutes_is_kept(make: Make, tmp_path: Path) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, keep_every="60m")
    checkpointer.restore()
    for step in range(5):
        trainee.train()
        checkpointer.save(step, "durable").wait()
    kept = [Version(1, 0), Version(1, 3), Version(1, 4)]
    eventually(lambda: versions(tmp_path / "job") == kept)  # retention runs after the commit that was waited for
    leave(checkpointer)
    assert versions(tmp_path / "job") == kept


@pytest.mark.parametrize("num_before", sampled([0, 1], 1), ids=["before the first save", "later"])
def test_a_frozen_keeper_holds_up_one_save_for_a_moment_and_no_other(
    make: Make, num_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    seen: list[str] = []
    checkpointer.events.subscribe(lambda event: seen.append(event.name))
    checkpointer.restore()
    for step in range(num_before):
        trainee.train()
        checkpointer.save(step).wait("captured", DEADLINE_S)
    pid = checkpointer.keeper_status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        # A thread of it may answer until one that was asleep has taken the signal.
        eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        for step in (1, 2, 3):
            trainee.train()
            handle = checkpointer.save(step)
            # The first one asks and waits for a moment; the others are told without asking.
            said = "did not answer" if step == 1 else "the keeper of this node does not answer"
            assert said in handle.given_up
    finally:
        os.kill(pid, signal.SIGCONT)
    assert seen.count("memory_level_lost") == 1
    assert caplog.text.count("is given up: the keeper of this node does not answer") == 1, "not at every step"

    deadline = time.monotonic() + DEADLINE_S
    while seen.count("memory_level_back") < 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    trainee.train()
    checkpointer.save(4, "durable").wait(timeout_s=DEADLINE_S)
    leave(checkpointer)


def test_a_keeper_that_freezes_beside_a_copy_holds_up_each_call_for_a_moment_and_no_step_behind(make: Make) -> None:
    """A save waits for the copy of the one before, which waits for the keeper."""
    trainee, took_s = Trainee(), list[float]()
    checkpointer = make(trainee, every="0")
    checkpointer.restore()
    for step in range(8):  # until copies are late
        trainee.train()
        checkpointer.save(step).wait("captured", DEADLINE_S)
    pid = checkpointer.keeper_status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        trainee.train()
        checkpointer.save(8)
        for step in (9, 10, 11):
            for call in (functools.partial(checkpointer.save, step), trainee.train):
                began = time.monotonic()
                call()
                took_s.append(time.monotonic() - began)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert sum(took_s) < 2.2, took_s  # 1 s, and 0.5 s until it is known; it was a second more
    leave(checkpointer)


def test_who_leaves_waits_no_second_time_for_a_keeper_that_answered_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was told to end has a bounded time, and all that is left to do is to say goodbye."""
    trainee, said = Trainee(), KeeperClient.goodbye
    checkpointer = make(trainee)
    checkpointer.restore()
    waits: list[float] = []

    def goodbye(client: KeeperClient, *, finished: bool, timeout_s: float = CALL_TIMEOUT_S) -> None:
        waits.append(timeout_s)
        said(client, finished=finished, timeout_s=timeout_s)

    monkeypatch.setattr(KeeperClient, "goodbye", goodbye)
    trainee.train()
    checkpointer.save(0).wait("captured", DEADLINE_S)
    pid = checkpointer.keeper_status()["pid"]
    keeper = psutil.Process(pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: keeper.status() == psutil.STATUS_STOPPED)
        trainee.train()
        assert "did not answer" in checkpointer.save(1).given_up
        checkpointer.abandon()
        assert waits == [ASK_S]
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_gone(keeper)


def test_the_last_version_is_saved_though_its_keeper_answered_too_late(make: Make, tmp_path: Path) -> None:
    """It has given a slot to who does not wait for it any more, and nobody else may have that one."""
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0).wait("captured", DEADLINE_S)
    keeper = psutil.Process(checkpointer.keeper_status()["pid"])
    keeper.suspend()
    try:
        eventually(lambda: keeper.status() == psutil.STATUS_STOPPED)
        trainee.train()
        assert "did not answer" in checkpointer.save(1).given_up
    finally:
        keeper.resume()
    checkpointer.close()
    assert versions(tmp_path / "job")[-1] == Version(1, 1)


@MORE
def test_the_end_waits_for_no_slots_of_a_keeper_that_is_frozen(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for them with the patience that memory needs, which is minutes."""
    monkeypatch.setattr(keeper_link, "SILENT_S", 0.5)
    monkeypatch.setattr(KeeperClient, "wake", lambda _: False)  # as one that no signal has stopped
    trainee, wait_all = Trainee(), Reservation.wait_all
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0).wait("captured", DEADLINE_S)
    faults: list[object] = []

    def noted(slots: Reservation, *given: Any, **more: Any) -> bool:
        there = wait_all(slots, *given, **more)
        faults.append(there or slots.fault)
        return there

    monkeypatch.setattr(Reservation, "wait_all", noted)
    keeper = psutil.Process(checkpointer.keeper_status()["pid"])
    keeper.suspend()
    try:
        eventually(lambda: keeper.status() == psutil.STATUS_STOPPED)
        trainee.train()
        assert "did not answer" in checkpointer.save(1).given_up
        memory: Any = checkpointer._run.saver.memory  # type: ignore[union-attr]
        there = memory._reservation
        memory._reservation = Reservation(there.client, there.num_bytes, 3, lambda _: None)  # one is missing still
        checkpointer.close()
        assert faults == [None], "it came, or was given up by itself"
    finally:
        keeper.resume()
    wait_gone(keeper)
    assert versions(tmp_path / "job")[-1] == Version(1, 1), "what the keeper held may be there as well"


def test_slow_storage_holds_up_no_save_and_gets_the_state_of_its_step(
    make: Make,
    tmp_path: Path,
    runtime_dir: Path,
) -> None:
    """Storage takes nothing at all while four more saves are made. They are counted, not timed: none is given up."""
    control, root = tmp_path / "control", str(tmp_path / "job")
    keeper = start_hurtable(root, holdfast.Config(runtime_dir=str(runtime_dir), linger_s=60.0), control)
    try:
        trainee = Trainee(width=2_000)
        checkpointer = make(trainee, num_slots=3, every=0)
        checkpointer.restore()
        control.write_text("stall@write")
        trainee.train()
        slow = checkpointer.save(0, "durable")
        kept = trainee.fingerprint()
        for step in range(1, 5):
            trainee.train()
            handle = checkpointer.save(step)
            assert handle.wait("captured", DEADLINE_S) == Level.CAPTURED
            assert not handle.given_up
        assert not slow.durable[0], "four saves were taken while the first was being written"
        control.write_text("")
        slow.wait("durable", DEADLINE_S)
        leave(checkpointer)
    finally:
        keeper.kill()
        keeper.wait()
    other = Trainee(width=2_000)
    following = make(other)
    assert following.restore("i000001-s0000000000") == 1
    assert other.fingerprint() == kept
    leave(following)


def test_what_is_written_beside_a_save_is_shown_and_comes_back(
    make: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    checkpointer.pin(Version(1, 1))
    info = {"tokens": 1 << 60, "best": float("inf"), "note": "warmed up", "epochs": [1, (2, 3)], 7: b"raw"}
    checkpointer.save(0, info=info).wait()
    checkpointer.save(1, "durable", info=info).wait()
    trainee.train()
    checkpointer.save(2, "durable").wait()
    for wrong in ({"tensor": torch.zeros(1)}, {"thing": object()}):
        with pytest.raises(UsageError, match="info"):
            checkpointer.save(3, info=wrong)
    with pytest.raises(UsageError, match="saved already"):
        checkpointer.save(2, info=info)
    checkpointer.save(3, "durable").wait()  # nothing of the refused ones is left
    look.inspect_version(str(tmp_path / "job"), "i000001-s0000000001", as_json=False)
    assert "warmed up" in capsys.readouterr().out

    for step, expected in ((1, info), (3, {})):
        checkpointer.restore(Version(1, step))
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.info == expected
    leave(checkpointer)


def test_info_is_what_it_was_at_the_call_whatever_its_containers_become(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Late copies are trusted after a few saves; then the copying thread is held until the containers have changed."""
    trainee, changed = Trainee(), threading.Event()
    checkpointer = make(trainee)
    checkpointer.restore()
    for step in range(5):
        trainee.train()
        checkpointer.save(step).wait("captured", DEADLINE_S)
    info: dict[str, Any] = {"log": [1], "deep": {"steps": 7}}
    trainee.train()
    encode = Structure.encode

    def held(self: Structure, gathered: Any) -> dict[str, bytes]:
        if threading.current_thread() is not threading.main_thread():
            assert changed.wait(DEADLINE_S)
        return encode(self, gathered)

    monkeypatch.setattr(Structure, "encode", held)
    handle = checkpointer.save(5, info=info)
    info["log"].append("later")
    info["deep"]["steps"] = 999
    changed.set()
    handle.wait("captured", DEADLINE_S)
    checkpointer.restore()
    assert checkpointer.last_restore is not None
    assert checkpointer.last_restore.info == {"log": [1], "deep": {"steps": 7}}
    leave(checkpointer)


@pytest.mark.parametrize(
    "call", sampled(["scandir", "open"], "scandir"), ids=["the list of versions", "the newest manifest"]
)
def test_storage_that_cannot_be_read_is_no_fresh_start_and_is_left_as_it_is(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """A device that gives errors at the recovery, and later reads again."""
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0, "durable").wait()
    kept = trainee.fingerprint()
    keeper = psutil.Process(checkpointer.keeper_status()["pid"])
    checkpointer.close()
    wait_gone(keeper)
    before = files_of(tmp_path / "job")
    another = Trainee()
    another.train()
    untouched = another.fingerprint()

    following = make(another, close_timeout_s=1.0)
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing(getattr(os, call), "scandir" if call == "scandir" else "manifest.json"))
        with pytest.raises(StorageError, match="Input/output error") as caught:
            following.restore()

    assert str(tmp_path / "job") in caught.value.where
    assert "check the device" in caught.value.remedy
    assert another.fingerprint() == untouched
    assert {name: data for name, data in files_of(tmp_path / "job").items() if name in before} == before
    with pytest.raises(UsageError, match="restore"):
        following.save(1)
    leave(following)
    again = make(another)
    assert again.restore() == 1
    assert another.fingerprint() == kept


def failing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A system call that gives EIO for a list of files, or for the file of this name."""

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "scandir" or path == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **kwargs)

    return call


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@MORE
def test_an_older_version_is_taken_once_and_no_live_state_instead_of_it(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the launcher wishes for when the newest version leads to the same failure again and again."""
    live: list[bool] = []
    run = Restorer.run

    def noted(self: Restorer, *args: Any, **kwargs: Any) -> Any:
        live.append(kwargs["live"])
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Restorer, "run", noted)
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    for step in range(2):
        trainee.train()
        checkpointer.save(step, "captured").wait(timeout_s=DEADLINE_S)
    monkeypatch.setattr(open_checkpointers.wish, "older", True)
    assert checkpointer.restore() == 1, "the version of step 0, so the loop goes on with step 1"
    assert checkpointer.restore() == 1, "and from there on the newest of what is left"
    assert live == [True, False, True]


def test_memory_for_what_the_first_step_will_make_is_taken_before_it(make: Make) -> None:
    """Moments do not exist yet at the restore; too little memory for them is no surprise of the first save."""
    trainee = Trainee(width=1 << 16)
    checkpointer = make(trainee)
    checkpointer.restore()
    saver = checkpointer._run.saver
    before = saver._reserved
    trainee.train()
    checkpointer.save(0).wait("captured", timeout_s=DEADLINE_S)
    assert saver._reserved == before
    parameters = sum(p.nbytes for p in trainee.model.parameters())
    assert before > 2 * parameters, "moments count"


def test_another_place_knows_the_incarnations_between(make: Make, tmp_path: Path) -> None:
    """Of which no version was copied there: what came before them is an ancestor all the same."""
    place = tmp_path / "far"
    for number in range(3):
        checkpointer = make(Trainee())
        step = checkpointer.restore()
        for each in (step, step + 1):
            checkpointer.save(each, also_to=[str(place)] if number != 1 else [], level="durable")
            checkpointer.flush(DEADLINE_S)
        checkpointer.close()
    far = open_storage(place, Events())
    assert far.incarnations.lineage() == open_storage(tmp_path / "job", Events()).incarnations.lineage()
    lines = Lineage(far.incarnations.lineage()).lines(far.versions())
    assert {line.first for line in lines} == {1}, "one run, not one that a fresh start ended and another"


@MORE
def test_a_place_with_a_cut_chain_says_so_and_the_next_copy_mends_it(make: Make, tmp_path: Path) -> None:
    """As an older holdfast left it: the record of the incarnation between is missing there."""
    place, job = tmp_path / "far", tmp_path / "job"
    for number in range(3):
        checkpointer = make(Trainee())
        step = checkpointer.restore()
        checkpointer.save(step, also_to=[str(place)] if number != 1 else [], level="durable")
        checkpointer.close()
    missing = Path("incarnations", "000002.resumed.json")
    (place / missing).unlink()
    broken = tmp_path / "broken"
    shutil.copytree(place, broken)
    (bundle,) = (broken / str(Version(3, 2))).glob("*.safetensors")
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 0xFF
    bundle.write_bytes(data)
    with pytest.raises(
        CorruptError, match="i000001-s0000000000 refused: nothing is recorded of incarnation 2"
    ) as caught:
        make(Trainee(), path=broken).restore()
    assert "writes what is missing of incarnation 2" in caught.value.remedy
    named = make(Trainee(), path=broken)
    assert named.restore("i000001-s0000000000") == 1
    leave(named)

    checkpointer = make(Trainee())
    checkpointer.save(checkpointer.restore(), also_to=[str(place)])
    checkpointer.close()
    assert (place / missing).read_bytes() == (job / missing).read_bytes()
    far = open_storage(place, Events())
    assert far.incarnations.lineage() == open_storage(job, Events()).incarnations.lineage()
    assert Lineage(far.incarnations.lineage()).cut is None


def test_a_stop_that_one_checkpointer_hears_makes_the_versions_of_another_one_durable(
    make: Make, tmp_path: Path
) -> None:
    """The script ends in the `step` of the first, and comes to no step and no end of the second."""
    trainees = {name: Trainee() for name in "ab"}
    made = {name: make(trainee, path=tmp_path / name, every="1") for name, trainee in trainees.items()}
    for each in made.values():
        each.restore()

    def run() -> None:
        for step in range(1000):
            for name, each in made.items():
                trainees[name].train()
                each.step(step)
            if step == 2:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    there = {name: [version.step for version in versions(tmp_path / name)] for name in made}
    assert there["a"][-1] - there["b"][-1] in (0, 1), there
    (open_one,) = (name for name in made if not made[name]._closed)
    trainees[open_one].train()
    made[open_one].save(there[open_one][-1] + 2).wait("captured", DEADLINE_S)  # a script may still do so behind it
    leave(made[open_one])


def test_a_stop_waits_for_the_next_keeper_of_another_checkpointer(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are in this process alone when the keeper has died, and go with it."""
    trainees = {name: Trainee() for name in "ab"}
    made = {name: make(trainee, path=tmp_path / name) for name, trainee in trainees.items()}
    for name, each in made.items():
        each.restore()
        trainees[name].train()
        each.save(0).wait("captured", DEADLINE_S)
    other, link = made["b"], made["b"]._run.link
    psutil.Process(other.keeper_status()["pid"]).kill()
    eventually(lambda: link.client is None)
    with pytest.raises(SystemExit):
        made["a"]._stop(made["a"]._run.last)
    assert [version.step for version in versions(tmp_path / "b")] == [0]
    leave(other)


def test_who_waits_in_vain_is_told_the_newest_alarms() -> None:
    """Older ones may be long over; what stands last is most likely the reason."""
    alarms = [{"text": f"alarm {number}"} for number in range(5)]
    client = SimpleNamespace(status=lambda **_: {"alarms": alarms})
    assert save_handle._alarms(client, time.monotonic()) == "; alarm 2; alarm 3; alarm 4"  # type: ignore[arg-type]
