"""Knows what was given to a Checkpointer, by identity: which objects and which memory are in every version."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.base.handler_errors import forgive
from holdfast.checkpoint.containers import dict_of, parts_of
from holdfast.checkpoint.entries.sharding import local_of, memory_of
from holdfast.checkpoint.usage import user_frames

# How deep it is looked into an object, and how many objects are looked at.
MAX_DEPTH, MAX_OBJECTS = 5, 5000
_CLOSED = (type, ModuleType, FunctionType, torch.Tensor, Optimizer, str, bytes, int, float, type(None))


class Given:
    """The objects of one Checkpointer.

    Args:
        objects: by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._numbers: set[int] = set()
        self._memory: set[Any] = set()
        self.look()

    def look(self) -> None:
        """Looks at what the objects hold now."""
        found = list(_walk(self._objects.values(), _held))
        self._numbers = {id(value) for value in found}
        tensors = (
            t for value in found if isinstance(value, nn.Module) for t in (*value.parameters(), *value.buffers())
        )
        self._memory = {memory for tensor in tensors if (memory := _memory_of(tensor)) is not None}

    def has(self, value: Any) -> bool:
        """Tell whether an object was given, or lies within one that was."""
        return id(value) in self._numbers

    def is_named(self, value: Any) -> bool:
        """Tell whether an object was given by itself, or in a list, not as a part of another one."""
        given = [
            each
            for thing in self._objects.values()
            for each in (parts_of(thing) if isinstance(thing, list | tuple) else [thing])
        ]
        return any(value is each for each in given)

    def saves(self, tensor: torch.Tensor) -> bool:
        """Tell whether the memory of a tensor belongs to a module that was given, or cannot be told."""
        memory = _memory_of(tensor)
        return memory is None or memory in self._memory

    def feeds(self, iterator: Any) -> bool:
        """Tell whether an iterator reads from something that was given, as far as it shows what it reads from."""
        return any(id(value) in self._numbers for value in _walk([iterator], _referred))


def _walk(values: Iterable[Any], parts: Any) -> Iterator[Any]:
    seen: dict[int, Any] = {}
    waiting = [(value, 0) for value in values]
    while waiting and len(seen) < MAX_OBJECTS:
        value, depth = waiting.pop(0)
        if id(value) in seen or value is None or isinstance(value, str | bytes | int | float):
            continue
        seen[id(value)] = value
        yield value
        if depth < MAX_DEPTH:
            waiting += [(part, depth + 1) for part in parts(value)]


def _held(value: Any) -> Iterable[Any]:
    """Returns what an object hands out with its own state, as far as can be known: what its attributes and items are."""
    if isinstance(value, nn.Module):
        return list(value.modules())
    if isinstance(value, LRScheduler):
        return getattr(value, "_schedulers", ())
    if isinstance(value, _CLOSED):
        return ()
    items = parts_of(value) if isinstance(value, dict | list | tuple) else ()
    return [*items, *(dict_of(value) or {}).values()]


def _referred(value: Any) -> Iterable[Any]:
    """Returns what an iterator refers to: a generator to its own names, and not to those of its file."""
    if isinstance(value, GeneratorType):
        return list(user_frames.own(value.gi_frame).values()) if value.gi_frame is not None else ()
    return () if isinstance(value, (*_CLOSED, nn.Module)) else gc.get_referents(value)


def _memory_of(tensor: torch.Tensor) -> Any:
    with forgive(RuntimeError, TypeError, NotImplementedError):
        return memory_of(local_of(tensor))
    return None  # a class of its own, or none
