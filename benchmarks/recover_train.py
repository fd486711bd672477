"""The job that `recover.py` breaks: a small data-parallel loop with its state in checkpoints. Not for use by itself.

recover_train.py ARM EVENTS CHECKPOINTS MIB: ARM is `torchrun` (state in `torch.distributed.checkpoint`), `rerun` (the same
loop with a holdfast.Checkpointer), `forked` (that, and a thread that it leaves behind) or `resumable` (its loop is a resumable
function; what holds no group stays). Appends
one JSON line to EVENTS for the first step of every run. SIGUSR1 makes a rank hang behind its next step; a line tells when.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist

import holdfast

ARM, EVENTS, CHECKPOINTS, MIB = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
SAVE_EVERY = 5
# The jobs that are not being hit must not take the processors from the one that is.
PAUSE_S = 0.3


def tell(event: str, step: int) -> None:
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    row = {"t": time.time(), "event": event, "rank": dist.get_rank(), "count": count, "pid": os.getpid(), "step": step}
    with open(EVENTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


class Job:
    """A model that computes, and ballast that makes the state as large as asked for."""

    def __init__(self) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(64, 256)
        self.ballast = torch.nn.Module()
        for i in range(16):
            weight = torch.nn.Parameter(torch.zeros((MIB << 20) // 64 // world_size), requires_grad=False)
            self.ballast.register_parameter(f"r{rank}_w{i}", weight)

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


def hang() -> None:
    """Waits for itself."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def loop(job: Job, start: int, save: Any) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    for step in range(start, 1 << 40):
        job.step()
        if asked:  # in the handler it might be inside of a collective, whose ranks are interrupted instead
            tell("hangs", step)
            hang()
        if step == start:
            tell("first_step", step)
        save(step)
        time.sleep(PAUSE_S)


def with_dcp() -> None:
    dist.init_process_group("gloo")
    job = Job()
    state: dict[str, Any] = dict(job.ballast.named_parameters())
    number = torch.zeros(1, dtype=torch.int64)
    state["step"] = number
    complete = [int(path.parent.name) for path in CHECKPOINTS.glob("*/.metadata")]
    if complete:
        dcp.load(state, checkpoint_id=CHECKPOINTS / str(max(complete)))

    def save(step: int) -> None:
        if step % SAVE_EVERY == 0:
            number.fill_(step)
            dcp.save(state, checkpoint_id=CHECKPOINTS / str(step))

    loop(job, int(number) + 1, save)


def with_holdfast() -> None:
    dist.init_process_group("gloo")
    job = Job()
    checkpointer = holdfast.Checkpointer(
        CHECKPOINTS, model=[job.model, job.ballast], optimizer=job.optimizer, every=SAVE_EVERY, durable_every="60s"
    )
    train = holdfast.resumable(go_on) if ARM == "resumable" else go_on
    train(job, checkpointer)


def go_on(job: Job, checkpointer: holdfast.Checkpointer) -> None:
    loop(job, checkpointer.restore(), checkpointer.step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if ARM == "forked":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    with_dcp() if ARM == "torchrun" else with_holdfast()
