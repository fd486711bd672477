"""Four ranks that make every kind of sharded state, check what they can see alone, and write the rest down.

    python state_worker.py RESULT_DIR

torch is imported once and the ranks are forked before it has a thread; that saves most of the start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import gloo_kit
from holdfast.base.errors import HoldfastError
from holdfast.checkpoint.entries.types import LiveTensor
from holdfast.checkpoint.state.training_state import State
from holdfast.core.layout.bundles import fingerprint, plan_bundles
from holdfast.core.model import Topology
from state_kit import continues
from zoo_optimizers import Accelerated, Lookahead, PostLocalSGDOptimizer

WORLD = 4
TOPOLOGY = Topology(("a", "b"), (0, 0, 1, 1))
Objects = dict[str, Any]
Made = tuple[Objects, Callable[[], None]]


class Net(nn.Module):
    """Rows that four ranks cannot share equally, fewer rows than ranks, dropout, a norm, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.odd = nn.Linear(8, 7)
        self.few = nn.Linear(7, 3)
        self.down = nn.Linear(8, 6, bias=False)
        self.tied = nn.Linear(8, 6, bias=False)
        self.tied.weight = self.down.weight
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x))
        few = self.few(torch.dropout(self.odd(h), 0.2, self.training))
        return self.norm(self.down(h) + self.tied(h)).sum() + few.square().sum()


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Made:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50, cycle_momentum=False)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 6) + dist.get_rank()).sum().backward()
        optimizer.step()
        scheduler.step()

    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, **more}, step


def ddp() -> Made:
    """BatchNorm's buffers differ by rank; one parameter is left out of DDP."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = Net(), nn.BatchNorm1d(6)
            self.private = nn.Parameter(torch.full((2,), float(dist.get_rank())))
            self._ddp_params_and_buffers_to_ignore = ["private"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.norm(x)) + self.private.sum()

    # With more than two ranks a sum depends on how gradients share buckets, and DDP rebuilds those after its first
    # step, so a restarted process would differ from one that was never interrupted; this keeps the first buckets.
    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    return stepping(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def ddp_pairs() -> Made:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(dist.get_rank() // 2)
    model = DistributedDataParallel(Net(), process_group=pairs[dist.get_rank() // 2])
    return stepping(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


def zero1() -> Made:
    """The parameters on all ranks, the state of each on one of them. First buckets kept, as above."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    return stepping(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))


def ddp_lookahead() -> Made:
    """A wrapper around an optimizer that hands out more than its state. First buckets kept, as above."""
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    return stepping(model, Accelerated(Lookahead(model.parameters(), lr=0.01, momentum=0.9)))


def zero1_lookahead() -> Made:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    return stepping(model, ZeroRedundancyOptimizer(model.parameters(), Lookahead, lr=0.01, momentum=0.9))


def local_sgd() -> Made:
    """As the error for DDP with this hook advises: the module inside, and the counters as an object."""
    hook = PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=1, post_local_gradient_allreduce=False)
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    model.register_comm_hook(hook, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), PeriodicModelAverager(period=3, warmup_steps=1)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optim, 2)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 6) + dist.get_rank()).sum().backward()
        optimizer.step()
        scheduler.step()

    return {"model": model.module, "optimizer": optimizer, "scheduler": scheduler, "hook": Counter(hook)}, step


class Counter:
    def __init__(self, hook: PostLocalSGDState) -> None:
        self.hook = hook

    def state_dict(self) -> Any:
        return {"iter": self.hook.iter}

    def load_state_dict(self, state: Any) -> None:
        self.hook.iter = state["iter"]


