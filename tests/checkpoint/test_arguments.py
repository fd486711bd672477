"""What people write for a step, a pattern or a place: it is meant, or it is refused by name."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.base.errors import ConfigError, UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.state.training_state import State
from holdfast.core.model import Level, Version
from holdfast.core.versions.step_numbers import MAX_STEP, Reason, as_number
from holdfast.tiers.storage.version_store import open_storage
from kit.checkpointers import Make, Trainee
from sample_kit import sampled


@pytest.mark.parametrize("kind", sampled([np.int64, np.uint8, torch.tensor, bool], np.int64, torch.tensor))
def test_a_step_is_the_number_that_it_stands_for(kind: Any, make: Make) -> None:
    trainee = Trainee()
    checkpointer = make(**trainee.objects(), every=1)
    checkpointer.restore()
    trainee.train()
    handle = checkpointer.step(kind(1))
    assert handle is not None
    handle.wait("captured", 60)
    assert type(handle.version.step) is int
    checkpointer.save(kind(1), "durable").wait(timeout_s=60)
    checkpointer.abandon()
    again = make(**Trainee().objects())
    assert again.restore() == 2


def test_what_names_no_version_is_refused_at_every_door(make: Make) -> None:
    trainee = Trainee()
    checkpointer = make(**trainee.objects(), every=1)
    checkpointer.restore()
    steps: list[Any] = [1.0, "1", None, np.float32(1), torch.tensor([1, 2]), -1, MAX_STEP + 1, 2**70]
    for door, step in product((checkpointer.step, checkpointer.save), steps):
        with pytest.raises(UsageError, match=r"a step is a whole number|cannot be named by step"):
            door(step)
    assert checkpointer.keeper_status()["counters"] is not None  # it was not told anything that it does not understand
    checkpointer.save(0).wait("captured", 60)


def test_the_largest_step_is_found_again() -> None:
    assert Version.parse(str(Version(1, MAX_STEP))) == Version(1, MAX_STEP)
    assert Version.parse(str(Version(1, MAX_STEP + 1))) is None
    assert as_number(MAX_STEP) == MAX_STEP
    assert isinstance(as_number(MAX_STEP + 1), Reason)


def test_one_string_is_one_pattern_and_not_its_letters() -> None:
    """The star of `model.*` alone would match everything, the random numbers of every rank too."""
    names = State({"model": nn.Linear(2, 2)}, rank=1, world_size=2, replicated="model.*").gather().tensors
    assert "model.weight" in names
    assert all(name.startswith("rank1/rng") for name in names if not name.startswith("model."))
    model = nn.ModuleDict({"base": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    left = State({"model": model}, rank=0, world_size=1, exclude="model.base*")
    assert {n for n in left.gather().tensors if n.startswith("model.")} == {"model.head.weight", "model.head.bias"}
    assert left.excluded.value == {"patterns": ["model.base*"]}


@pytest.mark.parametrize("kind", sampled([str, Path], str))
def test_one_place_is_one_place_and_meant_from_here(
    kind: Any, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    checkpointer = make(**Trainee().objects())
    checkpointer.restore()
    handle = checkpointer.save(0, also_to=kind("far"))
    monkeypatch.chdir(there)
    checkpointer.flush(60)
    assert open_storage(here / "far", Events()).versions() == [handle.version]
    assert [path.name for path in here.iterdir()] == ["far"]
    assert not list(there.iterdir())


@pytest.mark.parametrize("version", [3, b"i000001-s0000000003", Path("i000001-s0000000003"), ["i000001-s0000000003"]])
def test_what_is_no_version_is_refused_by_what_it_is(version: Any, make: Make) -> None:
    with pytest.raises(UsageError, match="is not a version"):
        make(**Trainee().objects()).restore(version)


@pytest.mark.parametrize("spelt", sampled(["link", "url"], "link"))
def test_who_starts_again_by_another_name_finds_what_is_in_memory(spelt: str, make: Make, tmp_path: Path) -> None:
    trainee = Trainee()
    checkpointer = make(**trainee.objects(), path=tmp_path / "job", linger_s=60.0)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(4).wait("captured", 60)
    checkpointer.abandon()
    (tmp_path / "latest").symlink_to(tmp_path / "job")
    path = tmp_path / "latest" if spelt == "link" else f"file://{tmp_path}/job"
    again = Trainee()
    other = make(**again.objects(), path=path)
    assert other.restore() == 5
    assert again.fingerprint() == trainee.fingerprint()
    other.save(5)
    other.close()
    assert open_storage(tmp_path / "job", Events()).versions() == [Version(2, 5)]


def test_a_path_that_is_no_text_is_refused_by_name_and_a_link_leads_there(make: Make, tmp_path: Path) -> None:
    there = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        make(path=there)
    there.mkdir()
    (tmp_path / "job").symlink_to(there)
    checkpointer = make(Trainee())
    checkpointer.restore()
    checkpointer.save(0, "durable").wait(timeout_s=60)
    checkpointer.close()
    assert make(Trainee()).restore() == 1


def test_info_and_times_of_the_wrong_kind_are_refused_with_a_remedy(make: Make) -> None:
    trainee = Trainee()
    checkpointer = make(**trainee.objects())
    checkpointer.restore()
    wrong: Any = [1]
    with pytest.raises(UsageError, match=r"info is a list and no dict.*give a dict"):
        checkpointer.save(0, info=wrong)
    handle = checkpointer.save(0)
    time: Any
    for time in ("5", True, float("nan")):
        with pytest.raises(UsageError, match=r"is no time.*give seconds"):
            handle.wait("captured", time)
        with pytest.raises(UsageError, match=r"is no time.*give seconds"):
            checkpointer.flush(time)
    with pytest.raises(UsageError, match=r"is no level.*name one of captured"):
        handle.wait(wrong, 60)
    assert handle.wait("captured", np.float32(60)) >= Level.CAPTURED
