"""One rank that trains until OUT/stop exists and, when its groups break, tries to save all the same. Not a test itself.

zombie_worker.py OUT: appends `<step> <digest> <incarnation>` to OUT/rank<R>-<pid>; what became of the save of a rank whose
groups broke is in OUT/tried-<pid>.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast

OUT = Path(sys.argv[1])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(10 + rank)
    checkpointer = holdfast.Checkpointer(OUT / "root", model=model, optimizer=optimizer, every=1, durable_every=5)
    step = checkpointer.restore()
    stop = torch.zeros(1)
    with (OUT / f"rank{rank}-{os.getpid()}").open("a", buffering=1) as rows:
        while True:
            try:
                model(torch.randn(4, 6)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                digest = hashlib.blake2b(model.module.weight.detach().numpy().tobytes(), digest_size=8).hexdigest()
                checkpointer.step(step)
                stop.fill_(float((OUT / "stop").exists()))
                dist.all_reduce(stop)
            except RuntimeError:
                try_to_save(checkpointer, step + 1)
                raise
            rows.write(f"{step} {digest} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
            if stop.item():
                break
            step += 1
            time.sleep(0.02)
    checkpointer.close()
    dist.destroy_process_group()


def try_to_save(checkpointer: holdfast.Checkpointer, step: int) -> None:
    """As somebody would who does not know that the job went on without him."""
    try:
        handle = checkpointer.save(step, "durable")
        told = handle.wait("captured", timeout_s=4)
        text = f"saved {handle.version} {told.name}"
    except holdfast.HoldfastError as error:
        text = f"refused {error}"
    (OUT / f"tried-{os.getpid()}").write_text(text)


if __name__ == "__main__":
    main()
