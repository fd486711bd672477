"""The Checkpointer with a real keeper and a real directory, in this process: save, come back, refuse, leave."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import holdfast
from holdfast.base import progress_report
from holdfast.base.errors import (
    ConfigError,
    CorruptError,
    LevelNotReached,
    MemoryRefused,
    MismatchError,
    UsageError,
    VersionNotFound,
)
from holdfast.base.events import Events
from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.capture.mutation_check import NUM_PROOFS
from holdfast.checkpoint.job import bootstrap, collectives
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.checkpoint.save import save_handle as handles
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.checkpoint.state.stateful import REMOVED
from holdfast.core.model import Level, Topology, Version
from holdfast.keeper.rpc.announcements import Announced
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.messages import Progress
from holdfast.tiers.storage.version_store import open_storage
from keeper.rig import eventually
from kit.checkpointers import Make, Trainee, kill_keeper, leave, wait_gone
from sample_kit import MORE, sampled


def test_training_goes_on_bit_for_bit_after_going_back_to_any_complete_version(make: Make) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    assert checkpointer.restore() == 0
    states, losses, handles = {}, {}, {}
    for step in range(NUM_PROOFS + 4):
        losses[step] = trainee.train()
        states[step] = trainee.fingerprint()
        handles[step] = checkpointer.save(step)
        if step == 0:
            assert handles[step].wait("captured", 60) == holdfast.Level.CAPTURED
    last = max(states)
    assert handles[last].wait(timeout_s=60) >= holdfast.Level.CAPTURED
    assert checkpointer.events.counters()["late_copied_bytes"] > 0, "after the proofs parameters are copied late"
    for _ in range(2):
        trainee.train()  # what the snapshot must not see

    assert checkpointer.restore() == last + 1
    assert trainee.fingerprint() == states[last]
    report = checkpointer.last_restore
    assert report is not None
    assert set(report.bytes) == {"slot"}, "nothing was read from storage"
    assert set(report.sources.values()) == {"from the rank's own slot"}
    assert f"({sum(report.bytes.values())} bytes) from the rank's own slot" in str(report)
    assert set(report.seconds) == {"slot", "fill", "total"}, "how long each source took, and all of it"
    assert 0 < report.seconds["fill"] < report.seconds["total"]
    assert checkpointer.events.counters().get("storage_read_bytes", 0) == 0
    again = [trainee.train() for _ in range(2)]

    before = handles[last - 1].version
    assert checkpointer.restore(before) == last
    assert trainee.fingerprint() == states[last - 1]
    assert trainee.train() == losses[last]
    assert trainee.fingerprint() == states[last]
    assert [trainee.train() for _ in range(2)] == again


def test_late_copies_are_the_state_at_the_call(make: Make) -> None:
    """The optimizer steps while the copy may still run; every captured version must be the one before the step."""
    trainee = Trainee(width=2000)
    checkpointer = make(trainee)
    checkpointer.restore()
    expected: dict[int, bytes] = {}
    for step in range(NUM_PROOFS + 3):
        trainee.train()
        expected[step] = trainee.fingerprint()
        handle = checkpointer.save(step)
        trainee.train()
        handle.wait("captured", 60)
        if step >= NUM_PROOFS:
            keep = trainee.fingerprint()
            checkpointer.restore(handle.version)
            assert trainee.fingerprint() == expected[step]
            assert keep != expected[step]
            break


def test_a_call_does_not_wait_for_the_keeper_and_is_the_state_of_its_moment(make: Make) -> None:
    trainee = Trainee(width=2000)
    checkpointer = make(trainee, begin_timeout_s=20.0, fence_timeout_s=20.0)
    checkpointer.restore()
    for step in range(NUM_PROOFS + 1):
        trainee.train()
        checkpointer.save(step)
    trainee.train()
    expected, position = trainee.fingerprint(), trainee.loader.position
    keeper = psutil.Process(checkpointer.keeper_status()["pid"])
    keeper.suspend()
    try:
        began = time.monotonic()
        handle = checkpointer.save(NUM_PROOFS + 1)
        assert time.monotonic() - began < 10.0, "the keeper was waited for"
        # Before the slot is there: the next forward moves the running means, the loader and the random state.
        trainee.model(torch.randn(8, 16))
        trainee.loader.take()
    finally:
        keeper.resume()
    handle.wait("captured", 60)
    trainee.train()
    assert checkpointer.restore(handle.version) == NUM_PROOFS + 2
    assert trainee.fingerprint() == expected
    assert trainee.loader.position == position


@pytest.mark.parametrize("which", sampled([0, 1], 1))
def test_the_step_of_every_optimizer_waits_for_the_copy(
    make: Make, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The copy never ends while the step of one of two optimizers comes: it waits, as long as the bound allows."""
    trainee = Trainee()
    checkpointer = make(trainee, fence_timeout_s=0.5)
    checkpointer.restore()
    for step in range(NUM_PROOFS + 1):
        trainee.train()
        checkpointer.save(step).wait("captured", 60)
    trainee.train()
    gate, copy = threading.Event(), copy_plan.copy
    monkeypatch.setattr(copy_plan, "copy", lambda *batch: (gate.wait(30.0), copy(*batch)))
    handle = checkpointer.save(NUM_PROOFS + 1)
    trainee.optimizers[which].step()
    gate.set()
    run: Any = checkpointer._run
    assert run.saver.fence.idle(30.0)
    assert "the step goes on" in handle.given_up


