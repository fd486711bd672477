"""A checkpoint that does not fit is refused with every name, and nothing is touched; not strict, it says what was left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.base.errors import MismatchError, UsageError
from holdfast.checkpoint.entries.types import SavedTensor
from holdfast.checkpoint.state import training_state
from holdfast.checkpoint.state.training_state import State
from holdfast.core.model import Extent
from state_kit import Saved, restore, save

Objects = dict[str, Any]


def objects(width: int = 4, layers: int = 2, optimizer: str = "AdamW", *, steps: int = 1, **extra: Any) -> Objects:
    torch.manual_seed(width + layers)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        model(torch.randn(2, width)).sum().backward()
        made.step()
    return {"model": model, "optimizer": made, **extra}


class Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"a": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["a"]


def state_of(given: Objects) -> State:
    return State(given, rank=0, world_size=1)


def untouched(given: Objects, act: Callable[[], object]) -> None:
    before = save(state_of(given))
    act()
    after = save(state_of(given))
    assert before.shards == after.shards
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    assert before.values == after.values


def refusal(given: Objects, saved: Saved) -> str:
    def act() -> None:
        with pytest.raises(MismatchError) as caught:
            restore(state_of(given), saved)
        messages.append(str(caught.value))

    messages: list[str] = []
    untouched(given, act)
    return messages[0]


@pytest.mark.parametrize("optimizer", ["AdamW", "Rprop"])
def test_state_comes_back_in_the_order_in_which_the_optimizer_makes_it(optimizer: str) -> None:
    """On every rank, whatever order a version was found in: a script may go through it with a collective for each tensor."""
    before = objects(optimizer=optimizer)
    saved, orders = save(state_of(before)), [list(one) for one in before["optimizer"].state.values()]
    for names in (sorted(saved.shards), sorted(saved.shards, reverse=True)):
        after = objects(optimizer=optimizer, steps=0)
        restore(state_of(after), replace(saved, shards={name: saved.shards[name] for name in names}))
        assert [list(one) for one in after["optimizer"].state.values()] == orders


def test_another_width_names_every_tensor_with_both_shapes() -> None:
    message = refusal(objects(width=4, steps=0), save(state_of(objects(width=5))))
    assert "model.0.weight (saved with shape (5, 5), here (4, 4))" in message
    assert "model.1.bias" in message
    assert "strict=False" in message


def test_another_depth_names_what_is_missing_and_what_is_unexpected() -> None:
    deep, flat = objects(layers=3), objects(layers=2)
    assert "missing in the checkpoint: model.2.weight, model.2.bias" in refusal(deep, save(state_of(flat)))
    message = refusal(flat, save(state_of(deep)))
    assert "model.2.weight" in message
    assert "optimizer.state.2.weight.exp_avg" in message
    assert "optimizer.param_groups (group 0 has other parameters: 2.weight, 2.bias)" in message


@pytest.mark.parametrize(
    ("there", "here"), [("SGD", "AdamW"), ("AdamW", "SGD"), ("SGD", "Adagrad"), ("Adagrad", "RMSprop")]
)
@pytest.mark.parametrize("steps", [0, 1])
def test_another_class_of_optimizer_is_refused(there: str, here: str, steps: int) -> None:
    message = refusal(objects(optimizer=here, steps=steps), save(state_of(objects(optimizer=there))))
    assert "saved by another class of optimizer" in message


def test_other_options_of_the_same_class_are_refused() -> None:
    given = objects(steps=0)
    given["optimizer"] = torch.optim.AdamW(given["model"].parameters(), lr=0.1, amsgrad=True)
    assert "missing in the checkpoint: optimizer.state.0.weight.max_exp_avg_sq" in refusal(
        given, save(state_of(objects()))
    )


def test_a_checkpoint_that_lacks_one_variable_or_has_it_under_another_name_is_refused_by_name() -> None:
    given, saved = objects(steps=0), save(state_of(objects()))
    names = set(saved.shards)
    assert {"model.0.weight", "model.1.bias", "optimizer.state.1.bias.exp_avg"} <= names
    for name in names:
        lacking = {other: shard for other, shard in saved.shards.items() if other != name}
        assert f"1 missing in the checkpoint: {name}" in refusal(given, replace(saved, shards=lacking))
        message = refusal(given, replace(saved, shards={**lacking, f"{name}s": saved.shards[name]}))
        missing, _, unexpected = message.partition("unexpected in the checkpoint")
        assert f"1 missing in the checkpoint: {name};" in missing
        assert f"{name}s" in unexpected


def test_objects_that_only_one_side_has() -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(objects()["optimizer"], 3)
    extra = {"t": torch.ones(2)}
    assert "missing in the checkpoint: scheduler" in refusal(objects(scheduler=scheduler), save(state_of(objects())))
    message = refusal(objects(), save(state_of(objects(extra=extra))))
    assert "2 unexpected in the checkpoint: extra, extra.t" in message


def test_a_value_of_a_later_release_is_refused_by_name_and_never_dropped_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a release reads `memory_order` that does not know it. A version that has nothing to say of it is as readable as before."""
    turned = torch.arange(6.0).reshape(2, 3).t()
    source, plain = objects(extra=Kept(turned)), objects(extra=Kept(torch.ones(3, 2)))
    monkeypatch.setattr(training_state, "MEMORY_ORDER", "of_a_later_release")
    saved, without = save(state_of(source)), save(state_of(plain))
    monkeypatch.undo()
    given = objects(extra=Kept(torch.zeros(3, 2)))
    assert "1 unexpected in the checkpoint: of_a_later_release" in refusal(given, saved)
    assert restore(state_of(given), saved, strict=False).not_used == ("of_a_later_release",)
    assert torch.equal(given["extra"].tensor, turned)
    assert not restore(state_of(given), without).not_used


