"""The findings of a walk: plain values and how they are set, and what must stay as it is.

look.leaves       path -> a plain value and how it is set: `args.global_step`, `Net.calls`, `step().count`, `rng`
look.fixed        path -> token of something that nobody can set back: a tensor, an array, the class of an object
look.orders       path of a dict that is not carried whole -> its keys
look.shared       path of a plain value that has a part in common with another -> what that is
look.local        path of a number or text under a name of a function -> its token: nobody can set it
look.data         path of a tensor, an array, a list of plain values -> its token, and whether it has texts
look.unknown      objects that cannot be looked into, of which nobody knows whether they keep something
look.born         path of an object that is nothing but attributes, and is held where another can be put -> its class by name
look.kinds        name of a class -> the class, of such objects and of classes of the user; None if two have the name
look.parts        path of a tensor or array that cannot be carried -> what else has a part of it
look.why          path of a container that cannot be carried -> why
look.places       path of every object that was looked at, by its `id`
look.begins       path of a generator that has not begun, where a loop is about to
look.loaders      path of a data loader whose workers stay -> a reference to it
look.unsure       what may hold a place that nobody can read: iterators, generators, files
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast.adapters.zero_lines.reach import container_kinds, growing_lists, held_arrays
from holdfast.adapters.zero_lines.reach.attributes import put_attribute

# The name, beside those of classes, of what a generator is when it has ended: it has no items, whatever it was.
ENDED = "a generator that has ended"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A plain value.

    Attributes:
        token: equal as long as the value is.
        owner, key: path of what holds it, and under which key.
        value: gives the value, as it can be stored.
        put: sets it in place, where it is.
        held: the tensor or array itself, if it is one; of a container with such what is in it.
        kind: of a container, what refilling it leaves as it is.
        lasts: whether it is set in an object that has to be there: a generator of random numbers.
    """

    token: object
    owner: str
    key: str | int
    value: Callable[[], Any]
    put: Callable[[Any], None]
    held: Any = None
    kind: container_kinds.Kind | None = None
    lasts: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """Something with keys: a namespace, the attributes of an object, a dict.

    Attributes:
        put: sets a key.
        drop: removes a key.
    """

    put: Callable[[Any, Any], None]
    drop: Callable[[Any], None]


@dataclass(slots=True)
class Look:
    """The things that were found; see the top of the file."""

    leaves: dict[str, Leaf] = field(default_factory=dict)
    owners: dict[str, Owner] = field(default_factory=dict)
    fixed: dict[str, object] = field(default_factory=dict)
    unsure: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    orders: dict[str, list[Any]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    local: dict[str, tuple[str, str]] = field(default_factory=dict)
    data: dict[str, tuple[object, bool]] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    born: dict[str, tuple[str, str, str | int]] = field(default_factory=dict)
    kinds: dict[str, type | None] = field(default_factory=dict)
    begins: dict[str, Any] = field(default_factory=dict)
    loaders: dict[str, weakref.ref[DataLoader[Any]]] = field(default_factory=dict)

    def put(self, rows: Iterable[Sequence[Any]], gone: Iterable[Sequence[Any]]) -> None:
        """Sets plain values as a version has them, where they are in this look, and makes objects that are not there.

        Raises:
            KeyError: there is no place for one, or no class.
        """
        for path, owner, key, value, *kind in rows:
            leaf = self.leaves.get(path)
            if kind:
                self._make(path, owner, key, kind[0])
            elif leaf is not None and not container_kinds.is_stored(value):
                leaf.put(_brought(value, leaf.held))
            else:
                self.owners[owner].put(key, _brought(value))
        for path, owner, key in gone:
            if path in self.leaves:
                self.owners[owner].drop(key)

    def _make(self, path: str, owner: str, key: str | int, kind: str) -> None:
        """Makes an object without attributes, of a class that the script has already used before its loop."""
        if path in self.born and self.born[path][0] == kind:
            return
        made = types.GeneratorType if kind == ENDED else self.kinds[kind]
        if made is None:
            raise KeyError(kind)
        if made is types.GeneratorType:
            self.owners[owner].put(key, _ended())
            return
        thing: Any = object.__new__(made)
        self.owners[owner].put(key, thing)
        self.owners[path] = owner_of(thing)


def _brought(value: Any, there: Any = None) -> Any:
    """Returns a value as it was before it was stored."""
    if container_kinds.is_stored(value):
        return container_kinds.brought(value)
    grown = growing_lists.is_stored(value)
    return growing_lists.brought(value, there) if grown else held_arrays.brought(value, there)


def _ended() -> Generator[Any, Any, Any]:
    """Returns a generator that has no items left."""

    def some() -> Generator[Any, Any, Any]:
        yield

    found = some()
    found.close()
    return found


def owner_of(thing: Any) -> Owner:
    """Sets in the object's own dict where it has one, so that no `__setattr__` of the user's runs."""
    return Owner(functools.partial(put_attribute, thing), functools.partial(delattr, thing))


def refill(owners: Mapping[str, Owner], live: Any, hold: tuple[str, str | int], value: Any) -> None:
    """Refill a container in place, for others may hold it too; unless it is something else now."""
    alike = isinstance(live, dict) is isinstance(value, dict) and isinstance(value, list | dict | set)
    if not alike or type(value) is OrderedDict:  # which has attributes
        owners[hold[0]].put(hold[1], value)
        return
    live.clear()
    live.update(value) if isinstance(live, dict | set) else live.extend(value)


def put_cell(cell: types.CellType, _: Any, new: Any) -> None:
    """Sets the variable of a closure."""
    cell.cell_contents = new


def freeze(params: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Sets `requires_grad` of parameters: false for these names, else true."""
    frozen = set(names)
    for name, parameter in params.items():
        parameter.requires_grad_(name not in frozen)


def set_still(modules: Mapping[str, nn.Module], names: Iterable[str]) -> None:
    """Sets `training` of modules: false for these names, else true."""
    still = set(names)
    for name, module in modules.items():
        module.training = name not in still


def itself(value: Any) -> Any:
    """Returns the value."""
    return value
