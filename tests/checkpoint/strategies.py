"""Every parallel strategy on eight ranks, twice: as a training script builds it, and as a layout describes it.

What a script builds says nothing about groups; the layout is written down from the meshes alone. The tests hold one
against the other, live and planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from holdfast.core.layout.job_layout import JobLayout, Mesh, Tensor
from holdfast.core.layout.placement import REPLICATE, Placement, only, shard, strided_shard

WORLD = 8
WIDTH, HIDDEN = 6, 9  # rows that neither two nor four nor eight ranks share equally
Objects = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


SHAPES = {
    "up.weight": (HIDDEN, WIDTH), "up.bias": (HIDDEN,), "down.weight": (WIDTH, HIDDEN), "down.bias": (WIDTH,),
    "norm.weight": (WIDTH,), "norm.bias": (WIDTH,),
}  # fmt: skip
EVEN = {name: tuple({HIDDEN: 8}.get(n, n) for n in shape) for name, shape in SHAPES.items()}
TP = {"up.weight": shard(0), "up.bias": shard(0), "down.weight": shard(1)}
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel()}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def mesh(**axes: int) -> Mesh:
    return Mesh(tuple(axes), tuple(axes.values()))


def device_mesh(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def with_states(tensors: list[Tensor], step: Callable[[Tensor], tuple[Placement, ...]] | None = None) -> list[Tensor]:
    """The tensors and what AdamW keeps of them; `step` says how a step count lies if it differs from its tensor."""
    found = list(tensors)
    for one in tensors:
        stem = f"optimizer.state.{one.name.removeprefix('model.')}"
        found += [replace(one, name=f"{stem}.{key}") for key in ("exp_avg", "exp_avg_sq")]
        scalar = tuple(REPLICATE if "shard" in p.kind.value else p for p in one.placements)
        found.append(Tensor(f"{stem}.step", "F32", (), scalar if step is None else step(one), one.mesh))
    return found


def laid(where: Mesh, place: Callable[[str], tuple[Placement, ...]], shapes: dict[str, Any] = SHAPES) -> JobLayout:
    tensors = [Tensor(f"model.{name}", "F32", shape, place(name)) for name, shape in shapes.items()]
    return JobLayout(WORLD, [where], with_states(tensors))


@dataclass(frozen=True)
class Strategy:
    """What a script does, and what must come of it."""

    make: Callable[[], Objects]
    layout: JobLayout
    replicated: tuple[str, ...] = ()


def ddp() -> Objects:
    model = DistributedDataParallel(Block())
    return {"model": model, "optimizer": adamw(model)}


def zero1() -> Objects:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Block())
    return {"model": model, "optimizer": ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)}


def _zero1_layout() -> JobLayout:
    """Greedy by size, as torch deals: the largest parameter to the rank that has least."""
    loads, owner = [0] * WORLD, {}
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        owner[f"model.{name}"] = loads.index(min(loads))
        loads[owner[f"model.{name}"]] += sizes[name]
    weights = [Tensor(f"model.{name}", "F32", shape, (REPLICATE,)) for name, shape in SHAPES.items()]
    states = [t for t in with_states(weights) if t.name.startswith("optimizer")]
    named = {f"optimizer.state.{name.removeprefix('model.')}": rank for name, rank in owner.items()}
    dealt = [replace(t, placements=(only(named[t.name.rpartition(".")[0]]),)) for t in states]
    return JobLayout(WORLD, [mesh(dp=8)], [*weights, *dealt])


def fsdp() -> Objects:
    model = Block()
    fully_shard(model)
    return {"model": model, "optimizer": adamw(model)}


def hsdp_tp() -> Objects:
    where = device_mesh(replicate=2, shard=2, tp=2)
    model = Block()
    model.up, model.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
    parallelize_module(model, where["tp"], dict(PLAN))
    fully_shard(model, mesh=where["replicate", "shard"])
    return {"model": model, "optimizer": adamw(model)}


def _sharded_over_tp(name: str) -> Placement:
    """FSDP's cut of dimension 0: where TP cuts it too, of each of TP's parts."""
    return strided_shard(0, 2) if TP.get(name) == shard(0) else shard(0)


def guide() -> Objects:
    """The network of MindSpore's guide: the first weight in four parts, the rest whole, on two rows of four."""
    where = device_mesh(dp=2, mp=4)
    place = {"w1": [Replicate(), Shard(0)], "w2": [Replicate()] * 2, "w3": [Replicate()] * 2}
    shapes = {"w1": (64, 32), "w2": (32, 32), "w3": (32, 16)}
    weights = {
        name: nn.Parameter(distribute_tensor(torch.randn(shape), where, place[name])) for name, shape in shapes.items()
    }
    model = nn.ParameterDict(weights)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)}


def _guide_layout() -> JobLayout:
    rows = {"w1": ((64, 32), shard(0)), "w2": ((32, 32), REPLICATE), "w3": ((32, 16), REPLICATE)}
    weights = [Tensor(f"model.{n}", "F32", shape, (REPLICATE, p)) for n, (shape, p) in rows.items()]
    moments = [
        replace(t, name=f"optimizer.state.{t.name.removeprefix('model.')}.momentum_buffer", mesh=0) for t in weights
    ]
    return JobLayout(WORLD, [mesh(dp=2, mp=4)], [*weights, *moments])