def fsdp() -> Made:
    model = Net()
    fully_shard(model.odd)
    fully_shard(model)
    return stepping(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def fsdp_lookahead() -> Made:
    """Slow weights that are DTensors as the parameters are."""
    model = Net()
    fully_shard(model)
    return stepping(model, Lookahead(model.parameters(), lr=0.01, momentum=0.9))


def fsdp_columns() -> Made:
    """Sharded over columns: the local part of some is not the first rows."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 8, bias=False))
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if tuple(p.shape) == (5, 8) else None)
    return stepping(model, torch.optim.RMSprop(model.parameters(), lr=0.01, foreach=False))


def hsdp() -> Made:
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return stepping(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


CPU = torch.device("cpu")


class Counted(nn.Module):
    """A net with what only `state_dict()` of a module tells apart: a buffer to keep, one to forget, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.register_buffer("seen", torch.zeros(2) + dist.get_rank())
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return self.net(x)


def first_fsdp() -> Made:
    """Flat parameters: parts begin and end anywhere in a weight; some ranks hold nothing of some."""
    model = Counted()
    model.net.odd = FullyShardedDataParallel(model.net.odd, device_id=CPU, use_orig_params=True)
    model = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    return stepping(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def first_fsdp_hybrid() -> Made:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = ShardingStrategy.HYBRID_SHARD
    model = FullyShardedDataParallel(
        Net(), device_id=CPU, use_orig_params=True, sharding_strategy=hybrid, device_mesh=mesh
    )
    return stepping(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


def first_fsdp_whole() -> Made:
    """Nothing is cut, as DDP; each rank still has its own buffers."""
    strategy = ShardingStrategy.NO_SHARD
    model = FullyShardedDataParallel(Net(), device_id=CPU, use_orig_params=True, sharding_strategy=strategy)
    return stepping(model, torch.optim.AdamW(model.parameters(), lr=0.01))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tp() -> Made:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = parallelize_module(Block(), mesh, dict(PLAN))
    return stepping(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))


def fsdp_tp() -> Made:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Block(), mesh["tp"], dict(PLAN))
    fully_shard(model, mesh=mesh["dp"])
    return stepping(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))


def fsdp_tp_uneven() -> Made:
    """Three rows for each of two: FSDP's cut of TP's part is not equal. Only saved, not trained."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 6, bias=False)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Odd(), mesh["tp"], {"up": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return {"model": model}, lambda: None


def loose() -> Made:
    """DTensors in dicts and in the state of an object."""
    mesh = init_device_mesh("cpu", (4,))
    average = DTensor.from_local(torch.randn(2, 3), mesh, [Shard(0)])

    class Holder:
        def __init__(self) -> None:
            self.average = torch.randn_like(average)

        def state_dict(self) -> Any:
            return {"average": self.average, "mean": [self.average.to_local().mean()]}

        def load_state_dict(self, state: Any) -> None:
            assert isinstance(state["average"], DTensor)
            assert torch.equal(state["average"].to_local().mean(), state["mean"][0])
            self.average = state["average"]

    holder = Holder()

    def step() -> None:
        average.mul_(0.5)
        holder.average.add_(average)

    return {"ema": {"average": average, "whole": torch.ones(2)}, "holder": holder}, step


SCENARIOS: dict[str, Callable[[], Made]] = {
    "ddp_lookahead": ddp_lookahead, "zero1_lookahead": zero1_lookahead, "fsdp_lookahead": fsdp_lookahead,
    "local_sgd": local_sgd, "ddp": ddp, "ddp_pairs": ddp_pairs, "zero1": zero1, "fsdp": fsdp, "fsdp_columns": fsdp_columns, "hsdp": hsdp, "tp": tp,
    "first_fsdp": first_fsdp, "first_fsdp_hybrid": first_fsdp_hybrid, "first_fsdp_whole": first_fsdp_whole,
    "fsdp_tp": fsdp_tp, "fsdp_tp_uneven": fsdp_tp_uneven, "loose": loose,
}  # fmt: skip


def refusals() -> Iterator[tuple[str, str]]:
    """What cannot be saved, with the error."""
    mesh, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    tensors = {
        "partial": DTensor.from_local(torch.ones(2), mesh, [Partial()]),
        "gaps": DTensor.from_local(
            torch.ones(2), square, [_StridedShard(0, split_factor=2), Replicate()], shape=(4,), stride=(1,)
        ),
    }
    hidden = FullyShardedDataParallel(Net(), device_id=CPU, use_orig_params=False)
    gathered = FullyShardedDataParallel(Net(), device_id=CPU, use_orig_params=True)
    things: dict[str, Objects] = {name: {"thing": {name: tensor}} for name, tensor in tensors.items()}
    with FullyShardedDataParallel.summon_full_params(gathered):
        for name, objects in {**things, "hidden": {"model": hidden}, "gathered": {"model": gathered}}.items():
            try:
                State(objects, rank=dist.get_rank(), world_size=WORLD).gather()
                yield name, "nothing"
            except HoldfastError as error:
                yield name, f"{type(error).__name__}: {error}"


def differing() -> Iterator[tuple[str, str]]:
    """DDP whose ranks differ on purpose, or hooks that see one share only, with the error."""
    local, without, averaged = (DistributedDataParallel(Net()) for _ in range(3))
    local.register_comm_hook(PostLocalSGDState(None, None, start_localSGD_iter=100), post_localSGD_hook)
    without.register_comm_hook(None, noop_hook)
    wrapped = PostLocalSGDOptimizer(torch.optim.SGD(averaged.parameters(), lr=0.1), PeriodicModelAverager(period=4))
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dealt = DistributedDataParallel(Net())
    hooked = ZeroRedundancyOptimizer(dealt.parameters(), torch.optim.SGD, lr=0.1)
    hooked.register_state_dict_post_hook(lambda *_: None)
    for name, objects in {
        "dealt": {"model": dealt, "optimizer": hooked},
        "local": {"model": nn.ModuleList([local])},
        "without": {"model": without},
        "averaged": {"model": averaged, "optimizer": wrapped},
    }.items():
        try:
            State(objects, rank=dist.get_rank(), world_size=WORLD).trained()
            yield name, "nothing"
        except HoldfastError as error:
            yield name, str(error)


def told() -> Iterator[tuple[str, str]]:
    """What is said of DDP's communication hooks that keep state: one compresses with feedback of errors, one does not."""
    logger = logging.getLogger("holdfast.checkpoint.state.unsaved_state")
    for name, hook, state in (
        ("compressed", powerSGD_hook, PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)),
        ("reduced", allreduce_hook, dist.group.WORLD),
    ):
        words: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, words=words: words.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        model = DistributedDataParallel(Net())
        model.register_comm_hook(state, hook)
        objects, step = stepping(model, torch.optim.SGD(model.parameters(), lr=0.01))
        looking = State(objects, rank=dist.get_rank(), world_size=WORLD)
        for _ in range(6):
            step()
            looking.gather()
        logger.removeHandler(handler)
        yield name, "; ".join(words)


