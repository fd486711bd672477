"""A script in the shape of PyTorch's examples for accelerators: it asks `torch.accelerator`, and knows nothing of holdfast.

`fsdp` shards every layer and clips gradients; `tensor` splits a feed-forward over the ranks. It prints a line at each step, and
saves nothing.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Feedforward(nn.Module):
    """Two layers and what is between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.relu(self.into(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=["fsdp", "tensor"], default="fsdp")
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument(
        "--never-clear", action="store_true", help="gradients add up, as in PyTorch's tensor parallel ones"
    )
    parser.add_argument(
        "--reduce-every", type=int, default=1, help="so many backward passes go by before gradients are reduced"
    )
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "no accelerator"
    device = torch.device(kind.type, local)
    torch.accelerator.set_device_index(local)
    dist.init_process_group(backend=dist.get_default_backend_for_device(device), device_id=device)
    mesh = init_device_mesh(kind.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = nn.Sequential(*(Feedforward(32) for _ in range(3))).to(device)
    if options.parallel == "fsdp":
        more = {}
        if options.mixed_precision:
            more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mesh=mesh, **more)
        fully_shard(model, mesh=mesh, **more)
    else:
        for layer in model:
            parallelize_module(layer, mesh, {"into": ColwiseParallel(), "out": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    torch.manual_seed(1 + (rank if options.parallel == "fsdp" else 0))
    for step in range(options.steps):
        if options.reduce_every > 1:
            model.set_requires_gradient_sync((step + 1) % options.reduce_every == 0)
        batch = torch.rand(8, 32, device=device)
        loss = (model(batch).float() - batch.flip(1)).square().mean()
        loss.backward()
        if options.parallel == "fsdp" and options.reduce_every == 1:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        if not options.never_clear:
            optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
