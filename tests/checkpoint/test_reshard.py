"""Into another layout inside one process: real states, images in memory, ranks as threads.

What real ranks, keepers and storage make of it is tests/e2e/test_layouts.py; here are cases that need many small layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.base.errors import ConfigError, HoldfastError, MismatchError
from holdfast.checkpoint.entries.types import Gathered, LiveTensor
from holdfast.checkpoint.job.bootstrap import RestoreRequest
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.checkpoint.restore.fetcher import Fault
from holdfast.checkpoint.restore.reshard import OtherLayout
from holdfast.checkpoint.restore.restorer import Restorer
from holdfast.checkpoint.state.training_state import State
from holdfast.core.layout.bundles import fingerprint, plan_bundles
from holdfast.core.model import BundleRef, Extent, Seal, Shard, Topology, Version
from holdfast.core.recovery.version_choice import Choice, Facts, Fetch
from holdfast.keeper.rpc.client import Located
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values as value_codec
from ranks_kit import on_all
from zoo_optimizers import Lookahead

VERSION = Version(1, 7)


@dataclass
class Saved:
    """A version that lies in storage. `hurt` is given the number of the request, and may answer it with another image."""

    choice: Choice
    images: dict[str, bytes]
    hurt: Callable[[int, bytes, Seal], tuple[bytes, Seal]] = lambda _, data, seal: (data, seal)
    requests: int = 0

    def obtain(self, _: Version, fetches: Iterable[Fetch], __: list[Fault]) -> list[Located]:
        found = []
        self.requests += 1
        for fetch in fetches:
            data, seal = self.hurt(self.requests, self.images[fetch.ref.bundle_id], fetch.seal)
            for first, end in fetch.chunks or ():
                size = image_format.CHUNK_BYTES
                view = memoryview(data)[first * size : end * size]
                found.append(Located(fetch.ref, seal, view, fetch.source, 0.0, (first, end)))
        return found


def one_node(world_size: int) -> Topology:
    return Topology(("n",), (0,) * world_size)


def save(states: Sequence[Any]) -> Saved:
    """What these ranks would leave in storage."""
    topology = one_node(len(states))
    refs, seals, images = {}, {}, {}
    for state in states:
        gathered = state.gather()
        shards = [live.shard for live in gathered.tensors.values()]
        for bundle in plan_bundles(shards, values_of=gathered.values, topology=topology):
            raw = (
                image_format.pad_values(value_codec.encode(dict(gathered.values[bundle.ranks])))
                if bundle.has_values
                else b""
            )
            plan = image_format.plan_image(bundle, len(raw))
            image = bytearray(plan.length)
            image[: len(plan.header)] = plan.header
            for piece in bundle.pieces:
                local = gathered.tensors[piece.shard.name].local
                rows = local.narrow(0, piece.start_row, piece.num_rows) if local.dim() else local
                start, size = plan.spans[piece.shard.name]
                image[start : start + size] = rows.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if plan.values_span is not None:
                image[plan.values_span[0] : sum(plan.values_span)] = raw
            name = bundle.bundle_id
            refs[name] = BundleRef(
                name, bundle.ranks, bundle.index, bundle.count, bundle.num_bytes, fingerprint(bundle)
            )
            seals[name], images[name] = image_format.seal(name, image), bytes(image)
    holders = dict.fromkeys(refs, ())
    return Saved(Choice(VERSION, tuple(refs.values()), seals, holders, True, len(states)), images)


def load(saved: Saved, states: Sequence[State], *, strict: bool = True) -> list[Any]:
    """By rank what was told of single ranks, or the error, or the first fault that was voted on."""

    def work(group: Ranks) -> tuple[str, ...]:
        facts = Facts((), {}, {}, None, one_node(len(states)))  # type: ignore[arg-type]
        state = states[group.rank]
        faults: list[Fault] = []

        def vote(found: list[Fault]) -> bool:
            faults.extend(found)
            return not found

        other = OtherLayout(group, state, saved, facts=facts, vote=vote, strict=strict)  # type: ignore[arg-type]
        loaded = other.load(saved.choice, lambda _: None)
        if loaded is None:
            return faults[0]
        state.apply(loaded.values, loaded.tensors)
        return loaded.by_rank

    return on_all(len(states), work)


def good(told: list[Any]) -> None:
    for row in told:
        if isinstance(row, HoldfastError):
            raise row
        assert not isinstance(row, Fault), row


class Embedding(nn.Module):
    """The first stage of a small language model, the last one, or both, then tied or not."""

    def __init__(self, *, first: bool, last: bool, tied: bool = True) -> None:
        super().__init__()
        if first:
            self.embed = nn.Embedding(7, 3)
            self.up = nn.Linear(3, 3)
        if last:
            self.head = nn.Linear(3, 7, bias=False)
        if first and last and tied:
            self.head.weight = self.embed.weight


def stage(rank: int, world_size: int, *, called: str = "model", **parts: bool) -> tuple[State, nn.Module, Any]:
    """One rank's objects after a step with gradients that depend on nothing but the tensor's shape."""
    torch.manual_seed(7)
    model = Embedding(**parts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (rank + 1))
    objects = {called: model, "optimizer": optimizer}
    return State(objects, rank=rank, world_size=world_size), model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


def same(model: nn.Module, name: str, optimizer: Any, other: nn.Module, second: str, its: Any) -> None:
    """Parameter `name` of one is `second` of the other, and so is its optimizer state."""
    here, there = model.get_parameter(name), other.get_parameter(second)
    assert torch.equal(here, there)
    assert optimizer.state[here].keys() == its.state[there].keys() != set()
    for key, value in its.state[there].items():
        assert torch.equal(optimizer.state[here][key], value), key


@pytest.mark.parametrize("edges", [(0, 3, 5, 7), (0, 7, 7), (0, 0, 4, 7), (0, 1, 2, 7)])
def test_uneven_rows_of_any_number_of_ranks_load_into_one(edges: tuple[int, ...]) -> None:
    """Rank r holds rows `edges[r]` to `edges[r + 1]`, perhaps none."""
    full = torch.randn(7, 3)
    values = [{"optimizer.param_groups": [{"lr": 0.5, "params": ["w"]}]}, *({} for _ in edges[2:])]
    ranks = []
    for rank, (first, end) in enumerate(pairwise(edges)):
        shard = Shard("model.w", "F32", (7, 3), Extent((first, 0), (end - first, 3)), (rank,))
        live = {"model.w": LiveTensor(shard, full[first:end].clone(), late=True)}
        ranks.append(SimpleNamespace(gather=partial(Gathered, live, {(rank,): values[rank]}, 1, 1)))
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(7, 3))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    good(load(save(ranks), [State({"model": model, "optimizer": optimizer}, rank=0, world_size=1)], strict=False))
    assert torch.equal(model["w"], full)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("same_everywhere", [True, False])
def test_what_two_groups_saved_under_one_name_must_be_the_same_to_become_one(same_everywhere: bool) -> None:
    """As FSDP over a sub-mesh does with a module that the other axis does not know: equal norms, or different experts."""
    full, ranks = torch.randn(4, 3), []
    for rank in range(4):
        row, group = rank // 2, rank % 2
        box = Extent((2 * row, 0), (2, 3))
        held = full[2 * row : 2 * row + 2] + (0 if same_everywhere or not group else 1)
        live = {"model.w": LiveTensor(Shard("model.w", "F32", (4, 3), box, (rank,)), held, late=True)}
        ranks.append(SimpleNamespace(gather=partial(Gathered, live, {}, 1, 1)))
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, 3))})
    (told,) = load(save(ranks), [State({"model": model}, rank=0, world_size=1)], strict=False)
    if same_everywhere:
        good([told])
        assert torch.equal(model["w"], full)
    else:
        assert isinstance(told, MismatchError)
        assert "saved several times with other bytes" in str(told)
        assert "model.w" in str(told)


# Requests of one rank that loads from storage: beginnings, headers, values, chunks that it reads for all, all its chunks.
HEADS, LAST = (1, 2, 3), 5


@pytest.mark.parametrize("request_number", [*HEADS, LAST])
@pytest.mark.parametrize("place", [12, -4000, -2])  # in the header, in a tensor, in the values
@pytest.mark.parametrize("again", [False, True])
def test_a_byte_that_flips_on_any_way_is_found_and_nothing_is_loaded(
    request_number: int, place: int, again: bool
) -> None:
    """`again`: the image is another one, whole in itself, with proper digests of its own."""

    def hurt(number: int, data: bytes, seal: Seal) -> tuple[bytes, Seal]:
        if number != request_number:
            return data, seal
        changed = bytearray(data)
        changed[place] ^= 1
        return bytes(changed), image_format.seal(seal.bundle_id, changed) if again else seal

    source, trained, trained_optimizer = stage(0, 1, first=True, last=True)
    step(trained, trained_optimizer)
    saved = save([source])
    saved.hurt = hurt
    state, model, optimizer = stage(0, 1, first=True, last=True, tied=False)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    (fault,) = load(saved, [state])
    assert isinstance(fault, Fault)
    assert (fault.bundle_id in saved.images, fault.node) == (True, None)
    assert saved.requests == (max(HEADS) if request_number in HEADS else LAST), (
        "heads are proved before the rest is asked for"
    )
    if request_number in HEADS:
        assert not optimizer.state
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    saved.hurt = lambda _, data, seal: (data, seal)
    good(load(saved, [state]))
    same(model, "embed.weight", optimizer, trained, "embed.weight", trained_optimizer)


@pytest.mark.parametrize("number", range(1, LAST + 1))
def test_an_error_of_one_rank_is_raised_by_all_in_every_round(number: int) -> None:
    """What no other copy can mend, met by one of two ranks; the other one does not wait for it in the next round."""
    saved = save([stage(rank, 3, first=True, last=False)[0] for rank in range(3)])

    class Refusing(Saved):
        def obtain(self, version: Version, fetches: Iterable[Fetch], faults: list[Fault]) -> list[Located]:
            if self.requests + 1 == number:
                raise ConfigError("the version is encrypted with another key")
            return super().obtain(version, fetches, faults)

    def work(group: Ranks) -> Any:
        source = (Refusing if group.rank else Saved)(saved.choice, saved.images)
        facts = Facts((), {}, {}, None, one_node(2))  # type: ignore[arg-type]
        state = stage(group.rank, 2, first=True, last=False)[0]
        other = OtherLayout(group, state, source, facts=facts, vote=lambda found: not found, strict=False)  # type: ignore[arg-type]
        return other.load(saved.choice, lambda _: None)

    assert [type(error) for error in on_all(2, work)] == [ConfigError] * 2


def test_another_number_of_ranks_is_another_layout_even_if_each_finds_its_own() -> None:
    """What the third of three had would be forgotten without a word."""
    saved = save([stage(rank, 3, first=True, last=False)[0] for rank in range(3)])
    for world_size in (3, 2):
        state = stage(1, world_size, first=True, last=False)[0]
        job = SimpleNamespace(group=SimpleNamespace(rank=1, world_size=world_size))
        restorer = Restorer(job, None, state=state, storage=None, asked=RestoreRequest(), timeout_s=1)  # type: ignore[arg-type]
        assert restorer._is_layout(saved.choice) == (world_size == 3)


@pytest.mark.parametrize("called", ["model", "net"])
def test_one_model_that_ties_two_weights_loads_into_stages_that_hold_one_each(called: str) -> None:
    state, model, optimizer = stage(0, 1, called=called, first=True, last=True)
    step(model, optimizer)
    saved = save([state])
    ranks = [stage(0, 2, called=called, first=True, last=False), stage(1, 2, called=called, first=False, last=True)]
    good(load(saved, [state for state, _, _ in ranks]))
    (_, early, early_optimizer), (_, late, late_optimizer) = ranks
    same(early, "embed.weight", early_optimizer, model, "embed.weight", optimizer)
    same(early, "up.weight", early_optimizer, model, "up.weight", optimizer)
    same(late, "head.weight", late_optimizer, model, "head.weight", optimizer)
    assert late_optimizer.param_groups[0]["lr"] == 0.01, "the options came along"


@pytest.mark.parametrize("called", ["model", "net"])
def test_two_stages_that_hold_a_tied_weight_load_into_one_model_that_ties_it(called: str) -> None:
    ranks = [stage(0, 2, called=called, first=True, last=False), stage(1, 2, called=called, first=False, last=True)]
    for _, model, optimizer in ranks:
        optimizer.param_groups[0]["lr"] = 0.125
        step(model, optimizer)
    saved = save([state for state, _, _ in ranks])
    state, model, optimizer = stage(0, 1, called=called, first=True, last=True)
    good(load(saved, [state]))
    assert model.head.weight is model.embed.weight
    same(model, "embed.weight", optimizer, ranks[0][1], "embed.weight", ranks[0][2])
    same(model, "head.weight", optimizer, ranks[1][1], "head.weight", ranks[1][2])


@pytest.mark.parametrize("what", ["weight", "state"])
def test_stages_whose_tied_weights_went_apart_are_refused_by_both_names(what: str) -> None:
    ranks = [stage(0, 2, first=True, last=False), stage(1, 2, first=False, last=True)]
    for _, model, optimizer in ranks:
        optimizer.param_groups[0]["lr"] = 0.125
        step(model, optimizer)
    late, late_optimizer = ranks[1][1:]
    wrong = late.head.weight.data if what == "weight" else late_optimizer.state[late.head.weight]["exp_avg"]
    wrong[6, 2] += 1
    saved = save([state for state, _, _ in ranks])
    (error,) = load(saved, [stage(0, 1, first=True, last=True)[0]])
    assert isinstance(error, MismatchError)
    names = {
        "weight": "model.embed.weight and model.head.weight",
        "state": "optimizer.state.embed.weight.exp_avg and optimizer.state.head.weight.exp_avg",
    }
    assert f"{names[what]}, which are tied here" in str(error)


def test_stages_whose_tied_weights_differ_in_shape_are_refused_by_both_names() -> None:
    ranks = [stage(0, 2, first=True, last=False), stage(1, 2, first=False, last=True)]
    ranks[1][1].head.weight = nn.Parameter(torch.ones(8, 3))
    states = [ranks[0][0], State({"model": ranks[1][1]}, rank=1, world_size=2)]
    (error,) = load(save(states), [State({"model": Embedding(first=True, last=True)}, rank=0, world_size=1)])
    assert isinstance(error, MismatchError)
    assert "model.head.weight (tied to model.embed.weight here; saved as F32 (8, 3)" in str(error)


def test_a_model_that_ties_no_more_takes_both_from_the_one_and_back() -> None:
    state, model, optimizer = stage(0, 1, first=True, last=True)
    step(model, optimizer)
    saved = save([state])
    loose_state, loose, loose_optimizer = stage(0, 1, first=True, last=True, tied=False)
    good(load(saved, [loose_state]))
    assert loose.head.weight is not loose.embed.weight
    same(loose, "embed.weight", loose_optimizer, model, "embed.weight", optimizer)
    same(loose, "head.weight", loose_optimizer, model, "head.weight", optimizer)
    again, tied, tied_optimizer = stage(0, 1, first=True, last=True)
    good(load(save([loose_state]), [again]))
    same(tied, "head.weight", tied_optimizer, loose, "head.weight", loose_optimizer)


def test_another_name_that_nobody_has_any_more_is_unexpected() -> None:
    state, _, _ = stage(0, 1, first=True, last=True)
    (error,) = load(save([state]), [State({"model": Embedding(first=True, last=False)}, rank=0, world_size=1)])
    assert isinstance(error, MismatchError)
    assert "model.head.weight" in str(error)


def test_a_version_without_the_other_name_is_refused_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions were saved before other names were."""
    state, model, _ = stage(0, 1, first=True, last=True)
    gather = state.gather

    def without() -> Any:
        gathered = gather()
        for values in gathered.values.values():
            values.pop("model.head.weight", None)  # type: ignore[attr-defined]
        return gathered

    monkeypatch.setattr(state, "gather", without)
    saved = save([state])
    ranks = [stage(0, 2, first=True, last=False)[0], stage(1, 2, first=False, last=True)[0]]
    told = load(saved, ranks)
    assert all(isinstance(error, MismatchError) and "rank1/model.head.weight" in str(error) for error in told)
    again, tied, _ = stage(0, 1, first=True, last=True)
    good(load(saved, [again]))
    assert torch.equal(tied.head.weight, model.embed.weight)


