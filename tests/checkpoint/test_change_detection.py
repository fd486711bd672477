"""The look at thousands of tensors: every change is seen, and the garbage collector is left alone."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.checkpoint.state.change_detection import Containers, Tensors
from holdfast.checkpoint.state.training_state import State

NUM_TENSORS = 2_000
NUM_LOOKS = 20


def of_the_same_memory(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "another shape": tensor.view(8, 2),
        "other strides": tensor.t(),
        "another dtype": tensor.view(torch.int32),
        "less of it": tensor[:2],
    }


class Other(torch.Tensor):
    """A class that is not torch's own."""


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter, Other])
@pytest.mark.parametrize("what", list(of_the_same_memory(torch.ones(4, 4))))
def test_a_tensor_that_is_something_else_at_the_same_address_has_changed(what: str, kind: type[torch.Tensor]) -> None:
    tensors = [torch.ones(4, 4).as_subclass(kind) for _ in range(3)]
    if kind is nn.Parameter:
        tensors = [nn.Parameter(torch.ones(4, 4), requires_grad=False) for _ in range(3)]
    watch = Tensors(tensors)
    assert watch.unchanged()
    before = tensors[1].data

    tensors[1].data = of_the_same_memory(before)[what]

    assert tensors[1].data_ptr() == before.data_ptr()
    assert not watch.unchanged()
    tensors[1].data = before
    assert watch.unchanged()


def test_a_tensor_elsewhere_has_changed() -> None:
    tensors = [torch.ones(4, 4) for _ in range(3)]
    watch = Tensors(tensors)
    tensors[2].data = torch.ones(4, 4)
    assert not watch.unchanged()


@pytest.mark.parametrize("kind", [torch.Tensor, Other])
def test_what_is_turned_or_freed_in_place_has_changed(kind: type[torch.Tensor]) -> None:
    tensors = [torch.ones(4, 4).as_subclass(kind) for _ in range(3)]
    watch = Tensors(tensors)
    tensors[0].t_()
    assert not watch.unchanged()
    tensors[0].t_()
    assert watch.unchanged()
    tensors[2].untyped_storage().resize_(0)
    assert not watch.unchanged()


def test_a_tensor_that_is_swapped_has_changed() -> None:
    tensors = [torch.ones(4, 4) for _ in range(3)]
    watch = Tensors(tensors)
    torch.utils.swap_tensors(tensors[1], torch.ones(4, 4))
    assert not watch.unchanged()


def test_what_a_script_frees_by_other_data_is_free_at_once() -> None:
    """State that is taken off a device between saves must make room there."""
    tensor = nn.Parameter(torch.ones(4, 4))
    watch, memory = Tensors([tensor]), tensor.untyped_storage()._weak_ref()
    assert watch.unchanged()
    tensor.data = torch.ones(4, 4)
    assert torch.UntypedStorage._expired(memory)
    assert not watch.unchanged()


def test_devices_for_which_torch_compares_no_storage_are_looked_at() -> None:
    tensor = torch.ones(4, 4, device="meta")
    watch = Tensors([tensor])
    assert watch.unchanged()
    tensor.data = tensor.t()
    assert not watch.unchanged()


def test_numbers_in_containers_may_change_and_objects_may_not() -> None:
    first, second = torch.ones(2), torch.ones(2)
    row = {"weight": first, "lr": 0.1, "name": "a", "none": None}
    watch = Containers([row, {"count": 1}])
    row["lr"] = 0.2
    assert watch.unchanged()
    row["weight"] = second
    assert not watch.unchanged()
    row["weight"], row["none"] = first, second
    assert not watch.unchanged(), "nothing became a tensor"
    row["none"] = None
    assert watch.unchanged()
    row["new"] = 1
    assert not watch.unchanged()


def collections_of(call: Callable[[], object]) -> int:
    """How often the collector began while `call` ran."""
    gc.collect()
    before = sum(generation["collections"] for generation in gc.get_stats())
    call()
    return sum(generation["collections"] for generation in gc.get_stats()) - before


def test_a_look_at_thousands_of_tensors_calls_no_garbage_collector() -> None:
    """It made a tuple, a Size and a stride of each, kept until the end of the look: 8 collections for each one."""
    model = nn.ParameterList(torch.ones(16) for _ in range(NUM_TENSORS))
    state = State({"model": model}, rank=0, world_size=1)
    state.gather()

    def look() -> None:
        for _ in range(NUM_LOOKS):
            state.gather()

    assert gc.isenabled()
    assert collections_of(look) <= NUM_LOOKS


@pytest.mark.parametrize("turned", [torch.conj, torch._neg_view])
def test_a_tensor_that_is_read_conjugated_or_negated_from_now_on_has_changed(
    turned: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A bit of the tensor says so: memory, shape, strides and dtype stay."""
    tensor = torch.ones(4, 4, dtype=torch.complex64)
    watch = Tensors([tensor])
    tensor.data = turned(tensor.data)
    assert not watch.unchanged()
