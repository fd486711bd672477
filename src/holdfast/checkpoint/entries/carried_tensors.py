"""Tensors, and containers of them, that live from turn to turn under a name: what can be carried, and how it comes back.

A tensor is carried without its graph, which no backward pass goes through twice; so one with a graph is carried only where the
first steps were rehearsed. It comes back on its device, in memory of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import xxhash

from holdfast.checkpoint.device.accelerator import name_of
from holdfast.checkpoint.entries.pytree import with_parts
from holdfast.checkpoint.entries.sharding import local_of

# More is not carried under one name.
MAX_BYTES = 64 << 20
_MAX_DEPTH = 8
_KEY, _ORDERED = "holdfast.tensor", "holdfast.ordered"
# What `state_dict()` of a module puts on what it returns.
_METADATA = "_metadata"


def is_carried(value: Any, is_plain: Callable[[Any], bool], *, depth: int = 0) -> bool:
    """Tell whether a value is made of plain values and tensors that can be carried.

    Args:
        value: of a name.
        is_plain: tells whether a value can be stored as it is.
        depth: how many containers it lies in.
    """
    if isinstance(value, torch.Tensor):
        return (
            type(value) is torch.Tensor
            and value.layout is torch.strided
            and not value.is_quantized
            and not (value.is_leaf and value.requires_grad)
            and value.nbytes <= MAX_BYTES
        )
    if is_plain(value):
        return True
    if depth > _MAX_DEPTH or type(value) not in (tuple, list, dict, OrderedDict):
        return False
    if isinstance(value, dict) and not all(type(key) is str and key not in (_KEY, _ORDERED) for key in value):
        return False
    if isinstance(value, OrderedDict) and not (vars(value).keys() <= {_METADATA} and is_plain(_metadata_of(value))):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return all(is_carried(part, is_plain, depth=depth + 1) for part in parts)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value that is carried."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


def is_large(value: Any) -> bool:
    """Tell whether the tensors of a value have more bytes together than one alone may have."""
    return sum(tensor.nbytes for tensor in tensors(value)) > MAX_BYTES


def packed(value: Any, *, copied: bool = True) -> Any:
    """Returns a value as it is saved; with its own tensors, for who saves it at once, unless they are `copied`."""
    if isinstance(value, torch.Tensor):
        return {_KEY: value.detach().clone() if copied else value.detach(), "device": name_of(value.device)}
    if type(value) is OrderedDict and next(tensors(value), None) is not None:
        return {_ORDERED: packed(dict(value), copied=copied), "metadata": _metadata_of(value)}
    return _within(value, partial(packed, copied=copied))


def unpacked(value: Any, *, device: torch.device | None = None) -> Any:
    """Returns a value as it was; its tensors on `device`, if that is known."""
    if isinstance(value, dict) and value.keys() == {_KEY, "device"}:
        return value[_KEY].detach().to(device or value["device"]).clone()
    if isinstance(value, dict) and value.keys() == {_ORDERED, "metadata"}:
        made = OrderedDict(unpacked(value[_ORDERED], device=device))
        if value["metadata"] is not None:
            vars(made)[_METADATA] = OrderedDict(value["metadata"])
        return made
    return _within(value, partial(unpacked, device=device))


def _metadata_of(value: OrderedDict[str, Any]) -> dict[str, Any] | None:
    found = vars(value).get(_METADATA)
    return dict(found) if isinstance(found, dict) else found


def _within(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a value with its parts changed; one without tensors as it is."""
    if next(tensors(value), None) is None:
        return value
    return with_parts(value, lambda _, part: change(part))


def stays(value: Any) -> bool:
    """Tell whether a value can have several names by which it is changed in place, and can be filled."""
    return isinstance(value, list | dict | set) or (type(value) is torch.Tensor and not value.requires_grad)


def filled(there: Any, value: Any) -> Any:
    """Returns what stands there, with what `value` has in it; `value` itself if they are of another kind."""
    if type(there) is not type(value) or not stays(there):
        return value
    if token(there) == token(value):
        return there
    if isinstance(there, torch.Tensor):
        if (there.shape, there.dtype, there.device) != (value.shape, value.dtype, value.device):
            return value
        with torch.no_grad():
            there.copy_(value)
    else:
        there.clear()
        there.extend(value) if isinstance(there, list) else there.update(value)
    return there


def token(value: Any) -> object:
    """Returns what is equal as long as a value is as it was, all tensors in it included."""
    if isinstance(value, dict):
        return dict, [(repr(key), token(part)) for key, part in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [token(part) for part in value]
    if not isinstance(value, torch.Tensor):
        return repr(value)
    local = local_of(value).detach()
    facts = (tuple(local.shape), str(local.dtype))
    if local.device.type == "cpu" and local.numel():
        data = local.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        return (*facts, xxhash.xxh3_64_digest(memoryview(data)))  # type: ignore[arg-type]  # an array has a buffer
    return (*facts, id(value), value._version)
