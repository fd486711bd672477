"""What torch keeps of tensors, read from where it stands: the same as torch says, and every change is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.entries import tensor_words
from holdfast.checkpoint.entries.tensor_words import Addresses, Places, TensorFacts, Words, Writes, find_places


@pytest.fixture
def places() -> Places:
    found = find_places()
    assert found is not None, "this torch keeps its facts in another way: saves of thousands of tensors take longer"
    return found


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4), requires_grad=False)


def elsewhere(tensor: nn.Parameter) -> None:
    tensor.data = torch.ones_like(tensor)


def reshaped(tensor: nn.Parameter) -> None:
    tensor.data = tensor.data.view(8, 2)


def another_dtype(tensor: nn.Parameter) -> None:
    tensor.data = tensor.data.view(torch.int32)


def a_part(tensor: nn.Parameter) -> None:
    tensor.data = tensor.data[1:]


def turned(tensor: nn.Parameter) -> None:
    tensor.data.t_()
    tensor.t_()


def given_another_storage(tensor: nn.Parameter) -> None:
    tensor.set_(torch.zeros(16).untyped_storage(), 0, (4, 4), (4, 1))


def taken_away(tensor: nn.Parameter) -> None:
    tensor.untyped_storage().resize_(0)


def taken_away_and_given_back(tensor: nn.Parameter) -> None:
    held = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    kept = torch.ones(16)  # of the size that became free
    tensor.untyped_storage().resize_(held)
    assert kept.data_ptr() != tensor.data_ptr()


def shared(tensor: nn.Parameter) -> None:
    tensor.share_memory_()


def swapped(tensor: nn.Parameter) -> None:
    torch.utils.swap_tensors(tensor, parameter())


CHANGES: list[Callable[[nn.Parameter], None]] = [
    elsewhere, reshaped, another_dtype, a_part, turned, given_another_storage, taken_away, shared, swapped,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_tensor_is_seen(places: Places, change: Callable[[nn.Parameter], None]) -> None:
    tensors = [parameter() for _ in range(3)]
    facts = TensorFacts(tensors, places)
    assert not facts.others
    assert facts.unchanged()
    tensors[0].add_(1)
    tensors[2].requires_grad_()
    tensors[2].grad = torch.ones(4, 4)
    assert facts.unchanged(), "what is in a tensor may change"
    change(tensors[1])
    assert not facts.unchanged()


def test_memory_that_was_taken_away_and_given_back_is_elsewhere_or_the_same(places: Places) -> None:
    tensor = parameter()
    facts, before = TensorFacts([tensor], places), tensor.data_ptr()
    taken_away_and_given_back(tensor)
    assert facts.unchanged() is (tensor.data_ptr() == before)


class Other(torch.Tensor):
    """A class that is not torch's own."""


def test_what_cannot_be_read_is_asked(places: Places) -> None:
    tensors = [
        parameter(),
        torch.ones(4).as_subclass(Other),
        torch.ones(1, 1, 1, 1, 1, 2),
        torch.ones(4, 4).to_sparse(),
        torch.ones(()),
        torch.empty(0, 3),
        torch.ones(2, 3, 4, 5, 6)[:, 1:, ::2],
    ]
    assert TensorFacts(tensors, places).others == [1, 2, 3]
    assert TensorFacts(tensors, None).others == list(range(7))
    assert TensorFacts([], places).unchanged()


@pytest.mark.parametrize("place", ["tensor", "dims", "sizes", "strides", "offset", "dtype", "data"])
def test_a_place_that_is_wrong_is_not_believed(places: Places, place: str) -> None:
    """As in another torch, where something else stands there."""
    wrong = replace(places, **{place: places.dims if place != "dims" else places.offset})
    if place in ("tensor", "data"):  # these are in other objects
        wrong = replace(places, **{place: 8})
    assert tensor_words._is_proved(places)
    assert not tensor_words._is_proved(wrong)


@pytest.mark.parametrize("known", [True, False])
def test_counts_of_writes_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    if not known:
        monkeypatch.setattr(tensor_words, "find_places", lambda: None)
    live = [parameter(), torch.ones(3), torch.ones(2, 2)]
    tensors = [tensor.detach() for tensor in live]
    writes = Writes(tensors)
    assert (writes._words is not None) is known
    live[0].add_(1)
    live[2].zero_().add_(2)
    assert writes.read().tolist() == [tensor._version for tensor in live] == [1, 0, 2]


@pytest.mark.parametrize("known", [True, False])
def test_memory_that_moves_under_a_tensor_is_seen(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    if not known:
        monkeypatch.setattr(tensor_words, "find_places", lambda: None)
    live = [parameter() for _ in range(3)]
    where = Addresses([tensor.detach() for tensor in live])
    assert (where._words is not None) is known
    before = where.read()
    taken_away(live[2])
    live[0].share_memory_()
    assert (where.read() != before).tolist() == [True, False, True]


def test_words_are_read_in_order_and_only_where_they_are() -> None:
    memory = np.arange(100, dtype=np.uint64)
    at = memory.ctypes.data + 8 * np.array([7, 99, 0, 7])
    words = Words(at)
    assert words.read().tolist() == [7, 99, 0, 7]
    memory[99] = 5
    assert words.read().tolist() == [7, 5, 0, 7]
    assert Words(at[:0]).read().tolist() == []
