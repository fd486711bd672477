"""A signal's handler raises in the middle of a save: nobody waits for that save, and what is still here is saved at the end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from holdfast.checkpoint.checkpointer.session import Run
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.checkpoint.save.save_handle import INTERRUPTED
from holdfast.checkpoint.save.storage_saver import DirectSaver
from holdfast.core.model import Level
from kit.checkpointers import Make, Trainee
from kit.strikes import Strike, called

TIMEOUT_S = 8.0
STORAGE = {"memory_budget": "1KB"}
MOMENTS = [
    pytest.param({}, Run.saves, id="memory-noted"),
    pytest.param({}, Saver._widen, id="memory-before"),
    pytest.param({}, Saver._copy, id="memory-within"),
    pytest.param(STORAGE, Run.saves, id="storage-noted"),
    pytest.param(STORAGE, DirectSaver._write, id="storage-within"),
]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize(("options", "moment"), MOMENTS)
def test_a_save_that_a_handler_breaks_off_is_given_up_and_made_at_the_end(  # noqa: PLR0913, PLR0917
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    moment: Any,
    error: type[BaseException],
    *,
    twice: bool,
) -> None:
    """`twice`: one more signal comes before the keeper is told."""

    def handle() -> None:
        if twice:
            monkeypatch.setattr(Saver, "give_up", again)
        raise error

    def again(*_: object) -> None:
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
    monkeypatch.undo()
    left = checkpointer._run.last  # type: ignore[union-attr]
    assert left is not None
    assert left.version.step == 1
    assert left.given_up == INTERRUPTED
    began = time.monotonic()
    checkpointer.close()
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert 1 in [version.step for version in checkpointer._storage.versions()]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_to_storage_alone_a_step_whose_save_was_broken_off_is_saved_when_it_is_asked_for_again(
    make: Make, error: type[BaseException]
) -> None:
    def handle() -> None:
        raise error

    trainee = Trainee()
    checkpointer = make(trainee, **STORAGE)
    checkpointer.restore()
    trainee.train()
    with pytest.raises(error), Strike(handle, called(DirectSaver._write)):
        checkpointer.save(0, "durable", info={"is": 1})
    assert checkpointer.save(0, "durable", info={"is": 2}).wait() is Level.DURABLE
    before = trainee.fingerprint()
    trainee.train()
    checkpointer.abandon()
    again = make(trainee, **STORAGE)
    assert again.restore() == 1
    assert trainee.fingerprint() == before
    assert again.last_restore is not None
    assert again.last_restore.info == {"is": 2}
