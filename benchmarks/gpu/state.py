"""A training whose state has a given size and number of tensors, and its Checkpointer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.card import Card

import holdfast

NUM_PROVING = 4  # so many saves copy in the call, until it is proven that late copies are safe


class Training:
    """Parameters of equal size with momentum; a step is one fused update by a constant gradient.

    Args:
        num_bytes: of parameters and momentum together.
        num_tensors: parameters; the state has twice as many.
    """

    def __init__(self, card: Card, directory: Path, *, num_bytes: int, num_tensors: int, **options: Any) -> None:
        self.card = card
        elements = max(1, num_bytes // 8 // num_tensors)
        torch.manual_seed(0)
        shapes = [torch.nn.Parameter(torch.zeros(elements, device=card.device)) for _ in range(num_tensors)]
        self.model = torch.nn.ParameterList(shapes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
        self._gradients = [torch.full_like(parameter, 0.5) for parameter in self.model]
        self.step_number = 0
        config = holdfast.Config(
            every="0", durable_every="0", runtime_dir=str(directory / "run"), linger_s=1.0, close_timeout_s=120.0
        )
        self.checkpointer = holdfast.Checkpointer(
            directory / "checkpoints", model=self.model, optimizer=self.optimizer, config=config, **options
        )
        self.checkpointer.restore()
        self.step()

    def step(self) -> None:
        for parameter, gradient in zip(self.model, self._gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()  # as scripts do; a save looks at each gradient that stays

    def save(self) -> holdfast.SaveHandle:
        self.step_number += 1
        return self.checkpointer.save(self.step_number)

    def prove(self) -> None:
        """From now on copies are late."""
        for _ in range(NUM_PROVING):
            self.save().wait("captured")
            self.step()

    def state(self) -> list[torch.Tensor]:
        """All tensors of the state."""
        found: list[torch.Tensor] = []
        for parameter in self.model:
            found += [parameter.detach(), self.optimizer.state[parameter]["momentum_buffer"]]
        return found

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state())

    def end(self) -> None:
        self.checkpointer.abandon()
