"""What users of DCP rely on, four ranks, with our writer and reader: each behaviour is tried and told. Not a test itself.

torchrun --nproc-per-node 4 dcp_behaviours_worker.py ROOT
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, zeros

from holdfast.adapters.dcp import StorageReader, StorageWriter

warnings.filterwarnings("ignore")
WHOLE = torch.arange(48.0).view(6, 8)  # four ranks split neither side evenly in every layout
SHARED: dict[str, Placement] = {"whole": Replicate(), "rows": Shard(0)}
BEHAVIOURS: dict[str, Callable[[StorageWriter, StorageReader], None]] = {}


def behaviour(check: Callable[[StorageWriter, StorageReader], None]) -> Callable[[StorageWriter, StorageReader], None]:
    BEHAVIOURS[check.__name__] = check
    return check


def layouts() -> dict[str, tuple[Any, tuple[Placement, ...]]]:
    """Every way to lay a matrix out on a line and on a square of ranks, without partial sums."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    ways = (Replicate(), Shard(0), Shard(1))
    found = {f"line {way}": (line, (way,)) for way in ways}
    return found | {f"square {one} {two}": (square, (one, two)) for one, two in itertools.product(ways, ways)}


@behaviour
def every_layout_is_loaded_into_every_other(writer: StorageWriter, reader: StorageReader) -> None:
    ways = layouts()
    saved = {name: distribute_tensor(WHOLE, mesh, placements) for name, (mesh, placements) in ways.items()}
    dcp.save(saved, storage_writer=writer)
    names = list(ways)
    for shift in range(1, len(names)):
        into = dict(zip(names, names[shift:] + names[:shift], strict=True))
        state = {name: zeros(6, 8, device_mesh=ways[to][0], placements=ways[to][1]) for name, to in into.items()}
        dcp.load(state, storage_reader=reader)
        for name, tensor in state.items():
            assert torch.equal(tensor.full_tensor(), WHOLE), f"{name} into {into[name]}"
    plain = {name: torch.zeros(6, 8) for name in names}
    dcp.load(plain, storage_reader=reader)
    assert all(torch.equal(tensor, WHOLE) for tensor in plain.values())


class Reduces:
    """Its loading is a collective: all ranks must load their objects in one order."""

    def __init__(self, gathers: bool) -> None:
        self.gathers, self.loaded = gathers, 0

    def state_dict(self) -> dict[str, Any]:
        return {"size": 1 + self.gathers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = torch.ones(state["size"])
        if self.gathers:
            dist.all_gather([torch.zeros_like(mine) for _ in range(dist.get_world_size())], mine)
        else:
            dist.all_reduce(mine)
        self.loaded += 1


@behaviour
def the_order_of_names_may_differ_between_ranks(writer: StorageWriter, reader: StorageReader) -> None:
    objects = {"a": Reduces(True), "b": Reduces(False)}
    state = dict(sorted(objects.items(), reverse=dist.get_rank() % 2 == 1))
    dcp.save(state, storage_writer=writer)
    dcp.load(state, storage_reader=reader)
    assert [each.loaded for each in objects.values()] == [1, 1]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(6, 12), torch.nn.Linear(12, 5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(batch)))


def trained(wrap: Callable[[Model], torch.nn.Module], seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, DTensor):
        return torch.equal(one.full_tensor(), other.full_tensor() if isinstance(other, DTensor) else other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def failed(work: Callable[[], object]) -> dict[int, Any]:
    """What DCP told of the ranks that failed; the same on every rank."""
    with pytest.raises(dcp.CheckpointException) as caught:
        work()
    return dict(caught.value.failures)


@behaviour
def a_part_of_what_was_saved_is_loaded_also_without_a_template(writer: StorageWriter, reader: StorageReader) -> None:
    model, optimizer = trained(fully_shard, 1)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=writer)
    other, _ = trained(fully_shard, 2)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, storage_reader=reader)
    assert same(state["model"], weights)
    read = _load_state_dict_from_keys("optimizer.state", storage_reader=reader)["optimizer"]
    assert read.keys() == {"state"}
    assert same(moments["state"], read["state"])


