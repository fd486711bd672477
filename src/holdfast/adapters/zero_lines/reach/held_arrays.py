"""Small tensors and arrays that an attribute, a class, a name or an item of a dict holds: how they are stored, and come back.

    class Meter:
        def update(self, value):                # `meter.sum` is a number first, and a tensor from the first step on
            self.sum += value

One that was the same object since the loop began comes back into the object that is there again (`id(meter.sum)`, `is`); every
other one comes back as a new one. So only those are carried whose memory nothing else that can be reached has a part of, that
have no graph, and whose layout in memory can be made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from holdfast.base.errors import UsageError
from holdfast.checkpoint.usage import sandbox

# Larger ones are compared, and not carried.
MAX_BYTES = 16 << 10
_KEY = "holdfast.held"
_SAME, _GRAPH = "same", "graph"

Span = tuple[int, int]


def is_held(value: Any, *, any_size: bool = False, with_graph: bool = False) -> bool:
    """Tell whether a tensor or an array is one that can be carried, as far as it tells itself.

    Args:
        value: a tensor or an array.
        any_size: also a large one.
        with_graph: also a tensor with a graph.
    """
    if type(value) is torch.Tensor:
        return (
            value.layout is torch.strided
            and value.device.type == "cpu"
            and not (value.requires_grad and (value.is_leaf or value.retains_grad or not with_graph))
            and not (value.is_quantized or value.is_conj() or value.is_neg() or value.is_inference())
            and value.is_contiguous()
            and (any_size or value.nbytes <= MAX_BYTES)
            and not vars(value)
        )
    return (
        type(value).__module__ == "numpy"
        and type(value).__qualname__ == "ndarray"
        and value.dtype.kind in "biufc"
        and value.dtype.isnative
        and value.flags.c_contiguous
        and value.flags.writeable
        and (any_size or value.nbytes <= MAX_BYTES)
    )


def stored(value: Any) -> dict[str, Any]:
    """Returns a tensor or an array as a plain value."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        data = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        graph = {_GRAPH: True} if value.requires_grad else {}
        return {_KEY: "tensor", "dtype": dtype, "shape": list(value.shape), "data": data, **graph}
    return {_KEY: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}


def same(stored_value: dict[str, Any]) -> dict[str, Any]:
    """Returns what was stored with the note that it was one object since the loop began."""
    return {**stored_value, _SAME: True}


def brought(value: Any, there: Any = None) -> Any:
    """Returns what was stored; every other value as it is. The tensor or array that stands in its place, `there`, is
    filled and returned if what was stored was one object since the loop began; else a new one is made.
    """
    if type(value) is not dict or _KEY not in value:
        return value
    made = remade(value[_KEY], value["dtype"], value["shape"], value["data"])
    if value.get(_GRAPH):
        with torch.enable_grad():
            made = _EndOfGraph.apply(made.requires_grad_())  # type: ignore[no-untyped-call]
    return filled(there, made) if value.get(_SAME) else made


class _EndOfGraph(torch.autograd.Function):
    """Stands for the graph that a tensor had before a restart."""

    @staticmethod
    def forward(_: Any, made: torch.Tensor) -> torch.Tensor:
        """Returns what was carried, in its own memory."""
        return made.detach()

    @staticmethod
    def backward(_: Any, *__: Any) -> Any:
        """Tells who goes through it.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a backward pass goes through a tensor that an attribute held before the restart, and its graph is gone",
            remedy="keep `loss.detach()` in the attribute, or call backward() before the optimizer's step()",
        )


def has_graph(value: Any) -> bool:
    """Tell whether this is a stored tensor that had a graph."""
    return type(value) is dict and _KEY in value and bool(value.get(_GRAPH))


def filled(there: Any, made: Any) -> Any:
    """Returns the tensor or array that stands there, with what `made` has in it; `made` if it is of another kind."""
    if type(there) is not type(made) or (there.dtype, there.shape) != (made.dtype, made.shape):
        return made
    if isinstance(made, torch.Tensor):
        with torch.no_grad():
            there.copy_(made)
    else:
        there[...] = made
    return there


def item_bytes(what: str, dtype: str) -> int:
    """Returns the bytes of one number in a `tensor`, or an `array`, of this kind."""
    if what == "tensor":
        return int(getattr(torch, dtype).itemsize)
    import numpy  # noqa: ICN001, PLC0415 - only a process that has such arrays has stored one

    return numpy.dtype(dtype).itemsize


def remade(what: str, dtype: str, shape: Sequence[int], data: bytes) -> Any:
    """Returns a `tensor`, or an `array`, of these bytes. It owns its memory, as what was stored did."""
    if what == "tensor":
        kind = getattr(torch, dtype)
        flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind, device="cpu")
        return flat.clone().reshape(shape)
    import numpy  # noqa: ICN001, PLC0415 - only a process that has such arrays has stored one

    return numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()


def span(value: Any) -> Span:
    """Returns where the memory of a tensor or an array begins and ends, all that it is a part of included; (0, 0) if it has none."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type == "meta":
            return 0, 0
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    while type(getattr(value, "base", None)).__qualname__ in ("ndarray", "memmap"):
        value = value.base
    if isinstance(getattr(value, "base", None), torch.Tensor):
        return span(value.base)
    first = value.__array_interface__["data"][0]
    return first, first + value.nbytes


def is_shared(*spans: Span) -> bool:
    """Tell whether other processes, or a file, see a part of the memory of one of these. The kernel is asked once, which takes 0.5 ms."""
    shared = [*sandbox.shared_memory()] if spans else []
    return any(first < last and begin < end for first, end in spans for begin, last in shared)


def overlapping(held: Iterable[tuple[str, Span]], others: Iterable[tuple[Span, str]]) -> dict[str, str]:
    """Returns those whose memory another one has a part of, with the name of that one.

    Args:
        held: path of each, and where it lies, or a part of it.
        others: where others lie, and what they are called.
    """
    spans = sorted(
        [
            *((first, end, path, True) for path, (first, end) in held),
            *((*part, name, False) for part, name in others),
        ]
    )
    found: dict[str, str] = {}
    reached, owner, is_held = 0, "", False
    for first, end, path, mine in spans:
        if first == end:
            continue
        if first < reached:
            if mine:
                found.setdefault(path, owner)
            if is_held:
                found.setdefault(owner, path)
        if end > reached:
            reached, owner, is_held = end, path, mine
    return found
