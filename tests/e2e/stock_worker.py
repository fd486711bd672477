"""Two ranks of FSDP2 that save a durable version and write down the whole tensors. Not a test itself.

torchrun --nproc-per-node 2 stock_worker.py ROOT EXPECTED
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

import holdfast


def whole(tensor: torch.Tensor) -> dict[str, object]:
    """The full tensor of all ranks, as plain values."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": str(full.dtype).removeprefix("torch."), "shape": list(full.shape), "raw": data.hex()}


def main() -> None:
    root, expected = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.LayerNorm(65), torch.nn.Linear(65, 7).bfloat16())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer)
    checkpointer.restore()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpointer.save(0, level="durable").wait()
    tensors = {f"model.{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.state.{name}.{key}"] = whole(value)
    if dist.get_rank() == 0:
        Path(expected).write_text(json.dumps({"tensors": tensors}))
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
