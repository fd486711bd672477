"""What a user's module and callbacks count or draw in attributes is told of once. Nothing of Lightning is needed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.adapters.lightning import Keeping
from holdfast.adapters.lightning.unsaved_attributes import check_of


class Own:
    """A callback."""

    def __init__(self) -> None:
        self.rng, self.count, self.name = random.Random(3), 0, "own"

    def step(self) -> None:
        self.rng.random()
        self.count += 1


class HandsOut(Own):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.noise, self.steps = torch.nn.Linear(2, 2), torch.Generator(), [0]

    def step(self) -> None:
        torch.rand(1, generator=self.noise)
        self.steps.append(1)
        with torch.no_grad():
            self.layer.weight.add_(1)


class HandsOutToo(Model):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["steps"] = self.steps


@pytest.mark.parametrize(
    ("model", "callback", "told"),
    [
        (Model(), Own(), "Model.noise, Model.steps, Own.count, Own.rng"),
        (HandsOutToo(), Own(), "Own.count, Own.rng"),
        (HandsOutToo(), HandsOut(), ""),
    ],
)
def test_what_no_checkpoint_has_is_told_of_once(
    model: Any, callback: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Own()
    check = check_of(SimpleNamespace(lightning_module=model, callbacks=[callback, ours]), ours)
    for _ in range(6):
        check.look(model.parameters())
        for each in (model, callback, ours):
            each.step()
    assert [told in record.getMessage() for record in caplog.records] == [True] * bool(told)


def test_what_changes_with_epochs_only_is_told_of_at_the_second(caplog: pytest.LogCaptureFixture) -> None:
    """The steps of the first epoch are looked at, and the best value so far does not change in them."""
    model, callback, keeping = Model(), Own(), Keeping("nowhere", {})
    trainer = SimpleNamespace(lightning_module=model, callbacks=[callback])
    keeping._fit = SimpleNamespace(epoch_loop=SimpleNamespace(global_step=0), trainer=trainer)
    keeping._unsaved_by_epoch = check_of(trainer, None)
    keeping._unsaved_by_epoch.look(model.parameters())
    for told in (0, 1, 1):
        with torch.no_grad():
            model.layer.weight.add_(1)
        callback.count += 1
        keeping._epoch_ends(lambda: None)
        assert sum("Own.count" in record.message for record in caplog.records) == told
