"""One of two ranks: `first_version_worker.py RANK STORE ROOT LIFE`. In its first life rank 0 alone saves, and both wait to be killed."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

import holdfast


def main() -> None:
    rank, store, root, life = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer)
    start = checkpointer.restore()
    if life == "first":
        if rank == 0:
            checkpointer.save(0)
            while "sealed" not in json.dumps(checkpointer.keeper_status()["ranks"]["0"]["slots"]):
                time.sleep(0.01)
        print(json.dumps({"start": start}), flush=True)
        sys.stdin.read()
    report = checkpointer.last_restore
    assert report is not None
    checkpointer.save(start, "durable")
    checkpointer.close()
    print(json.dumps({"start": start, "reason": report.reason}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
