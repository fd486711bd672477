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
    config = holdfast.Config(every="0", durable_every="0", begin_timeout_s=0.2, linger_s=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer, config=config)
    checkpointer.restore()
    checkpointer.save(0).wait("captured", 60)
    dist.barrier()
    if rank == 1:
        time.sleep(2.0)  # ten times what a save in the middle of a training may wait
    checkpointer.save(1)
    said = ""
    if how == "close":
        checkpointer.step(2)
    elif how == "last":
        checkpointer.save_last(2)
        with torch.no_grad():
            model.weight.zero_()
    elif how == "abandoned" and rank == 0:
        checkpointer.save(2)
        dist.barrier()
    elif how == "abandoned":  # as where it found no slot, and its state is gone when it closes
        dist.barrier()
        checkpointer._run.link.require().abandon(checkpointer._run.job.version(2), "it found no slot")
        model(torch.ones(64)).sum().backward()
        optimizer.step()
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


if __name__ == "__main__":
    main()
