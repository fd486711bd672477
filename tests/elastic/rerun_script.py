"""A script that a runner runs again and again in one process: FSDP2 over a group of one, an optimizer, some state."""

from __future__ import annotations

import sys

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss = model(torch.randn(16, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        file.write(f"{loss.item():.17g} {len(sys.modules)}\n")
    if sys.argv[2] == "raise":
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer: as if a rank had died")


if __name__ == "__main__":
    main()