def tp_sp() -> Objects:
    model = parallelize_module(Block(), device_mesh(tp=8), dict(PLAN))
    return {"model": model, "optimizer": adamw(model)}


def pp() -> Objects:
    """Two stages of four data parallel ranks; the embedding is tied over the stages."""
    stage = dist.get_rank() // 4
    groups = [dist.new_group(list(range(4))), dist.new_group(list(range(4, 8)))]
    layers = nn.ModuleDict({f"layer{stage}": Block(), "embedding": nn.Embedding(5, WIDTH)})
    model = DistributedDataParallel(layers, process_group=groups[stage])
    return {"model": model, "optimizer": adamw(model)}


def _pp_layout() -> JobLayout:
    where = mesh(pp=2, dp=4)
    tensors = [
        Tensor(f"model.layer{stage}.{name}", "F32", shape, (only(stage), REPLICATE))
        for stage in range(2)
        for name, shape in SHAPES.items()
    ]
    tensors.append(Tensor("model.embedding.weight", "F32", (5, WIDTH), (only(0, 1), REPLICATE)))
    return JobLayout(WORLD, [where], with_states(tensors))


def ep() -> Objects:
    """Attention on all ranks alike; six experts on one axis of another mesh."""
    experts, dense = device_mesh(edp=2, ep=4), device_mesh(dp=8)
    weights = {
        "attention": nn.Parameter(distribute_tensor(torch.randn(4, 4), dense, [Replicate()])),
        "experts": nn.Parameter(distribute_tensor(torch.randn(6, 4, 4), experts, [Replicate(), Shard(0)])),
    }
    model = nn.ParameterDict(weights)
    return {"model": model, "optimizer": adamw(model)}


def _ep_layout() -> JobLayout:
    tensors = [
        Tensor("model.attention", "F32", (4, 4), (REPLICATE,), 1),
        Tensor("model.experts", "F32", (6, 4, 4), (REPLICATE, shard(0)), 0),
    ]
    return JobLayout(WORLD, [mesh(edp=2, ep=4), mesh(dp=8)], with_states(tensors))


def cp() -> Objects:
    """Data and context parallel ranks shard together; tensor parallelism inside."""
    where = device_mesh(dp=2, cp=2, tp=2)
    together = where["dp", "cp"]._flatten("dp_cp")
    model = Block()
    model.up, model.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
    parallelize_module(model, where["tp"], dict(PLAN))
    fully_shard(model, mesh=together)
    return {"model": model, "optimizer": adamw(model)}


def twice_cut() -> Objects:
    """Two axes cut one dimension; parts of unequal length, and empty ones."""
    where = device_mesh(a=2, b=4)
    tensors = {
        "odd": distribute_tensor(torch.randn(13, 2), where, [Shard(0), Shard(0)]),
        "few": distribute_tensor(torch.randn(3, 2), where, [Shard(0), Shard(0)]),
        "both": distribute_tensor(torch.randn(5, 7), where, [Shard(1), Shard(0)]),
    }
    return {"thing": tensors}


def _twice_cut_layout() -> JobLayout:
    rows = {
        "odd": ((13, 2), (shard(0), shard(0))),
        "few": ((3, 2), (shard(0), shard(0))),
        "both": ((5, 7), (shard(1), shard(0))),
    }
    return JobLayout(
        WORLD, [mesh(a=2, b=4)], [Tensor(f"thing.{n}", "F32", shape, place) for n, (shape, place) in rows.items()]
    )


class Large(nn.Module):
    """2.25 MiB of parameters, so that headers do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(384, 768, bias=False), nn.Linear(768, 384, bias=False)


LARGE = {"up.weight": (768, 384), "down.weight": (384, 768)}


def large() -> Objects:
    where = device_mesh(replicate=2, shard=2, tp=2)
    model = parallelize_module(Large(), where["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=where["replicate", "shard"])
    return {"model": model, "optimizer": adamw(model)}


STRATEGIES = {
    "ddp": Strategy(ddp, laid(mesh(dp=8), lambda _: (REPLICATE,))),
    "zero1": Strategy(zero1, _zero1_layout()),
    "fsdp": Strategy(fsdp, laid(mesh(fsdp=8), lambda _: (shard(0),))),
    "hsdp_tp": Strategy(
        hsdp_tp,
        laid(
            mesh(replicate=2, shard=2, tp=2),
            lambda name: (REPLICATE, _sharded_over_tp(name), TP.get(name, REPLICATE)),
            EVEN,
        ),
    ),
    "large": Strategy(
        large,
        laid(mesh(replicate=2, shard=2, tp=2), lambda name: (REPLICATE, _sharded_over_tp(name), TP[name]), LARGE),
    ),
    "guide": Strategy(guide, _guide_layout()),
    "tp_sp": Strategy(tp_sp, laid(mesh(tp=8), lambda name: (TP.get(name, REPLICATE),))),
    "pp": Strategy(pp, _pp_layout(), ("model.embedding.*",)),
    "ep": Strategy(ep, _ep_layout()),
    "cp": Strategy(cp, laid(mesh(dp_cp=4, tp=2), lambda name: (_sharded_over_tp(name), TP.get(name, REPLICATE)), EVEN)),
    "twice_cut": Strategy(twice_cut, _twice_cut_layout()),
}
