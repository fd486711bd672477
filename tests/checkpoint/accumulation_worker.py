"""A rank that reports every micro-batch: `accumulation_worker.py RANK WORLD STORE ROOT WAY KILL`. Not a test itself.

It is killed behind the backward pass of the micro-batch after KILL, whose version is captured by then; KILL -1: it trains to the end, and
before that once without a checkpointer. It prints what it began with, its digest at the end, and the undisturbed one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEPS, TURNS = 12, 4  # micro-batches in all, and of an optimizer's step


class Net(torch.nn.Module):
    """Two heads of which each second micro-batch uses one, a sum of rows that are looked up, and a convolution."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(8, 8, sparse=way == "sparse")
        self.body = torch.nn.Conv2d(2, 4, 3, padding=1)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, 1) for _ in range(2))
        if way == "channels":
            self.body.to(memory_format=torch.channels_last)
        self.one_head = way == "heads"

    def forward(self, data: torch.Tensor, turn: int) -> torch.Tensor:
        looked = self.rows((data.abs() * 7).long().clamp(max=7)[:, :, 0, 0]).mean()
        found = self.body(data).flatten(1)
        used = self.heads[:1] if self.one_head and turn // TURNS else self.heads
        return looked + sum(head(found).square().mean() for head in used)


class Job:
    def __init__(self, way: str, rank: int, world: int) -> None:
        torch.manual_seed(5)
        self.way = way
        self.net: Any = Net(way)
        if way == "fsdp":
            fully_shard(self.net.body)
            fully_shard(self.net)
        elif world > 1:
            self.net = DistributedDataParallel(self.net, gradient_as_bucket_view=way.endswith("buckets"))
        parameters = list(self.net.parameters())
        make = torch.optim.SGD if way == "sparse" else torch.optim.AdamW
        if way == "two":  # of which the second one steps in each turn
            self.optimizers = [torch.optim.AdamW(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.1)]
        else:
            self.optimizers = [make(parameters, lr=0.1)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1, enabled=way == "scaler")
        torch.manual_seed(rank)

    def turn(self, number: int) -> None:
        if self.way == "first" and number and number % TURNS == 0:
            self.step(self.optimizers[0])
        ends = (number + 1) % TURNS == 0
        silent = self.way.startswith("no_sync") and not ends
        with self.net.no_sync() if silent else contextlib.nullcontext():
            self.scaler.scale(self.net(torch.randn(4, 2, 2, 2), number)).backward()
        if self.way == "two":
            self.step(self.optimizers[1])
        if ends and self.way != "first":
            self.step(self.optimizers[0])
            self.scaler.update()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=self.way != "zeros")

    def digest(self) -> str:
        found = [*self.net.state_dict().values()]
        for optimizer in self.optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                found += [value for _, value in sorted(optimizer.state.get(parameter, {}).items()) if value is not None]
        return b"".join(getattr(t, "_local_tensor", t).detach().contiguous().numpy().tobytes() for t in found).hex()


def main() -> None:
    rank, world, store, root, way, kill = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], int(sys.argv[6])
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    whole = Job(way, rank, world)
    for number in range(STEPS if kill < 0 else 0):
        whole.turn(number)
    job = Job(way, rank, world)
    config = holdfast.Config(every="1", durable_every="0", linger_s=60.0 if kill >= 0 else 1.0)
    checkpointer = holdfast.Checkpointer(
        root, config=config, model=job.net, optimizer=job.optimizers, scaler=job.scaler
    )
    start = checkpointer.restore()
    for number in range(start, STEPS):
        job.turn(number)
        if number == kill + 1 and kill >= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        handle = checkpointer.step(number)
        if number == kill:
            assert handle is not None
            checkpointer.settle()
            handle.wait("captured", 60)
            if world > 1:
                dist.barrier()
    checkpointer.close()
    print(json.dumps({"start": start, "end": job.digest(), "whole": whole.digest()}))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
