"""Tensors and arrays of attributes: they come back bit for bit, and what shares memory is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.adapters.zero import held_arrays
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
    assert held_arrays.overlapping(spans, []) == {"part", "other part", "row", "seen through torch"}
    assert held_arrays.overlapping({"alone": spans["alone"]}, [held_arrays.span(alone)]) == {"alone"}
    assert held_arrays.overlapping({"alone": spans["alone"]}, [spans["part"], spans["row"]]) == set()
