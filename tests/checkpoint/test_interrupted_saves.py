"""A signal's handler raises in the middle of a save: nobody waits for that save, and what is still here is saved at the end."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gloo_kit
import holdfast
from holdfast.base.errors import StorageError
from holdfast.checkpoint.checkpointer.session import Run
from holdfast.checkpoint.save import memory_saver, storage_saver
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.checkpoint.save.save_handle import INTERRUPTED, SaveHandle
from holdfast.checkpoint.save.storage_saver import DirectSaver
from holdfast.core.model import Level
from holdfast.tiers.storage.version_store import Storage
from kit.checkpointers import Make, Trainee
from kit.strikes import Strike, called
from sample_kit import sampled

TIMEOUT_S = 8.0
STORAGE = {"memory_budget": "1KB"}
BEFORE_COMMIT = [Run.saves, DirectSaver.save, DirectSaver._write, Storage.commit]
BEHIND_COMMIT = [Storage._take_back_if_retired, DirectSaver._retire, SaveHandle.committed]
ERRORS = [KeyboardInterrupt, TimeoutError]
MOMENTS = [*BEFORE_COMMIT, *BEHIND_COMMIT]
IN_MEMORY = [Run.saves, Saver.save, Saver._widen, Saver._copy]


def _struck(
    make: Make, error: type[BaseException], moment: Any, **options: Any
) -> tuple[Trainee, holdfast.Checkpointer, SaveHandle]:
    """A handler raises at this moment of the save of step 1, behind a durable step 0; returns what is left of that save too."""

    def handle() -> None:
        raise error

    trainee = Trainee()
    checkpointer = make(trainee, close_timeout_s=TIMEOUT_S, **options)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0, "durable").wait()
    trainee.train()
    checkpointer.step(1)
    with pytest.raises(error), Strike(handle, called(moment)):
        checkpointer.save(1, "durable")
    left = checkpointer._run.last  # type: ignore[union-attr]
    assert left is not None
    assert left.version.step == 1
    return trainee, checkpointer, left


def _closes_soon(checkpointer: holdfast.Checkpointer) -> None:
    began = time.monotonic()
    checkpointer.close()
    assert time.monotonic() - began < TIMEOUT_S / 2


def _comes_back(make: Make, step: int, expected: bytes, **options: Any) -> None:
    other = Trainee()
    assert make(other, **options).restore() == step
    assert other.fingerprint() == expected


@pytest.mark.parametrize(
    ("error", "moment", "encrypted"),
    sampled(
        product(ERRORS, MOMENTS, [False, True]),
        *((ERRORS[at % 2], moment, at % 3 == 0) for at, moment in enumerate(MOMENTS)),
        (KeyboardInterrupt, DirectSaver._write, True),
        (TimeoutError, DirectSaver._retire, False),
    ),
)
def test_to_storage_alone_a_step_whose_save_is_broken_off_is_whole_after_the_close(
    make: Make, tmp_path: Path, error: type[BaseException], moment: Any, *, encrypted: bool
) -> None:
    """A number that is drawn behind it would make another file of the same version."""

    options: dict[str, Any] = dict(STORAGE)
    if encrypted:
        (key := tmp_path / "key").write_text("ab" * 32)
        key.chmod(0o600)
        options["encryption_key"] = str(key)
    trainee, checkpointer, left = _struck(make, error, moment, **options)
    assert (left.given_up, left.reached) == (
        ("", Level.DURABLE) if moment in BEHIND_COMMIT else (INTERRUPTED, Level.NONE)
    )
    expected = trainee.fingerprint()
    torch.rand(1)
    _closes_soon(checkpointer)
    _comes_back(make, 2, expected, **options)


def test_what_was_committed_unheard_is_not_written_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more signal comes before storage is asked."""

    def handle() -> None:
        raise KeyboardInterrupt

    def again(*_: object) -> bool:
        raise KeyboardInterrupt

    trainee = Trainee()
    checkpointer = make(trainee, close_timeout_s=TIMEOUT_S, **STORAGE)
    checkpointer.restore()
    trainee.train()
    checkpointer.step(0)
    with monkeypatch.context() as patch:
        patch.setattr(SaveHandle, "is_stored", again)
        with pytest.raises(KeyboardInterrupt), Strike(handle, called(DirectSaver._retire)):
            checkpointer.save(0, "durable")
    files = checkpointer._storage.manifest(checkpointer._storage.versions()[0])
    expected = trainee.fingerprint()
    torch.rand(1)
    checkpointer.close()
    assert checkpointer._storage.manifest(checkpointer._storage.versions()[0]) == files
    _comes_back(make, 1, expected, **STORAGE)


