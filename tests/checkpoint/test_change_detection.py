"""The look at thousands of tensors: every change is seen, and the garbage collector is left alone."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.checkpoint.state.change_detection import Tensors
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


@pytest.mark.parametrize("what", list(of_the_same_memory(torch.ones(4, 4))))
def test_a_tensor_that_is_something_else_at_the_same_address_has_changed(what: str) -> None:
    tensors = [torch.ones(4, 4) for _ in range(3)]
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
