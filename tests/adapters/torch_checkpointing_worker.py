"""A training with torch_checkpointing as its users write it, with two lines of holdfast; run by test_torch_checkpointing.py. No test.

torchrun torch_checkpointing_worker.py ROOT --steps N [--fsdp] [--async-save] [--wide] [--kill N --moment M]
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from kill_once import kill_once
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

import holdfast.adapters.torch_checkpointing as hf
from holdfast.testing.contracts import adapter_output

warnings.filterwarnings("ignore")


def last_of_the_library(root: Path) -> str | None:
    """The newest checkpoint by the names of the directories, as the library's tutorial looks for it."""
    found = [path for path in root.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return str(max(found, key=lambda path: int(path.name.removeprefix("step_")))) if found else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--no-random", action="store_true", help="then any number of ranks may go on")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--kill", type=int, default=-1, help="rank 1 kills itself with SIGKILL in this step, once")
    parser.add_argument("--moment", choices=("gradients", "save", "saved"), default="gradients", help="of --kill")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    width = 320 if options.wide else 256
    net = torch.nn.Sequential(
        torch.nn.Linear(32, width), torch.nn.Dropout(0.1 * (not options.no_random)), torch.nn.Linear(width, width)
    )
    model: torch.nn.Module = DistributedDataParallel(net) if not options.fsdp else net
    if options.fsdp:
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    process = CheckpointProcessConfig(subprocess_init_timeout_secs=300)  # of 30 s a busy machine needs more
    save: Any = SyncCheckpointSaverConfig()
    if options.async_save:
        save = AsyncCheckpointSaverConfig(staging_config=staging, process_config=process)
    alike = [] if options.fsdp else ["model", "optimizer"]
    # Some file systems, ext4 among them, refuse the unaligned direct writes that are the library's default.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    library = CheckpointManager.Config(save=save, storage_config=storage)
    manager = hf.manager(options.root, library, replicated=alike)

    def payload(step: int) -> dict[str, Any]:
        if options.fsdp:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments, "step": step}
        return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}

    start, newest = 0, hf.newest(options.root, last_of_the_library(options.root))
    if newest is not None:
        into = payload(0)
        if not options.fsdp:
            into["optimizer"] = None  # all of it, as the tutorial has it: a new optimizer has no state to fill
        found = manager.load(newest, into=into)
        start = int(found["step"])
        if options.fsdp:
            set_state_dict(
                model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
            )  # fmt: skip
        else:
            optimizer.load_state_dict(found["optimizer"])
        loaded = json.dumps(getattr(manager, "holdfast_loaded", ""))
        print(f"from {rank} {loaded}\n", end="", flush=True)  # one write: ranks share the pipe

    def dies(moment: str) -> None:
        if (rank, step, moment) == (1, options.kill, options.moment):
            kill_once(options.root / "killed")

    adapter_output.start(rank, start)
    whole = [parameter.detach() for parameter in model.parameters()]
    adapter_output.whole(rank, start, whole)
    for step in range(start, options.steps):
        if options.no_random:
            torch.manual_seed(step * 100 + rank)
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        dies("gradients")
        with manager.lock():
            optimizer.step()
        optimizer.zero_grad()
        dies("save")
        manager.save(str(options.root / f"step_{step + 1}"), payload(step + 1))
        dies("saved")
        adapter_output.step(rank, step, [loss.detach(), *tensors(model, optimizer)])
    digest = adapter_output.digest(tensors(model, optimizer))
    print(f"state {rank} {digest}\n", end="", flush=True)
    adapter_output.whole(rank, options.steps, whole)
    manager.close()


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Everything of this rank that training changes."""
    moments = [tensor for entry in optimizer.state.values() for _, tensor in sorted(entry.items())]
    return [*(parameter.detach() for parameter in model.parameters()), *moments]


if __name__ == "__main__":
    main()
