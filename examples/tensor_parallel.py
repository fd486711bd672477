"""Tensor parallelism: the feed-forward layers are split over the ranks, everything else is the same on all of them.

    holdfast run --nproc-per-node 2 examples/tensor_parallel.py --steps 200

What is split says so itself (DTensor). A plain tensor could be anything, so that it is replicated is declared; then
it is saved once and the ranks share the work.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.testing.gpt import ByteGPT, Text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/tensor_parallel")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = ByteGPT()
    for block in model.blocks:
        parallelize_module(block, mesh, {"expand": ColwiseParallel(), "contract": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = Text()  # all ranks see the same batch

    checkpointer = holdfast.Checkpointer(
        options.checkpoints, model=model, optimizer=optimizer, loader=loader, replicated=("model.*", "optimizer.*")
    )
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
