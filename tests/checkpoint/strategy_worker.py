"""Eight ranks that build every strategy, step once, and write down what each of them holds.

    python strategy_worker.py RESULT_DIR

torch is imported once and the ranks are forked before it has a thread.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rank_files
import torch
from safetensors import safe_open
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import command_kit
import gloo_kit
from checkpoint.strategies import PLAN, STRATEGIES, WORLD, Block, Strategy, adamw, device_mesh
from holdfast.adapters.mindspore import restore_group_info_list
from holdfast.adapters.mindspore.rank_files import RankCheckpoints
from holdfast.base.config import Config
from holdfast.base.errors import HoldfastError
from holdfast.base.events import Events
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.dry_run import rehearse
from holdfast.checkpoint.job import collectives as agree
from holdfast.checkpoint.job import redundancy_warning
from holdfast.checkpoint.state.training_state import State
from holdfast.core.model import Shard, Topology

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
    redundancy_warning.warn(agree.ranks(), HOSTS, live, events)
    return {"predicted": predicted, "live": rows(live), "warned": warned}


def collectives() -> int:
    """How many this rank has begun, in all its groups."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def save_and_wait(rank: int, results: Path) -> int:
    """How many collectives a save was. A real save of the large job on two nodes; keepers stay until everything about them was asked."""
    objects = STRATEGIES["large"].make()
    config = Config(node_label="ab"[rank // 4], runtime_dir=str(results / "r"), every="0", durable_every="0")
    checkpointer = Checkpointer(str(results / "job"), config=config, **objects)
    checkpointer.restore()
    step(objects)
    before = collectives()
    handle = checkpointer.save(0, "durable")
    handle.wait("replicated", 60)
    handle.wait("durable", 60)
    called = collectives() - before
    (results / f"status-{rank}.json").write_text(json.dumps(checkpointer.keeper_status()))
    (results / f"saved-{rank}").touch()
    until(results / "asked")
    checkpointer.close()
    return called


def guide_scenario(rank: int, results: Path) -> dict[str, Any]:
    """What the guide does by hand, as examples/rank_files.py does it: run, lose rank 0's files, recover, lose 4's too."""
    home = results / "checkpoints"
    where = device_mesh(dp=2, mp=4)
    model, optimizer = rank_files.build(where)
    files = RankCheckpoints(home, {"model": model, "optimizer": optimizer})
    info = home / f"rank_{rank}" / "group_info.pb"
    found: dict[str, Any] = {
        "before": files.recover(),
        "group_info": [restore_group_info_list(str(info)), info.stat().st_mode & 0o777],
        "saved": [],
    }
    for number in range(6):
        rank_files.train(model, optimizer, number)
        before = collectives()
        saved = files.save(number // 4 + 1, number % 4 + 1)
        found["collectives"] = collectives() - before
        found["saved"].append(str(saved.relative_to(home)))
    found["slices"] = {f"model.{name}": p.to_local().nbytes for name, p in model.named_parameters()}
    with safe_open(saved, "pt") as file:
        found["in_file"] = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118 - not a dict
    found["expected"] = [rank_files.train(model, optimizer, number) for number in range(6, 9)]
    expected = [p.to_local().clone() for p in model.parameters()]

    lose(home, rank)
    model, optimizer = rank_files.build(where)
    files = RankCheckpoints(home, {"model": model, "optimizer": optimizer})
    found["recovered"] = files.recover()
    found["again"] = [rank_files.train(model, optimizer, number) for number in range(6, 9)]
    found["bitwise"] = all(torch.equal(p.to_local(), e) for p, e in zip(model.parameters(), expected, strict=True))
    found["saved"].append(str(files.save(3, 1).relative_to(home)))

    lose(home, rank)
    if rank == 4:
        for path in (home / "rank_4").glob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.chmod(0o600)
            path.write_bytes(data)
    dist.barrier()
    model, optimizer = rank_files.build(where)
    untouched = [p.to_local().clone() for p in model.parameters()]
    try:
        RankCheckpoints(home, {"model": model, "optimizer": optimizer}).recover()
    except HoldfastError as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    found["untouched"] = all(torch.equal(p.to_local(), e) for p, e in zip(model.parameters(), untouched, strict=True))
    found["untouched"] = found["untouched"] and not optimizer.state
    return found


def lose(home: Path, rank: int) -> None:
    dist.barrier()
    if rank == 0:
        shutil.rmtree(home / "rank_0")
    dist.barrier()


def until(*paths: Path) -> None:
    deadline = time.monotonic() + 90
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not come"
        time.sleep(0.02)


def ask(results: Path) -> None:
    """The commands about a job that runs."""
    until(*(results / f"saved-{rank}" for rank in range(WORLD)))
    environment = {**os.environ, "HOLDFAST_RUNTIME_DIR": str(results / "r")}
    for command in ("groups", "plan"):
        (results / f"{command}.json").write_text(json.dumps(asdict(command_kit.ask([command, "--json"], environment))))
    (results / "asked").touch()


def main(rank: int, results: Path) -> None:
    with gloo_kit.member(rank, WORLD, results):
        found = {}
        logging.basicConfig(filename=results / f"{rank}.log", level=logging.WARNING)
        for name, strategy in STRATEGIES.items():
            torch.manual_seed(0)
            found[name] = run(strategy)
        found["scenario"] = guide_scenario(rank, results)
        found["collectives"] = {"before": collectives(), "save": save_and_wait(rank, results)}
        (results / f"{rank}.json").write_text(json.dumps(found))


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
    ranks = gloo_kit.start(main, WORLD, Path(sys.argv[1]))
    ask(Path(sys.argv[1]))
    failed = gloo_kit.join(ranks, 100)
    plan()
    sys.exit(failed)
