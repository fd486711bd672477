"""The job of `holdfast drill soak`: two ranks that train until they are told to stop, and say what every step gave.

soak_train.py HOME [STEPS]: with STEPS it trains so many without holdfast and without a pause, as the yardstick. Every rank
appends `step digest pid time` to HOME/steps-<rank> (or reference-<rank>). A file HOME/hit-<rank> makes it raise or exit, a
file HOME/oddity-<rank> do what a file of the user's calls by a name; HOME/lived-<rank> tells that this ended. Sums have two
terms, so every run of a step is bit-equal.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

import holdfast

HOME = Path(sys.argv[1])
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else None
PAUSE_S = 0.05


class Job:
    """A small model; its input is drawn from random numbers that are part of the state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(1 + dist.get_rank())

    def step(self) -> str:
        """One step; what it gave."""
        self.model(torch.randn(8, 32)).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        state = hashlib.blake2b(digest_size=6)
        for parameter in self.model.parameters():
            state.update(parameter.detach().numpy().tobytes())
        return state.hexdigest()


def told_to_stop() -> bool:
    """The same answer on both ranks, in the same step."""
    told = torch.tensor([float((HOME / "stop").exists())])
    dist.all_reduce(told)
    return told.item() > 0


def obey(rank: int) -> None:
    """Raises or exits if that was asked for."""
    hit = HOME / f"hit-{rank}"
    if hit.exists():
        how = hit.read_text()
        hit.unlink()
        if how == "exit":
            os._exit(3)
        raise ValueError("planted")


def do_oddity(rank: int, model: torch.nn.Module) -> None:
    """Does what was asked for beside the training; the other rank waits in its next step."""
    asked = HOME / f"oddity-{rank}"
    if asked.exists():
        path, name = asked.read_text().splitlines()
        asked.unlink()
        runpy.run_path(path)["HEALTHY"][name](model)
        (HOME / f"lived-{rank}").write_text(name)


def main() -> None:
    """Trains."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, job = dist.get_rank(), Job()
    with (HOME / f"{'steps' if STEPS is None else 'reference'}-{rank}").open("a", buffering=1) as out:
        if STEPS is not None:
            for step in range(STEPS):
                out.write(f"{step} {job.step()}\n")
            dist.barrier()
            out.flush()
            # All is told. An interpreter that ends beside torch's own threads aborts now and then (gloo, SIGABRT).
            os._exit(0)
        checkpointer = holdfast.Checkpointer(
            HOME / "checkpoints", model=job.model, optimizer=job.optimizer, every=5, durable_every=50
        )
        step = checkpointer.restore()
        while not told_to_stop():
            out.write(f"{step} {job.step()} {os.getpid()} {time.time():.3f}\n")
            checkpointer.step(step)
            obey(rank)
            do_oddity(rank, job.model)
            time.sleep(PAUSE_S)
            step += 1
        checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
