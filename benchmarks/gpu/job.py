"""The job of some checks: job.py DEVICE DIRECTORY KIND AT. Prints how it ends.

KIND is `plain` (one process, killed at step AT), `ranks` (under the launcher, DDP; the last rank is killed once at
step AT) or `hang` (its device stands still for a minute instead). AT is 0: nobody is hurt.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

DEVICE, DIRECTORY, KIND, AT = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
STEPS = 12
# Ranks share a card, which NCCL refuses; gloo takes tensors of CUDA, and of nothing else. None: what torch has for it.
BACKENDS = {"cuda": "gloo", "sim": "cpu:gloo,sim:simccl"}

if DEVICE == "sim":
    from holdfast.testing import device as simulated

    simulated.load()

import holdfast  # noqa: E402 - behind the device
from holdfast.testing.gpt import ByteGPT, Shape  # noqa: E402


def still(place: torch.device) -> None:
    """The device does nothing for a minute."""
    from benchmarks.gpu.card import Card  # noqa: PLC0415 - a module of the project would keep survivors from running again

    Card(DEVICE, small=False, directory=DIRECTORY).sleep(60.0)
    torch.zeros(1, device=place).item()


def hurt(step: int, place: torch.device, rank: int, size: int) -> None:
    mark = DIRECTORY / "hurt"
    if step != AT or not AT or rank != size - 1 or mark.exists():
        return
    mark.touch()
    if KIND == "hang":
        still(place)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    place = torch.device(DEVICE, 0)  # ranks share a card
    if size > 1:
        dist.init_process_group(BACKENDS.get(DEVICE))
    torch.manual_seed(7 + rank)
    inner = ByteGPT(Shape(width=32, layers=2, heads=2, context=16, dropout=0.1)).to(place)
    model = DistributedDataParallel(inner) if size > 1 else inner
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
    config = holdfast.Config(every="1", durable_every="0", linger_s=20.0)
    checkpointer = holdfast.Checkpointer(
        DIRECTORY / "checkpoints", model=model, optimizer=optimizer, scaler=scaler, config=config
    )
    start = checkpointer.restore()
    free = int(torch.get_device_module(DEVICE).mem_get_info()[0])
    longest, last = 0.0, time.monotonic()
    for step in range(start, STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        batch = torch.randint(0, 256, (2, 17), generator=generator).to(place)
        loss = model(batch[:, :-1], batch[:, 1:])
        scaler.scale(loss).backward()
        hurt(step, place, rank, size)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        checkpointer.step(step)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in inner.parameters())).hexdigest()
    checkpointer.close()
    if rank == 0:
        told = {
            "digest": digest,
            "start": start,
            "longest_s": longest,
            "pids": len(set((DIRECTORY / "began0").read_text().split())),
            "grown_bytes": free - int(torch.get_device_module(DEVICE).mem_get_info()[0]),
        }
        print("job ends: " + json.dumps(told), flush=True)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (DIRECTORY / f"began{os.environ.get('RANK', '0')}").open("a") as began:
        began.write(f"{os.getpid()}\n")
    main()
