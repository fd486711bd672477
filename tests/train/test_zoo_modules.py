"""A zoo of modules: each is kept, so that training goes on bit for bit, or refused by name before training begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.base.errors import MismatchError, UsageError
from state_kit import restore, save
from zoo_kit import Make, goes_on, start
from zoo_modules import KEPT, REFUSED, Counting, Extra, Saves, body, with_hook


def training(make_model: Callable[[], nn.Module]) -> Make:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return {"model": model, "optimizer": optimizer}, step

    return make


@pytest.mark.parametrize("kind", sorted(KEPT))
def test_a_module_goes_on_bit_for_bit(kind: str) -> None:
    goes_on(training(KEPT[kind]))


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_module_is_refused_by_name_before_training(kind: str) -> None:
    make_model, words = REFUSED[kind]
    model = make_model()
    trained = [p for p in model.parameters() if not torch.nn.parameter.is_lazy(p)]
    with pytest.raises(UsageError, match=words) as caught:
        start({"model": model, "optimizer": torch.optim.SGD(trained, lr=0.1)})
    assert caught.value.remedy
