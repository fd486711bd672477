"""One rank of a job whose ranks are all twins, one on each node; in the second version one bit of one rank is wrong.

Usage: twins_worker.py ROOT FACTS VICTIM. Writes what it saw as JSON to FACTS/<rank>.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.base.errors import LevelNotReached


def main(root: str, facts: Path, victim: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = holdfast.Checkpointer(root, model=model, optimizer=optimizer, every=0, durable_every=0)
    seen: dict[str, object] = {"start": ckpt.restore()}
    reasons: list[str] = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 1 and rank == victim:
            model.module[0].weight.data.view(torch.int32)[2, 3] ^= 1 << 7
        try:
            ckpt.save(step, "durable").wait(timeout_s=60)
        except LevelNotReached as error:
            reasons.append(str(error))
    deadline = time.monotonic() + 60
    status = ckpt.keeper_status()
    # Which entry it is comes behind that something differs, and to other nodes behind that.
    while not any(".weight" in alarm["text"] for alarm in status["alarms"]) and time.monotonic() < deadline:
        status = ckpt.keeper_status()
    seen.update(reasons=reasons, suspects=status["suspects"], alarms=[alarm["text"] for alarm in status["alarms"]])
    dist.barrier()
    ckpt.restore()  # in the middle of training: back to the last version that is verified
    seen["back"] = str(ckpt.last_restore.version)
    seen["weight"] = model.module[0].weight.flatten().tolist()
    (facts / f"{rank}.json").write_text(json.dumps(seen))
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
