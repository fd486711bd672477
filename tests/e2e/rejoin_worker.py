"""Two ranks (`hsdp`: four) train in many ways and kill themselves in many moments. Not a test itself.

rejoin_worker.py OUT CELL...: a cell is `<strategy>:<phase>[:<every>[:<fault>]]`. For each: steps without holdfast as the
reference, then the same steps with it, saved every so many (each one), in which rank 1 (`restore`: then rank 0 too)
meets the fault (`kill`, `stop`, `raise`, `exit`) at step KILL_AT in that phase; `inside` is within the optimizer's step,
`caught` one step later, while rank 0 is held within it, `spoilt` in forward, and what rank 0 then sends to the new process
arrives with a bit of it changed. Every rank writes what it trained, and its process id at every start. As a user's script it
knows nothing of being run again; only the test's bookkeeping (what is done already) lies in files.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.checkpoint.job import collectives

STEPS, KILL_AT = 8, 4
OUT = Path(sys.argv[1])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = torch.nn.Linear(12, 32)
        self.two = torch.nn.Linear(32, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.nn.functional.dropout(self.one(x).relu(), 0.1, self.training))


class Spoilt(collectives.Group):
    """The ranks of a job in which what one sends to another arrives with a bit of it changed."""

    def send(self, data: torch.Tensor, to: int) -> None:
        data[0] ^= 1
        (OUT / "spoilt").touch()
        super().send(data, to)


class Job:
    """Model, optimizer and one step of a strategy; `at` is called in every phase."""

    def __init__(self, strategy: str, at: Callable[[str], None]) -> None:
        self.rank, self.at = dist.get_rank(), at
        self.model: torch.nn.Module = Net()
        self.step = self.whole_step
        self.turn = 0
        if strategy in ("ddp", "behind", "adding"):
            self.wrap()
            self.step = {"behind": self.step_behind, "adding": self.step_adding}.get(strategy, self.step)
        elif strategy == "fsdp":
            fully_shard(self.model.two)
            fully_shard(self.model)
        elif strategy == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(self.model.two, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif strategy == "tp":
            plan = {"one": ColwiseParallel(), "two": RowwiseParallel()}
            self.model = parallelize_module(self.model, init_device_mesh("cpu", (2,)), plan)
        elif strategy == "pp":
            name = ("one", "two")[self.rank]
            self.model = torch.nn.ModuleDict({name: getattr(self.model, name)})
            self.step = self.stage_step
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer.register_step_post_hook(lambda *_: self.at("inside"))  # before anybody else hears of the end
        # Ranks of one TP group drop out the same units, others their own.
        torch.manual_seed(7 if strategy == "tp" else 7 + self.rank)

    def wrap(self) -> None:
        """Groups are new after an interruption, and so is what holds them."""
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        self.model = DistributedDataParallel(inner)

    def whole_step(self) -> None:
        x = torch.randn(4, 12)
        self.at("forward")
        out = self.model(x)
        out = out.to_local() if isinstance(out, DTensor) else out
        out.register_hook(lambda _: self.at("backward"))
        out.square().sum().backward()
        self.finish()

    def step_behind(self) -> None:
        """The optimizer's step comes one step later: gradients live whenever one is reported."""
        if next(self.model.parameters()).grad is not None:
            self.finish()
        self.model(torch.randn(4, 12)).square().sum().backward()

    def step_adding(self) -> None:
        """The optimizer makes one step in three: gradients are added up at the others."""
        self.model(torch.randn(4, 12)).square().sum().backward()
        if self.turn % 3 == 2:
            self.finish()

    def stage_step(self) -> None:
        x, h = torch.randn(4, 12), torch.zeros(4, 32)
        if self.rank == 0:
            h = self.model["one"](x)
            dist.send(h.detach(), 1)
            grad = torch.zeros_like(h)
            self.at("backward")
            dist.recv(grad, 1)
            h.backward(grad)
        else:
            dist.recv(h, 0)
            h.requires_grad_()
            self.at("forward")
            self.model["two"](h.relu()).square().sum().backward()
            self.at("backward")
            dist.send(h.grad, 0)
        self.finish()

    def finish(self) -> None:
        self.at("update")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        state = hashlib.blake2b(digest_size=8)
        for parameter in self.model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            state.update(local.detach().contiguous().numpy().tobytes())
        return state.hexdigest()


