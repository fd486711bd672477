"""Frameworks that save when they like hand their state over for the time of a save: what the Checkpointer beside them must not do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.adapters.save_only import SaveOnly, number_of
from holdfast.base.config import Config
from holdfast.base.errors import LevelNotReached, UsageError
from holdfast.core.model import Level
from kit.checkpointers import kill_keeper


class Handed:
    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"tree": self.tree}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tree = state["tree"]


@pytest.fixture
def handed() -> Handed:
    return Handed()


@pytest.fixture
def checkpointer(handed: Handed, tmp_path: Path, runtime_dir: Path) -> Iterator[SaveOnly]:
    made = SaveOnly(tmp_path / "job", config=Config(runtime_dir=str(runtime_dir), linger_s=1.0), handed=handed)
    yield made
    made.abandon()


@pytest.mark.slow
def test_the_end_never_saves_what_is_handed_over_no_more(
    checkpointer: SaveOnly, handed: Handed, tmp_path: Path
) -> None:
    checkpointer.restore()
    handed.tree = {"x": torch.ones(3)}
    checkpointer.save(0, "durable").wait(Level.DURABLE)
    handed.tree = {"x": torch.full((3,), 2.0)}
    kill_keeper(checkpointer)
    assert checkpointer.save(1, "durable").given_up
    handed.tree = {}
    with pytest.raises(LevelNotReached, match="keeper"):
        checkpointer.close()
    assert [path.parent.name for path in (tmp_path / "job").glob("i*/manifest.json")] == ["i000001-s0000000000"]


def test_sigterm_keeps_its_effect_for_no_step_is_reported_that_would_act_on_it(checkpointer: SaveOnly) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        checkpointer.restore()
        checkpointer.save(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM]
        checkpointer.close()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("name", "number"), [("ckpts/iter_0000010", 10), ("ckpts/step_3/", 3), ("s3://b/run2/12", 12)])
def test_the_number_of_a_checkpoint_is_at_the_end_of_its_name(name: str, number: int) -> None:
    assert number_of(name) == number


@pytest.mark.parametrize("name", ["ckpts/final", "", "ckpts/iter_10_old"])
def test_a_name_without_a_number_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(UsageError, match="end the directory's name with it"):
        number_of(name)


def test_the_newest_durable_version_of_a_step_is_found(checkpointer: SaveOnly, handed: Handed) -> None:
    checkpointer.restore()
    for number in (0, 4):
        handed.tree = {"x": torch.full((3,), float(number))}
        checkpointer.save(number, "durable").wait(Level.DURABLE)
    found = checkpointer.version_of(4)
    assert found is not None
    assert found.step == 4
    assert checkpointer.version_of(3) is None
