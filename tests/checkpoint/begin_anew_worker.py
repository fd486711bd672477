"""One of two ranks: `begin_anew_worker.py RANK STORE ROOT LIFE CASE`. In its first life it saves to memory and waits to be killed.

CASE `first-version`: rank 0 alone saves. `lost-node`: each rank stands on a node of its own, and holds a shard that nobody else
holds. With LIFE `required` a checkpoint is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.base.errors import HoldfastError


def main() -> None:
    rank, store, root, life, case = int(sys.argv[1]), *sys.argv[2:]
    apart = case == "lost-node"
    if apart:
        settings = Path(f"{store}-{rank}.toml")
        settings.write_text(f'node_label = "{"ab"[rank]}"\nredundancy = "none"\ndurable_every = "100000s"\n')
        os.environ["HOLDFAST_CONFIG"] = str(settings)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0 if apart else rank)
    model = torch.nn.Linear(64, 64)
    if apart:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer)
    try:
        start = checkpointer.restore(required=life == "required")
    except HoldfastError as error:
        print(json.dumps({"error": error.what}), flush=True)
        return
    if life == "first":
        if apart:
            checkpointer.save(0).wait("captured")
        elif rank == 0:
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