def victim(cell: str, phase: str, step: int) -> None:
    """Kills this process if it is its turn; once for each cell and rank."""
    kind = cell.split(":")[1]
    if kind == "caught":
        hold(cell, phase, step)
        kind, step = "forward", step - 1
    if kind == "spoilt":
        kind = "forward"
    wanted = [(1, "forward" if kind == "restore" else kind, KILL_AT)] + [(0, "restored", -1)] * (kind == "restore")
    marker = OUT / f"killed-{cell}-{dist.get_rank()}"
    again = phase != "restored" or (OUT / f"killed-{cell}-1").exists()
    if (dist.get_rank(), phase, step) in wanted and again and not marker.exists():
        marker.touch()
        strike(cell.split(":")[3] if cell.count(":") == 3 else "kill")


def strike(fault: str) -> None:
    """Here and now."""
    if fault == "raise":
        raise ValueError("planted")
    if fault == "exit":
        os._exit(3)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


def hold(cell: str, phase: str, step: int) -> None:
    """Rank 0 goes nowhere from here, until the job is interrupted."""
    marker = OUT / f"held-{cell}"
    if (dist.get_rank(), phase, step) == (0, "inside", KILL_AT) and not marker.exists():
        marker.touch()
        threading.Event().wait()


def reference(cell: str, rank: int) -> None:
    file = OUT / f"reference-{cell}-{rank}.json"
    strategy = cell.split(":", maxsplit=1)[0]
    job = Job("ddp" if strategy == "resumable" else strategy, lambda _: None)
    rows = []
    for job.turn in range(STEPS):
        job.step()
        rows.append(job.digest())
    write(file, rows)


def train(cell: str, rank: int) -> None:
    now = {"step": -1}
    job = Job(cell.split(":", maxsplit=1)[0], lambda phase: victim(cell, phase, now["step"]))
    inside = cell.startswith("resumable")  # the model stays, its wrapper does not
    every = int(cell.split(":")[2]) if cell.count(":") > 1 else 1
    checkpointer = holdfast.Checkpointer(
        OUT / f"root-{cell.replace(':', '-')}", model=job.model, optimizer=job.optimizer, every=every, durable_every=100,
        replicated=("model*", "optimizer*") if inside else (),
    )  # fmt: skip
    if ":spoilt" in cell:
        checkpointer._ranks = Spoilt
    go_on = holdfast.resumable(loop) if cell.startswith("resumable") else loop
    go_on(cell, rank, job, checkpointer, now)
    checkpointer.close()


def loop(cell: str, rank: int, job: Job, checkpointer: holdfast.Checkpointer, now: dict[str, int]) -> None:
    if cell.startswith("resumable"):
        job.wrap()
    # A job's steps have rising numbers; by them the agent knows that a failure comes after progress.
    before = 120 * sys.argv[2:].index(cell)
    start = max(0, checkpointer.restore() - before)
    if cell == "resumable:restore:3":
        dist.barrier()  # rank 1 too has come back to this step: else its state is the saved one
    victim(cell, "restored", -1)
    rows: dict[int, str] = {}
    for step in range(start, STEPS):
        now["step"] = job.turn = step
        job.step()
        rows[step] = job.digest()
        write(OUT / f"trained-{cell}-{rank}-{os.getpid()}-{start}.json", rows)
        checkpointer.step(before + step)
        if cell.endswith(":save:100") and step == KILL_AT:
            dist.barrier()  # rank 0 too has made and reported this step: else its state is the one before
        victim(cell, "save", step)
        if cell.startswith("behind") and step == KILL_AT:
            dist.barrier()  # rank 0 goes no further: the next step begins with the optimizer's


def write(path: Path, facts: object) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(facts))
    unfinished.rename(path)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (OUT / f"runs-{rank}").open("a") as pids:
        pids.write(f"{os.getpid()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
    for cell in sys.argv[2:]:
        for part in (reference, train):
            if all((OUT / f"done-{part.__name__}-{cell}-{r}").exists() for r in range(dist.get_world_size())):
                continue
            part(cell, rank)
            (OUT / f"done-{part.__name__}-{cell}-{rank}").touch()
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
