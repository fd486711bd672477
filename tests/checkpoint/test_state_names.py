"""What entries are called, what is refused, and when the structure counts as changed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from calls_kit import worth
from holdfast.base.errors import UsageError
from holdfast.checkpoint.entries.entries import Collector
from holdfast.checkpoint.entries.sharding import Layouts
from holdfast.checkpoint.state.training_state import State
from holdfast.core.model import Extent
from holdfast.tiers.format.values import TensorRef
from state_kit import restore, save


class Holder:
    """An object with whatever state a test wants."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def alone(**objects: Any) -> State:
    return State(objects, rank=0, world_size=1)


def names(state: State) -> set[str]:
    return {name for name in state.gather().tensors if "rng." not in name}


def test_wrappers_leave_no_trace_in_names() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)  # a name of the user's own, not a wrapper's

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), Inner())
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = names(alone(model=compiled, optimizer=optimizer))
    plain = {"0.weight", "0.bias", "1.module.weight", "1.module.bias"}
    assert found == {f"model.{n}" for n in plain} | {f"optimizer.state.{n}.momentum_buffer" for n in plain}


def test_tied_weights_are_kept_once_and_restored_in_both() -> None:
    def make() -> nn.ModuleDict:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, other = make(), make()
    saved = save(alone(model=model))
    assert [name for name in saved.shards if name.startswith("model")] == ["model.embed.weight"]
    restore(alone(model=other), saved)
    assert torch.equal(other["head"].weight, model["embed"].weight)
    assert other["head"].weight is other["embed"].weight


def test_what_only_this_rank_holds_is_named_after_it() -> None:
    model, holder = nn.Linear(2, 2), Holder({"t": torch.ones(2)})
    objects = {"model": model, "scheduler": Holder({"epoch": 1}), "extra": holder}
    state = State(objects, rank=1, world_size=4, replicated=["model", "sched*"])
    gathered = state.gather()
    assert gathered.tensors["model.weight"].shard.ranks == (0, 1, 2, 3)
    assert gathered.tensors["rank1/extra.t"].shard.ranks == (1,)
    assert set(gathered.values[0, 1, 2, 3]) == {"scheduler"}
    assert set(gathered.values[1,]) == {"rank1/extra", "rank1/rng"}
    assert gathered.values[1,]["rank1/extra"] == {"t": TensorRef("rank1/extra.t")}


def test_optimizer_state_follows_a_declared_parameter() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    objects = {"model": model, "optimizer": optimizer}
    declared = State(objects, rank=1, world_size=2, replicated=["model.*"]).gather()
    assert declared.tensors["optimizer.state.weight.exp_avg"].shard.ranks == (0, 1)
    assert declared.tensors["optimizer.state.weight.step"].shard.ranks == (0, 1)
    assert "optimizer.param_groups" in declared.values[0, 1]
    own = State(objects, rank=1, world_size=2).gather()
    assert own.tensors["rank1/optimizer.state.weight.exp_avg"].shard.ranks == (1,)
    assert "rank1/optimizer.param_groups" in own.values[1,]


def test_only_what_an_optimizer_owns_is_late() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model(torch.rand(3, 2)).sum().backward()
    optimizer.step()
    tensors = alone(model=model, optimizer=optimizer, extra={"t": torch.ones(1)}).gather().tensors
    late = {name for name, live in tensors.items() if live.late}
    assert late == {"model.0.weight", "model.0.bias"} | {n for n in tensors if n.startswith("optimizer.state")}


