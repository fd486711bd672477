"""One of two ranks: `last_save_worker.py RANK STORE ROOT HOW`. Rank 1 is seconds behind with step 1 when rank 0 saves its last.

The slots of rank 0 are taken until then: one holds the newest version that all ranks have, the other one step 1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import holdfast
from holdfast.base.errors import LevelNotReached


def main() -> None:
    rank, store, root, how = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 64)
    left_out = how in ("stepped", "loaded")
    shorter = how.startswith("shorter")
    budget = {"memory_budget": "64KiB"} if how == "storage alone" else {}
    config = holdfast.Config(
        every="1" if left_out or (shorter and "seldom" not in how) else "0",
        durable_every="0",
        begin_timeout_s=0.2,
        linger_s=1.0,
        **budget,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer, config=config)
    checkpointer.patience_s = 0.5 if how == "late" else None
    checkpointer.restore()
    checkpointer.save(0, "captured" if not budget else "durable").wait(timeout_s=60)
    dist.barrier()
    if left_out and rank == 0:
        dist.barrier()
    elif rank == 1 and not left_out and not shorter:
        time.sleep(4.0 if how == "late" else 2.0)  # ten times what a save in the middle of a training may wait
    checkpointer.step(1) if budget or "seldom" in how else checkpointer.save(1)
    said = ""
    if how == "close":
        checkpointer.step(2)
    elif shorter:
        go_on(checkpointer, rank, model, how)
    elif how == "last":
        checkpointer.save_last(2)
        with torch.no_grad():
            model.weight.zero_()
    elif budget and rank == 1:
        model.load_state_dict(torch.nn.Linear(64, 64).state_dict())
    elif left_out and rank == 0:
        checkpointer.step(2)
    elif left_out:  # rank 0 has not saved step 1 yet
        checkpointer._run.saver._patience.spend(60.0)
        checkpointer.step(2)
        model(torch.ones(64)).sum().backward()
        optimizer.step() if how == "stepped" else model.load_state_dict(torch.nn.Linear(64, 64).state_dict())
        dist.barrier()
    elif how == "told":
        os.kill(os.getpid(), signal.SIGTERM)
        for step in range(2, 1000):
            checkpointer.step(step)
            time.sleep(0.01)
    try:
        checkpointer.close()
    except LevelNotReached as error:
        said = str(error)
    print(json.dumps({"said": said}), flush=True)
    dist.destroy_process_group()


def go_on(checkpointer: holdfast.Checkpointer, rank: int, model: torch.nn.Module, how: str) -> None:
    """Rank 0 makes four steps that the other one does not make. Where saves are seldom, it has not saved the last one of the other."""
    waits = how == "shorter and waits"
    if rank == 0:
        for step in range(2, 6):
            checkpointer.step(step)
    if how == "shorter and loaded" or (
        how == "shorter, seldom and loaded" and rank == 0
    ):  # as at the end of `Join`, which sends the weights of one rank to all
        model.load_state_dict(torch.nn.Linear(64, 64).state_dict())
    if waits and rank == 0:
        checkpointer.patience_s = 1.0
        checkpointer.close()
    if waits:
        dist.barrier()  # so rank 1 does not come to its end before rank 0 has closed


if __name__ == "__main__":
    main()
