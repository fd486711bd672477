"""One rank of a job whose second node loses its keeper for good, gets one again, and loses it once more before the end.

Usage: lower_worker.py ROOT FACTS. Writes what it saw as JSON to FACTS/<rank>.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import holdfast
from holdfast.base import program
from holdfast.base.errors import LevelNotReached
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.checkpoint.save.storage_saver import DirectSaver

VICTIM = 1
PATIENCE_S = 30.0


class Job:
    """DDP on every rank, so that ranks are never more than a step apart."""

    def __init__(self, root: str) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.ckpt = holdfast.Checkpointer(root, model=self.model, optimizer=self.optimizer, every=1, durable_every=5)
        self.ckpt.restore()
        self.step = -1
        self.slowest = 0.0

    def train(self) -> None:
        self.step += 1
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 64)).sum().backward()
        self.optimizer.step()
        time.sleep(0.02)  # what a step would take
        started = time.monotonic()
        self.ckpt.step(self.step)
        self.slowest = max(self.slowest, time.monotonic() - started)

    def until(self, kind: type) -> int:
        """Trains until saves are made in this way, and 10 steps on; returns the step at which it began."""
        deadline = time.monotonic() + PATIENCE_S
        while not isinstance(self.ckpt._run.saver, kind):
            assert time.monotonic() < deadline
            self.train()
        began = self.step
        for _ in range(10):
            self.train()
        return began


def lose_keeper(ckpt: holdfast.Checkpointer) -> None:
    """It is killed, and no other one starts."""
    if dist.get_rank() == VICTIM:
        program.sys = SimpleNamespace(executable="/bin/false")
        os.kill(ckpt.keeper_status()["pid"], signal.SIGKILL)


def main(root: str, facts: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job = Job(root)
    names: list[str] = []
    job.ckpt.events.subscribe(lambda event: names.append(event.name))
    for _ in range(3):
        job.train()
    lose_keeper(job.ckpt)
    seen = {"down": job.until(DirectSaver)}
    seen["reason"] = job.ckpt._run.saver._reason
    program.sys = sys
    seen["up"] = job.until(Saver)
    deadline = time.monotonic() + PATIENCE_S
    while job.ckpt._run.last.reached < holdfast.Level.CAPTURED:
        assert time.monotonic() < deadline
    with contextlib.suppress(LevelNotReached):  # names what was lost on the way down
        job.ckpt.flush(PATIENCE_S)
    dist.barrier()
    lose_keeper(job.ckpt)
    dist.barrier()
    job.train()
    job.ckpt.close()
    seen.update(last=job.step, names=names, slowest=job.slowest, weight=job.model.module.weight.flatten().tolist())
    (facts / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
