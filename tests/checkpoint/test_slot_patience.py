"""How long saves wait for a slot: those that are due hold training up for a share of its time only."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.base.errors import LevelNotReached
from holdfast.base.events import Events
from holdfast.checkpoint.save import durable_tracker, left_out_saves
from holdfast.checkpoint.save.left_out_saves import ASIDE_BYTES
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.checkpoint.save.slot_patience import FREE_S, MOST_TIMES, SHARE, SlotPatience, Waits
from holdfast.core.scheduling.cadence import Cadence
from holdfast.keeper.rpc.client import NoSlotYet
from holdfast.tiers.storage.version_store import open_storage
from keeper.rig import eventually
from kit.checkpointers import Make, Trainee
from sample_kit import sampled

BEGIN_S = 0.2
SLOW_DISK = Path(__file__).parent.parent / "kit" / "slow_disk"
# Room for two slots of this state, and not for three more.
TWO_SLOTS = "4MiB"


class Average:
    """Hands out its own tensor, as it is."""

    def __init__(self, num_elements: int) -> None:
        self.mean = torch.zeros(num_elements)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.mean = state["mean"]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_waits_of_due_saves_are_a_share_of_the_time_that_passes() -> None:
    clock = Clock()
    patience = SlotPatience(1.0, 600.0, clock)
    waited_s = 0.0
    for _ in range(1000):  # a storage that never ends, and steps of 0.2 s
        allowed_s = patience.seconds(Waits.DUE)
        assert allowed_s <= 1.0
        patience.spend(allowed_s)
        waited_s += allowed_s
        clock.now_s += 0.2 + allowed_s
    assert waited_s <= MOST_TIMES * 1.0 + SHARE * (clock.now_s - 100.0) + 1000 * FREE_S
    clock.now_s += 100.0
    assert patience.seconds(Waits.DUE) == 1.0, "what was saved up"


@pytest.mark.parametrize(("why", "seconds"), [(Waits.ASKED, 1.0), (Waits.LAST, 600.0)])
def test_who_asks_for_a_save_may_always_wait(why: Waits, seconds: float) -> None:
    patience = SlotPatience(1.0, 600.0, Clock())
    patience.spend(1000.0)
    assert patience.seconds(Waits.DUE) == 0.0
    assert patience.seconds(why) == seconds


def test_a_step_that_was_held_up_for_longer_is_made_up_for() -> None:
    clock = Clock()
    patience = SlotPatience(1.0, 600.0, clock)
    patience.spend(MOST_TIMES + 10.0)
    assert patience.in_debt
    clock.now_s += 9.0 / SHARE
    assert patience.seconds(Waits.DUE) == 0.0
    assert patience.in_debt
    clock.now_s += 2.0 / SHARE
    assert 0.0 < patience.seconds(Waits.DUE) <= 1.0
    assert not patience.in_debt


def test_a_round_trip_costs_no_credit() -> None:
    patience = SlotPatience(1.0, 600.0, Clock())
    for _ in range(100_000):
        patience.spend(FREE_S)
    assert patience.seconds(Waits.DUE) == 1.0


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: as long as it is there, storage comes to no end."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SLOW_DISK), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("HELD", str(tmp_path / "held"))
    return tmp_path / "held"


@pytest.mark.parametrize("width", sampled([32, 600], 600), ids=["in the call", "late"])
def test_a_storage_that_takes_long_does_not_hold_training_up(
    make: Make, tmp_path: Path, held: Path, caplog: pytest.LogCaptureFixture, width: int
) -> None:
    """While a version is written both slots are taken: by that one, and by the newest that memory has."""
    trainee = Trainee(width)
    checkpointer = make(trainee, every="1", begin_timeout_s=BEGIN_S, memory_budget=TWO_SLOTS)
    checkpointer.restore()
    for step in range(10):
        trainee.train()
        checkpointer.step(step)
    held.touch()
    checkpointer.save(9, "durable")
    try:
        for step in range(10, 110):  # each of them would wait
            trainee.train()
            checkpointer.step(step)
    finally:
        held.unlink()
    counters = checkpointer.events.counters()
    assert counters["saves_left_out"] > 50
    assert counters["save_seconds"] + counters.get("fence_wait_seconds", 0.0) < 100 * BEGIN_S / 2
    told = [
        record for record in caplog.records if "is left out" in record.getMessage() and record.levelname == "WARNING"
    ]
    assert len(told) < 10, "once for each time that slots are taken"
    checkpointer.close()
    assert [version.step for version in open_storage(tmp_path / "job", Events()).versions()] == [9, 109]
    again = Trainee(width)
    assert make(again).restore() == 110
    assert again.fingerprint() == trainee.fingerprint()


def test_a_storage_that_is_always_a_little_slow_does_not_fill_the_log(
    make: Make, held: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots become free and are taken again, all day; each version that is left out was due for storage as well."""
    for each in (left_out_saves, durable_tracker):  # however slow this machine is
        monkeypatch.setattr(each, "TELL_EVERY_S", 3600.0)
    trainee = Trainee()
    checkpointer = make(trainee, every="1", durable_every="1", begin_timeout_s=0.01, memory_budget=TWO_SLOTS)
    checkpointer.restore()
    for step in range(60):
        held.touch() if step % 20 == 0 else None
        trainee.train()
        checkpointer.step(step)
        if step % 20 == 19:
            held.unlink()
            with suppress(LevelNotReached):
                checkpointer.flush(30.0)
    assert checkpointer.events.counters()["saves_left_out"] > 30
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("is left out" in line for line in told) == 1
    assert sum("is not durable" in line for line in told) < 5
    checkpointer.close()


