"""What test_worker_eviction launches: two ranks that meet in a file, of which one is killed once; the other waits there.

file_store_worker.py DIRECTORY        they meet by `init_method="file://..."`, and the second dies behind an all-reduce
file_store_worker.py DIRECTORY wait   they only look at a store; the first waits in there for what never comes
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
killed = directory / "killed"


def die() -> None:
    killed.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def wait() -> None:
    if killed.exists():
        return
    store = dist.FileStore(str(directory / "store"), 2)
    if rank == 0:
        store.set("ready", "yes")
        store.wait(["never"], dt.timedelta(seconds=600))
    store.wait(["ready"], dt.timedelta(seconds=60))
    die()


def meet() -> None:
    limit = dt.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{directory / 'met'}", limit, world_size=2, rank=rank)
    for _ in range(10):
        total = torch.ones(1)
        dist.all_reduce(total)
    if rank == 1 and not killed.exists():
        die()
    dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    wait() if sys.argv[2:] else meet()
    print(f"rank {rank} ends, recoveries {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