def test_a_version_whose_commit_a_fault_of_storage_follows_is_durable_and_stays_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise StorageError("the path refuses", where="here")

    trainee = Trainee()
    checkpointer = make(trainee, close_timeout_s=TIMEOUT_S, **STORAGE)
    checkpointer.restore()
    trainee.train()
    checkpointer.step(0)
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "_take_back_if_retired", fails)
        assert checkpointer.save(0, "durable").wait() is Level.DURABLE
    expected = trainee.fingerprint()
    torch.rand(1)
    checkpointer.close()
    _comes_back(make, 1, expected, **STORAGE)


@pytest.mark.parametrize(
    ("error", "moment"),
    sampled(product(ERRORS, IN_MEMORY), *((ERRORS[at % 2], moment) for at, moment in enumerate(IN_MEMORY))),
)
def test_in_memory_a_save_that_is_broken_off_is_given_up_and_made_at_the_close(
    make: Make, error: type[BaseException], moment: Any
) -> None:
    trainee, checkpointer, left = _struck(make, error, moment)
    assert left.given_up == INTERRUPTED
    expected = trainee.fingerprint()
    _closes_soon(checkpointer)
    _comes_back(make, 2, expected, **STORAGE)


def test_ranks_of_which_a_handler_takes_one_out_of_a_save_meet_again_at_the_next(tmp_path: Path) -> None:
    """To storage alone: who waits in a collective is not answered by a word of another save."""
    results = gloo_kit.run(Path(__file__).with_name("struck_ranks_worker.py"), tmp_path)
    rows = [json.loads((results / f"{rank}.json").read_text()) for rank in range(2)]
    assert [said for told in rows for _, said, _, there in told if said == "DURABLE" and not there] == []
    undisturbed = [(step, said) for told in rows for step, said, _, _ in told if step % 2]
    assert [row for row in undisturbed if row[1] != "DURABLE"] == []
    assert sum(struck for told in rows for _, _, struck, _ in told) >= len(rows[0]) // 2 - 1


@pytest.mark.parametrize(
    ("options", "module", "moment"),
    [(STORAGE, storage_saver, DirectSaver._write), ({}, memory_saver, Saver._copy)],
    ids=["storage", "memory"],
)
def test_a_second_signal_that_comes_at_once_leaves_no_save_that_never_ends(
    make: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], module: ModuleType, moment: Any
) -> None:
    def handle() -> None:
        raise TimeoutError

    def again(*_: object) -> None:
        monkeypatch.undo()
        raise TimeoutError("one more")

    trainee = Trainee()
    checkpointer = make(trainee, close_timeout_s=TIMEOUT_S, **options)
    checkpointer.restore()
    trainee.train()
    checkpointer.step(0)
    monkeypatch.setattr(module, "of_a_handler", again)
    with pytest.raises(TimeoutError, match="one more"), Strike(handle, called(moment)):
        checkpointer.save(0, "durable")
    _closes_soon(checkpointer)
    assert [version.step for version in checkpointer._storage.versions()] == [0]


def test_a_step_of_an_optimizer_that_nobody_reported_is_named_at_the_end(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a handler strikes in the first lines of the call that reports it."""
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0, "durable").wait()
    trainee.train()
    checkpointer.close()
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told.startswith("what is durable is step 0; an optimizer made a step behind it that nobody reported")


@pytest.mark.parametrize("moment", [DirectSaver._write, DirectSaver._retire], ids=["before the commit", "behind it"])
def test_the_step_of_a_save_that_is_broken_off_has_its_info_and_its_places(
    make: Make, tmp_path: Path, moment: Any
) -> None:
    def handle() -> None:
        raise KeyboardInterrupt

    trainee = Trainee()
    checkpointer = make(trainee, **STORAGE)
    checkpointer.restore()
    trainee.train()
    with pytest.raises(KeyboardInterrupt), Strike(handle, called(moment)):
        checkpointer.save(0, "durable", info={"epoch": 3}, also_to=[str(tmp_path / "copy")])
    checkpointer.close()
    other = Trainee()
    again = make(other, path=tmp_path / "copy", **STORAGE)
    assert again.restore() == 1
    assert again.last_restore is not None
    assert again.last_restore.info == {"epoch": 3}
