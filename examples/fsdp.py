"""FSDP2, or HSDP when the number of ranks allows two replicas: shards inside, twins across.

    holdfast run --nproc-per-node 4 examples/fsdp.py --steps 200

Twins hold the same bytes, so nothing has to be sent to protect them, and a lost node comes back from its twin.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.testing.gpt import ByteGPT, Text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/fsdp")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replicas = 2 if world_size % 2 == 0 and world_size > 2 else 1
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=names)

    torch.manual_seed(0)
    model = ByteGPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh if replicas > 1 else mesh["shard"])
    fully_shard(model, mesh=mesh if replicas > 1 else mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = Text(rank=rank, world_size=world_size)
    torch.manual_seed(rank)

    checkpointer = holdfast.Checkpointer(options.checkpoints, model=model, optimizer=optimizer, loader=loader)
    start = checkpointer.restore()
    print(f"rank {rank} starts at step {start}", flush=True)
    for step in range(start, options.steps):
        loss = model(*next(loader))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.17g}", flush=True)
        checkpointer.step(step)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
