"""The script of the DCP door: FSDP2 or DDP, saved by `dcp.save`, loaded by `dcp.load`. Not a test itself.

torchrun dcp_worker.py ROOT --steps N [--ddp] [--stage] [--no-random] [--wide]
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.adapters.dcp import AsyncStager, StorageReader, StorageWriter
from holdfast.testing.contracts import adapter_output

warnings.filterwarnings("ignore")


class State:
    """Model, optimizer, step and data position, as DCP's own `Stateful`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, random: bool) -> None:
        self.model, self.optimizer, self.random, self.step = model, optimizer, random, -1

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        rng = {"rng": {f"rank{dist.get_rank()}": torch.get_rng_state()}} if self.random else {}
        return {"model": model, "optimizer": optimizer, "step": self.step, **rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]
        if self.random:
            torch.set_rng_state(state["rng"][f"rank{dist.get_rank()}"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--stage", action="store_true")
    parser.add_argument("--no-random", action="store_true")  # then any number of ranks may go on
    parser.add_argument("--wide", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options)
    # After DDP is gone: as the last owner of the group it would join the group's threads with the interpreter locked, and one
    # of them may wait for that lock to drop the last tensor.
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    width = 320 if options.wide else 256
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(32, width),
        torch.nn.Dropout(0.1 * (not options.no_random)),
        torch.nn.Linear(width, width),
        torch.nn.Linear(width, 8),
    )
    if options.ddp:
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    writer = StorageWriter(options.root, replicated=["*.model", "*.optimizer"] if options.ddp else ())
    reader = StorageReader(writer)
    state = State(model, optimizer, not options.no_random)
    if reader.find() is not None:
        planner = dcp.DefaultLoadPlanner(allow_partial_load=False)
        dcp.load({"app": state}, storage_reader=reader, planner=planner)
    start = state.step + 1
    adapter_output.start(rank, start)
    whole = [parameter.detach() for parameter in model.parameters()]
    adapter_output.whole(rank, start, whole)
    future = None
    beside = dist.new_group() if options.stage else None  # DCP plans in its thread while training uses the other one
    for step in range(start, options.steps):
        if options.no_random:
            torch.manual_seed(step * 100 + rank)
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step = step
        if options.stage:
            if future is not None:
                future.result()
            stager = AsyncStager(writer, step=step)
            future = dcp.async_save({"app": state}, storage_writer=writer, async_stager=stager, process_group=beside)
        else:
            dcp.save({"app": state}, checkpoint_id=f"{options.root}/step-{step}", storage_writer=writer)
        moments = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
        adapter_output.step(rank, step, [loss, *model.parameters(), *moments])
    if future is not None:
        future.result()
    adapter_output.whole(rank, options.steps, whole)
    writer.close()


if __name__ == "__main__":
    main()
