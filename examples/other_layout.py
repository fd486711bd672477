"""The same job with any number of ranks: start it with two, go on with one or four; nothing has to be said.

    holdfast run --nproc-per-node 2 examples/other_layout.py --steps 100
    holdfast run --nproc-per-node 4 examples/other_layout.py --steps 200      # goes on at step 100, sharded over four

The batch of a step is the same whoever computes it, so the run does not depend on when the size changed. A loader that
keeps a position per rank would be told of all saved positions by `load_state_dicts`; see docs/resharding.md.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.testing.gpt import ByteGPT, Text


class Batches:
    """The batch of a step, cut over the ranks. Its state is the same on every rank, whatever their number."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.text = Text(rank=0, world_size=1)
        self.rank, self.world_size = rank, world_size

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = next(self.text)
        return inputs[self.rank :: self.world_size], targets[self.rank :: self.world_size]

    def state_dict(self) -> dict[str, object]:
        return self.text.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.text.load_state_dict(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/other_layout")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = ByteGPT()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = Batches(rank, world_size)

    checkpointer = holdfast.Checkpointer(options.checkpoints, model=model, optimizer=optimizer, loader=batches)
    start = checkpointer.restore()
    print(f"rank {rank} of {world_size} starts at step {start}: {checkpointer.last_restore}", flush=True)
    for step in range(start, options.steps):
        loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.17g}", flush=True)
        checkpointer.step(step)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
