"""One of two ranks of a node: `keeper_dies_worker.py RANK STORE ROOT MOMENT`. Rank 1 kills their keeper when it comes to the moment, in a restore."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.keeper.rpc.client import KeeperClient

KINDS: dict[str, Any] = {"KeeperLink": KeeperLink, "Saver": Saver, "KeeperClient": KeeperClient}


def strike(checkpointer: Any, moment: str) -> None:
    """The keeper dies at the next call of a method, before it does anything."""
    owner, name = moment.split(".")
    real, link, killed = getattr(KINDS[owner], name), checkpointer._run.link, []
    keeper = checkpointer.keeper_status()["pid"]

    def struck(*args: Any, **kwargs: Any) -> Any:
        if not killed:
            killed.append(keeper)
            os.kill(keeper, signal.SIGKILL)
            while link.client is not None:
                time.sleep(0.01)
        return real(*args, **kwargs)

    setattr(KINDS[owner], name, struck)


def main() -> None:
    rank, store, root, moment = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model, own = torch.nn.Linear(64, 64), {"mine": torch.full((8,), float(rank))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {"model": model, "optimizer": optimizer, "own": own}
    checkpointer = holdfast.Checkpointer(root, every=0, replicated=["model*", "optimizer*"], **objects)
    checkpointer.restore()

    def train() -> None:
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        own["mine"] += 1

    for step in range(3):
        train()
        if step < 2:
            checkpointer.save(step, "captured" if step else "durable").wait()
            kept = [model.weight.detach().clone(), own["mine"].clone()]
    dist.barrier()
    if rank == 1:
        strike(checkpointer, moment)
    start = checkpointer.restore()
    same = all(map(torch.equal, kept, [model.weight, own["mine"]]))
    train()
    checkpointer.save(start).wait("captured", 60)
    checkpointer.close()
    print(json.dumps({"start": start, "same": same}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
