"""Keeps what the dataset and the sampler of a plain loader count and draw by themselves, in attributes of their own.

    kept = DataAttributes(loader, changed=set(), doubted=tell)
    state = kept.state_dict()        # numbers, texts and generators that have changed since the loader was made

A sampler that counts its epochs, a dataset with a generator of its own, a module's generator that a function of the data uses: nothing else
knows of them, and a restart would make them anew. What never changes is left as the script made it. Lists, arrays, tensors
and numbers of NumPy are looked at only, at their first parts: one that changes is told of. So is an iterator, and what is made later than the loader and changes then.
Objects that Lightning tells the epoch, modules, and all that belongs to a trainer are passed by.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from types import CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from holdfast.base.installed import is_installed
from holdfast.checkpoint.containers import items_of, length_of, parts_of
from holdfast.checkpoint.entries.rng import random_state
from holdfast.checkpoint.state.optimizer_extras import same
from holdfast.checkpoint.state.stateful import is_stateful

_ROOTS = ("dataset", "sampler", "batch_sampler", "collate_fn")
_ATOMS = (bool, int, float, str, NoneType)
# Values that are told of when they change, and not kept.
_TOLD = (complex, range, enum.Enum)
_LISTS = (list, tuple, deque, set, frozenset)
_MAX_DEPTH, _MAX_PARTS, _MAX_OBJECTS, _MAX_ALL = 8, 64, 16, 500
# Of these packages an object belongs to the trainer or to the process, not to the data.
_NOT_DATA = ("lightning", "pytorch_lightning", "logging", "threading", "multiprocessing", "concurrent", "holdfast")
_NOT_LOOKED_AT = (nn.Module, type, ModuleType)
# What an attribute holds, and how it is set; None: it cannot be.
_Found = tuple[Any, Callable[[Any], None] | None]


class DataAttributes:
    """The attributes of one loader's parts, as an object with a state.

    Args:
        loader: of which no iterator was made.
        changed: names of attributes that have changed before, in this process; those that do are added.
        doubted: called with the name of one that changes and cannot be kept; once for each.
        keeps: whether they are kept; else each that changes is doubted, but for what the loader hands out itself.
    """

    def __init__(self, loader: Any, changed: set[str], doubted: Callable[[str], None], *, keeps: bool = True) -> None:
        self._loader, self._changed, self._doubted, self._keeps = loader, changed, doubted, keeps
        self._first = {name: value for name, (value, _) in self._look().items()}
        self._late: set[str] = set()  # made later: a restart has nothing yet that could be set

    def state_dict(self) -> dict[str, Any]:
        """Return the values of those that have changed."""
        state = {}
        for name, (value, write) in self._look().items():
            if name not in self._first:
                self._first[name] = value
                self._late.add(name)
            if name not in self._changed:
                first = self._first[name]
                if same(value, first):
                    continue
                if (type(value) in _ATOMS) != (type(first) in _ATOMS):
                    self._late.add(name)
                self._changed.add(name)
                if write is None or name in self._late or not self._keeps:
                    self._doubted(name)
            if write is not None and name not in self._late:
                state[name] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them, and such as had not changed then; one that is not there any more, or of another kind, is left out."""
        found = self._look()
        self._changed |= state.keys()
        for name in self._changed:
            value, (now, write) = state.get(name, self._first.get(name)), found.get(name, (None, None))
            if write is not None and (type(now) is type(value) or {type(now), type(value)} <= {*_ATOMS}):
                write(value)

    def _look(self) -> dict[str, _Found]:
        seen: set[int] = set()
        roots = {name: getattr(self._loader, name, None) for name in _ROOTS}
        if self._keeps:
            return {name: found for root, value in roots.items() for name, found in _within(value, root, seen, 0)}
        roots = {name: value for name, value in roots.items() if not is_stateful(value)}
        looked = (found for root, value in roots.items() for found in _within(value, root, seen, 0))
        return {name: found for name, found in looked if name.rpartition(".")[2] != "generator"}


