"""What torch keeps of tensors, read from where it stands: the same as torch says, and every change is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.entries import tensor_words
from holdfast.checkpoint.entries.tensor_words import Addresses, Places, Words, Writes, find_places


@pytest.fixture
def places() -> Places:
    found = find_places()
    assert found is not None, "this torch keeps its facts in another way: saves of thousands of tensors take longer"
    return found


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4), requires_grad=False)


class Other(torch.Tensor):
    """A class that is not torch's own."""


@pytest.mark.parametrize(
    "other", [torch.ones(4).as_subclass(Other), torch.ones(4, 4).to_sparse()], ids=["class", "sparse"]
)
def test_what_cannot_be_read_is_asked(places: Places, other: torch.Tensor) -> None:
    assert tensor_words._memory_of([torch.ones(3), other], places) is None
    tensors = [torch.ones(()), torch.empty(0, 3), torch.ones(2, 3, 4, 5, 6, 7)[:, 1:, ::2], torch.ones(4, 4).t()]
    assert tensor_words._memory_of(tensors, places) is not None
    assert tensor_words._memory_of(tensors, None) is None
    assert Addresses([]).read().tolist() == []
    assert Writes([torch.ones(4).as_subclass(Other).add_(1)]).read().tolist() == [1]


@pytest.mark.parametrize("place", ["storage", "counter", "data", "count"])
def test_a_place_that_is_wrong_is_not_believed(monkeypatch: pytest.MonkeyPatch, places: Places, place: str) -> None:
    """As in another torch, where something else stands there."""
    wrong = {"storage": places.counter, "counter": places.storage, "data": places.data + 8, "count": places.count ^ 4}
    monkeypatch.setattr(tensor_words, "find_places", lambda: replace(places, **{place: wrong[place]}))
    tensors = [parameter().detach().add_(1) for _ in range(3)]
    where, writes = Addresses(tensors), Writes(tensors)
    assert (where._words is None) == (place in ("storage", "data"))
    assert writes._words is None
    assert writes.read().tolist() == [1, 1, 1]


def test_where_no_memory_is_shown_all_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Places:
        raise PermissionError("/proc/self/mem")

    monkeypatch.setattr(tensor_words, "_search", refuse)
    with caplog.at_level("INFO"):
        assert find_places.__wrapped__() is None
    assert "tensors are asked one by one: PermissionError: /proc/self/mem" in caplog.text


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
    live[2].untyped_storage().resize_(0)
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
