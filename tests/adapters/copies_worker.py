"""Four real ranks that save k copies of every slice, lose every choice of k - 1 and of k folders, and write down what came back.

python copies_worker.py RESULT_DIR
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import gloo_kit
from holdfast.adapters.mindspore.rank_files import RankCheckpoints
from holdfast.base.errors import HoldfastError
from holdfast.checkpoint.state.training_state import State

WORLD = 4
WHOLE, HALF = [Replicate(), Replicate()], [Replicate(), Shard(0)]
# By name: copies, and how each of the weights lies on a mesh of 2 x 2. Half a weight lives on two ranks.
CASES: dict[str, tuple[int, list[Any]]] = {"halves": (2, [HALF] * 4 + [WHOLE] * 7), "whole": (3, [WHOLE] * 10)}
LEARNING_RATE = 0.0123


def build(mesh: DeviceMesh, placements: list[Any], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    half = mesh.get_local_rank("mp")
    weights = []
    for number, placed in enumerate(placements):
        whole = torch.randn(16 + 2 * number, 3)
        local = whole.chunk(2)[half].clone() if placed is HALF else whole
        weights.append(nn.Parameter(DTensor.from_local(local, mesh, placed, run_check=False)))
    model = nn.Module()
    for number, weight in enumerate(weights):
        model.register_parameter(f"w{number}", weight)
    return {"model": model, "optimizer": torch.optim.SGD(weights, lr=0.5, momentum=0.9, foreach=False)}


def step(objects: dict[str, Any]) -> None:
    for weight in objects["model"].parameters():
        weight.grad = weight.detach().clone()
    objects["optimizer"].step()


def bits(objects: dict[str, Any]) -> list[bytes]:
    """All the state of a rank."""
    optimizer = objects["optimizer"]
    tensors = [*objects["model"].parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    values = [tensor.detach().to_local().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return [*values, repr(optimizer.param_groups[0]["lr"]).encode()]


def load(home: Path, objects: dict[str, Any], copies: int | None) -> dict[str, Any]:
    before = bits(objects)
    try:
        done = RankCheckpoints(home, objects, copies=copies).recover()
    except HoldfastError as error:
        return {"refused": f"{type(error).__name__}: {error}", "untouched": bits(objects) == before}
    return {"done": done}


def move(rank: int, home: Path, lost: tuple[int, ...], *, away: bool) -> None:
    """Rank 0 takes folders away, or brings them back."""
    dist.barrier()
    for number in lost if rank == 0 else ():
        here, gone = home / f"rank_{number}", home.parent / f"{home.name}.lost_{number}"
        if away:
            here.rename(gone)
        else:
            (here / "group_info.pb").unlink()
            here.rmdir()
            gone.rename(here)
    dist.barrier()


def damage(rank: int, home: Path) -> None:
    dist.barrier()
    path = home / f"rank_{rank}" / "checkpoint-1_2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def run(rank: int, results: Path, case: str, mesh: DeviceMesh) -> dict[str, Any]:
    copies, placements = CASES[case]
    home = results / case
    objects = build(mesh, placements, 0)
    objects["optimizer"].param_groups[0]["lr"] = LEARNING_RATE
    files = RankCheckpoints(home, objects, copies=copies)
    found: dict[str, Any] = {"before": files.recover(), "lost": []}
    saved = {}
    for number in (1, 2):
        step(objects)
        files.save(1, number)
        saved[number] = bits(objects)
    shards = State(objects, rank=rank, world_size=WORLD).trained()
    found["shards"] = [[s.name, s.extent.offsets, s.num_bytes, s.ranks] for s in shards]
    for size in (0, copies - 1, copies):
        for lost in itertools.combinations(range(WORLD), size):
            move(rank, home, lost, away=True)
            fresh = build(mesh, placements, 1)
            outcome = load(home, fresh, copies)
            found["lost"].append([lost, outcome | {"bitwise": bits(fresh) == saved[2]}])
            move(rank, home, lost, away=False)
    found["as whole files"] = load(home, build(mesh, placements, 1), None)
    found["other numbers"] = load(home, build(mesh, placements, 1), 1 + rank % 2)
    if case == "halves":
        for damaged in (0, 2):
            if rank == damaged:
                damage(rank, home)
            else:
                dist.barrier()
            dist.barrier()
            fresh = build(mesh, placements, 1)
            found[f"damaged {damaged}"] = load(home, fresh, copies)
            found[f"damaged {damaged}"]["is"] = [number for number, one in saved.items() if one == bits(fresh)]
    return found


def main(rank: int, results: Path) -> None:
    with gloo_kit.member(rank, WORLD, results):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "mp"))
        found = {case: run(rank, results, case, mesh) for case in CASES}
        (results / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(gloo_kit.join(gloo_kit.start(main, WORLD, Path(sys.argv[1])), 80))