def looking_ahead(rank: int, world_size: int, *, counted: int = 4) -> tuple[State, Lookahead]:
    """One rank of DDP, as far as names go, with an optimizer that hands out slow weights and a counter."""
    torch.manual_seed(7)
    model = nn.Linear(3, 2)
    optimizer = Lookahead(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(counted):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    objects = {"model": model, "optimizer": optimizer}
    return State(objects, rank=rank, world_size=world_size, replicated=["model"]), optimizer


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (2, 3)])
def test_what_all_optimizers_handed_out_alike_loads_into_any_number_of_ranks(before: int, after: int) -> None:
    saved = [looking_ahead(rank, before) for rank in range(before)]
    fresh = [looking_ahead(rank, after, counted=0) for rank in range(after)]
    good(load(save([state for state, _ in saved]), [state for state, _ in fresh]))
    for _, optimizer in fresh:
        assert optimizer.k == 4
        assert all(map(torch.equal, optimizer.slow, saved[0][1].slow))


def test_a_rank_that_was_not_saved_is_not_given_what_the_others_have_each_for_itself() -> None:
    saved = [looking_ahead(rank, 2) for rank in range(2)]
    saved[1][1].k += 1
    fresh = [looking_ahead(rank, 3, counted=0) for rank in range(3)]
    told = load(save([state for state, _ in saved]), [state for state, _ in fresh])
    assert all(isinstance(error, MismatchError) for error in told)
    assert "missing in the checkpoint: rank2/optimizer.state_dict" in str(told[0])


