"""Entries that are not saved: frozen base weights stay as the script makes them, and everybody is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.base.errors import MismatchError, UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.job import collectives
from holdfast.cli.stored import versions
from holdfast.tiers.storage.version_store import open_storage
from kit.checkpointers import Make
from ranks_kit import on_all
from sample_kit import MORE


class Adapted(nn.Module):
    """A frozen base and a small part that is trained."""

    def __init__(self, fill: float = 1.0) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64)
        self.base.register_buffer("scale", torch.ones(64))
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(64, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(fill)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(x))


def optimizer_of(model: Adapted) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.adapter.parameters(), lr=0.1, momentum=0.9)


def train(model: Adapted, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()


def entries(path: Path) -> set[str]:
    storage = open_storage(path / "job", Events())
    version = storage.versions()[-1]
    images = [storage.bundles.image(version, file) for file in storage.manifest(version).bundles]
    return {entry.name for image in images for entry in image.entries}


LEFT_OUT = ("model.base.bias", "model.base.scale", "model.base.weight")


def test_what_is_excluded_is_not_saved_and_stays_as_the_script_makes_it(
    make: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Adapted()
    optimizer = optimizer_of(model)
    checkpointer = make(model=model, optimizer=optimizer, exclude=["model.base"])
    checkpointer.restore()
    for step in range(3):  # the late copies of a proven state, too
        train(model, optimizer)
        checkpointer.save(step).wait("captured")
    checkpointer.save(3, "durable").wait()
    assert not entries(tmp_path) & set(LEFT_OUT)
    assert "model.adapter.weight" in entries(tmp_path)
    versions.inspect_version(str(tmp_path / "job"), "i000001-s0000000003", as_json=False)
    assert "model.base" in capsys.readouterr().out
    checkpointer.abandon()

    other = Adapted(fill=5.0)
    again = make(model=other, optimizer=optimizer_of(other), exclude=["model.base"])
    assert again.restore() == 4
    assert torch.equal(other.adapter.weight, model.adapter.weight)
    assert torch.equal(other.base.weight, torch.full((64, 64), 5.0))
    assert again.last_restore is not None
    assert sorted(again.last_restore.left_out) == sorted(LEFT_OUT)
    assert "model.base.weight" in str(again.last_restore)


def test_who_expects_them_is_told_how_they_were_left_out(make: Make) -> None:
    model = Adapted()
    checkpointer = make(model=model, exclude=["model.base"])
    checkpointer.restore()
    checkpointer.save(0, "durable").wait()
    checkpointer.abandon()
    with pytest.raises(MismatchError, match=r"model.base.weight.*exclude=\['model.base'\]"):
        make(model=Adapted()).restore()


@MORE
def test_a_version_that_has_them_all_the_same_fills_them(make: Make) -> None:
    model = Adapted(fill=3.0)
    checkpointer = make(model=model)
    checkpointer.restore()
    checkpointer.save(0, "durable").wait()
    checkpointer.abandon()
    other = Adapted()
    again = make(model=other, exclude=["*.base.*"])
    assert again.restore() == 1
    assert torch.equal(other.base.weight, model.base.weight)
    assert again.last_restore is not None
    assert again.last_restore.left_out == ()


def test_what_an_optimizer_steps_is_never_left_out(make: Make) -> None:
    model = Adapted()
    with pytest.raises(UsageError, match=r"cannot be left out.*model.adapter"):
        make(model=model, optimizer=optimizer_of(model), exclude=["model.adapter"]).restore()


def test_ranks_that_exclude_differently_are_refused_on_all() -> None:
    def ask(group: collectives.Ranks) -> None:
        collectives.same(group, "exclude", ["model.base"] if group.rank else [])

    found = on_all(3, ask)
    assert all(isinstance(error, UsageError) for error in found)
    assert "rank 1 has ['model.base']" in str(found[0])
    assert on_all(2, lambda group: collectives.same(group, "exclude", [])) == [None, None]
