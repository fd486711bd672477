"""Tensors and arrays of attributes: they come back bit for bit, and what shares memory is found."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.adapters.zero_lines.changes import Changes
from holdfast.adapters.zero_lines.reach import held_arrays
from holdfast.adapters.zero_lines.reach.look import Leaf, Look
from holdfast.base.errors import UsageError
from holdfast.tiers.format import values as value_codec


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.5, -0.0, float("nan")]),
        torch.tensor(3, dtype=torch.int64),
        torch.zeros(2, 0),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array([0.1, np.inf]),
    ],
)
def test_it_comes_back_bit_for_bit_through_the_codec(value: torch.Tensor | np.ndarray) -> None:
    assert held_arrays.is_held(value)
    there = held_arrays.brought(value_codec.decode(value_codec.encode(held_arrays.stored(value))))
    assert type(there) is type(value)
    assert there.dtype == value.dtype
    assert there.shape == value.shape
    assert held_arrays.stored(there) == held_arrays.stored(value)
    there += there  # it can be written


def test_a_tensor_that_keeps_its_gradient_is_not_carried_without_it() -> None:
    hidden = torch.ones(2, requires_grad=True) * 2
    hidden.retain_grad()
    hidden.sum().backward()
    assert not held_arrays.is_held(hidden, with_graph=True)


def test_a_backward_pass_through_what_had_a_graph_before_the_restart_raises() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * 3).sum()
    assert held_arrays.is_held(loss, with_graph=True)
    assert not held_arrays.is_held(loss)
    assert not held_arrays.is_held(weight, with_graph=True)
    with torch.no_grad():  # as a version is taken up
        there = held_arrays.brought(value_codec.decode(value_codec.encode(held_arrays.stored(loss))))
    assert (there.item(), there.requires_grad, there.is_leaf) == (6.0, True, False)
    with pytest.raises(UsageError, match="its graph is gone"):
        (there + weight.sum()).backward()
    assert isinstance(there, torch.Tensor) or there.flags.owndata  # and resized


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 2).t(),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(2).to_sparse(),
        torch.ones(held_arrays.MAX_BYTES),
        np.array([object()]),
        np.ones((3, 2)).T,
        np.ones(2).view(np.matrix),
        "text",
        [torch.ones(2)],
    ],
)
def test_what_would_come_back_as_something_else_is_left(value: object) -> None:
    assert not held_arrays.is_held(value)


def test_who_shares_memory_is_found() -> None:
    base, alone, array = torch.zeros(8), torch.zeros(2), np.zeros(4)
    held = {
        "part": base[:2], "other part": base[6:], "alone": alone, "row": array[1:], "seen through torch": torch.from_numpy(array),
    }  # fmt: skip
    spans = {name: held_arrays.span(value) for name, value in held.items()}
    assert held_arrays.overlapping(spans.items(), []) == {
        "part": "other part", "other part": "part", "row": "seen through torch", "seen through torch": "row",
    }  # fmt: skip
    mine = {"alone": spans["alone"]}
    assert held_arrays.overlapping(mine.items(), [(held_arrays.span(alone), "a name")]) == {"alone": "a name"}
    assert held_arrays.overlapping(mine.items(), [(spans["part"], "part"), (spans["row"], "row")]) == {}


def test_memory_that_other_processes_see_is_found() -> None:
    array = np.frombuffer(multiprocessing.Array("f", 3).get_obj(), dtype="f")
    shared = (torch.zeros(3).share_memory_()[1:], array, torch.from_numpy(array))
    assert [held_arrays.is_shared(held_arrays.span(each)) for each in shared] == [True] * 3
    alone = (torch.zeros(3), np.zeros(3), torch.zeros(0))
    assert [held_arrays.is_shared(held_arrays.span(each)) for each in alone] == [False] * 3


@pytest.mark.parametrize("make", [lambda: torch.zeros(3), lambda: np.zeros(3)], ids=["tensor", "array"])
def test_one_object_comes_back_into_the_one_that_is_there_and_another_as_a_new_one(make: Callable[[], Any]) -> None:
    """So `id(meter.sum)` and `is` mean after a restart what they mean without one."""
    there, value = make(), make() + 2
    kept = held_arrays.same(held_arrays.stored(value))
    assert held_arrays.brought(value_codec.decode(value_codec.encode(kept)), there) is there
    assert (there == value).all()
    another = held_arrays.brought(held_arrays.stored(value), there)
    assert another is not there
    assert (another == value).all()
    assert held_arrays.brought(kept, make()[:2]).shape == (3,), "the place is of another shape"


@pytest.mark.parametrize(("replaced", "same"), [(False, True), (True, False)])
def test_whether_a_tensor_is_still_the_object_of_the_beginning_is_stored(replaced: bool, same: bool) -> None:
    meter = SimpleNamespace(sum=torch.zeros(2))

    def look() -> Look:
        value = meter.sum
        held = partial(held_arrays.stored, value)
        return Look(leaves={"meter.sum": Leaf(str(value), "meter", "sum", held, partial(setattr, meter, "sum"), value)})

    changes = Changes(look, {}, before=look())
    if replaced:
        meter.sum = meter.sum + 1
    else:
        meter.sum += 1
    ((_, _, _, value),) = changes.now().rows
    assert value.get("same", False) is same
