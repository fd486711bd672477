"""Memory that is lost in mid-run: saves go to storage alone, all ranks at one step, and come back up."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.base import program
from holdfast.base.events import Events
from holdfast.checkpoint.checkpointer import storage_fallback
from holdfast.checkpoint.checkpointer.storage_fallback import StorageFallback
from holdfast.core.model import Level, Version
from holdfast.core.scheduling import storage_only_steps
from holdfast.core.scheduling.storage_fallback import FallbackState
from holdfast.tiers.storage.version_store import open_storage
from kit.checkpointers import Make, Trainee, kill_keeper
from sample_kit import sampled

JOB = SimpleNamespace(job_id="job")


class Growing:
    """State whose size changes in mid-run."""

    def __init__(self, num_bytes: int) -> None:
        self.data = torch.arange(num_bytes, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data = state["data"].clone()


def versions(path: Path) -> list[Version]:
    return open_storage(path / "job", Events()).versions()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether memory can be had is looked at after every step, not every five seconds."""
    monkeypatch.setattr(storage_only_steps, "MAX_GAP_S", 0.0)


def test_a_state_that_grew_is_saved_to_storage_until_it_fits_again(make: Make, tmp_path: Path) -> None:
    growing, names = Growing(100_000), []
    checkpointer = make(growing=growing, durable_every=1, memory_budget="4MB", keep_every="1")
    checkpointer.events.subscribe(lambda event: names.append(event.name))
    checkpointer.restore()
    first = checkpointer.step(0)
    assert first is not None
    first.wait("captured", 60)

    growing.data = torch.arange(3_000_000).to(torch.uint8)
    lost = checkpointer.step(1)
    assert lost is not None
    assert "of 4000000 allowed" in lost.given_up
    lower = checkpointer.step(2)
    assert lower is not None
    assert lower.reached is Level.DURABLE
    assert "durable_only" in names
    assert Version(1, 2) in versions(tmp_path)

    growing.data = torch.arange(100_000).to(torch.uint8)
    checkpointer.step(3)  # memory could be had again: known now, and so from the next step on
    again = checkpointer.step(4)
    assert again is not None
    assert again.wait("captured", 60) >= Level.CAPTURED
    assert "memory_level_back" in names
    checkpointer.close()
    assert versions(tmp_path)[-1] == Version(1, 4)


