"""Memory that takes long: neither a restore nor training waits for it, and the last step is saved all the same."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.base.events import Events
from holdfast.checkpoint.checkpointer import checkpointer as door
from holdfast.checkpoint.save import memory_saver
from holdfast.core.model import Level, Version
from holdfast.testing.faults.rig import start_hurtable
from holdfast.tiers.storage.version_store import open_storage
from keeper.rig import eventually
from kit.checkpointers import Make, Trainee
from sample_kit import sampled

BOUND_S = 0.2


class Memory:
    """A keeper whose pages come when the test says so."""

    def __init__(self, base: Path, runtime: Path) -> None:
        self._control = base / "hurt"
        self._control.write_text("stall@pages")
        config = holdfast.Config(runtime_dir=str(runtime), linger_s=60.0)
        self.keeper: subprocess.Popen[bytes] = start_hurtable(str(base / "job"), config, self._control)

    def give(self) -> None:
        self._control.write_text("")

    def refuse(self) -> None:
        self._control.write_text("ENOMEM@pages")


@pytest.fixture
def memory(tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(door, "SLOTS_S", BOUND_S)
    hurt = Memory(tmp_path, runtime_dir)
    yield hurt
    hurt.give()
    hurt.keeper.terminate()  # it removes what it made
    hurt.keeper.wait(30)


def versions(base: Path) -> list[Version]:
    return open_storage(base / "job", Events()).versions()


def test_training_begins_before_its_memory_is_made(make: Make, memory: Memory) -> None:
    checkpointer = make(Trainee(), begin_timeout_s=0.1)
    began = time.monotonic()
    assert checkpointer.restore() == 0
    assert time.monotonic() - began < 20, "300 s passed, and then the job failed"

    early = checkpointer.save(0)
    assert "still being made" in early.given_up
    memory.give()
    assert checkpointer._run is not None
    assert checkpointer._run.saver.await_slots(10)

    assert checkpointer.save(1).wait("captured", 60) >= Level.CAPTURED


def test_a_save_that_waits_for_its_memory_says_so_once(
    make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_saver, "SAY_S", 0.05)
    checkpointer = make(Trainee(), begin_timeout_s=0.2)
    checkpointer.restore()
    assert "still being made" in checkpointer.save(0).given_up
    memory.give()
    (told,) = (text for record in caplog.records if "has waited" in (text := record.getMessage()))
    assert "memory of its slots" in told
    assert "holdfast doctor" in told


@pytest.mark.parametrize("is_due", sampled([False, True], True))
def test_the_last_step_is_saved_as_it_was_although_its_memory_came_after_it(
    make: Make, memory: Memory, tmp_path: Path, is_due: bool
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, every="1", durable_every="1", begin_timeout_s=0.1)
    checkpointer.restore()
    trainee.train()
    early = checkpointer.step(0) if is_due else checkpointer.save(0, "durable")
    assert "still being made" in early.given_up
    expected, position = trainee.fingerprint(), trainee.loader.position
    trainee.model(torch.randn(8, 16) + trainee.loader.take())  # in training mode: its running means go on
    memory.give()

    checkpointer.close()

    assert versions(tmp_path) == [Version(1, 0)]
    again = Trainee()
    assert make(again).restore() == 1
    assert (again.fingerprint(), again.loader.position) == (expected, position)


def test_steps_wait_for_their_memory_as_they_do_for_a_slot(make: Make, memory: Memory) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, every="1", begin_timeout_s=0.1)
    checkpointer.restore()
    checkpointer.save(0)
    for step in range(1, 41):
        trainee.train()
        checkpointer.step(step)
    assert checkpointer.events.counters()["save_seconds"] < 20 * 0.1
    memory.give()
    checkpointer.close()


def test_memory_that_is_refused_after_it_was_granted_leaves_storage(
    make: Make,
    memory: Memory,
    tmp_path: Path,
) -> None:
    trainee, names = Trainee(), []
    checkpointer = make(trainee)
    checkpointer.events.subscribe(lambda event: names.append(event.name))
    memory.refuse()
    checkpointer.restore()
    trainee.train()
    early = checkpointer.save(0)
    assert "no room for" in early.given_up

    assert checkpointer.step(1) is None
    trainee.train()
    late = checkpointer.save(2, "durable")

    assert late.reached is Level.DURABLE
    assert "durable_only" in names
    assert versions(tmp_path) == [Version(1, 2)]


def test_a_job_that_needs_memory_waits_for_all_of_it_and_is_refused_otherwise(
    make: Make,
    memory: Memory,
) -> None:
    memory.refuse()
    with pytest.raises(holdfast.HoldfastError, match="no room for"):
        make(Trainee(), require_memory=True).restore()


def test_a_keeper_that_dies_before_all_slots_are_there_is_replaced_by_one_that_makes_them(
    make: Make,
    memory: Memory,
) -> None:
    checkpointer = make(Trainee(), begin_timeout_s=5.0)
    checkpointer.restore()
    assert checkpointer._run is not None
    lost = checkpointer._run.link.client
    assert lost is not None
    memory.keeper.kill()
    memory.keeper.wait()
    eventually(lambda: not lost.alive)
    assert checkpointer._run.link.wait_mended(20)

    assert checkpointer.save(1).wait("captured", 60) >= Level.CAPTURED
    assert len(checkpointer.keeper_status()["ranks"]["0"]["slots"]) == 2
