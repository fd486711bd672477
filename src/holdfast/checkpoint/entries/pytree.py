"""Nested state to a tree of plain values with references, and back: what `state_dict()` of any object may return.

Tensors and NumPy arrays become entries; a `TensorRef` stays in their place. Dicts, lists and tuples keep their kind. What
the value format does not know (arrays, deques, keys that are no strings or whole numbers, sizes, dtypes and devices of
torch) is spelt as a dict with one reserved key, and comes back as it was; every other value is left for
`tiers.format.values.encode` to accept or to refuse by name. The containers of the result are new, so the tree is the state
at the call even if the object goes on changing its own.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.base.errors import CorruptError, UsageError
from holdfast.base.handler_errors import pass_on
from holdfast.tiers.format.values import MAX_DEPTH, TensorRef

_ARRAY_KEY = "holdfast.ndarray"
_PAIRS_KEY = "holdfast.pairs"
_DEQUE_KEY = "holdfast.deque"
_SIZE_KEY = "holdfast.torch.Size"
_DTYPE_KEY = "holdfast.torch.dtype"
_DEVICE_KEY = "holdfast.torch.device"
_RESERVED = frozenset((_ARRAY_KEY, _PAIRS_KEY, _DEQUE_KEY, _SIZE_KEY, _DTYPE_KEY, _DEVICE_KEY))
_PLAIN = frozenset((int, float, str, bool, bytes, complex, type(None), TensorRef))
_PLAIN_KEYS = frozenset((str, int))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

# Path of a tensor and the tensor -> what stands in its place.
Emit = Callable[[str, torch.Tensor], Any]


def flatten(value: Any, path: str, emit: Emit, depth: int = 0) -> Any:
    """The tree of `value` with `emit(path, tensor)` in place of every tensor.

    Args:
        value: what an object's `state_dict()` returned.
        path: name of the value; a tensor below it is named with dots, `loader.sampler.order`.
        emit: takes a tensor and returns what stands for it, usually a TensorRef.
        depth: how deep `value` lies in the whole.

    Raises:
        UsageError: an array of a kind that has no tensor, or containers nested too deep.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return emit(path, value)
    if depth > MAX_DEPTH:
        raise UsageError(f"values are nested deeper than {MAX_DEPTH}, or contain themselves", where=path)
    if kind is dict or kind is OrderedDict:
        if not _RESERVED.isdisjoint(value):
            name = next(iter(_RESERVED.intersection(value)))
            raise UsageError(f"the key {name!r} is reserved", where=path, remedy="rename the key")
        items = ((key, flatten(item, f"{path}.{key}", emit, depth + 1)) for key, item in value.items())
        return kind(items) if _PLAIN_KEYS.issuperset(map(type, value)) else _spelt_pairs(kind, items)
    if kind is list or kind is tuple:
        if _PLAIN.issuperset(map(type, value)):
            return kind(value)  # long lists of numbers, at the speed of C
        return kind(flatten(item, f"{path}.{index}", emit, depth + 1) for index, item in enumerate(value))
    if kind is deque:
        return {_DEQUE_KEY: [value.maxlen, flatten(list(value), path, emit, depth + 1)]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return {_ARRAY_KEY: emit(path, _tensor_of(value, path))}
    return value.copy() if kind is set or kind is Counter else _spelt(value)


def unflatten(tree: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """The value of a tree that `flatten` made, with `fetch(name)` for every reference."""
    kind = type(tree)
    if kind is TensorRef:
        return fetch(tree.name)
    if kind is dict and len(tree) == 1 and not _RESERVED.isdisjoint(tree):
        spelling, content = next(iter(tree.items()))
        try:
            return _read(spelling, content, fetch)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            pass_on(error)
            raise CorruptError(f"a value is not what {spelling!r} announces: {error}") from error
    if kind is dict or kind is OrderedDict:
        return kind((key, unflatten(item, fetch)) for key, item in tree.items())
    if kind is list or kind is tuple:
        return kind(unflatten(item, fetch) for item in tree)
    return tree


def with_parts(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a container with `change(key or index, part)` for each of its parts; what is none as it is."""
    if isinstance(value, dict) and not isinstance(value, Counter):  # made of pairs it would count them
        return type(value)((key, change(key, part)) for key, part in value.items())
    if not isinstance(value, list | tuple | deque):
        return value
    parts = [change(index, part) for index, part in enumerate(value)]
    return deque(parts, value.maxlen) if isinstance(value, deque) else type(value)(parts)


def references(tree: Any) -> Iterator[str]:
    """Names of all entries that a tree refers to."""
    if type(tree) is TensorRef:
        yield tree.name
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from references(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from references(item)


def _spelt(value: Any) -> Any:
    """Returns what stands for a size, dtype or device of torch; anything else as it is."""
    if type(value) is torch.Size:
        return {_SIZE_KEY: list(value)}
    if isinstance(value, torch.dtype):
        return {_DTYPE_KEY: str(value).removeprefix("torch.")}
    return {_DEVICE_KEY: str(value)} if isinstance(value, torch.device) else value


def _spelt_pairs(kind: type, items: Iterator[tuple[Any, Any]]) -> dict[str, Any]:
    """Returns what stands for a dict with keys that the format has not, such as floats and tuples."""
    return {_PAIRS_KEY: [kind is OrderedDict, [[key, item] for key, item in items]]}


def _read(spelling: str, content: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """Returns what a dict with a reserved key stands for."""
    if spelling == _ARRAY_KEY:
        return fetch(content.name).cpu().numpy()
    if spelling == _DTYPE_KEY:
        return _DTYPES[content]
    if spelling == _DEVICE_KEY:
        return torch.device(str(content))  # a number would be any accelerator's
    if spelling == _SIZE_KEY:
        return torch.Size(content)
    first, items = content
    if spelling == _DEQUE_KEY:
        return deque((unflatten(item, fetch) for item in items), first)
    pairs = ((key, unflatten(item, fetch)) for key, item in items)
    return OrderedDict(pairs) if first else dict(pairs)


def _tensor_of(array: Any, path: str) -> torch.Tensor:
    """A tensor with a copy of the array's elements."""
    numpy = sys.modules["numpy"]
    try:
        if type(array) is not numpy.ndarray:
            raise TypeError
        return torch.from_numpy(numpy.array(array, order="C"))
    except (TypeError, ValueError) as error:
        pass_on(error)
        raise UsageError(
            f"a NumPy array of class {type(array).__name__} and dtype {array.dtype} cannot be saved",
            where=path,
            remedy="convert it to a plain array of a numeric dtype in native byte order, or to a list",
        ) from None
