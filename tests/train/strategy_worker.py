"""Eight ranks that build every strategy, step once, and write down what each of them holds.

    python strategy_worker.py RESULT_DIR

torch is imported once and the ranks are forked before it has a thread.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.base.events import Events
from holdfast.core.model import Shard, Topology
from holdfast.train import agree, exposure
from holdfast.train.rehearsal import rehearse
from holdfast.train.state import State
from train.strategies import PLAN, STRATEGIES, WORLD, Block, Strategy, adamw, device_mesh

# Ranks 0 to 3 on one host, 4 to 7 on another.
HOSTS = Topology(("a", "b"), (0, 0, 0, 0, 1, 1, 1, 1))


def rows(shards: tuple[Shard, ...]) -> dict[str, Any]:
    return {s.name: [s.dtype, s.global_shape, s.extent.offsets, s.extent.lengths, s.ranks] for s in shards}


def step(objects: dict[str, Any]) -> None:
    """One optimizer step: the numbers do not matter, the state that it makes does."""
    for parameter in objects["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    objects["optimizer"].step()


def run(strategy: Strategy) -> dict[str, Any]:
    objects = strategy.make()
    state = State(objects, rank=dist.get_rank(), world_size=WORLD, replicated=strategy.replicated)
    predicted = rows(state.trained())
    if "optimizer" in objects:
        step(objects)
    live = state.trained()
    events = Events()
    warned: list[dict[str, Any]] = []
    events.subscribe(lambda event: warned.append(event.fields))
    exposure.warn(agree.ranks(), HOSTS, live, events)
    return {"predicted": predicted, "live": rows(live), "warned": warned}


def main(rank: int, results: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{results / 'rendezvous'}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    try:
        found = {}
        logging.basicConfig(filename=results / f"{rank}.log", level=logging.WARNING)
        for name, strategy in STRATEGIES.items():
            torch.manual_seed(0)
            found[name] = run(strategy)
        (results / f"{rank}.json").write_text(json.dumps(found))
    except BaseException:
        (results / f"{rank}.error").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def plan() -> None:
    """The same strategies before anything is allocated; in processes of their own."""

    def work(tell: Callable[[State], None]) -> None:
        dist.init_process_group("gloo")
        for strategy in STRATEGIES.values():
            state = State(
                strategy.make(),
                rank=dist.get_rank(),
                world_size=WORLD,
                replicated=strategy.replicated,
                allocated=False,
            )
            tell(state)

    planned = rehearse(work, world_size=WORLD, ranks_per_node=4)
    told = {
        name: [[s.name, *rows((s,))[s.name]] for s in found] for name, found in zip(STRATEGIES, planned, strict=True)
    }
    (Path(sys.argv[1]) / "planned.json").write_text(json.dumps(told))


def warm() -> None:
    """Loads what torch loads at first use, so that eight ranks need not. Not with their meshes: torch remembers those."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for name in ("ddp", "zero1"):
        step(STRATEGIES[name].make())
    model = parallelize_module(Block(), device_mesh(tp=2), dict(PLAN))
    fully_shard(Block())
    step({"model": model, "optimizer": adamw(model)})
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(rank, Path(sys.argv[1]))) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=100)
        process.kill()
        process.join(timeout=5)
    plan()
    sys.exit(any(process.exitcode for process in ranks))
