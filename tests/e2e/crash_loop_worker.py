"""Two ranks of which one fails at step 6, always. Not a test itself: crash_loop_worker.py OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast

OUT = Path(sys.argv[1])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = holdfast.Checkpointer(OUT / "checkpoints", model=model, optimizer=optimizer, every=1)
    start = checkpointer.restore()
    with (OUT / f"starts-{dist.get_rank()}").open("a") as file:
        file.write(f"{start} ")
    last = None
    for step in range(start, 20):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 6:
            if last is not None:
                last.wait("captured")  # what memory holds at the failure is not left to the pace of the machine
            if dist.get_rank() == 1:
                raise ZeroDivisionError(f"always at step {step}")
            dist.barrier()
        last = checkpointer.step(step)


if __name__ == "__main__":
    main()