def test_a_long_list_is_cut_with_a_count() -> None:
    message = refusal(objects(layers=2), save(state_of(objects(layers=30))))
    assert "unexpected in the checkpoint" in message
    assert "more" in message
    assert message.count("optimizer.state") <= 20


def test_another_dtype_or_box_is_refused() -> None:
    given = objects(steps=0)
    saved = save(state_of(objects()))
    offered = saved.offered()
    offered["model.0.weight"] = SavedTensor("F64", (4, 4), (Extent((0, 0), (4, 4)),))
    offered["model.1.weight"] = SavedTensor("F32", (4, 4), (Extent((2, 0), (2, 4)),))
    with pytest.raises(MismatchError) as caught:
        state_of(given).fitting(offered, saved.decoded())
    assert "saved as F64, here F32" in str(caught.value)
    assert "this rank holds (0, 0)+(4, 4), the checkpoint offers (2, 0)+(2, 4)" in str(caught.value)
    assert not given["optimizer"].state


def test_pieces_that_make_up_the_tensor_are_accepted() -> None:
    given = objects(steps=0)
    saved = save(state_of(objects()))
    offered = saved.offered()
    halves = (Extent((0, 0), (1, 4)), Extent((1, 0), (3, 4)))
    offered["model.0.weight"] = SavedTensor("F32", (4, 4), halves)
    state = state_of(given)
    targets = state.create(state.fitting(offered, saved.decoded()))
    assert targets["model.0.weight"].shard.extent == Extent((0, 0), (4, 4))


def test_not_strict_loads_what_fits_and_reports_the_rest() -> None:
    given, source = objects(layers=3, steps=0), objects(layers=2, extra={"t": torch.ones(2)})
    record = restore(state_of(given), save(state_of(source)), strict=False)
    assert torch.equal(given["model"][1].weight, source["model"][1].weight)
    assert {"model.2.weight", "model.2.bias"} <= set(record.not_loaded)
    assert set(record.not_used) == {"extra", "extra.t"}
    assert [text.split(" ")[0] for text in record.misfit] == ["optimizer.param_groups"]
    assert set(given["optimizer"].state) == set(given["model"][:2].parameters())
    given["model"](torch.ones(1, 4)).sum().backward()
    given["optimizer"].step()


def classifier(classes: int, optimizer: str, *, steps: int) -> Objects:
    torch.manual_seed(classes)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, classes))
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(2, 4)).square().sum().backward()
        made.step()
    return {"model": model, "optimizer": made}


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad", "Adafactor", "RMSprop"])
@pytest.mark.parametrize(("saved", "here"), [(3, 5), (3, 1), (1, 3)])
@pytest.mark.parametrize("steps", [0, 1])
def test_not_strict_the_state_of_a_parameter_that_differs_stays_with_it(
    optimizer: str, saved: int, here: int, steps: int
) -> None:
    """As another head for other classes: moments of the old one have another shape, or one that broadcasts."""
    source, given = classifier(saved, optimizer, steps=3), classifier(here, optimizer, steps=steps)
    first, head = given["model"]
    before = {p: {k: v.clone() for k, v in given["optimizer"].state[p].items()} for p in head.parameters()}
    record = restore(state_of(given), save(state_of(source)), strict=False)
    assert given["optimizer"].state[first.weight]["step"] == 3
    for parameter, state in before.items():
        now = given["optimizer"].state[parameter]
        assert now.keys() == state.keys()
        assert all(torch.equal(now[key], value) for key, value in state.items())
    assert "optimizer.state.1.weight.step (its parameter differs)" in record.misfit
    assert not record.not_used
    given["model"](torch.ones(1, 4)).sum().backward()
    given["optimizer"].step()


def test_not_strict_a_value_that_stays_because_of_a_tensor_in_it_is_named() -> None:
    source = {"extra": {"t": torch.ones(3), "best": 5}}
    given = {"extra": {"t": torch.ones(4), "best": 0}}
    record = restore(state_of(given), save(state_of(source)), strict=False)
    assert given["extra"]["best"] == 0
    assert [text.split(" ")[0] for text in record.misfit] == ["extra.t", "extra"]
    assert "all of it stays as it is" in record.misfit[1]


