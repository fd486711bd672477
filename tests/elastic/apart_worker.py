"""Ranks that do not go the same way. Not a test itself.

apart_worker.py OUT early: rank 1 is done after some steps; rank 0 goes on alone, and dies when OUT/die is there, once.
apart_worker.py OUT stutter: rank 1 meets a broken group once, and no process died.
Who begins for the second time ends when OUT/end is there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

OUT, WAY = Path(sys.argv[1]), sys.argv[2]
STEPS = 40


def work_until(name: str) -> None:
    """Alone: nobody else is asked for anything."""
    while not (OUT / name).exists():
        time.sleep(0.01)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (OUT / f"pids-{rank}").open("a") as file:
        file.write(f"{os.getpid()} ")
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    for step in range(STEPS):
        dist.all_reduce(torch.ones(1))
        if WAY == "stutter" and rank == 1 and step == STEPS // 2 and not again:
            raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection reset by peer")
    if WAY == "early" and rank == 0 and not again:
        (OUT / "alone").touch()
        work_until("die")
        os.kill(os.getpid(), signal.SIGKILL)
    if again:
        work_until("end")
    if WAY != "early":  # who has no group any more ends with its script
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
