"""A zoo of optimizers: each is kept, so that training goes on bit for bit, or refused by name before training begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.base.errors import MismatchError, UsageError
from holdfast.train.fence import Fence
from holdfast.train.state import State
from holdfast.train.window import Window
from state_kit import restore, save, same_bits
from zoo_kit import Make, goes_on, start
from zoo_optimizers import OPTIMIZERS, REFUSED, Accelerated, Forgets, Galore, Lookahead, Sam, Scaled, Silent, both_hooks

CLOSURES = ("torch LBFGS", "SAM", "LookSAM", "accelerate around SAM")


def training(make_optimizer: Callable[[nn.Module], Any], *, closure: bool = False) -> Make:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = make_optimizer(model)

        def step() -> torch.Tensor:
            x = torch.randn(4, 6)

            def loss() -> torch.Tensor:
                model.zero_grad()
                value = model(x).square().mean()
                value.backward()
                return value

            value = loss()
            optimizer.step(loss) if closure else optimizer.step()
            return value.detach()

        return {"model": model, "optimizer": optimizer}, step

    return make


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_an_optimizer_goes_on_bit_for_bit(kind: str) -> None:
    goes_on(training(OPTIMIZERS[kind], closure=kind.startswith(CLOSURES)))


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_an_optimizer_is_refused_by_name_before_training(kind: str) -> None:
    make_optimizer, words = REFUSED[kind]
    objects, _ = training(make_optimizer)()
    with pytest.raises(UsageError, match=words) as caught:
        start(objects)
    assert caught.value.remedy


def test_sparse_gradients_go_on_bit_for_bit() -> None:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model = nn.Embedding(9, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randint(0, 9, (3,))).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return {"model": model, "optimizer": optimizer}, step

    goes_on(make)