def boxes_hold_what_they_say(objects: Objects, state: State) -> int:
    """Compares every local part with its box of the whole tensor; the number of tensors compared."""
    tensors = state.gather().tensors
    compared = 0
    for raw, parameter in objects["model"].named_parameters():
        if isinstance(parameter, DTensor):
            live = tensors[f"model.{raw}"]
            box = tuple(
                slice(o, o + n) for o, n in zip(live.shard.extent.offsets, live.shard.extent.lengths, strict=True)
            )
            assert torch.equal(parameter.full_tensor()[box], live.local), raw
            compared += 1
    return compared + flat_boxes_hold_what_they_say(objects["model"], tensors)


def flat_boxes_hold_what_they_say(model: nn.Module, tensors: Mapping[str, LiveTensor]) -> int:
    """The same for rows of numbers out of parameters that the first FSDP gathers."""
    if not isinstance(model, FullyShardedDataParallel):
        return 0
    with FullyShardedDataParallel.summon_full_params(model):
        whole = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}
    mine = {name: tensors[f"model.{name}"] for name in whole if f"model.{name}" in tensors}
    for name, live in mine.items():
        start, length = live.shard.extent.offsets[0], live.shard.extent.lengths[0]
        flat = live.local.dim() == 1 and whole[name].dim() > 1
        expected = whole[name].flatten()[start : start + length] if flat else whole[name][start : start + length]
        assert torch.equal(expected, live.local), name
    return len(mine)


def run(make: Callable[[], Made]) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    objects, step = make()
    state = State(objects, rank=rank, world_size=WORLD)
    began = collectives()
    predicted = state.predict()
    called = collectives() - began
    step()
    began = collectives()
    actual = {name: live.shard for name, live in state.gather().tensors.items()}
    before = state.gather()
    called += collectives() - began
    step()
    after = state.gather()
    compared = boxes_hold_what_they_say(objects, state) if "model" in objects else 0
    saved = continues(make, rank=rank, world_size=WORLD)
    bundles = plan_bundles(saved.shards.values(), values_of=saved.values, topology=TOPOLOGY)
    return {
        "predicted": predicted == actual,
        "steady": (before.structure, before.storages) == (after.structure, after.storages),
        "compared": compared,
        "collectives": called,
        "shards": {
            n: [s.dtype, s.global_shape, s.extent.offsets, s.extent.lengths, s.ranks] for n, s in saved.shards.items()
        },
        "digests": {n: digest(t) for n, t in saved.tensors.items()},
        "values": [[g, hashlib.sha256(v).hexdigest(), v.decode()] for g, v in saved.values.items()],
        "late": sorted(n for n, live in after.tensors.items() if live.late),
        "bundles": {b.bundle_id: [b.ranks, fingerprint(b)] for b in bundles},
    }


def collectives() -> int:
    """How many this rank has begun, in all its groups."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def main(rank: int, results: Path) -> None:
    with gloo_kit.member(rank, WORLD, results):
        found: dict[str, Any] = {name: run(make) for name, make in SCENARIOS.items()}
        found["refusals"] = {**dict(refusals()), **dict(differing()), **dict(told())}
        (results / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(gloo_kit.join(gloo_kit.start(main, WORLD, Path(sys.argv[1])), 100))
