"""Four ranks of one node: replicas whose shards stand on one node too. Saves, says what was given up, comes back.

one_node_worker.py ROOT OUT LAYOUT    with the variables that torchrun sets
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast

STEPS = 4


def build(layout: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if layout == "hsdp":
        fully_shard(model, mesh=mesh)
    else:
        parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["outer"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def sums(model: torch.nn.Module) -> list[float]:
    """One number for each parameter's part in this rank."""
    found = []
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        found.append(float(local.detach().double().sum()))
    return found


def main() -> None:
    root, out, layout = sys.argv[1:]
    dist.init_process_group("gloo")
    model, optimizer = build(layout)
    ckpt = holdfast.Checkpointer(root, model=model, optimizer=optimizer)
    ckpt.restore()
    handles = []
    for step in range(STEPS):
        model(torch.full((4, 32), float(step + 1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        handles.append(ckpt.save(step, level="durable"))
    ckpt.close()
    anew, other = build(layout)
    again = holdfast.Checkpointer(root, model=anew, optimizer=other)
    start = again.restore()
    facts = {
        "given_up": [handle.given_up for handle in handles if handle.given_up],
        "start": start,
        "equal": sums(anew) == sums(model),
    }
    again.close()
    Path(out, f"{layout}-{os.environ['RANK']}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
