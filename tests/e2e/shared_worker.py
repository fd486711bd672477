"""One rank of two that share a node and their model; between two averagings their weights differ, as under local SGD.

Usage: shared_worker.py ROOT FACTS BUDGET [WHAT]. Writes what it saw as JSON to FACTS/<rank>.json. WHAT differs: "owned" by an
optimizer, which is the default, "unowned" parameters that the script updates itself, a "dict" that is replicated, or "the end" of the job.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.base.errors import LevelNotReached


def main(root: str, facts: Path, budget: str, what: str = "owned") -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    lingers_s = 1.0 if what == "the end" else 600.0
    config = holdfast.Config(every="0", durable_every="0", memory_budget=budget, linger_s=lingers_s)
    if what == "the end":
        differing_at_the_end(root, facts, config, model)
        return
    if what != "owned":
        differing_beside(what, root, facts, config, model)
        return
    checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer, config=config)
    checkpointer.restore()
    given_up: list[str] = []
    averaged: list[list[float]] = []
    for step in range(8):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        with model.no_sync():  # every rank goes its own way
            model(torch.randn(4, 256)).square().sum().backward()
        optimizer.step()
        if step % 2:
            for state in optimizer.state.values():
                dist.all_reduce(state["momentum_buffer"])
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 2
            averaged.append([float(parameter.sum()) for parameter in model.parameters()])
        handle = checkpointer.save(step, "durable")
        try:
            handle.wait("durable", 60)
            given_up.append("")
        except LevelNotReached as error:
            given_up.append(str(error))
    dist.barrier()
    checkpointer.restore()
    told = {
        "given_up": given_up,
        "back": str(checkpointer.last_restore.version),
        "equal": [float(parameter.sum()) for parameter in model.parameters()] == averaged[-1],
    }
    (facts / f"{rank}.json").write_text(json.dumps(told))
    checkpointer.close()
    dist.destroy_process_group()


def differing_at_the_end(root: str, facts: Path, config: holdfast.Config, model: DistributedDataParallel) -> None:
    """The last version of all ranks is in memory alone, and what they have at the end makes none."""
    checkpointer = holdfast.Checkpointer(root, model=model, config=config)
    checkpointer.restore()
    checkpointer.save(0).wait("captured", 60)
    for parameter in model.parameters():
        parameter.data.fill_(float(dist.get_rank() + 1))
    checkpointer.step(1)
    said = ""
    try:
        checkpointer.close()
    except LevelNotReached as error:
        said = str(error)
    (facts / f"{dist.get_rank()}.json").write_text(json.dumps({"said": said}))
    dist.destroy_process_group()


def differing_beside(
    what: str, root: str, facts: Path, config: holdfast.Config, model: DistributedDataParallel
) -> None:
    """What no optimizer owns differs at every other step; a tensor of the dict is another one each time."""
    rank, average = dist.get_rank(), {"w": torch.zeros(64, 64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3) if what == "dict" else None
    shown = {"model": model, "optimizer": optimizer, "average": average}
    checkpointer = holdfast.Checkpointer(root, **shown, replicated=["average*"], config=config)
    checkpointer.restore()
    given_up = []
    for step in range(4):
        value = float(step if step % 2 else 10 * step + rank + 1)
        if what == "dict":
            average["w"] = torch.full((64, 64), value)
        else:
            for parameter in model.parameters():
                parameter.data.fill_(value)
        try:
            checkpointer.save(step, "durable").wait("durable", 60)
            given_up.append("")
        except LevelNotReached as error:
            given_up.append(str(error))
    dist.barrier()
    checkpointer.restore()
    found = average["w"] if what == "dict" else next(model.parameters()).detach()
    (facts / f"{rank}.json").write_text(json.dumps({"given_up": given_up, "holds": found.unique().tolist()}))
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