@behaviour
def fine_tuning_takes_what_is_there_and_keeps_what_is_new(writer: StorageWriter, reader: StorageReader) -> None:
    model, _ = trained(fully_shard, 1)
    dcp.save({"model": get_model_state_dict(model)}, storage_writer=writer)
    other, _ = trained(
        lambda made: fully_shard(torch.nn.ModuleDict({"head": torch.nn.Linear(5, 2)}).train() and made), 2
    )
    state = {"model": {**get_model_state_dict(other), "head.weight": torch.full((2, 5), 7.0)}}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=reader, planner=planner)
    assert torch.equal(state["model"].pop("head.weight"), torch.full((2, 5), 7.0))
    assert same(state["model"], get_model_state_dict(model))
    failures = failed(lambda: dcp.load({"model": {"head.weight": torch.zeros(2, 5)}}, storage_reader=reader))
    assert all("Missing key" in str(error[0]) for error in failures.values()), failures


@behaviour
def the_first_fsdp_finds_its_optimizer_by_the_names_of_its_model(writer: StorageWriter, reader: StorageReader) -> None:
    def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)

    wrap = lambda made: FullyShardedDataParallel(made, device_id=torch.device("cpu"))  # noqa: E731
    model, optimizer = trained(wrap, 1)
    weights, moments = states(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=writer)
    other, _ = trained(wrap, 2)
    with FullyShardedDataParallel.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        state = {"model": other.state_dict()}
        dcp.load(state, storage_reader=reader)
        found = load_sharded_optimizer_state_dict(state["model"], "optimizer", reader)["optimizer"]
    for name, kept in moments["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            mine, read = (each.local_shards() for each in (kept[key], found["state"][name][key]))
            assert [shard.metadata.shard_offsets for shard in mine] == [shard.metadata.shard_offsets for shard in read]
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(mine, read, strict=True)), name


@behaviour
def cached_plans_save_what_is_there_now_and_a_change_in_what_is_shared_is_said(
    writer: StorageWriter, reader: StorageReader
) -> None:
    def save(state: dict[str, Any], *, cached: bool = True) -> None:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=cached)
        dcp.save(state, storage_writer=writer, planner=planner)

    line, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
    state: dict[str, Any] = {name: zeros(4, 2, device_mesh=line, placements=(way,)) for name, way in SHARED.items()}
    for count in range(3):
        for tensor in state.values():
            tensor.fill_(count)
        if count == 2 and rank == 1:
            state["own"] = torch.full((3,), 7.0)  # one rank makes a new plan, and shares what it shared
        save(state)
        found = {name: torch.full((4, 2), -1.0) for name in SHARED}
        dcp.load(found, storage_reader=reader)
        assert all(torch.equal(tensor, torch.full((4, 2), float(count))) for tensor in found.values()), count
    own = {"own": torch.zeros(3)}
    dcp.load(own, storage_reader=reader)
    assert torch.equal(own["own"], torch.full((3,), 7.0))
    for changed, said in ((1, "the planner gave it its old plan"), (0, "share has changed with the plans of others")):
        rest = {name: tensor for name, tensor in state.items() if name != "whole" or rank != changed}
        failures = failed(lambda rest=rest: save(rest))
        assert said in str(failures), failures
        save(rest, cached=False)
        dcp.load(found, storage_reader=reader)
        assert all(torch.equal(tensor, torch.full((4, 2), 2.0)) for tensor in found.values())


@behaviour
def a_fault_of_one_rank_is_an_error_that_names_it_on_all(writer: StorageWriter, reader: StorageReader) -> None:
    before = writer.last
    state = {"x": distribute_tensor(WHOLE, init_device_mesh("cpu", (4,)), [Shard(0)])}
    bad = {f"strange{dist.get_rank()}": Path("x") if dist.get_rank() == 2 else 1}
    failures = failed(lambda: dcp.save({**state, **bad}, storage_writer=writer))
    assert 2 in failures, failures
    assert all("strange2" in str(error[0]) for error in failures.values()), failures  # what others lose they lose by it
    assert before is not None
    dcp.save(state, storage_writer=writer)  # and the job goes on
    assert writer.last is not None
    assert writer.last.version.step > before.version.step
    assert reader.find() == writer.last.version.step


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    assert not any(isinstance(way, Partial) for _, ways in layouts().values() for way in ways)
    writer = StorageWriter(sys.argv[1])
    for name, check in BEHAVIOURS.items():
        check(writer, StorageReader(writer))
        if name.startswith("every"):
            check(writer, StorageReader(sys.argv[1]))  # each rank by itself, from storage
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"seen {name}\n", end="", flush=True)  # one write: ranks share the pipe
    writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
