"""A keeper that dies, or is stopped, while a job ends: the last step becomes durable all the same, within seconds."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.base.errors import HoldfastError, LevelNotReached, StorageError
from holdfast.base.events import Events
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.checkpoint.save.save_handle import LOOK_S, SaveHandle
from holdfast.checkpoint.save.storage_saver import DirectSaver
from holdfast.core.model import Level, Version
from holdfast.keeper.rpc.announcements import Announced
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.storage.version_store import open_storage
from keeper.rig import eventually
from kit.checkpointers import Make, Trainee, leave, wait_gone
from kit.late_copies import Held, fill, trusted
from sample_kit import MORE, sampled

DEADLINE_S = 60.0


def keeper_of(checkpointer: Any) -> psutil.Process:
    return psutil.Process(checkpointer.keeper_status()["pid"])


def captured(make: Make) -> tuple[Trainee, Any]:
    """A trainee and its checkpointer, with the version of step 0 in memory."""
    trainee = Trainee()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0).wait("captured", DEADLINE_S)
    return trainee, checkpointer


def stop(keeper: psutil.Process) -> None:
    keeper.suspend()
    eventually(lambda: keeper.status() == psutil.STATUS_STOPPED)


def with_a_step_unsaved(make: Make) -> tuple[Any, psutil.Process]:
    """A checkpointer that was told of step 1 behind the version in memory, and its keeper: `close` saves that step."""
    trainee, checkpointer = captured(make)
    trainee.train()
    checkpointer.step(1)
    return checkpointer, keeper_of(checkpointer)


def newest(path: Path) -> Version:
    return open_storage(path, Events()).versions()[-1]


@pytest.mark.parametrize("level", sampled(["captured", "durable"], "durable"))
def test_the_last_version_is_saved_again_if_its_keeper_died_before_it_was_sealed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """All of it was copied, and the rank had told so: nothing of the rank's was given up."""
    copied = KeeperClient.copied
    trainee, checkpointer = captured(make)
    keeper = keeper_of(checkpointer)

    def copied_in_vain(client: KeeperClient, *given: Any, **more: Any) -> None:
        stop(keeper)
        copied(client, *given, **more)
        keeper.kill()

    monkeypatch.setattr(KeeperClient, "copied", copied_in_vain)
    trainee.train()
    last = checkpointer.save(1, level)
    checkpointer._run.saver.settle()
    monkeypatch.undo()
    assert not last.given_up
    checkpointer.close()
    assert newest(tmp_path / "job") == Version(1, 1)


