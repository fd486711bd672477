"""Reads containers as their classes in Python's library do, whatever a subclass makes of it.

To look at what an object holds must not change it: `__iter__`, `values` or `__getitem__` of a user's class may read files, count, or draw
random numbers. What holds a container and is none (`UserDict`, `ModuleList`) has attributes, which are looked at instead. Of these
`__getattr__`, which may open what is opened late, is not asked.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable, Iterator
from typing import Any

# Classes whose own methods say what is in them, and no more.
STANDARD = frozenset(
    (
        dict,
        collections.OrderedDict,
        collections.defaultdict,
        collections.Counter,
        list,
        set,
        tuple,
        frozenset,
        collections.deque,
    )
)
_BY_ID = {id(kind): kind for kind in STANDARD}  # a user's class may forbid to be hashed


def standard_of(value: Any) -> Any:
    """Return the class of Python's that the class of a container is made from; None if it is none, whatever it says of itself."""
    return next((_BY_ID[id(part)] for part in type(value).__mro__ if id(part) in _BY_ID), None)


def length_of(value: Any) -> int:
    """Return how many parts a container has; 0 for what is none."""
    base = standard_of(value)
    return 0 if base is None else int(base.__len__(value))


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a container has in it, with keys or numbers; nothing for what is none."""
    base = standard_of(value)
    if base is None:
        return ()
    found: Iterable[tuple[Any, Any]] = base.items(value) if issubclass(base, dict) else enumerate(base.__iter__(value))
    return found


def parts_of(value: Any) -> Iterable[Any]:
    """Return what a container has in it; nothing for what is none."""
    return (part for _, part in items_of(value))


def dict_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that are no slots; None if it has none."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return held if isinstance(held, dict) else None


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of an object that are slots, by name: those that are set."""
    for kind in type(value).__mro__:
        members = vars(kind) if "__slots__" in vars(kind) else {}
        for name, member in list(members.items()):
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # not set yet
                    continue
