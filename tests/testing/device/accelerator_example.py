"""A script as PyTorch's examples are: it asks torch.accelerator what there is, and knows nothing of a simulated device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank = int(os.environ["LOCAL_RANK"])
kind = torch.accelerator.current_accelerator()
assert kind is not None, "no accelerator"
device = torch.device(f"{kind}:{rank}")
torch.accelerator.set_device_index(rank)
dist.init_process_group(backend=dist.get_default_backend_for_device(device), device_id=device)
mesh = init_device_mesh(kind.type, (dist.get_world_size(),))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 16)).to(device)
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for step in range(8):
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(8, 16, generator=generator).to(device)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

parallel = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(device)
whole = parallel(torch.ones(2, 8, device=device)).sum().item()
parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
split = parallel(torch.ones(2, 8, device=device)).sum().item()
dist.barrier()
dist.destroy_process_group()
Path(f"{sys.argv[1]}.{rank}").write_text(f"{device.type} {losses[-1] < losses[0]} {abs(whole - split) < 1e-4}")
