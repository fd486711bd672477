"""A job that trains an adapter beside a frozen layer, and has an average that rests until it is told to move."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

# The frozen weight, and the average's.
BASE_BYTES = 768 * 1024 * 4


class Adapted(torch.nn.Module):
    """A frozen layer of 3 MiB with a small one that is trained beside it, as adapters of low rank are."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(768, 1024)
        self.down, self.up = torch.nn.Linear(768, 4, bias=False), torch.nn.Linear(4, 1024, bias=False)
        self.base.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


class Tuning:
    """A job that trains the adapter only, and an average of two tensors that moves when it is told to."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = Adapted()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        self.average = AveragedModel(torch.nn.Linear(768, 1024, bias=False))

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "average": self.average}

    def train(self) -> None:
        self.model(torch.randn(2, 768)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        found |= {f"average.{name}": tensor for name, tensor in self.average.state_dict().items()}
        return {name: tensor.clone() for name, tensor in found.items()}