@pytest.mark.parametrize("moment", sampled(["begin", "copied"], "copied"))
def test_one_rank_saves_the_last_step_again_if_its_keeper_dies_as_it_is_saved(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The save that `close` makes is given up; there is no other rank that would notice."""
    real = getattr(KeeperClient, moment)
    checkpointer, keeper = with_a_step_unsaved(make)

    def killed(client: KeeperClient, *given: Any, **more: Any) -> Any:
        monkeypatch.undo()
        keeper.kill()
        eventually(lambda: not client.alive)
        return real(client, *given, **more)

    monkeypatch.setattr(KeeperClient, moment, killed)
    checkpointer.close()
    assert newest(tmp_path / "job") == Version(1, 1)


@pytest.mark.parametrize("moment", sampled(["before", "between"], "between"))
def test_a_keeper_that_dies_while_the_last_version_is_waited_for_is_replaced(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    wait = SaveHandle.wait
    _, checkpointer = captured(make)
    keeper = keeper_of(checkpointer)

    def killed(handle: SaveHandle, level: Level | str | None = None, timeout_s: float | None = None) -> Level:
        monkeypatch.undo()
        keeper.suspend()
        keeper.kill()
        if moment == "before":
            keeper.wait(DEADLINE_S)
            eventually(lambda: handle._link.client is None)
        return wait(handle, level, timeout_s)

    monkeypatch.setattr(SaveHandle, "wait", killed)
    checkpointer.close()
    assert newest(tmp_path / "job") == Version(1, 0)


def test_a_version_that_becomes_due_just_as_its_keeper_dies_is_due_for_the_next_one(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word is in the connection, and nobody reads it any more."""
    persist = KeeperClient.persist
    _, checkpointer = captured(make)
    keeper = keeper_of(checkpointer)

    def persist_in_vain(client: KeeperClient, version: Version) -> None:
        monkeypatch.undo()
        stop(keeper)
        persist(client, version)
        keeper.kill()
        eventually(lambda: not client.alive)
        assert checkpointer._run.link.wait_mended(DEADLINE_S)

    monkeypatch.setattr(KeeperClient, "persist", persist_in_vain)
    checkpointer.close()
    assert newest(tmp_path / "job") == Version(1, 0)


def test_a_keeper_that_a_signal_stopped_is_continued_at_the_end(make: Make, tmp_path: Path) -> None:
    """It would be waited for as long as storage may take, and what it holds is nowhere else."""
    _, checkpointer = captured(make)
    keeper = keeper_of(checkpointer)
    stop(keeper)
    checkpointer.close()
    assert newest(tmp_path / "job") == Version(1, 0)


@MORE
def test_a_keeper_that_a_signal_stops_while_it_is_waited_for_is_continued_and_told_of(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainee, checkpointer = captured(make)
    keeper = keeper_of(checkpointer)
    stop(keeper)
    trainee.train()
    checkpointer._run.link.require().persist(Version(1, 0))
    checkpointer._run.last.wait("durable", DEADLINE_S)
    assert f"keeper {keeper.pid} was stopped by a signal and is waited for: it is continued" in caplog.text
    assert "the keeper of this node does not answer" in caplog.text
    assert newest(tmp_path / "job") == Version(1, 0)
    leave(checkpointer)


@pytest.mark.parametrize("fate", sampled(["killed", "stopped"], "stopped"))
def test_flush_waits_for_no_keeper_that_is_gone_or_stopped(make: Make, tmp_path: Path, fate: str) -> None:
    """Nobody but a save looked for the next one, and no save comes while this waits."""
    _, checkpointer = captured(make)
    keeper = keeper_of(checkpointer)
    stop(keeper)
    checkpointer.save(0, "durable")
    if fate == "killed":
        keeper.kill()
    checkpointer.flush(DEADLINE_S)
    assert newest(tmp_path / "job") == Version(1, 0)
    leave(checkpointer)


def test_what_is_durable_is_told_once_whoever_is_asked_again(make: Make) -> None:
    trainee, told = Trainee(), list[Version]()
    checkpointer = make(trainee, on_durable=lambda version, _: told.append(version))
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0, "durable").wait("durable", DEADLINE_S)
    checkpointer.flush(DEADLINE_S)
    checkpointer.close()
    assert told == [Version(1, 0)]


@pytest.mark.parametrize("flushes", sampled([False, True], True))
def test_what_is_in_storage_is_durable_though_no_keeper_is_left_that_knows(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, flushes: bool
) -> None:
    """The keeper dies before it tells so, and those of the other nodes have ended with their ranks."""
    trainee, told = Trainee(), list[HoldfastError | None]()
    checkpointer = make(trainee, on_durable=lambda _, error: told.append(error), close_timeout_s=10.0)
    checkpointer.restore()
    trainee.train()
    keeper, link = keeper_of(checkpointer), checkpointer._run.link
    monkeypatch.setattr(Announced, "_progressed", lambda *_: None)
    checkpointer.save(0, "durable")
    eventually(lambda: open_storage(tmp_path / "job", Events()).versions() == [Version(1, 0)])
    keeper.kill()
    eventually(lambda: link.client is None)
    monkeypatch.setattr(KeeperLink, "hand_over", lambda *_: None)
    if flushes:
        checkpointer.flush()
        assert told == [None]
    checkpointer.close()
    assert told == [None]


def test_what_is_found_in_storage_and_cannot_be_made_durable_is_not_called_so(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper may have died between its commit and the synchronisation of the directory."""

    def refused(_: LocalBackend, directory: str) -> None:
        raise StorageError("the disk failed", where=directory)

    _, checkpointer = captured(make)
    keeper, link = keeper_of(checkpointer), checkpointer._run.link
    monkeypatch.setattr(Announced, "_progressed", lambda *_: None)
    last = checkpointer.save(0, "durable")
    eventually(lambda: open_storage(tmp_path / "job", Events()).versions() == [Version(1, 0)])
    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "settle", refused)
        patched.setattr(KeeperLink, "hand_over", lambda *_: None)
        keeper.kill()
        eventually(lambda: link.client is None)
        with pytest.raises(LevelNotReached):
            last.wait("durable", 0.5)
    assert last.wait("durable", DEADLINE_S) is Level.DURABLE
    assert link.wait_mended(DEADLINE_S)
    leave(checkpointer)


def test_flush_waits_for_no_version_that_its_keeper_had_not_sealed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was copied, and never becomes captured: the next keeper knows nothing of it."""
    trainee, copied = Trainee(), KeeperClient.copied
    checkpointer = make(trainee)
    checkpointer.restore()
    keeper = keeper_of(checkpointer)

    def copied_in_vain(client: KeeperClient, *given: Any, **more: Any) -> None:
        stop(keeper)
        copied(client, *given, **more)
        keeper.kill()

    monkeypatch.setattr(KeeperClient, "copied", copied_in_vain)
    trainee.train()
    checkpointer.save(0, "durable")
    checkpointer._run.saver.settle()
    monkeypatch.undo()
    with pytest.raises(LevelNotReached, match="its keeper died before it was sealed"):
        checkpointer.flush(DEADLINE_S)
    checkpointer.close()
    assert newest(tmp_path / "job") == Version(1, 0)


def test_the_end_waits_for_a_keeper_that_is_just_being_started(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = threading.Event()
    _, checkpointer = captured(make)
    keeper, link, start, wait = keeper_of(checkpointer), checkpointer._run.link, KeeperLink._connect, SaveHandle.wait

    def starts_late(link: KeeperLink, *given: Any) -> KeeperClient:
        waited.wait(DEADLINE_S)
        return start(link, *given)

    def waits(handle: SaveHandle, *given: Any) -> Level:
        try:
            return wait(handle, *given)
        finally:
            waited.set()

    def closing(*_: Any) -> bool:
        monkeypatch.undo()
        monkeypatch.setattr(KeeperLink, "_connect", starts_late)
        monkeypatch.setattr(SaveHandle, "wait", waits)
        keeper.kill()
        eventually(lambda: link.client is None)
        link.mend()
        eventually(lambda: link.last_client is None)
        return False

    monkeypatch.setattr(checkpointer._run.lower, "closing", closing)
    checkpointer.close()
    assert newest(tmp_path / "job") == Version(1, 0)


@pytest.mark.parametrize("moment", ["begin", pytest.param("goodbye", marks=pytest.mark.slow)])
def test_a_keeper_that_a_signal_stops_at_the_very_end_ends_with_its_job(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It would keep the memory of its slots, and nobody comes to it any more."""
    real = getattr(KeeperClient, moment)
    checkpointer, keeper = with_a_step_unsaved(make)

    def stopped(client: KeeperClient, *given: Any, **more: Any) -> Any:
        monkeypatch.undo()
        stop(keeper)
        return real(client, *given, **more)

    monkeypatch.setattr(KeeperClient, moment, stopped)
    checkpointer.close()
    wait_gone(keeper)
    assert newest(tmp_path / "job") == Version(1, 1)


def test_nobody_waits_for_a_version_that_its_keeper_had_not_sealed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next keeper tells all ranks that it is lost, and of those before it."""
    copied, begin = KeeperClient.copied, KeeperClient.begin
    trainee, checkpointer = captured(make)
    keeper = keeper_of(checkpointer)

    def copied_in_vain(client: KeeperClient, *given: Any, **more: Any) -> None:
        stop(keeper)
        copied(client, *given, **more)

    def begin_in_vain(client: KeeperClient, *given: Any, **more: Any) -> Any:
        keeper.kill()
        return begin(client, *given, **more)

    monkeypatch.setattr(KeeperClient, "copied", copied_in_vain)
    trainee.train()
    last = checkpointer.save(1)
    checkpointer._run.saver.settle()
    monkeypatch.setattr(KeeperClient, "begin", begin_in_vain)
    trainee.train()
    assert checkpointer.save(2).given_up
    monkeypatch.undo()
    assert not last.given_up
    assert checkpointer._run.link.wait_mended(DEADLINE_S)
    with pytest.raises(LevelNotReached, match="its keeper died before it was sealed"):
        last.wait("captured", 10 * DEADLINE_S)
    leave(checkpointer)


@pytest.mark.parametrize("is_stored", sampled([False, True], True), ids=["not heard of", "not told of"])
def test_what_a_dead_keeper_was_asked_to_store_is_told_of_without_another_call(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_stored: bool
) -> None:
    """It was asked behind the save, so what the next keeper finds in the slots does not say so."""
    trainee, told = Trainee(), list[HoldfastError | None]()
    checkpointer = make(trainee, on_durable=lambda _, error: told.append(error))
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0).wait("captured", DEADLINE_S)
    keeper, link = keeper_of(checkpointer), checkpointer._run.link
    if is_stored:
        monkeypatch.setattr(Announced, "_progressed", lambda *_: None)
    else:
        stop(keeper)
    checkpointer.save(0, "durable")
    if is_stored:
        eventually(lambda: open_storage(tmp_path / "job", Events()).versions() == [Version(1, 0)])
    keeper.kill()
    eventually(lambda: link.client is None)
    monkeypatch.undo()
    if is_stored:  # without the next one
        eventually(lambda: bool(told))
    link.mend()
    eventually(lambda: bool(told))
    assert told == [None]
    leave(checkpointer)


def test_a_version_that_is_saved_again_at_the_end_is_told_of_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as given up and then as durable: to who listens it is one save."""
    copied = KeeperClient.copied
    trainee, told = Trainee(), list[HoldfastError | None]()
    checkpointer = make(trainee, on_durable=lambda _, error: told.append(error))
    checkpointer.restore()
    trainee.train()
    checkpointer.step(0)
    keeper = keeper_of(checkpointer)

    def killed(client: KeeperClient, *given: Any, **more: Any) -> None:
        monkeypatch.undo()
        keeper.kill()
        eventually(lambda: not client.alive)
        copied(client, *given, **more)

    monkeypatch.setattr(KeeperClient, "copied", killed)
    checkpointer.close()
    assert told == [None]


@MORE
def test_a_script_does_not_end_well_if_another_checkpointer_could_not_save(make: Make, tmp_path: Path) -> None:
    """One of several ends the script, after SIGTERM, and what the others hold in memory goes with it."""
    trainees = {name: Trainee() for name in "ab"}
    made: dict[str, Any] = {
        name: make(trainee, path=tmp_path / name, close_timeout_s=2.0) for name, trainee in trainees.items()
    }
    for name, each in made.items():
        each.restore()
        trainees[name].train()
        each.save(0).wait("captured", DEADLINE_S)
    (tmp_path / "b").rename(tmp_path / "away")
    (tmp_path / "b").touch()
    with pytest.raises(LevelNotReached, match=f"{tmp_path / 'b'}: .* is captured, not durable"):
        made["a"]._stop(made["a"]._run.last)
    assert newest(tmp_path / "a") == Version(1, 0)
    leave(made["b"])


def test_the_end_waits_for_no_version_that_the_next_keeper_cannot_know(make: Make, tmp_path: Path) -> None:
    """Its slot was given to a later one before its keeper died, and it was captured then."""
    trainee = Trainee()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    for step in range(3):
        trainee.train()
        checkpointer.save(step).wait("captured", DEADLINE_S)
    trainee.train()
    checkpointer.step(3)
    keeper, link = keeper_of(checkpointer), checkpointer._run.link
    keeper.kill()
    eventually(lambda: link.client is None)
    began = time.monotonic()
    checkpointer.close()
    assert time.monotonic() - began < DEADLINE_S
    assert newest(tmp_path / "job") == Version(1, 3)


def test_a_wait_ends_in_its_time_though_storage_does_not_answer(make: Make) -> None:
    """The keeper died, and whether the version is in storage cannot be known."""
    _, checkpointer = captured(make)
    keeper, link, answers = keeper_of(checkpointer), checkpointer._run.link, threading.Event()
    stop(keeper)
    last = checkpointer.save(0, "durable")
    last._in_storage = lambda _: answers.wait(DEADLINE_S)
    keeper.kill()
    eventually(lambda: link.client is None)
    began = time.monotonic()
    with pytest.raises(LevelNotReached):
        last.wait("durable", 0.5)
    assert time.monotonic() - began < LOOK_S / 2
    answers.set()
    assert link.wait_mended(DEADLINE_S)
    leave(checkpointer)


def test_a_wait_looks_in_storage_if_the_keeper_dies_meanwhile(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies behind its commit and before it tells."""
    wait, waits = Announced.wait, threading.Event()
    _, checkpointer = captured(make)
    keeper, told = keeper_of(checkpointer), list[Level]()

    def waited(announced: Announced, *given: Any) -> Level:
        waits.set()
        return wait(announced, *given)

    monkeypatch.setattr(Announced, "_progressed", lambda *_: None)
    monkeypatch.setattr(Announced, "wait", waited)
    last = checkpointer.save(0, "durable")
    waiter = threading.Thread(target=lambda: told.append(last.wait("durable", DEADLINE_S)))
    waiter.start()
    assert waits.wait(DEADLINE_S)
    eventually(lambda: open_storage(tmp_path / "job", Events()).versions() == [Version(1, 0)])
    keeper.kill()
    waiter.join(DEADLINE_S)
    assert told == [Level.DURABLE]
    assert checkpointer._run.link.wait_mended(DEADLINE_S)
    leave(checkpointer)


def test_what_was_durable_stays_so_though_no_later_keeper_knows_of_it(make: Make, tmp_path: Path) -> None:
    """Retention removed it before the keeper died."""
    trainee = Trainee()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    saved = list[SaveHandle]()
    while not saved or saved[0].version in open_storage(tmp_path / "job", Events()).versions():
        trainee.train()
        saved.append(checkpointer.save(len(saved), "durable"))
        saved[-1].wait(timeout_s=DEADLINE_S)
    keeper, link = keeper_of(checkpointer), checkpointer._run.link
    keeper.kill()
    eventually(lambda: link.client is None)
    assert link.wait_mended(DEADLINE_S)
    assert saved[0].reached is Level.DURABLE
    assert saved[0].wait("durable", 1.0) is Level.DURABLE
    leave(checkpointer)


def test_what_another_checkpointer_still_copies_and_gives_up_is_not_what_becomes_durable(
    make: Make, held: Held, tmp_path: Path
) -> None:
    """Its newest save turns out torn as the copy ends; the one before is whole."""
    trainees = {name: Trainee() for name in "ab"}
    first: Any = make(trainees["a"], path=tmp_path / "a")
    first.restore()
    trainees["a"].train()
    first.save(0).wait("captured", DEADLINE_S)
    other = trusted(make, trainees["b"], path=tmp_path / "b")
    whole = other.save(10)
    whole.wait("captured", DEADLINE_S)
    trainees["b"].train()
    held.gate.clear()
    torn = other.save(11)
    fill(trainees["b"])
    opens = threading.Timer(0.3, held.gate.set)
    opens.start()
    with pytest.raises(SystemExit):
        first._stop(first._run.last)
    opens.join()
    assert torn.given_up
    assert newest(tmp_path / "b") == whole.version
    leave(other)


@pytest.mark.parametrize("saves_to", sampled(["memory", "storage"], "storage"))
def test_a_script_does_not_end_well_if_another_checkpointer_gave_up_all(
    make: Make, tmp_path: Path, saves_to: str
) -> None:
    """Nothing of that one is in storage, and nothing of it could be made durable."""
    trainees = {name: Trainee() for name in "ab"}
    made: dict[str, Any] = {name: make(each, path=tmp_path / name) for name, each in trainees.items()}
    for name, each in made.items():
        each.restore()
        trainees[name].train()
    run = made["b"]._run
    if saves_to == "storage":
        direct = partial(DirectSaver, reason="of a test", config=made["b"]._config, events=made["b"].events)
        run.saver = direct(run.state, run.link, run.job, made["b"]._storage).begin_together()
        run.optimizer_steps = run.saver.fence.num_steps
        (tmp_path / "b").rename(tmp_path / "away")
        (tmp_path / "b").touch()
    lost = made["b"].save(0, "durable")
    if saves_to == "memory":
        run.saver.settle()
        run.saver.give_up(lost, "of a test")
    assert lost.given_up
    made["a"].save(0).wait("captured", DEADLINE_S)
    with pytest.raises(LevelNotReached, match=f"{tmp_path / 'b'}: {lost.version} is not durable"):
        made["a"]._stop(made["a"]._run.last)
    leave(made["b"])