def test_every_byte_is_copied_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the call while it proves itself, and behind the next step afterwards; never both."""
    trainee, copied, copy = Trainee(), [0], copy_plan.copy

    def counted(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copied[0] += sum(target.nbytes for target in targets)
        copy(targets, sources)

    monkeypatch.setattr(copy_plan, "copy", counted)
    checkpointer = make(trainee)
    checkpointer.restore()
    for step in range(NUM_PROOFS + 2):
        trainee.train()
        copied[0] = 0
        checkpointer.save(step).wait("captured", 60)
        run: Any = checkpointer._run
        assert copied[0] == sum(live.local.nbytes for live in run.state.gather().tensors.values())
    assert checkpointer.events.counters()["late_copied_bytes"] > 0


def test_without_overlap_everything_is_copied_in_the_call(make: Make) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, overlap=False)
    checkpointer.restore()
    for step in range(NUM_PROOFS + 2):
        trainee.train()
        handle = checkpointer.save(step)
    assert handle.wait("captured", 60) == holdfast.Level.CAPTURED
    assert "late_copied_bytes" not in checkpointer.events.counters()


@pytest.mark.parametrize("what", sampled(["moved", "restored"], "moved"))
def test_tensors_that_moved_or_were_restored_prove_themselves_again(make: Make, what: str) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()

    def saved_late(step: int) -> float:
        before = checkpointer.events.counters().get("late_copied_bytes", 0)
        trainee.train()
        checkpointer.save(step).wait("captured", 60)
        return checkpointer.events.counters().get("late_copied_bytes", 0) - before

    late = [saved_late(step) > 0 for step in range(NUM_PROOFS + 2)]
    assert late == [False] * NUM_PROOFS + [True] * 2
    if what == "moved":
        weight = trainee.model[0].weight
        weight.data = weight.data.clone()
    else:
        checkpointer.restore()
    first = NUM_PROOFS + 2
    again = [saved_late(step) > 0 for step in range(first, first + NUM_PROOFS + 1)]
    assert again == [False] * NUM_PROOFS + [True]


@MORE
def test_what_changes_outside_the_step_is_never_copied_late(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    trainee = Trainee()
    culprit = trainee.model[0].bias
    checkpointer = make(trainee)
    checkpointer.restore()
    for step in range(NUM_PROOFS + 2):
        trainee.train()
        expected = trainee.fingerprint()
        handle = checkpointer.save(step)
        with torch.no_grad():
            culprit.add_(1.0)  # between the save and the step
        trainee.train()
        handle.wait("captured", 60)
    assert "model.0.bias" in caplog.text
    assert "model.0.weight" not in caplog.text
    checkpointer.restore(handle.version)
    assert trainee.fingerprint() == expected


@MORE
def test_verification_finds_one_element_written_during_copy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, verify_capture=True, fence_timeout_s=20.0)
    checkpointer.restore()
    for step in range(NUM_PROOFS + 1):
        trainee.train()
        good = checkpointer.save(step)
        trainee.train()
    assert good.wait("captured", 60) == holdfast.Level.CAPTURED
    run: Any = checkpointer._run
    monkeypatch.setattr(run.saver._checks, "look", lambda *_, **__: None)  # digests alone have to find it
    gate, copy = threading.Event(), copy_plan.copy
    monkeypatch.setattr(copy_plan, "copy", lambda *batch: (gate.wait(30.0), copy(*batch)))
    monkeypatch.setattr(copy_plan, "copy_at_once", lambda now, _: copy(now.targets, now.sources))
    handle = checkpointer.save(NUM_PROOFS + 1)
    trainee.model[0].weight.data.view(-1)[7] += 1
    gate.set()
    with pytest.raises(LevelNotReached, match=r"written while it was copied: model\.0\.weight"):
        handle.wait("captured", 60)
    assert checkpointer.restore() == NUM_PROOFS + 1, "the version before is still there"


def test_the_next_keeper_has_the_slots_although_the_old_one_died_in_a_restore(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of training; before, no later save found a slot, for ever."""
    trainee = Trainee()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    trainee.train()
    expected = trainee.fingerprint()
    checkpointer.save(0, "durable").wait("durable", 60)
    link = checkpointer._run.link
    mended = link.wait_mended

    def mended_and_killed(timeout_s: float) -> bool:
        there = bool(mended(timeout_s))
        kill_keeper(checkpointer)
        eventually(lambda: link.client is None)
        return there

    monkeypatch.setattr(link, "wait_mended", mended_and_killed)
    trainee.train()
    assert checkpointer.restore() == 1
    monkeypatch.undo()
    assert trainee.fingerprint() == expected
    trainee.train()
    assert checkpointer.save(1).wait("captured", 60)


