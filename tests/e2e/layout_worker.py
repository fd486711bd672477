"""One rank of a job in some layout: restores, trains a few steps, saves, writes down its full tensors. Not a test itself.

python layout_worker.py SPEC (JSON): layout, steps, root, out, and how to end. Gradients are a function of name and step,
so every layout trains the same full tensors, without talking to anybody.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast

TP_PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


class Loader:
    """Where this rank stands in its data; made of all ranks' positions if `all_ranks` jobs ask for it."""

    def __init__(self, rank: int) -> None:
        self.position = 1000 * rank

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class WholeLoader(Loader):
    """One that can make its position of those of all ranks that were saved."""

    def load_state_dicts(self, states: list[dict[str, int]], rank: int, world_size: int) -> None:
        self.position = sum(state["position"] for state in states) * 10 + rank


class Layers(nn.Module):
    """Layers by number; a stage of a pipeline has some of them. Never run: gradients are made up."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def model_of(layout: str, rank: int, big: int, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {"0": nn.Linear(12, 36), "1": nn.LayerNorm(36), "2": nn.Linear(36, 7)}
    layers["3"] = nn.Linear(8, big, bias=False) if big else nn.Linear(3, 2)
    world = dist.get_world_size() if dist.is_initialized() else 1
    ends = {"embed": nn.Linear(9, 5, bias=False), "head": nn.Linear(9, 5, bias=False)} if tied else {}
    if tied:  # one weight, where both are; the same twice, where they are in two stages
        ends["head"].weight = ends["embed"].weight
    if layout == "pp":  # stages in order; the last one has what is left
        mine = {name: layer for name, layer in layers.items() if min(int(name) * world // 3, world - 1) == rank}
        mine |= {name: layer for name, layer in ends.items() if rank == (world - 1 if name == "head" else 0)}
        return Layers(mine)
    model = Layers(layers | ends)
    if layout == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if layout == "first_fsdp":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if layout == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shard")))
    if layout == "tp":
        return parallelize_module(model, init_device_mesh("cpu", (world,)), TP_PLAN)
    if layout == "fsdp_tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        return fully_shard(parallelize_module(model, mesh["tp"], TP_PLAN), mesh=mesh["dp"])
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    assert layout == "one"
    return model


def whose(name: str) -> str:
    """A parameter's name in the whole model, where the head is the embedding."""
    return name.removeprefix("module.").replace("head.", "embed.")


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
    return torch.randn(shape, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for name, parameter in model.named_parameters():
        full = gradient(whose(name), parameter.shape, step)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = full if parameter.numel() else None  # FSDP leaves none where other ranks hold it all
    optimizer.step()
    optimizer.zero_grad()


def digest(tensor: torch.Tensor) -> str:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{full.dtype} {tuple(full.shape)} {hashlib.blake2b(data, digest_size=12).hexdigest()}"


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {}
    if isinstance(model, FullyShardedDataParallel):  # gathered by PyTorch
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            found = {name: digest(tensor) for name, tensor in model.state_dict().items()}
            for name, state in FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"].items():
                found |= {f"{name}.{key}": digest(value) for key, value in state.items()}
        return found
    for name, parameter in model.named_parameters():
        name = whose(name)
        found[name] = digest(parameter)
        for key, value in sorted(optimizer.state[parameter].items()):
            found[f"{name}.{key}"] = digest(value)
    return found


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if world > 1 or spec["layout"] == "first_fsdp":
        dist.init_process_group("gloo", init_method=f"file://{spec['rendezvous']}", rank=rank, world_size=world)
    model = model_of(spec["layout"], rank, spec["big"], tied=spec.get("tied", False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = (WholeLoader if spec.get("all_ranks") else Loader)(rank)
    torch.manual_seed(77 + rank)
    facts: dict[str, Any] = {"seed": torch.initial_seed()}
    checkpointer = holdfast.Checkpointer(
        spec["root"], model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, durable_every="0"
    )
    out = Path(spec["out"])
    started = time.perf_counter()
    (out / f"{spec['name']}-{rank}.begun").touch()
    try:
        facts["start"] = start = checkpointer.restore(strict=spec.get("strict"), **spec.get("restore", {}))
    except holdfast.HoldfastError as error:
        facts["error"] = f"{type(error).__name__}: {error}"
        write(out / f"{spec['name']}-{rank}.json", facts)
        os._exit(0)
    facts["seconds"] = time.perf_counter() - started
    report = checkpointer.last_restore
    assert report is not None
    facts |= {"report": str(report), "bytes": dict(report.bytes), "by_rank": report.by_rank}
    facts |= {"not_used": report.not_used, "not_loaded": report.not_loaded, "misfit": report.misfit}
    facts |= {
        "restored": content(model, optimizer),
        "random": torch.rand(1).item(),
        "lr": optimizer.param_groups[0]["lr"],
    }
    facts |= {"position": loader.position, "counters": checkpointer.keeper_status()["counters"]}
    for step in range(start, start + spec["steps"]):
        train(model, optimizer, step)
        scheduler.step()
        loader.position += 1
    facts |= {"state": content(model, optimizer), "lr_after": optimizer.param_groups[0]["lr"], "at": loader.position}
    if spec["steps"]:
        handle = checkpointer.save(start + spec["steps"] - 1, level=spec["level"])
        handle.wait(spec["level"], 60)
        facts["version"] = str(handle.version)
    facts["random_after"] = torch.rand(1).item()
    write(out / f"{spec['name']}-{rank}.json", facts)
    if world > 1:
        dist.barrier()
    if spec.get("dies"):
        os._exit(0)
    checkpointer.close()
    if world > 1:
        dist.destroy_process_group()


def write(path: Path, facts: dict[str, Any]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(facts))
    temporary.rename(path)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
