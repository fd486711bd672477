"""What test_worker_eviction launches: ranks that meet in a file, of which the second is killed once.

file_store_worker.py DIRECTORY        they meet by `init_method="file://..."`, and the second dies behind an all-reduce
file_store_worker.py DIRECTORY wait   they only look at a store; the first waits in there for what never comes
file_store_worker.py DIRECTORY own    as the first, by a script that goes its own ways: twice in one file, to which each rank has
                                      another path, with ranks counted from behind and the environment of another launcher
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

directory, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
killed = directory / "killed"


def die() -> None:
    killed.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def wait() -> None:
    if killed.exists():
        return
    signal.signal(signal.SIGTERM, lambda *_: None)  # as who saves at it
    store = dist.FileStore(str(directory / "store"), 2)
    if rank == 0:
        store.set("ready", "yes")
        store.wait(["never"], dt.timedelta(seconds=600))
    store.wait(["ready"], dt.timedelta(seconds=60))
    die()


def group(path: Path, group_rank: int) -> torch.Tensor:
    limit = dt.timedelta(seconds=20)
    dist.init_process_group("gloo", f"file://{path}", limit, world_size=size, rank=group_rank)
    for _ in range(10):
        total = torch.ones(1)
        dist.all_reduce(total)
    return total


def meet(path: Path, group_rank: int) -> None:
    total = group(path, group_rank)
    if rank == 1 and not killed.exists():
        die()
    dist.all_reduce(total)
    dist.destroy_process_group()


def go_own_ways() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK="0", WORLD_SIZE="1")
    if not killed.exists():
        (directory / f"to{rank}").symlink_to(directory)
    path = directory / f"to{rank}" / "met"
    group(path, size - 1 - rank)
    dist.destroy_process_group()
    (directory / f"left{rank}").touch()
    while len(list(directory.glob("left*"))) < size:  # the last one has removed the file
        time.sleep(0.01)
    meet(path, size - 1 - rank)


if __name__ == "__main__":
    how = "".join(sys.argv[2:])
    if how:
        {"wait": wait, "own": go_own_ways}[how]()
    else:
        meet(directory / "met", rank)
    print(f"rank {rank} ends, recoveries {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