def test_nested_state_comes_back_with_its_types() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)[::-1]
    state = {
        "array": array, 1: torch.tensor(1), "1": torch.tensor(2), "counter": Counter([3, 3]),
        "ordered": OrderedDict(a=[torch.zeros(0, 2), {"x": (torch.ones(2), None, 1.5)}]),
        "flag": True, "scalar": np.float32(0.1), "bytes": b"\0", "big": 2**80, "nan": float("inf"),
    }  # fmt: skip
    saved = save(alone(thing=Holder(state)))
    other = Holder({})
    restore(alone(thing=other), saved)
    back = other.state
    assert back.keys() == state.keys()
    assert isinstance(back["array"], np.ndarray)
    assert back["array"].dtype == np.int16
    assert np.array_equal(back["array"], array)
    assert (back[1].item(), back["1"].item()) == (1, 2)
    assert type(back["ordered"]) is OrderedDict
    zeros, inner = back["ordered"]["a"]
    assert zeros.shape == (0, 2)
    assert torch.equal(inner["x"][0], torch.ones(2))
    for name in ("counter", "flag", "scalar", "bytes", "big", "nan"):
        assert back[name] == state[name]
        assert type(back[name]) is type(state[name])


def test_values_are_the_state_at_the_call() -> None:
    numbers = [1, 2, 3]
    holder = Holder({"numbers": numbers})
    gathered = alone(thing=holder).gather()
    numbers.append(4)
    assert gathered.values[0,]["thing"] == {"numbers": [1, 2, 3]}