def saved_twice(make: Make) -> tuple[Trainee, Any, bytes]:
    """A trainee of two steps, its checkpointer, and the state of the second one, which memory alone holds."""
    trainee = Trainee()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    for step in range(2):
        trainee.train()
        checkpointer.save(step, "captured" if step else "durable").wait(timeout_s=60)
    return trainee, checkpointer, trainee.fingerprint()


@pytest.mark.parametrize(
    "moment",
    sampled(
        [
            "KeeperLink.wait_mended",
            "KeeperLink.assembled",
            "Saver.reserve",
            "KeeperClient.inventory",
            "KeeperClient.obtain",
            "KeeperClient.resume",
        ],
        "KeeperClient.obtain",
    ),
)
def test_what_was_captured_is_found_although_the_keeper_dies_in_a_restore(
    make: Make, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """In the middle of training: the slots are this process's too, and the restore begins anew with the next keeper."""
    trainee, checkpointer, expected = saved_twice(make)
    link, (owner, name) = checkpointer._run.link, moment.split(".")
    kind = {"KeeperLink": KeeperLink, "Saver": Saver, "KeeperClient": KeeperClient}[owner]
    real, killed = getattr(kind, name), []

    def struck(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs) if name == "wait_mended" else None
        if not killed:
            killed.append(moment)
            kill_keeper(checkpointer)
            eventually(lambda: link.client is None)
        return found if name == "wait_mended" else real(self, *args, **kwargs)

    monkeypatch.setattr(kind, name, struck)
    trainee.train()
    assert checkpointer.restore() == 2
    assert killed
    assert trainee.fingerprint() == expected
    trainee.train()
    assert checkpointer.save(2).wait("captured", 60)


@pytest.mark.parametrize(
    ("owner", "name"),
    sampled([(KeeperLink, "recollect"), (Saver, "reserve"), (KeeperClient, "inventory")], (Saver, "reserve")),
)
def test_a_keeper_that_dies_in_the_first_restore_of_a_process_is_replaced(
    make: Make, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Nothing was captured by this process: the next keeper does as well, and the script does not end."""
    trainee, real = Trainee(), getattr(owner, name)
    checkpointer: Any = make(trainee)

    def struck(self: Any, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        client = self if isinstance(self, KeeperClient) else (self if owner is KeeperLink else self._link).require()
        os.kill(client.welcome.pid, signal.SIGKILL)
        eventually(lambda: not client.alive)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, struck)
    assert checkpointer.restore() == 0
    trainee.train()
    assert checkpointer.save(0).wait("captured", 60)


def test_that_a_keeper_has_ended_is_told_by_no_rank_alone() -> None:
    """The others would wait for it in the collective that it left."""
    link: Any = SimpleNamespace(client=None, last_client=SimpleNamespace(welcome=SimpleNamespace(address="unix:/x/s")))
    assert bootstrap._addresses(collectives.Alone(), Topology(("n0",), (0,)), link) == ("unix:/x/s",)


def test_what_was_resumed_from_is_found_although_the_keeper_dies_before_the_next_save(make: Make) -> None:
    """Its slots are of an incarnation before, and only the ranks know which bundles the version consists of."""
    trainee, checkpointer, expected = saved_twice(make)
    for _ in range(2):  # the second time the next keeper has them from the keeper between
        trainee.train()
        assert checkpointer.restore() == 2
        assert trainee.fingerprint() == expected
        kill_keeper(checkpointer)
        eventually(lambda: checkpointer._run.link.client is None)
    trainee.train()
    assert checkpointer.restore() == 2, "the newest version was in memory all the time"
    assert trainee.fingerprint() == expected
    trainee.train()
    assert checkpointer.save(2).wait("captured", 60)


@pytest.mark.parametrize("who", ["who reads", pytest.param("who sends", marks=MORE)])
def test_a_killed_keeper_costs_the_memory_level_for_a_moment_and_nothing_else(
    make: Make, tmp_path: Path, who: str
) -> None:
    """`who` finds out first that the keeper is gone."""
    trainee = Trainee()
    checkpointer = make(trainee, overlap=False)
    checkpointer.restore()
    names: list[str] = []
    checkpointer.events.subscribe(lambda event: names.append(event.name))
    trainee.train()
    checkpointer.save(0).wait("captured", 60)
    kept = trainee.fingerprint()
    link = checkpointer._run.link  # type: ignore[union-attr]
    if who == "who sends":
        link.client._lost_callbacks.clear()
    kill_keeper(checkpointer)

    trainee.train()
    lost = checkpointer.save(1)
    assert "keeper" in lost.given_up
    with pytest.raises(LevelNotReached, match="keeper"):
        lost.wait("captured", 1)
    eventually(lambda: "memory_level_back" in names)  # the save that was given up has begun to look for a new one
    assert [name for name in names if name.startswith("memory_level")] == ["memory_level_lost", "memory_level_back"]
    assert link.client is not None
    assert checkpointer.restore() == 1, "the new keeper adopted what the old one had sealed"
    assert trainee.fingerprint() == kept
    trainee.train()
    assert checkpointer.save(1).wait("captured", 60) == holdfast.Level.CAPTURED
    kill_keeper(checkpointer)
    trainee.train()
    assert checkpointer.save(2).given_up
    checkpointer.close()  # waits for the next keeper and saves the same step after all
    assert (tmp_path / "job" / "i000002-s0000000002" / "manifest.json").exists()


@MORE
def test_a_keeper_that_dies_within_a_save_is_replaced_before_the_next_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, overlap=False)
    checkpointer.restore()
    begin = KeeperClient.begin

    def dies(*told: Any, **options: Any) -> Any:
        monkeypatch.setattr(KeeperClient, "begin", begin)
        kill_keeper(checkpointer)
        return begin(*told, **options)

    monkeypatch.setattr(KeeperClient, "begin", dies)
    names: list[str] = []
    checkpointer.events.subscribe(lambda event: names.append(event.name))
    assert checkpointer.save(0).given_up
    eventually(lambda: "memory_level_back" in names)
    assert names.count("memory_level_lost") == 1
    assert checkpointer.save(1).wait("captured", 60) == holdfast.Level.CAPTURED


def test_cadence_and_close_make_the_last_step_durable(make: Make, tmp_path: Path) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, every=2, durable_every="4")
    start = checkpointer.restore()
    handles = {}
    for step in range(start, 7):
        trainee.train()
        handle = checkpointer.step(step)
        if handle is not None:
            handles[step] = handle
    assert sorted(handles) == [1, 3, 5]
    assert handles[3].wait(timeout_s=60) == holdfast.Level.DURABLE, "a wait waits for the level that was asked for"
    assert not others_get_in(tmp_path / "job")
    checkpointer.close()
    assert others_get_in(tmp_path / "job"), "the process lives, and does not work on the path any more"
    checkpointer.close()
    versions = sorted(path.parent.name for path in (tmp_path / "job").glob("i*/manifest.json"))
    assert versions == ["i000001-s0000000003", "i000001-s0000000006"], "step 6 was saved by close()"
    final = trainee.fingerprint()

    with pytest.raises(UsageError, match="closed"):
        checkpointer.step(7)
    other = Trainee()
    following = make(other)
    assert following.restore() == 7
    assert other.fingerprint() == final
    assert open_storage(tmp_path / "job", Events()).incarnations.lineage() == {1: None, 2: Version(1, 6)}, (
        "before training goes on"
    )
    assert following.last_restore is not None
    assert set(following.last_restore.bytes) == {"storage"}
    assert all(why.startswith("from storage, as no memory holds") for why in following.last_restore.sources.values())
    (told,) = following.keeper_status()["ranks"].values()
    assert told["restored"]["version"] == versions[-1]
    assert told["restored"]["bytes"]["storage"] >= following.last_restore.bytes["storage"], "heads are read as well"
    other.train()
    following.save(7, level="captured").wait()
    following.close()  # what was only captured becomes durable
    assert (tmp_path / "job" / "i000002-s0000000007" / "manifest.json").exists()


def test_a_copy_of_the_directory_lets_no_second_job_in(make: Make, tmp_path: Path) -> None:
    checkpointer = make(Trainee())
    checkpointer.restore()
    (tmp_path / "job" / "run.lock").read_bytes()  # as a copy or an upload of the whole directory does
    assert not others_get_in(tmp_path / "job")


def others_get_in(root: Path) -> bool:
    """Whether another process could take the lock of the path."""
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return (
        subprocess.run([sys.executable, "-c", code, str(root / "run.lock")], stderr=subprocess.DEVNULL).returncode == 0
    )


@pytest.mark.parametrize("error", [pytest.param(ZeroDivisionError(), marks=MORE), KeyboardInterrupt()])
def test_an_exception_in_training_saves_nothing_and_the_last_version_stays(make: Make, error: BaseException) -> None:
    trainee = Trainee()
    kept: list[bytes] = []

    def train() -> None:
        with make(trainee) as checkpointer:
            checkpointer.restore()
            trainee.train()
            checkpointer.save(0).wait("captured", 60)
            kept.append(trainee.fingerprint())
            trainee.train()
            checkpointer.step(1)  # finished and not saved; what comes after it has changed it by half
            torch.nn.init.zeros_(trainee.model[0].weight)
            raise error

    with pytest.raises(type(error)):
        train()
    other = Trainee()
    following = make(other)
    assert following.restore() == 1
    assert other.fingerprint() == kept[0]
    leave(following)


def test_a_state_beyond_the_last_step_is_not_saved_under_its_number(make: Make, tmp_path: Path) -> None:
    """The job breaks off after an update that no `step` has reported."""
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0)
    kept = trainee.fingerprint()
    trainee.train()
    checkpointer.step(1)
    trainee.train()
    checkpointer.close()
    assert open_storage(tmp_path / "job", Events()).versions() == [Version(1, 0)], "the last that was whole"
    other = Trainee()
    following = make(other)
    assert following.restore() == 1
    assert other.fingerprint() == kept


def test_a_stop_whose_save_fails_is_made_at_the_next_step(make: Make, tmp_path: Path) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.step(0)
    kill_keeper(checkpointer)
    os.kill(os.getpid(), signal.SIGTERM)
    trainee.train()
    failed = checkpointer.step(1)
    assert failed is not None
    assert "keeper" in failed.given_up
    run: Any = checkpointer._run
    assert run.link.wait_mended(20)
    trainee.train()
    with pytest.raises(SystemExit) as left:
        checkpointer.step(2)
    assert left.value.code == 0
    assert open_storage(tmp_path / "job", Events()).versions() == [Version(1, 2)]


def test_long_waits_and_restores_say_how_far_they_are(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    handle = checkpointer.save(0)
    handle.wait("captured", 60)
    monkeypatch.setattr(progress_report, "QUIET_S", 0.0)
    monkeypatch.setattr(handles, "PROGRESS_S", 0.01)
    with caplog.at_level(logging.INFO, "holdfast"):
        with pytest.raises(LevelNotReached):
            handle.wait("durable", 0.2)
        assert f"waiting for {handle.version} to be durable" in caplog.text
        assert "now captured" in caplog.text
        checkpointer.restore()
    assert f"verifying and copying {handle.version}: " in caplog.text
    assert " left" in caplog.text.split("verifying and copying")[1]


def test_sigterm_finishes_the_step_saves_and_exits_with_0(make: Make, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test before it may have left a handler
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    assert checkpointer.step(0) is None
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        trainee.train()
        with pytest.raises(SystemExit) as left:
            checkpointer.step(1)
        assert left.value.code == 0
        assert (tmp_path / "job" / "i000001-s0000000001" / "manifest.json").exists()
        # From a scheduler and a launcher it comes twice: the second kills nobody on the way out.
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_a_sigterm_it_is_as_before(make: Make) -> None:
    before = signal.getsignal(signal.SIGTERM)
    checkpointer = make(Trainee())
    checkpointer.restore()
    assert signal.getsignal(signal.SIGTERM) != before
    checkpointer.abandon()
    assert signal.getsignal(signal.SIGTERM) == before


@MORE
def test_damage_is_refused_by_name_and_never_a_silent_fresh_start(make: Make, tmp_path: Path) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    states = []
    for step in range(2):
        trainee.train()
        states.append(trainee.fingerprint())
        checkpointer.save(step, level="durable").wait(timeout_s=60)
    keeper = psutil.Process(checkpointer.keeper_status()["pid"])
    checkpointer.close()
    wait_gone(keeper)  # while it lingers, its memory holds both versions undamaged
    newest, oldest = (next((tmp_path / "job").glob(f"i*-s000000000{step}/*.safetensors")) for step in (1, 0))
    flip(newest)

    following = make(trainee)
    assert following.restore() == 1
    assert trainee.fingerprint() == states[0]
    report = following.last_restore
    assert report is not None
    assert report.refused
    assert "i000001-s0000000001" in report.refused[0]
    keeper = psutil.Process(following.keeper_status()["pid"])
    with pytest.raises(CorruptError, match="i000001-s0000000001"):
        following.restore("i000001-s0000000001")
    with pytest.raises(UsageError, match="restore"):
        following.save(2)  # a failed restore may leave a mixture, which must never be saved
    leave(following)
    keeper.kill()
    wait_gone(keeper)

    flip(oldest)
    last = make(trainee)
    with pytest.raises(CorruptError) as caught:
        last.restore()
    assert "fresh=True" in caught.value.remedy
    assert last.restore(fresh=True) == 0
    leave(last)
    assert newest.exists()
    assert oldest.exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_other_objects_are_refused_by_name(make: Make) -> None:
    trainee = Trainee()
    with make(trainee) as checkpointer:
        checkpointer.restore()
        trainee.train()
        checkpointer.save(0)
    following = make(Trainee(width=33))
    with pytest.raises(MismatchError, match=r"model\.0\.weight"):
        following.restore()


def test_wrong_calls_say_what_to_do(make: Make, tmp_path: Path) -> None:
    trainee = Trainee()
    with pytest.raises(ConfigError, match="often"):
        make(trainee, every="often")
    refused = make(trainee, memory_budget="100KB", require_memory=True)
    with pytest.raises(MemoryRefused):
        refused.restore()
    checkpointer = make(trainee, path=tmp_path / "other")
    for call in (checkpointer.step, checkpointer.save):
        with pytest.raises(UsageError, match=r"restore\(\) has not been called"):
            call(0)
    with pytest.raises(UsageError, match="not a version"):
        checkpointer.restore("newest")
    with pytest.raises(VersionNotFound):
        checkpointer.restore("i000001-s0000000004")
    checkpointer.restore()
    checkpointer.step(3)
    with pytest.raises(UsageError, match="step 3"):
        checkpointer.step(3)
    with pytest.raises(UsageError, match="captured, replicated, durable"):
        checkpointer.save(4, level="safe")
    with pytest.raises(LevelNotReached, match="one node"):
        checkpointer.save(4).wait("replicated", 60)  # it is said at once
    with pytest.raises(UsageError, match="cannot be saved after"):
        checkpointer.save(3)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("dear diary")
    with pytest.raises(holdfast.HoldfastError, match=r"not ours|someone|foreign"):
        make(trainee, path=foreign).restore()
    assert (foreign / "thesis.tex").exists()


def test_a_wait_for_copies_that_nobody_makes_ends_when_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "PROGRESS_S", 0.01)
    captured = Announced(0, lambda: True)
    captured.take(Progress(version=Version(1, 3), reached=(Level.CAPTURED,), reason="all sealed it", abandoned=False))
    client = SimpleNamespace(announced=captured, alive=True)
    link: Any = SimpleNamespace(client=client, last_client=client)
    handle = handles.SaveHandle(
        Version(1, 3), Level.REPLICATED, link=link, in_storage=lambda _: False, settle=lambda _: None,
        topology=Topology(("a", "b"), (0, 1), redundancy="none"), timeout_s=600.0,
    )  # fmt: skip
    with pytest.raises(LevelNotReached, match="is captured, and nothing makes it replicated: redundancy is none"):
        handle.wait()


def test_going_back_leaves_nothing_in_a_dict_that_came_later(make: Make) -> None:
    """Counters by name and best values; what the script began with stays, though an older version lacks it."""
    extra: dict[str, Any] = {"ema": torch.zeros(3), "seen": {"a": 1}, "best": {"loss": 3.0}}
    checkpointer = make(Trainee(), extra=extra)
    checkpointer.restore()
    checkpointer.save(0).wait("captured", 60)
    extra["seen"]["b"], extra["new"], extra["best"]["loss"], extra["best"]["epoch"] = 2, {"x": [1]}, 1.0, 5
    assert checkpointer.restore() == 1
    assert {key: value for key, value in extra.items() if key != "ema"} == {"seen": {"a": 1}, "best": {"loss": 3.0}}
    checkpointer.save(1, level="durable").wait(timeout_s=60)
    checkpointer.close()

    newer: dict[str, Any] = {"ema": torch.zeros(3), "seen": {}, "best": {"loss": 9.0, "epoch": -1}, "rate": 0.1}
    following = make(Trainee(), extra=newer)
    with pytest.raises(MismatchError, match=r"2 missing in the checkpoint: extra\.best\.epoch, extra\.rate"):
        following.restore()
    assert newer["seen"] == {}, "nothing is touched"
    following = make(Trainee(), extra=newer)
    assert following.restore(strict=False) == 2
    assert following.last_restore is not None
    assert sorted(following.last_restore.not_loaded) == ["extra.best.epoch", "extra.rate"]
    assert newer["rate"] == 0.1
    assert newer["best"] == {"loss": 3.0, "epoch": -1}
    assert newer["seen"] == {"a": 1}


def test_what_the_script_took_out_of_a_dict_stays_out_after_a_restart(make: Make) -> None:
    """A list of work to be done, say: the script begins with all of it again, and the version knows what is done."""

    def fresh() -> dict[str, Any]:
        work: dict[Any, Any] = {"a": 1, 2: [2], (3, 4): {"x": 1}}
        return {"work": work, "warm": {"up": torch.zeros(3)}, "left": 9, "kept": {"n": 1}}

    extra = fresh()
    checkpointer = make(Trainee(), extra=extra)
    checkpointer.restore()
    del extra["work"]["a"], extra["work"][(3, 4)], extra["warm"], extra["left"]
    extra["kept"]["n"] = 2
    expected = {"work": {2: [2]}, "kept": {"n": 2}}
    checkpointer.save(0, "durable").wait()
    extra["left"] = "again"
    assert checkpointer.restore() == 1
    assert extra == expected
    checkpointer.close()

    again = fresh()
    following = make(Trainee(), extra=again)
    assert following.restore() == 1
    assert again == expected
    following.save(1, "durable").wait()  # what is out stays out in the versions of the next process too
    following.close()
    again = fresh()
    assert make(Trainee(), extra=again).restore() == 2
    assert again == expected


@MORE
def test_what_came_later_goes_also_after_an_interruption(make: Make) -> None:
    """Under `holdfast.resumable` the Checkpointer and its objects stay, and what they began with is known."""
    extra: dict[str, Any] = {"ema": torch.zeros(3), "seen": {"a": 1}}
    checkpointer = make(Trainee(), extra=extra)
    checkpointer.restore()
    checkpointer.save(0).wait("captured", 60)
    extra["seen"]["b"], extra["new"] = 2, 3
    checkpointer.interrupted()
    assert checkpointer.restore() == 1
    assert extra.keys() == {"ema", "seen"}
    assert extra["seen"] == {"a": 1}


def test_the_key_that_tells_what_was_taken_out_is_reserved(make: Make) -> None:
    with pytest.raises(UsageError, match="reserved"):
        make(Trainee(), extra={"w": torch.zeros(3), REMOVED: 1}).restore()


@pytest.mark.parametrize("shape", sampled(["dict", "list", "deeper"], "deeper"))
def test_going_back_takes_no_tensors_away_that_came_later(make: Make, shape: str) -> None:
    """Without `strict` they stay as they are, and the report names them; so does what stands beside them."""
    extra: dict[str, Any] = {"ema": torch.zeros(3)}
    checkpointer = make(Trainee(), extra=extra)
    checkpointer.restore()
    checkpointer.save(0).wait("captured", 60)
    tensor = torch.ones(2)
    late = {"dict": {"w": tensor, "n": 1}, "list": [tensor, 1], "deeper": {"a": [{"w": tensor}], "n": 1}}[shape]
    extra["late"], extra["plain"] = late, {"n": [1]}
    assert checkpointer.restore(strict=False) == 1
    assert extra.get("late") is late
    assert "plain" not in extra
    assert checkpointer.last_restore is not None
    assert any(name.startswith("extra.late") for name in checkpointer.last_restore.not_loaded)


@pytest.mark.parametrize("named", sampled(["in the home", "from here"], "from here"))
def test_a_path_means_the_directory_it_named_at_the_constructor(
    named: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path: Any = "~/run" if named == "in the home" else "run"
    checkpointer = make(Trainee(), path=path)
    os.chdir(tmp_path / "elsewhere")
    checkpointer.restore()
    checkpointer.save(3, "durable")
    checkpointer.close()
    assert [version.step for version in open_storage(str(tmp_path / "run"), Events()).versions()] == [3]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_durable_version_is_still_durable_after_close(make: Make) -> None:
    checkpointer = make(Trainee())
    checkpointer.restore()
    handle = checkpointer.save(1, "durable")
    checkpointer.close()
    assert handle.reached is handle.wait() is holdfast.Level.DURABLE
    assert handle.durable == (True, "")


def test_a_key_that_changes_in_the_middle_of_a_job_is_not_written_with(make: Make, tmp_path: Path) -> None:
    """The next keeper reads the file again. What two keys wrote would be called durable, and open with none."""
    key = tmp_path / "job.key"
    key.touch(mode=0o600)
    key.write_text("1" * 64)
    trainee = Trainee()
    checkpointer = make(trainee, encryption_key=str(key))
    checkpointer.restore()
    checkpointer.save(0, "durable").wait(timeout_s=60)
    key.write_text("2" * 64)
    names: list[str] = []
    checkpointer.events.subscribe(lambda event: names.append(event.name))
    kill_keeper(checkpointer)
    trainee.train()
    assert checkpointer.save(1).given_up
    eventually(lambda: "memory_level_back" in names)
    saved = checkpointer.save(2, "durable")
    with pytest.raises(LevelNotReached, match="another one by now"):
        saved.wait("durable", 5.0)
    key.write_text("1" * 64)
    trainee.train()
    checkpointer.save(3, "durable").wait(timeout_s=60)
    checkpointer.close()
    again = make(Trainee(), encryption_key=str(key))
    assert again.restore() == 4


def test_a_keeper_of_an_earlier_start_writes_with_the_key_of_this_one(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper lives on between the starts. A relative key file is that of the constructor's directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("one.key", "other.key"):
        with os.fdopen(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(name.encode().hex().ljust(64, "0"))
    starts: list[dict[str, Any]] = [{}, {"encryption_key": "one.key", "encryption_required": False}]
    starts += [{"encryption_key": "other.key", "encryption_required": False}, {}]
    keepers, ids = set(), []
    for number, options in enumerate(starts):
        os.chdir(tmp_path)
        checkpointer = make(Trainee(), linger_s=600.0, **options)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        os.chdir(tmp_path / "elsewhere")
        checkpointer.restore(fresh=True)
        version = checkpointer.save(10 + number, "durable")
        version.wait("durable")
        keepers.add(checkpointer.keeper_status()["pid"])
        files = open_storage(tmp_path / "job", Events()).manifest(version.version).bundles
        ids.append({file.key_id for file in files})
        leave(checkpointer)
    for keeper in map(psutil.Process, keepers):
        keeper.terminate()
        wait_gone(keeper)
    assert len(keepers) == 1
    assert len(set(map(frozenset, ids))) == 3, ids
    assert ids[0] == ids[3] == {""}
