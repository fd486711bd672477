"""A pipeline: 1F1B of `torch.distributed.pipelining`, one stage per rank, a checkpoint in memory after every step.

    holdfast run --nproc-per-node 2 examples/pipeline.py --steps 200

The schedule is found by itself: copies are made while a stage waits for its neighbour.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed as dist
from torch.distributed.pipelining import Schedule1F1B

import holdfast
from holdfast.testing.gpt import Shape, Text
from holdfast.testing.pipeline_gpt import loss_of, stage

MICRO_BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/pipeline")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = stage(Shape(layers=2 * world_size), rank, world_size)
    schedule = Schedule1F1B(part, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.submod.parameters(), lr=3e-3)
    loader = Text(batch=2 * MICRO_BATCHES)  # the first stage takes inputs of it, the last one targets

    checkpointer = holdfast.Checkpointer(options.checkpoints, model=part.submod, optimizer=optimizer, loader=loader)
    start = checkpointer.restore()
    print(f"rank {rank} starts at step {start}", flush=True)
    for step in range(start, options.steps):
        inputs, targets = next(loader)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets if rank == world_size - 1 else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().item() if losses else 0.0
        print(f"rank {rank} step {step} loss {loss:.17g}", flush=True)
        checkpointer.step(step)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