def test_modules_that_make_up_tensors_get_them_back() -> None:
    class Packed(nn.Module):
        """Saves something else than it holds."""

        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Parameter(torch.ones(2))
            self.secret = torch.randn(3)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "doubled"] = self.secret * 2

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            self.secret = state_dict.pop(prefix + "doubled") / 2
            super()._load_from_state_dict(state_dict, prefix, *rest)

    model, other = nn.Sequential(Packed()), nn.Sequential(Packed())
    saved = save(alone(model=model))
    assert not torch.equal(model[0].secret, other[0].secret)
    restore(alone(model=other), saved)
    assert torch.equal(model[0].secret, other[0].secret)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {  # what -> (how it is made, the name in the error)
    "a number": (lambda: 3, "thing"),
    "a class": (lambda: nn.Linear, "thing"),
    "sparse": (lambda: Holder({"s": torch.ones(2, 2).to_sparse()}), "thing.s"),
    "dtype": (lambda: Holder({"c": torch.ones(2, dtype=torch.complex128)}), "thing.c"),
    "quantised": (lambda: Holder({"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)}), "thing.q"),
    "text array": (lambda: Holder({"n": [np.array(["text"])]}), "thing.n.0"),
    "meta": (lambda: nn.Linear(1, 1, device="meta"), "thing.weight"),
    "lazy": (lambda: nn.LazyLinear(2), "thing.weight"),
    "stray optimizer": (lambda: torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), "thing"),
    "master copies": (lambda: {"a": torch.optim.SGD([torch.ones(1)], lr=1.0)}, "thing.a"),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_cannot_be_saved_is_refused_by_name(kind: str) -> None:
    make, name = REFUSED[kind]
    with pytest.raises(UsageError) as caught:
        alone(thing=make()).gather()
    assert name in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["rng", "a/b", "a.b", ""])
def test_names_that_cannot_be_used(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        alone(**{name: nn.Linear(1, 1)})


def test_two_things_of_one_name_are_refused() -> None:
    model, generator = nn.ModuleDict({"generator": nn.Linear(1, 1)}), nn.Linear(1, 1)
    parameters = [*model.parameters(), *generator.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(UsageError, match="same name"):
        alone(model=model, generator=generator, optimizer=optimizer).gather()


def trained() -> tuple[nn.Sequential, torch.optim.AdamW, State]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    state = alone(model=model, optimizer=optimizer)
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, state


def test_training_steps_change_neither_structure_nor_storages() -> None:
    model, optimizer, state = trained()
    first = state.gather()
    for _ in range(3):
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    second = state.gather()
    assert (first.structure, first.storages) == (second.structure, second.storages)
    assert second.tensors["model.0.weight"].local.data_ptr() == model[0].weight.data_ptr()
    assert all(not live.local.requires_grad for live in second.tensors.values())


CHANGES: dict[
    str, tuple[Any, bool]
] = {  # what happens -> (how, whether the structure changes and not the memory alone)
    "new memory": (lambda m, _: setattr(m[0].weight, "data", m[0].weight.data.clone()), False),
    "new strides": (lambda m, _: setattr(m[0].weight, "data", m[0].weight.data.t()), False),
    "new shape": (lambda m, _: setattr(m[0].weight, "data", m[0].weight.data[:2]), True),
    "new dtype": (lambda m, _: setattr(m[0].weight, "data", m[0].weight.data.to(torch.float16)), True),
    "new parameter": (lambda m, _: m[0].register_parameter("extra", nn.Parameter(torch.ones(1))), True),
    "replaced buffer": (lambda m, _: setattr(m[1], "running_mean", torch.ones(4)), False),
    "removed buffer": (lambda m, _: m[1].register_buffer("running_mean", None), True),
    "new module": (lambda m, _: m.append(nn.Linear(1, 1)), True),
    "new group": (lambda m, o: (m.append(nn.Linear(1, 1)), o.add_param_group({"params": m[2].parameters()})), True),
    "state gone": (lambda _, o: o.state.clear(), True),
    "new state": (lambda m, o: o.state[m[0].weight].update(more=torch.ones(1)), True),
    "replaced state": (lambda m, o: o.state[m[0].weight].update(exp_avg=torch.ones(4, 4)), False),
    "state loaded": (lambda _, o: o.load_state_dict(o.state_dict()), False),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_every_change_of_structure_is_seen(change: str) -> None:
    model, optimizer, state = trained()
    first = state.gather()
    act, new_structure = CHANGES[change]
    act(model, optimizer)
    second = state.gather()
    assert second.storages > first.storages
    assert (second.structure > first.structure) == new_structure
    fresh = alone(model=model, optimizer=optimizer).gather()
    assert {n: (live.shard, live.local.data_ptr(), live.local.stride()) for n, live in second.tensors.items()
            if "rng" not in n} == {
        n: (live.shard, live.local.data_ptr(), live.local.stride()) for n, live in fresh.tensors.items()
        if "rng" not in n
    }  # fmt: skip


def test_state_of_objects_may_change_its_structure() -> None:
    holder, content = Holder({"t": torch.ones(2)}), {"x": torch.ones(1)}
    state = alone(thing=holder, content=content)
    first = state.gather()
    holder.state = {"t": torch.ones(3)}
    second = state.gather()
    content["y"] = torch.ones(1)
    third = state.gather()
    assert first.structure < second.structure < third.structure
    assert third.tensors["thing.t"].shard.extent == Extent((0,), (3,))
    assert "content.y" in third.tensors


def test_gathering_is_cheap() -> None:
    """A GPT of 12 layers with AdamW: 445 tensors and 149 step counts in about a millisecond, and seldom more."""
    blocks = []
    for _ in range(12):
        linears = (nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 8))
        blocks.append(nn.ModuleList([nn.LayerNorm(8), *linears, nn.LayerNorm(8)]))
    model = nn.ModuleList([nn.Embedding(9, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 9)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = alone(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5))
    assert len(state.gather().tensors) > 590
    assert worth(state.gather) < 60_000, "about 14,000 on a quiet machine, which takes a millisecond"


def _add_post_hook(model: nn.Module) -> None:
    def hook(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}scale"] = torch.ones(2)

    model.register_state_dict_post_hook(hook)
    model.register_load_state_dict_pre_hook(lambda _, state, prefix, *__: state.pop(f"{prefix}scale"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_add_post_hook, {"model.scale", "model.mean"}),
        (lambda model: model.register_buffer("mean", model.mean, persistent=False), set()),
    ],
    ids=["a hook that adds to the state", "a buffer that stays behind"],
)
def test_what_changes_the_state_a_module_hands_out_is_seen_at_the_next_save(
    change: Callable[[nn.Module], None], expected: set[str]
) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mean", torch.zeros(1))
    state = alone(model=model)
    before = {"model.weight", "model.bias"}
    assert names(state) == before | {"model.mean"}
    change(model)
    assert names(state) == before | expected


def test_two_values_of_one_name_are_refused() -> None:
    out = Collector(Layouts(0, 1, ()))
    out.value("a.b", 1)
    with pytest.raises(UsageError, match="two things have the same name"):
        out.value("a.b", 2)