def _within(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, _Found]]:
    """Yields what an object holds, by name."""
    if id(value) in seen or depth > _MAX_DEPTH or len(seen) > _MAX_ALL or not _is_data(value, depth):
        return
    seen.add(id(value))
    holder: MutableMapping[Any, Any] | None = None
    if isinstance(value, _LISTS):
        first = list(itertools.islice(parts_of(value), _MAX_PARTS))
        if all(type(part) in _ATOMS for part in first):
            yield name, (f"{length_of(value)} {first!r}", None)
            return
        parts: Any = {str(index): part for index, part in enumerate(first[:_MAX_OBJECTS])}
    elif isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, MethodType):
        parts = {"self": value.__self__}
    elif isinstance(value, FunctionType):
        yield from _of_function(value, name, seen, depth)
        return
    else:
        parts = holder = value if isinstance(value, dict) else vars(value)
        for function in () if isinstance(value, dict) else _methods(type(value)):  # type: ignore[arg-type]
            yield from _within(function, name, seen, depth + 1)
    for key, part in list(itertools.islice(items_of(parts), _MAX_PARTS)):
        yield from held(holder, key, part, f"{name}.{key}", seen, depth)


def _of_function(function: FunctionType, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, _Found]]:
    """Yields what a function has of the function around it, and what of its module."""
    cells = _Cells(function)
    for key, part in cells.contents():
        yield from held(cells, key, part, f"{name}.{key}", seen, depth)
    for key in _names(function.__code__):
        if key in function.__globals__:
            part = function.__globals__[key]
            yield from held(function.__globals__, key, part, f"{function.__module__}.{key}", seen, depth)


class _Cells:
    """Names of a function around; to set one sets it for all functions that have it."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))

    def contents(self) -> Iterator[tuple[str, Any]]:
        """Names that have a value, with it."""
        for key, cell in self._cells.items():
            with contextlib.suppress(ValueError):  # empty
                yield key, cell.cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        self._cells[key].cell_contents = value


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """Returns the names that a function, and those within it, may take from the module."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))[:_MAX_PARTS]


@functools.lru_cache(maxsize=256)
def _methods(kind: type[Any]) -> tuple[FunctionType, ...]:
    """Returns the methods that the user wrote for a class."""
    own = [each for each in kind.__mro__ if is_own(each.__module__)]
    found = [value for each in own for value in vars(each).values() if isinstance(value, FunctionType)]
    return tuple(found[:_MAX_PARTS])


def held(
    holder: MutableMapping[Any, Any] | _Cells | None, key: Any, part: Any, name: str, seen: set[int], depth: int
) -> Iterator[tuple[str, _Found]]:
    """Yields what one part of an object holds, by name, with what sets it in the holder."""
    if type(part) in _ATOMS:
        if holder is not None:
            yield name, (part, lambda value: holder.__setitem__(key, value))
    elif isinstance(part, _TOLD):
        yield name, (repr(part), None)
    elif (random := random_state(part)) is not None:
        yield name, (random[0](), random[1])
    elif isinstance(part, torch.Tensor):
        if part.device.type == "cpu" and part.layout is torch.strided and part.numel():
            yield name, (f"{[*part.shape]} {_row(part).tolist()!r}", None)
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(part, numpy.ndarray | numpy.generic):
        if part.dtype.kind in "biuf" and part.size:
            yield name, (f"{[*part.shape]} {_row(part).tolist()!r}", None)
    elif isinstance(part, Iterator) and not isinstance(part, io.IOBase) and not is_own(type(part).__module__):
        yield name, (object(), None)  # goes on, and nobody can say where it is
    else:
        yield from _within(part, name, seen, depth + 1)


def _row(array: Any) -> Any:
    """Returns the beginning of the first row, of which nothing has to be copied; a single number as it is."""
    return array[(0,) * (array.ndim - 1)][:_MAX_PARTS] if array.ndim else array


def _is_data(value: Any, depth: int) -> bool:
    """Tell whether an object may hold what belongs to the data: a container, a part of the loader, what the user or PyTorch wrote for data."""
    if isinstance(value, (*_LISTS, dict, functools.partial, MethodType)):
        return True
    if isinstance(value, FunctionType):
        return is_own(value.__module__)
    if depth and not _is_of_user(type(value).__module__):
        return False
    if isinstance(value, _NOT_LOOKED_AT) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    if isinstance(value, Sampler) and callable(getattr(value, "set_epoch", None)):
        return False
    return not any(kind.__module__.partition(".")[0] in _NOT_DATA for kind in type(value).__mro__)


def _is_of_user(module: str) -> bool:
    """Tell whether a user's module, or PyTorch's for data, defines a class."""
    return is_own(module) or module.startswith("torch.utils.data.")


@functools.lru_cache(maxsize=256)
def is_own(module: str) -> bool:
    """Tell whether a module is a user's."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not is_installed(file))
