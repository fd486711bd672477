"""A rank of a job under Slurm: DDP with random numbers, a step at a time until `go` is there, then to the end.

slurm_worker.py MARKS PACE    with the variables of `holdfast run`, ROOT and, in an array, SLURM_ARRAY_TASK_ID

MARKS gets, for each rank, `rankK` (process id, step) and at the end `endK` (a digest of all state).
PACE: seconds of a step as long as there is no `go`.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEPS = 400


def main() -> None:
    marks, pace_s = Path(sys.argv[1] + os.environ.get("SLURM_ARRAY_TASK_ID", "")), float(sys.argv[2])
    marks.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(int(os.environ.get("SLURM_ARRAY_TASK_ID", "0")))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank + 10)
    ckpt = holdfast.Checkpointer(os.environ["ROOT"], model=model, optimizer=optimizer)
    start = ckpt.restore()
    print(f"rank {rank} starts at step {start}", flush=True)
    for step in range(start, STEPS):
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)
        part = marks / f"rank{rank}.part"
        part.write_text(f"{os.getpid()} {step}")
        part.rename(marks / f"rank{rank}")
        while step == STEPS - 20 and not (marks / "go").exists():
            time.sleep(pace_s)
        if not (marks / "go").exists():
            time.sleep(pace_s)
    digest = hashlib.sha256()
    moments = optimizer.state_dict()["state"]  # in an order of its own after a restore
    for tensor in [
        *model.state_dict().values(),
        *(moments[k][name] for k in sorted(moments) for name in sorted(moments[k])),
    ]:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    (marks / f"end{rank}").write_text(digest.hexdigest())
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
