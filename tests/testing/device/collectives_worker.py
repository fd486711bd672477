"""One rank of a job on the simulated device: collectives, DDP, FSDP2, or a collective whose peer is gone."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.testing import device as sim

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)


def train(module: nn.Module, device: str, ranks: list[int]) -> list[float]:
    """Three steps; the gradients of several ranks are averaged here, where nobody else does it."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(3):
        for rank in ranks:
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
            (module(batch).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return torch.cat([p.detach().cpu().flatten() for p in whole]).tolist()


def ddp(device: str) -> Any:
    return train(DistributedDataParallel(model(device)), device, [RANK])


def fsdp(device: str) -> Any:
    return _fully_sharded(device, init_device_mesh("sim", (SIZE,)))


def hsdp(device: str) -> Any:
    return _fully_sharded(device, init_device_mesh("sim", (SIZE, 1), mesh_dim_names=("replicas", "shards")))


def _fully_sharded(device: str, mesh: Any) -> Any:
    module = model(device)
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return train(module, device, [RANK])


def attention(device: str) -> Any:
    """The gradients of a causal attention whose heads lie on all ranks: computed so, and in one process."""
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 5, 8) for _ in range(3)]
    heads = init_device_mesh("sim", (SIZE,))
    parts = [distribute_tensor(each.to(device), heads, [Shard(1)]).requires_grad_() for each in whole]
    alone = [each.requires_grad_() for each in whole]
    for each in (parts, alone):
        nn.functional.scaled_dot_product_attention(*each, is_causal=True).square().sum().backward()
    return [[each.grad.full_tensor().tolist() for each in parts], [each.grad.tolist() for each in alone]]


def plain(device: str) -> Any:
    return train(model("cpu"), "cpu", list(range(SIZE)))


def collectives(device: str) -> Any:
    def full(value: float) -> torch.Tensor:
        return torch.full((2,), float(value), device=device)

    def empty(n: int = 2) -> torch.Tensor:
        return torch.empty(n, device=device)

    told = {}
    dist.all_reduce(x := full(RANK + 1))
    told["sum"] = x.tolist()
    dist.all_reduce(x := full(RANK + 1), op=dist.ReduceOp.AVG)
    told["mean"] = x.tolist()
    dist.all_reduce(x := full(RANK + 1), op=dist.ReduceOp.MAX)
    told["max"] = x.tolist()
    dist.all_gather(parts := [empty(), empty()], full(RANK))
    told["gathered"] = torch.cat(parts).tolist()
    dist.reduce_scatter(x := empty(), [full(0), full(1)])
    told["scattered sum"] = x.tolist()
    dist.broadcast(x := full(RANK), 1)
    told["broadcast"] = x.tolist()
    dist.reduce(x := full(RANK + 1), 0)
    told["reduced to 0"] = x.tolist()
    dist.gather(full(RANK), parts := [empty(), empty()] if RANK == 0 else None, dst=0)
    told["gathered at 0"] = torch.cat(parts).tolist() if parts else None
    dist.scatter(x := empty(), [full(5), full(6)] if RANK == 0 else None, src=0)
    told["scattered"] = x.tolist()
    dist.all_to_all_single(x := empty(4), torch.arange(4.0, device=device) + 10 * RANK)
    told["exchanged"] = x.tolist()
    dist.all_to_all(parts := [empty(), empty()], [full(10 * RANK), full(10 * RANK + 1)])
    told["exchanged lists"] = torch.cat(parts).tolist()
    swap = [dist.P2POp(dist.isend, full(RANK), 1 - RANK), dist.P2POp(dist.irecv, x := empty(), 1 - RANK)]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    told["swapped"] = x.tolist()
    dist.barrier()
    dist.all_gather_object(objects := [None, None], {"rank": RANK})
    told["objects"] = objects
    return told


def two_devices(device: str) -> Any:
    """Each rank's collectives go over two devices of its own, and each rank is behind on another one of them."""
    places = [f"sim:{RANK + shift * SIZE}" for shift in (0, 1)]
    sim.sleep(0.2, places[RANK])
    sums = [torch.full((3 + 100 * number,), 1.0, device=place) for number, place in enumerate(places)]
    for _ in range(3):
        for each in sums:
            dist.all_reduce(each)
    return [each.unique().tolist() for each in sums]


def lost_peer(device: str) -> Any:
    """Rank 1 ends; rank 0 finds its device hanging behind a collective, aborts, and sees what is there; twice."""
    groups = {how: dist.new_group(backend="simccl") for how in ("goes on", "error")}
    for group in groups.values():
        dist.all_reduce(torch.ones(2, device=device), group=group)
    torch.accelerator.synchronize()
    if RANK == 1:
        os._exit(0)
    return {how: _abort(device, group, how) for how, group in groups.items()}


def _abort(device: str, group: Any, how: str) -> Any:
    sim.set_abort(how)
    x = torch.full((2,), 7.0, device=device)
    dist.all_reduce(x, group=group)
    x.mul_(2)
    behind = torch.Event("sim")
    behind.record()
    told: dict[str, Any] = {"hangs": not _comes(behind, 0.5)}
    group.abort()
    try:
        torch.accelerator.synchronize()
        told["x"] = x.tolist()
    except RuntimeError as error:
        told["error"] = str(error).splitlines()[0]
    try:
        dist.all_reduce(x, group=group)
    except dist.DistBackendError as error:
        told["next"] = str(error).splitlines()[0]
    told["sound"] = torch.full((2,), 1.0, device=device).add_(1).tolist()
    return told


def _comes(event: torch.Event, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if event.query():
            return True
        time.sleep(0.01)
    return False


def main() -> None:
    out, modes = sys.argv[1], sys.argv[2:]
    sim.load()
    torch.accelerator.set_device_index(RANK)
    dist.init_process_group("cpu:gloo,sim:simccl", init_method=f"file://{out}.store", rank=RANK, world_size=SIZE)
    told = {mode: globals()[mode](f"sim:{RANK}") for mode in modes}
    with open(f"{out}.{RANK}", "w", encoding="utf-8") as file:
        json.dump(told, file)
    if "lost_peer" not in modes:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