def test_storage_gets_another_version_if_the_one_that_was_due_found_no_slot(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow line to another node takes the slots again and again, and storage is quick."""
    trainee, told = Trainee(), list[tuple[int, object]]()
    open_now = Saver._open_now

    def opened(saver: Saver, taken: Any) -> Any:
        if taken.durable:
            raise NoSlotYet("all slots are sent")
        return open_now(saver, taken)

    monkeypatch.setattr(Saver, "_open_now", opened)
    checkpointer = make(
        trainee, every="1", durable_every="5", overlap=False, on_durable=lambda v, error: told.append((v.step, error))
    )
    checkpointer.restore()
    for step in range(8):
        trainee.train()
        if (handle := checkpointer.step(step)) is not None and not handle.given_up:
            handle.wait("captured", 30.0)
    eventually(lambda: any(error is None for _, error in told))
    monkeypatch.undo()
    checkpointer.close()


@pytest.mark.parametrize("num_elements", sampled([8, 1 << 19], 1 << 19), ids=["planned", "grown"])
def test_with_room_in_the_budget_a_third_slot_takes_saves_while_storage_writes(
    make: Make, held: Path, num_elements: int
) -> None:
    trainee, average = Trainee(), Average(8)
    checkpointer = make(trainee, every="1", begin_timeout_s=BEGIN_S, average=average)
    checkpointer.restore()
    trainee.train()
    average.mean = torch.zeros(num_elements)  # more than was planned for it: all slots are made anew
    held.touch()
    checkpointer.save(0, "durable")
    step, slots = 0, []
    while len(slots) < 3 or not checkpointer._run.saver._reservation.is_complete:
        step += 1
        assert step < 1000
        trainee.train()
        checkpointer.step(step)
        slots = checkpointer.keeper_status()["ranks"]["0"]["slots"]
    for _ in range(10):
        step += 1
        trainee.train()
        handle = checkpointer.step(step)
        handle.wait("captured", 30)
    held.unlink()
    checkpointer.close()


def left_out(
    make: Make, held: Path, trainee: Trainee, memory_budget: str = TWO_SLOTS, **objects: Any
) -> tuple[holdfast.Checkpointer, int]:
    """A run whose storage is at its first version for as long as `held` is there, and whose last step found no slot."""
    checkpointer = make(trainee, every="1", begin_timeout_s=0.05, memory_budget=memory_budget, **objects)
    checkpointer.restore()
    trainee.train()
    held.touch()
    checkpointer.save(0, "durable")
    step = 0
    while step < 10 or not checkpointer._run.last.given_up:
        step += 1
        assert step < 1000
        trainee.train()
        checkpointer.step(step)
        checkpointer._run.saver.settle()
    return checkpointer, step


@pytest.mark.parametrize("width", sampled([32, 600], 600), ids=["narrow", "wide"])
def test_what_is_come_back_to_is_as_it_was_at_its_step(make: Make, held: Path, width: int) -> None:
    """Behind the last step a script draws numbers, takes batches, and estimates the statistics of its layers once more."""
    trainee, average = Trainee(width), Average(8)
    checkpointer, step = left_out(make, held, trainee, average=average)
    expected, position, drawn = trainee.fingerprint(), trainee.loader.position, torch.randn(4)
    trainee.model(torch.randn(8, 16) + trainee.loader.take())
    average.mean += 1
    assert trainee.fingerprint() != expected
    held.unlink()
    checkpointer.close()
    again, average = Trainee(width), Average(8)
    assert make(again, average=average).restore() == step + 1
    assert again.fingerprint() == expected
    assert again.loader.position == position
    assert not average.mean.any()
    assert torch.equal(torch.randn(4), drawn)


@pytest.mark.parametrize("is_written", sampled([False, True], True))
def test_what_is_large_and_was_written_since_is_not_come_back_to(
    make: Make, tmp_path: Path, held: Path, caplog: pytest.LogCaptureFixture, is_written: bool
) -> None:
    """An average of another size than is set aside: never a version with tensors of two moments."""
    trainee, average = Trainee(), Average((ASIDE_BYTES >> 2) + 1)
    checkpointer, step = left_out(make, held, trainee, "8MiB", average=average)
    if is_written:
        average.mean[5] = 1.0
    whole = checkpointer._run.whole.version
    held.unlink()
    checkpointer.close()
    newest = open_storage(tmp_path / "job", Events()).versions()[-1].step
    assert newest == (whole.step if is_written else step)
    assert (f"step {step} is not saved: tensors that no optimizer owns were written" in caplog.text) == is_written


def test_other_ranks_hear_at_the_next_step_that_nobody_comes_back_to_one(make: Make, held: Path) -> None:
    trainee = Trainee()
    checkpointer, step = left_out(make, held, trainee)
    last, checkpointer._run.schedule._capture = checkpointer._run.last.version, Cadence(steps=1000)
    checkpointer._run.link.went_on(last)  # this one may be come back to
    assert last in [version for version, _ in checkpointer._run.link.unannounced._versions]
    trainee.train()
    assert checkpointer.step(step + 1) is None
    assert not checkpointer._run.link.unannounced._versions
    client = checkpointer._run.link.client
    eventually(lambda: (known := client.announced.known(last)) is not None and known.abandoned)
    held.unlink()
    checkpointer.close()


def test_a_last_step_that_was_not_due_is_saved_behind_one_that_was_left_out(
    make: Make, tmp_path: Path, held: Path
) -> None:
    trainee, average = Trainee(), Average((ASIDE_BYTES >> 2) + 1)
    checkpointer, step = left_out(make, held, trainee, "8MiB", average=average)
    checkpointer._run.schedule._capture = Cadence(steps=1000)
    trainee.train()
    average.mean[5] = 1.0
    assert checkpointer.step(step + 1) is None
    held.unlink()
    checkpointer.close()
    assert open_storage(tmp_path / "job", Events()).versions()[-1].step == step + 1


def test_the_last_save_comes_back_to_a_step_that_was_left_out_when_it_was_reported(
    make: Make, tmp_path: Path, held: Path
) -> None:
    trainee = Trainee()
    checkpointer, step = left_out(make, held, trainee)
    threading.Timer(0.5, held.unlink).start()
    assert not checkpointer.save_last(step).given_up
    kept = trainee.fingerprint()
    trainee.model.load_state_dict({name: tensor * 0 for name, tensor in trainee.model.state_dict().items()})
    checkpointer.close()
    again = Trainee()
    assert make(again).restore() == step + 1
    assert again.fingerprint() == kept


@pytest.mark.parametrize("trains_on", sampled([False, True], False))
def test_what_was_left_out_for_good_is_said_and_the_newest_whole_version_is_durable(
    make: Make, tmp_path: Path, held: Path, caplog: pytest.LogCaptureFixture, trains_on: bool
) -> None:
    """More than a few saves in a row find no slot. The last step is saved straight to storage, if it is still there at the end."""
    trainee = Trainee()
    checkpointer = make(trainee, every="1", begin_timeout_s=0.05, memory_budget=TWO_SLOTS)
    checkpointer.restore()
    trainee.train()
    held.touch()
    checkpointer.save(0, "durable")
    for step in range(1, 20):
        trainee.train()
        checkpointer.step(step)
    last, whole = checkpointer._run.last.version, checkpointer._run.whole.version
    assert whole.step < 15
    client = checkpointer._run.link.client
    eventually(lambda: (known := client.announced.known(last)) is not None and known.abandoned)
    held.unlink()
    kept = trainee.fingerprint()
    if trains_on:
        trainee.train()
    checkpointer.close()
    durable = open_storage(tmp_path / "job", Events()).versions()[-1]
    if not trains_on:
        assert durable.step == 19
        again = Trainee()
        assert make(again).restore() == 20
        assert again.fingerprint() == kept
        return
    assert durable == whole
    assert f"what is durable is step {whole.step}; step 19 is not saved: an optimizer made a step" in caplog.text
