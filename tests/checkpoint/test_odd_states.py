"""Odd tensors and values in a dict of tensors and in an object's state: they come back as they were, or are refused by place."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.base.errors import UsageError
from sample_kit import sampled
from state_kit import restore, save
from zoo_kit import start


class Box:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


Point = namedtuple("Point", "x y")


def line(new: int, length: int = 20) -> torch.Tensor:
    return torch.arange(float(length)) + 100 * new


def inferred(new: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.rand(3) + new


# `new` is 0 for what is saved and 1 for what the script has when it comes back.
DICTS: dict[str, Callable[[int], dict[Any, Any]]] = {
    "views of one memory that overlap": lambda new: {"a": (base := line(new))[:12], "b": base[6:]},
    "expanded": lambda new: {"a": torch.full((1, 4), 1.0 + new).expand(5, 4)},
    "strided": lambda new: {"a": line(new, 24).as_strided((4, 3), (2, 3))},
    "elements that overlap": lambda new: {"a": line(new, 24).as_strided((4, 4), (1, 1))},
    "conjugated": lambda new: {"a": (line(new, 4) + 1j).conj()},
    "conjugated beside its memory": lambda new: {"a": (base := line(new, 4) + 1j), "b": base.conj()},
    "negated beside its memory": lambda new: {"a": (base := (line(new, 4) + 1j)).imag, "b": base.conj().imag},
    "negated": lambda new: {"a": (line(new, 4) + 1j).conj().imag},
    "empty and scalar": lambda new: {"a": torch.zeros(0, 5), "b": torch.zeros(()) + new, "c": torch.zeros(3, 0)},
    "channels last": lambda new: {"a": (torch.rand(2, 3, 4, 5) + new).to(memory_format=torch.channels_last)},
    "eight bits, unsigned, truth": lambda new: {
        "a": line(new, 8).to(torch.float8_e4m3fn), "b": line(new, 4).to(torch.uint16), "c": torch.tensor([new == 1, True])
    },
    "parameters and buffers": lambda new: {
        "a": torch.nn.Parameter(torch.rand(3) + new), "b": torch.nn.Buffer(torch.rand(3) + new)
    },
    "made in inference mode": lambda new: {"a": inferred(new)},
    "odd keys": lambda new: {
        "a": {"b": torch.ones(1) + new, 2: torch.ones(2) + new},
        **{key: torch.ones(3) + new + size for size, key in enumerate(["", "x/y", "\u00fc\U0001f600", "k" * 300, "~", "a.2"])},
    },
    "keys that are spelt alike": lambda new: {
        key: torch.arange(2.0) + 10 * place + new for place, key in enumerate([1, "1", "1~", "b.c"])
    } | {"b": {"c": torch.arange(2.0) + 90 + new}},
    "plain values beside tensors": lambda new: {
        "n": float("nan"), "big": 1 if new else 2**70, "z": -0.0, "b": b"" if new else b"\0x", "t": (1, [2, {"x": None}]),
        "c": 1j + new, "tt": torch.zeros(1) + new,
    },
}  # fmt: skip
BOXES: dict[str, Callable[[int], Any]] = {
    "arrays": lambda new: {
        "a": np.arange(6).reshape(2, 3).T + new, "be": np.arange(4, dtype=">f8") + new, "z": np.array(3.0 + new),
        "s": np.float32(1.5 + new), "bool": np.array([new == 1]),
    },
    "states of generators": lambda new: {
        "np": np.random.default_rng(3 + new).bit_generator.state, "py": random.Random(3 + new).getstate(),
        "old": np.random.RandomState(3 + new).get_state(),
    },
    "one tensor by several names": lambda new: {"a": (t := line(new, 4)), "b": t, "c": t[:2]},
    "ten thousand tensors": lambda new: {f"k{i}": torch.full((3,), float(i + new)) for i in range(10_000)},
    "truth as keys": lambda new: {True: 1 + new, 2: 5, "True": 7},
    "keys that look alike": lambda new: {1: torch.ones(1) + new, "1": torch.ones(2) + new, 1.5: torch.ones(3) + new},
    "sets": lambda new: {"s": {1, 2, "x"}, "f": frozenset([1 + new])},
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: {"a": torch.eye(3).to_sparse()}, r"sparse.*\[thing\.a\]"),
    "rows of a sparse one": (lambda: {"a": torch.eye(3).to_sparse_csr()}, r"sparse.*\[thing\.a\]"),
    "quantized": (
        lambda: {"a": torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.quint8)},
        r"quint8.*\[thing\.a\]",
    ),
    "without memory": (lambda: {"a": torch.empty(3, device="meta")}, r"no memory yet.*\[thing\.a\]"),
    "array of objects": (lambda: Box({"a": np.array([None, 1], dtype=object)}), r"\[thing\.a\]"),
    "array of records": (lambda: Box({"a": np.zeros(2, dtype=[("x", "f4"), ("y", "i4")])}), r"\[thing\.a\]"),
    "named tuple": (lambda: Box({"p": Point(1, torch.ones(2))}), r"\[thing\.p\]"),
}


def shown(thing: Any) -> Any:
    """Everything about a value that a script can see."""
    if isinstance(thing, torch.Tensor):
        flat = thing.detach().clone().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return type(thing), thing.dtype, tuple(thing.shape), thing.requires_grad, bytes(flat.view(torch.uint8).numpy())
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, thing.shape, thing.tobytes()
    if isinstance(thing, dict):
        return type(thing), [(type(key), key, shown(value)) for key, value in thing.items()]
    if isinstance(thing, list | tuple):
        return type(thing), [shown(value) for value in thing]
    if isinstance(thing, set | frozenset):
        return type(thing), sorted(map(repr, thing))
    return type(thing), repr(thing)


@pytest.mark.parametrize("name", DICTS)
def test_an_odd_dict_of_tensors_comes_back_as_it_was(name: str) -> None:
    saved, there = DICTS[name](0), DICTS[name](1)
    expected = shown(saved)
    restore(start({"thing": there}), save(start({"thing": saved})))
    assert shown(there) == expected
    assert shown(saved) == expected, "a save changes nothing"


@pytest.mark.parametrize("name", sampled(BOXES, *(name for name in BOXES if name != "ten thousand tensors")))
def test_an_odd_state_of_an_object_comes_back_as_it_was(name: str) -> None:
    saved, there = Box(BOXES[name](0)), Box(BOXES[name](1))
    expected = shown(saved.state)
    restore(start({"thing": there}), save(start({"thing": saved})))
    assert shown(there.state) == expected


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_place(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(UsageError, match=said):
        start({"thing": make()})


@pytest.mark.parametrize("part", ["weight", "rows"])
def test_a_tensor_whose_memory_was_taken_away_is_refused_by_name_and_not_read(part: str) -> None:
    """Whoever reads it ends the process."""
    whole = torch.zeros(8, 4)
    state = start({"thing": {"weight": whole, "rows": whole[6:], "other": torch.zeros(3)}})
    size = whole.untyped_storage().nbytes()
    whole.untyped_storage().resize_(0 if part == "weight" else size - 16)
    with pytest.raises(UsageError, match=r"the memory of the tensor was taken away.*thing"):
        state.gather()
    whole.untyped_storage().resize_(size)
    assert save(state), "it is saved again once it has its memory"
