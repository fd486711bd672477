"""`torch.distributed.checkpoint` as ever, with holdfast's writer and reader: saved in memory first, read back nearest first.

torchrun --nproc-per-node 2 examples/doors/dcp_save.py --steps 200
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from holdfast.adapters.dcp import StorageReader, StorageWriter
from holdfast.testing.gpt import ByteGPT, Shape, Text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/dcp")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = ByteGPT(Shape(dropout=0.0))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = Text(rank=rank, world_size=world_size)

    writer = StorageWriter(options.checkpoints)
    reader = StorageReader(writer)
    start = 0
    if reader.find() is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "loader": loader.state_dict()}
        dcp.load(state, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loader.load_state_dict(state["loader"])
        start = reader.find() + 1
    print(f"rank {rank} starts at step {start}", flush=True)
    for step in range(start, options.steps):
        loss = model(*next(loader))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.17g}", flush=True)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "loader": loader.state_dict()}
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