class Average(nn.Module):
    """What no optimizer steps, and a parameter that one does."""

    def __init__(self, weight: float, buffer: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), weight))
        self.register_buffer("mean", torch.full((3,), buffer))


def alone(rank: int, world_size: int, weight: float, buffer: float = 0.0) -> tuple[State, Average]:
    """One rank's objects, which nothing shows to be anybody else's, after a step."""
    model = Average(weight, buffer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    return State({"model": model, "optimizer": optimizer}, rank=rank, world_size=world_size), model


@pytest.mark.parametrize("after", [2, 3])
def test_what_only_a_rank_that_is_no_more_has_learnt_is_refused_by_name(after: int) -> None:
    """As experts that are spread by hand: each rank trains its own under one name."""
    saved = save([alone(rank, 4, float(rank))[0] for rank in range(4)])
    told = load(saved, [alone(rank, after, 9.0)[0] for rank in range(after)])
    assert all(isinstance(error, MismatchError) for error in told)
    for rank in range(after, 4):
        assert f"model.weight of rank {rank}" in str(told[0])
    fresh = [alone(rank, after, 9.0) for rank in range(after)]
    told = load(saved, [state for state, _ in fresh], strict=False)
    good(told)
    assert any("model.weight: what rank 3 had is not used, and no other rank had the same" in row for row in told[0])
    for rank, (_, model) in enumerate(fresh):
        assert torch.equal(model.weight, alone(rank, 4, float(rank))[1].weight)


def test_what_ranks_had_alike_may_go_with_them_and_buffers_go_with_a_word() -> None:
    """As data parallelism by hand: the parameters are the same everywhere, and running means are not."""
    saved = save([alone(rank, 4, 1.0, float(rank))[0] for rank in range(4)])
    fresh = [alone(rank, 2, 9.0) for rank in range(2)]
    told = load(saved, [state for state, _ in fresh])
    good(told)
    lost = [f"model.mean: what rank {rank} had is not used, and no other rank had the same" for rank in (2, 3)]
    for rank, (_, model) in enumerate(fresh):
        assert torch.equal(model.weight, alone(rank, 4, 1.0)[1].weight)
        assert torch.equal(model.mean, torch.full((3,), float(rank)))
        assert [row for row in told[rank] if row.startswith("model.")] == lost
