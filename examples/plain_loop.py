"""A plain training loop that survives kills: one process, or DDP under `holdfast run`. Lines with `holdfast:` are ours.

python examples/plain_loop.py --steps 200
holdfast run --nproc-per-node 2 examples/plain_loop.py --steps 200
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast  # holdfast: 1
from holdfast.testing.gpt import ByteGPT, Text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/plain_loop")
    options = parser.parse_args()

    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    world_size = dist.get_world_size() if distributed else 1

    torch.manual_seed(0)
    model: torch.nn.Module = ByteGPT()
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    loader = Text(rank=rank, world_size=world_size)
    torch.manual_seed(rank)  # every rank drops out its own units

    checkpointer = holdfast.Checkpointer(  # holdfast: 2
        options.checkpoints, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
    )
    start = checkpointer.restore()  # holdfast: 3 (0 on a fresh start)
    print(f"rank {rank} starts at step {start}", flush=True)
    for step in range(start, options.steps):
        loss = model(*next(loader))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.17g}", flush=True)
        checkpointer.step(step)  # holdfast: 4 (captures every step, durable every minute)
    checkpointer.close()  # holdfast: 5 (the last step is durable, or an error says what is missing)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
