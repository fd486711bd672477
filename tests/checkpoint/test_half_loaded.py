"""A version that vanishes while it is read: nothing begins with objects of which a part was filled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.base.errors import MismatchError, UsageError
from holdfast.core.model import Version
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format.image import CHUNK_BYTES
from kit.checkpointers import Make, Trainee, kill_keeper, leave
from sample_kit import MORE

FILL = 7.0


class Wide(Trainee):
    """Tensors of several chunks; `more` of them."""

    def __init__(self, more: int = 0) -> None:
        sizes = [CHUNK_BYTES // 4 + 3] * (3 + more)
        self.model = torch.nn.ParameterList(torch.full((size,), FILL) for size in sizes)

    def objects(self) -> dict[str, Any]:
        return {"model": self.model}

    def holds(self, number: float) -> list[bool]:
        return [bool((tensor == number).all()) for tensor in self.model.parameters()]


def saved(make: Make, step: int, *, more: int = 0) -> None:
    """Makes a version of zeros durable, and ends with the keeper."""
    trainee = Wide(more)
    checkpointer = make(trainee)
    checkpointer.restore(strict=False)
    with torch.no_grad():
        for tensor in trainee.model.parameters():
            tensor.zero_()
    checkpointer.save(step, "durable").wait()
    kill_keeper(checkpointer)
    leave(checkpointer)


def vanishes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a version removed right before its third chunk is read."""
    real = LocalBackend.read_into

    def read_into(self: LocalBackend, name: str, view: memoryview, *, offset: int = 0) -> int:
        if offset == 2 * CHUNK_BYTES and path.exists():
            shutil.rmtree(path)
        return real(self, name, view, offset=offset)

    monkeypatch.setattr(LocalBackend, "read_into", read_into)


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk is read after the other."""
    monkeypatch.setattr("holdfast.tiers.storage.stored_bundles.requests_at_once", lambda _: 1)


@pytest.mark.usefixtures("in_order")
def test_a_version_that_vanishes_while_read_is_no_fresh_start(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(make, 0)
    vanishes(tmp_path / "job" / str(Version(1, 0)), monkeypatch)
    trainee = Wide()
    checkpointer = make(trainee)
    with pytest.raises(UsageError, match=r"left a part .* start this process again"):
        checkpointer.restore()
    assert trainee.model[0][:3].tolist() == [0.0] * 3, "it was read before the version vanished"
    with pytest.raises(UsageError, match="start this process again"):
        checkpointer.restore(fresh=True)
    leave(checkpointer)
    assert make(Wide()).restore() == 0, "new objects are as the script made them"


@MORE
@pytest.mark.usefixtures("in_order")
def test_an_older_version_is_taken_if_it_fills_all_that_was_touched(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(make, 0)
    saved(make, 1)
    vanishes(tmp_path / "job" / str(Version(2, 1)), monkeypatch)
    trainee = Wide()
    checkpointer: holdfast.Checkpointer = make(trainee)
    assert checkpointer.restore() == 1
    assert all(trainee.holds(0.0))
    leave(checkpointer)


@pytest.mark.usefixtures("in_order")
def test_an_older_version_that_leaves_a_part_of_the_newer_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(make, 0)
    saved(make, 1, more=1)
    vanishes(tmp_path / "job" / str(Version(2, 1)), monkeypatch)
    checkpointer = make(Wide(more=1))
    with pytest.raises(MismatchError, match=r"lacks model\.3, and the objects hold a part of what another version had"):
        checkpointer.restore(strict=False)
    leave(checkpointer)
