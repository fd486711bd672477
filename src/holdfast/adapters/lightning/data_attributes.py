"""Keeps what the dataset and the sampler of a plain loader count and draw by themselves, in attributes of their own.

    kept = DataAttributes(loader, changed=set(), doubted=tell)
    state = kept.state_dict()        # numbers, texts and generators that have changed since the loader was made

A sampler that counts its epochs, a dataset with a generator of its own: nothing else knows of them, and a restart would make them anew. What
never changes is left as the script made it. Lists and arrays are looked at only, at their first parts: one that changes is told of.
Objects that Lightning tells the epoch, modules, and all that belongs to a trainer are passed by.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, MutableMapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from holdfast.base.installed import is_installed
from holdfast.checkpoint.entries.rng import random_state
from holdfast.checkpoint.state.optimizer_extras import same

_ROOTS = ("dataset", "sampler", "batch_sampler", "collate_fn")
_ATOMS = (bool, int, float, str)
_MAX_DEPTH, _MAX_PARTS, _MAX_OBJECTS = 3, 64, 16
# Of these packages an object belongs to the trainer or to the process, not to the data.
_NOT_DATA = ("lightning", "pytorch_lightning", "logging", "threading", "multiprocessing", "concurrent", "holdfast")
_NOT_LOOKED_AT = (nn.Module, type, FunctionType, MethodType, ModuleType)
# What an attribute holds, and how it is set; None: it cannot be.
_Found = tuple[Any, Callable[[Any], None] | None]


class DataAttributes:
    """The attributes of one loader's parts, as an object with a state.

    Args:
        loader: of which no iterator was made.
        changed: names of attributes that have changed before, in this process; those that do are added.
        doubted: called with the name of one that changes and cannot be kept; once for each.
    """

    def __init__(self, loader: Any, changed: set[str], doubted: Callable[[str], None]) -> None:
        self._loader, self._changed, self._doubted = loader, changed, doubted
        self._first = {name: value for name, (value, _) in self._look().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the values of those that have changed."""
        state = {}
        for name, (value, write) in self._look().items():
            if name not in self._changed:
                if name not in self._first or same(value, self._first[name]):
                    continue
                self._changed.add(name)
                if write is None:
                    self._doubted(name)
            if write is not None:
                state[name] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them, and such as had not changed then; one that is not there any more, or of another kind, is left out."""
        found = self._look()
        self._changed |= state.keys()
        for name in self._changed:
            value, (now, write) = state.get(name, self._first.get(name)), found.get(name, (None, None))
            if write is not None and type(now) is type(value):
                write(value)

    def _look(self) -> dict[str, _Found]:
        seen: set[int] = set()
        roots = {name: getattr(self._loader, name, None) for name in _ROOTS}
        return {name: found for root, value in roots.items() for name, found in _within(value, root, seen, 0)}


def _within(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, _Found]]:
    """Yields what an object holds, by name."""
    if id(value) in seen or depth > _MAX_DEPTH or not _is_data(value, depth):
        return
    seen.add(id(value))
    if isinstance(value, list | tuple):
        first = value[:_MAX_PARTS]
        if all(type(part) in _ATOMS for part in first):
            yield name, (f"{len(value)} {first!r}", None)
            return
        parts = {str(index): part for index, part in enumerate(first[:_MAX_OBJECTS])}
        holder: MutableMapping[Any, Any] | None = None
    else:
        parts = holder = value if isinstance(value, dict) else vars(value)
    for key, part in list(itertools.islice(parts.items(), _MAX_PARTS)):
        yield from _held(holder, key, part, f"{name}.{key}", seen, depth)


def _held(
    holder: MutableMapping[Any, Any] | None, key: Any, part: Any, name: str, seen: set[int], depth: int
) -> Iterator[tuple[str, _Found]]:
    if type(part) in _ATOMS:
        if holder is not None:
            yield name, (part, lambda value: holder.__setitem__(key, value))
    elif (random := random_state(part)) is not None:
        yield name, (random[0](), random[1])
    elif isinstance(part, torch.Tensor):
        if part.device.type == "cpu" and part.layout is torch.strided and part.ndim and part.numel():
            yield name, (f"{[*part.shape]} {_row(part).tolist()!r}", None)
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(part, numpy.ndarray):
        if part.dtype.kind in "biuf" and part.ndim and part.size:
            yield name, (f"{[*part.shape]} {_row(part).tolist()!r}", None)
    else:
        yield from _within(part, name, seen, depth + 1)


def _row(array: Any) -> Any:
    """Returns the beginning of the first row, of which nothing has to be copied."""
    return array[(0,) * (array.ndim - 1)][:_MAX_PARTS]


def _is_data(value: Any, depth: int) -> bool:
    """Tell whether an object may hold what belongs to the data: a container, a part of the loader, what the user or PyTorch wrote for data."""
    if isinstance(value, list | tuple | dict):
        return True
    if depth and not _is_of_user(type(value).__module__):
        return False
    if isinstance(value, _NOT_LOOKED_AT) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    if isinstance(value, Sampler) and callable(getattr(value, "set_epoch", None)):
        return False
    return not any(kind.__module__.partition(".")[0] in _NOT_DATA for kind in type(value).__mro__)


@functools.lru_cache(maxsize=256)
def _is_of_user(module: str) -> bool:
    """Tell whether a user's module, or PyTorch's for data, defines a class."""
    file = getattr(sys.modules.get(module), "__file__", None)
    is_own = module == "__main__" or (file is not None and not is_installed(file))
    return is_own or module.startswith("torch.utils.data.")
