"""Two ranks that train on the simulated device, its host ahead of it, and are hurt once: device_job.py DIRECTORY KIND WHERE.

KIND is ddp, fsdp or hsdp; WHERE tells what becomes of the last rank at step 15, in which part of the step. The end is the sum
of all parameters, to be compared with that of a run that nobody hurt (WHERE is `nowhere`). With a fourth word a rule of
ours is taken out, and the end is another one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.testing import device
from holdfast.train import alive

STEPS, AT = 24, 12
DIRECTORY, KIND, WHERE = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def hurt(step: int, where: str) -> None:
    """Kills this process, hangs its device or raises, once in the life of the job."""
    how, _, place = WHERE.partition("-")
    mark = DIRECTORY.with_suffix(".hurt")
    if place != where or step != AT or RANK != SIZE - 1 or mark.exists():
        return
    mark.touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fault":
        device.fault(now=True)
    if how == "raise":
        raise RuntimeError("an error of the script's own, in the middle of a step")


def model_of(place: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(place)
    if KIND == "ddp":
        return DistributedDataParallel(model)
    shape, names = ((SIZE,), ("shard",)) if KIND == "fsdp" else ((SIZE // 2, 2), ("replicate", "shard"))
    mesh = init_device_mesh(place.type, shape, mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def main() -> None:
    if "no-void" in sys.argv[4:]:
        alive.void = lambda: None
    torch.set_num_threads(1)
    device.load()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    place = torch.device(device.name(), int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(f"cpu:gloo,{device.name()}:simccl")
    model = model_of(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    config = holdfast.Config(linger_s=2.0)
    checkpointer = holdfast.Checkpointer(DIRECTORY, model=model, optimizer=optimizer, config=config)
    start = checkpointer.restore()
    print(f"rank {RANK} starts at {start}", flush=True)
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)).to(place)
    device.set_kernel_time(0.001)
    for step in range(start, STEPS):
        hurt(step, "forward")
        loss = model(data * (1.0 + step * 0.01 + RANK * 0.1)).square().mean()
        loss.item()  # as most loops do: until here the host waits for the device, so it is interrupted between two updates
        if step == AT:
            device.sleep(0.5)  # from here on it does not
        hurt(step, "backward")
        loss.backward()
        hurt(step, "collective")
        optimizer.step()
        optimizer.zero_grad()
        hurt(step, "optimizer")
        checkpointer.step(step)
        hurt(step, "save")
    total = sum(float(whole(parameter.detach()).double().sum()) for parameter in model.parameters())
    os.write(1, f"rank {RANK} ends with {total.hex()}\n".encode())  # in one piece
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