@pytest.fixture
def no_keeper(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Keepers end while they start, or again they do not."""
    real = program.sys

    def switch(off: bool) -> None:
        monkeypatch.setattr(program, "sys", SimpleNamespace(executable="/bin/false") if off else real)

    return switch


def test_a_keeper_that_is_gone_for_good_costs_one_save_and_memory_returns_with_the_next(
    make: Make,
    tmp_path: Path,
    no_keeper: Callable[[bool], None],
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, durable_every=1, keep_every="1")
    checkpointer.restore()
    trainee.train()
    checkpointer.step(0)
    checkpointer.flush(60)
    link = checkpointer._run.link  # type: ignore[union-attr]
    no_keeper(True)
    kill_keeper(checkpointer)
    trainee.train()
    lost = checkpointer.step(1)
    assert lost is not None
    assert "keeper" in lost.given_up
    assert not link.wait_mended(20)

    trainee.train()
    kept = trainee.fingerprint()
    lower = checkpointer.step(2)
    assert lower is not None
    assert lower.reached is Level.DURABLE
    assert "no keeper can be started" in checkpointer._run.saver._reason  # type: ignore[union-attr]

    no_keeper(False)
    assert link.wait_mended(20) or link.wait_mended(20), "an attempt that began before may end as it had to"
    trainee.train()
    checkpointer.step(3)
    again = checkpointer.step(4)
    assert again is not None
    assert again.wait("captured", 60) >= Level.CAPTURED
    assert checkpointer.restore("i000001-s0000000002") == 3
    assert trainee.fingerprint() == kept


@pytest.mark.root
@pytest.mark.parametrize("planted", sampled(["directory", "file"], "directory"))
def test_a_job_goes_on_where_another_user_made_the_default_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, planted: str
) -> None:
    """They need no right but to write into `/tmp`; the job must not end of it."""
    for variable in ("HOLDFAST_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = holdfast.Config().runtime_path
    if planted == "directory":
        taken.mkdir()
    else:
        taken.touch()
    os.chown(taken, 65534, 65534)
    trainee = Trainee()
    checkpointer = holdfast.Checkpointer(tmp_path / "job", every="0", durable_every="1", **trainee.objects())
    try:
        assert checkpointer.restore() == 0
        trainee.train()
        saved = checkpointer.step(0)
        assert saved is not None
        assert saved.wait("durable", 60) is Level.DURABLE
        checkpointer.close()
    finally:
        checkpointer.abandon()
    assert ("another user made it" in caplog.text) == (planted == "directory")
    assert "set HOLDFAST_RUNTIME_DIR to a private directory" in caplog.text
    assert versions(tmp_path)[0] == Version(1, 0)
    assert planted == "file" or list(taken.iterdir()) == []


def test_the_last_save_is_durable_without_a_keeper(
    make: Make,
    tmp_path: Path,
    runtime_dir: Path,
    no_keeper: Callable[[bool], None],
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.step(0)
    no_keeper(True)
    kill_keeper(checkpointer)
    checkpointer.close()
    assert versions(tmp_path) == [Version(1, 0)]
    shutil.rmtree(runtime_dir)  # of the keeper that was killed and has no successor


def test_memory_returns_only_where_every_rank_could_have_it() -> None:
    words = [
        storage_only_steps.MeetingInput(stop=False, memory=True),
        storage_only_steps.MeetingInput(stop=False, memory=False),
    ]
    assert not storage_only_steps.outcome(words).memory
    assert storage_only_steps.outcome(words[:1] * 2).memory


class Board(dict[str, str]):
    """What both ranks of a test can read and write."""

    put = dict.__setitem__

    def add(self, key: str) -> int:
        self[key] = str(int(self.get(key, "0")) + 1)
        return int(self[key])

    def first(self, key: str, text: str) -> str:
        return self.setdefault(key, text)

    def least(self, key: str, number: int) -> None:
        self[key] = str(min(number, int(self.get(key, number))))


class Link:
    """Is a link to a keeper that is in order.

    Attributes:
        mended: how often somebody looked whether a keeper is to be replaced.
    """

    trouble, silent, client = "", False, None

    def __init__(self) -> None:
        self.mended = 0

    def wait_mended(self, _: float) -> None:
        self.mended += 1


def test_a_last_version_that_one_rank_gave_up_is_saved_again_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it until `close_timeout_s` is over, nor is the last step lost."""
    board, went = Board(), []
    monkeypatch.setattr(StorageFallback, "_down", lambda self, *_: went.append(self) or True)

    saver = SimpleNamespace(refused="", fence=SimpleNamespace(num_steps=3))
    saver.memory = saver

    def closing(rank: int, given_up: str) -> bool:
        job: Any = SimpleNamespace(group=SimpleNamespace(rank=rank, world_size=2), incarnation=1, assembly=JOB)
        link: Any = Link()
        nothing: Any = None
        config = holdfast.Config(close_timeout_s=60.0)
        lower = StorageFallback(job, state=nothing, link=link, storage=nothing, config=config, events=Events())
        lower._boards = lambda _: board
        durable = bool(given_up), given_up
        last = SimpleNamespace(version=Version(1, 2), reached=Level.NONE, durable=durable, is_stored=lambda: False)
        run: Any = SimpleNamespace(saver=saver, last=last, optimizer_steps=3)
        try:
            return lower.closing(run)
        finally:
            assert link.mended

    monkeypatch.setattr(storage_fallback, "board_of", lambda *_: None)
    with ThreadPoolExecutor() as threads:
        ends = [threads.submit(closing, *words) for words in ((0, "no slot became free"), (1, ""))]
        assert [end.result(30) for end in ends] == [True, True]
    assert len(went) == 2


def test_nobody_waits_at_the_end_for_a_rank_that_cannot_save_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is given up, for another rank closed after its objects changed: no meeting, and no ten minutes."""
    board = Board()
    monkeypatch.setattr(StorageFallback, "_down", lambda *_: pytest.fail("not all ranks are there"))
    trainee = Trainee()
    checkpointer = make(trainee, every=1)
    checkpointer.restore()
    trainee.train()
    checkpointer.step(0).wait("captured", 60)  # type: ignore[union-attr]
    trainee.train()
    checkpointer._run.lower._boards = lambda _: board  # type: ignore[union-attr]
    checkpointer.close()

    job: Any = SimpleNamespace(group=SimpleNamespace(rank=0, world_size=2), incarnation=1, assembly=JOB)
    nothing: Any = None
    monkeypatch.setattr(storage_fallback, "board_of", lambda *_: None)
    config = holdfast.Config(close_timeout_s=20.0)
    link: Any = Link()
    lower = StorageFallback(job, state=nothing, link=link, storage=nothing, config=config, events=Events())
    lower._boards = lambda _: board
    monkeypatch.setattr(FallbackState, "give_up", lambda _: pytest.fail("it waited until its time was over"))
    saver = SimpleNamespace(refused="", fence=SimpleNamespace(num_steps=3))
    saver.memory = saver
    durable = True, "rank 1: it changed"
    last = SimpleNamespace(version=Version(1, 0), reached=Level.NONE, durable=durable, is_stored=lambda: False)
    run: Any = SimpleNamespace(saver=saver, last=last, optimizer_steps=3)
    assert not lower.closing(run)


@pytest.mark.parametrize("stored", [(True,), (False, False, True)], ids=["before", "while it waits"])
def test_nobody_waits_at_the_end_for_those_who_know_that_it_is_durable(
    monkeypatch: pytest.MonkeyPatch, stored: tuple[bool, ...]
) -> None:
    """This rank's keeper died before it told so, and there is no next one: the others have left, or wait for storage."""
    monkeypatch.setattr(StorageFallback, "_down", lambda *_: pytest.fail("storage has it"))
    monkeypatch.setattr(storage_fallback, "STORED_EVERY_S", 0.01)
    monkeypatch.setattr(storage_fallback, "board_of", lambda *_: None)
    job: Any = SimpleNamespace(group=SimpleNamespace(rank=0, world_size=2), incarnation=1, assembly=JOB)
    nothing, link, board, looks = None, Link(), Board(), list(stored)
    link.trouble = "no keeper can be started"
    config = holdfast.Config(close_timeout_s=600.0)
    lower = StorageFallback(
        job,
        state=nothing,
        link=link,
        storage=nothing,
        config=config,
        events=Events(),  # type: ignore[arg-type]
    )
    lower._boards = lambda _: board
    saver = SimpleNamespace(refused="", fence=SimpleNamespace(num_steps=3))
    saver.memory = saver
    last = SimpleNamespace(
        version=Version(1, 2), reached=Level.NONE, durable=(False, ""), is_stored=lambda: looks.pop(0)
    )
    run: Any = SimpleNamespace(saver=saver, last=last, optimizer_steps=3)
    began = time.monotonic()
    assert not lower.closing(run)
    assert time.monotonic() - began < 60
    assert looks == []
