"""Two ranks of which one does odd and healthy things between steps, while the other waits for it in a collective.

odd_worker.py DIRECTORY NAME...: names of oddity_jobs.HEALTHY; `prepare` before all others: many collectives, then work of
one rank before the first step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import oddity_jobs

STEPS_BETWEEN = 12


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if names[0] == "prepare":
        for number in range(20):
            dist.all_gather_object([None, None], {"number": number})
        if rank:
            oddity_jobs.tokenises()
        dist.barrier()
        names = names[1:]
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for name in names:
        for _ in range(STEPS_BETWEEN):
            model(torch.ones(2, 4)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        if rank:
            oddity_jobs.HEALTHY[name](model)
        dist.barrier()
    (directory / f"ended{rank}").write_text(f"{os.getpid()} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