def test_not_strict_keeps_an_optimizer_that_the_checkpoint_does_not_know() -> None:
    given = objects()
    before = {p: s["exp_avg"].clone() for p, s in given["optimizer"].state.items()}
    saved = save(state_of({"model": objects()["model"]}))
    record = restore(state_of(given), saved, strict=False)
    assert "optimizer.param_groups" in record.not_loaded
    assert all(torch.equal(given["optimizer"].state[p]["exp_avg"], old) for p, old in before.items())


def test_strict_leaves_nothing_to_report() -> None:
    record = restore(state_of(objects(steps=0)), save(state_of(objects())))
    assert (record.not_loaded, record.not_used, record.misfit) == ((), (), ())


def test_hooks_on_loading_are_called_once_with_what_was_saved() -> None:
    given = objects(steps=0)
    calls: list[Any] = []
    given["optimizer"].register_load_state_dict_pre_hook(lambda _, said: calls.append(said))
    given["optimizer"].register_load_state_dict_post_hook(lambda optimizer: calls.append(len(optimizer.state)))
    source = objects(steps=2)
    restore(state_of(given), save(state_of(source)))
    said, number = calls
    assert number == len(given["optimizer"].state) == 4
    wanted = source["optimizer"].state_dict()
    assert said["param_groups"] == wanted["param_groups"]
    assert all(torch.equal(said["state"][i]["exp_avg"], wanted["state"][i]["exp_avg"]) for i in range(4))


def test_tensors_keep_their_identity() -> None:
    given = objects(extra={"deep": {"t": torch.zeros(3)}, "n": 1})
    optimizer = given["optimizer"]
    kept = [*given["model"].parameters(), given["extra"]["deep"]["t"], *optimizer.state.values()]
    kept += [t for s in optimizer.state.values() for t in s.values()]
    saved = save(state_of(objects(extra={"deep": {"t": torch.ones(3)}, "n": 2})))
    restore(state_of(given), saved)
    after = [*given["model"].parameters(), given["extra"]["deep"]["t"], *given["optimizer"].state.values()]
    after += [t for s in optimizer.state.values() for t in s.values()]
    assert all(a is b for a, b in zip(kept, after, strict=True))
    assert torch.equal(given["extra"]["deep"]["t"], torch.ones(3))
    assert given["extra"]["n"] == 2


def test_apply_wants_what_targets_gave() -> None:
    saved = save(state_of(objects()))
    state = state_of(objects(steps=0))
    with pytest.raises(UsageError, match="asked for last"):
        state.apply(saved.decoded(), {})
    targets = state.create(state.fitting(saved.offered(), saved.decoded()))
    with pytest.raises(UsageError, match="asked for last"):
        state.apply(saved.decoded(), {"model.0.weight": targets["model.0.weight"]})


def test_a_second_plan_replaces_the_first() -> None:
    """The first copy turned out bad after the memory was made; an older version without optimizer state is used."""
    older, newer = save(state_of(objects(steps=0))), save(state_of(objects(steps=2)))
    given = objects(steps=0)
    state = state_of(given)
    state.create(state.fitting(newer.offered(), newer.decoded()))
    assert given["optimizer"].state
    restore(state, older)
    assert not given["optimizer"].state


def test_a_reference_without_its_entry_is_missing() -> None:
    saved = save(state_of(objects(extra={"t": torch.ones(2)})))
    shards = {name: shard for name, shard in saved.shards.items() if name != "rng.torch"}
    message = refusal(objects(extra={"t": torch.ones(2)}), replace(saved, shards=shards))
    assert "1 missing in the checkpoint: rng.torch" in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer.param_groups", 3),
        ("optimizer.param_groups", [{"lr": 1.0}]),
        ("optimizer.param_groups", [{"params": {"a": 1}}]),
        ("optimizer.state.0.weight", [1]),
        ("extra", None),
    ],
)
def test_values_of_another_kind_are_refused(path: str, value: Any) -> None:
    """Values are read before the bytes they lie in are proven; whatever they are, the answer is an error of ours."""
    saved = save(state_of(objects(extra={"n": 1})))
    damaged = {**saved.decoded()[0,], path: value}
    given = objects(extra={"n": 1}, steps=0)
    with pytest.raises(MismatchError) as caught:
        state_of(given).fitting(saved.offered(), {(0,): damaged})
    assert path in str(caught.value)
    assert not given["optimizer"].state


def test_a_shape_without_its_bytes_takes_no_memory() -> None:
    saved = save(state_of(objects(optimizer="LBFGS", steps=0)))
    offered = {**saved.offered(), "rng.torch": SavedTensor("U8", (1 << 60,), (Extent((0,), (8,)),))}
    with pytest.raises(MismatchError, match=r"rng.torch \(parts of shape"):
        state_of(objects(optimizer="LBFGS", steps=0)).fitting(offered, saved.decoded())
