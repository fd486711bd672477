"""Plain values: numbers, texts, and containers of these. What can be stored, what is too large to be looked at whole."""

from __future__ import annotations

import collections
import itertools
import tempfile
import types
from typing import Any

from holdfast.checkpoint.containers import STANDARD

# Of a container of containers with more elements so many are looked at, of a larger tensor or array so many elements.
MAX_ELEMENTS, MAX_BYTES, NUM_SPOTS = 16384, 64 << 20, 64
MAX_DEPTH = 40
# Larger numbers are times of a clock.
CLOCK = 1e9
CONTAINERS = (list, dict, set, collections.deque)
ATOMS = (type(None), bool, int, float, complex, str, bytes)
ATOM_SET = frozenset(ATOMS)
_ASKED = ("__iter__", "__len__", "keys", "values", "items")


def is_plain(value: Any, depth: int = 0) -> bool:
    """Tell whether a value can be stored: numbers, text, containers of these."""
    kind = type(value)
    if kind in ATOMS:
        return True
    if depth > MAX_DEPTH or not isinstance(value, list | tuple | dict | set | frozenset | collections.deque):
        return kind.__module__ == "numpy" and getattr(value, "shape", None) == () and value.dtype.kind in "biufc"
    if depth and kind not in (list, tuple, dict, set, frozenset, collections.OrderedDict, collections.Counter):
        return False  # inside of another it is stored whole, and would come back as something else
    if makes_up_parts(kind):
        return False
    if isinstance(value, dict) and not {str, int}.issuperset(map(type, value)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return ATOM_SET.issuperset(map(type, parts)) or all(is_plain(part, depth + 1) for part in some_of(parts))


def makes_up_parts(kind: type) -> bool:
    """Tell whether a class of containers says by code of its own what is in it: that may load modules, count, or draw."""
    for part in kind.__mro__:
        if part in STANDARD:
            break
        if any(isinstance(vars(part).get(name), types.FunctionType) for name in _ASKED):
            return True
    return False


def texts_in(value: Any) -> bool | None:
    """Tell whether a plain value has texts; None if it may hold what is another at every start: times, places, an order."""
    found = False
    waiting = [value]
    while waiting:
        part = waiting.pop()
        kind = type(part)
        if kind is str or kind is bytes:
            if kind is str and part.startswith(tempfile.gettempdir()):
                return None
            found = True
        elif kind is float:
            if part >= CLOCK:
                return None
        elif isinstance(part, set | frozenset):
            return None
        elif isinstance(part, dict):
            waiting += [*part, *part.values()]
        elif isinstance(part, list | tuple | collections.deque):
            if len(part) <= MAX_ELEMENTS:
                waiting += part
            else:
                waiting += some_of(list(part))
    return found


def has_set(value: Any) -> bool:
    """Tell whether a plain value has a set in it: what comes back iterates in another order."""
    if isinstance(value, set | frozenset):
        return True
    if not isinstance(value, dict | list | tuple | collections.deque):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not ATOM_SET.issuperset(map(type, parts)) and any(map(has_set, parts))


def is_vast(value: Any) -> bool:
    """Tell whether a container has more containers than are looked at."""
    if len(value) <= MAX_ELEMENTS:
        return False
    parts = list(value.values() if isinstance(value, dict) else value)
    tuples = [part for part in parts if type(part) is tuple]
    return not (
        (ATOM_SET | {tuple}).issuperset(map(type, parts))
        and ATOM_SET.issuperset(map(type, itertools.chain.from_iterable(tuples)))
    )


def as_stored(value: Any) -> Any:
    """Returns a plain container as one that can be stored: without what a subclass adds."""
    if isinstance(value, dict):
        return dict(value)
    return set(value) if isinstance(value, set) else list(value)


def some_of(items: Any) -> Any:
    """Returns the items of a container, of a large one some of them."""
    if len(items) <= MAX_ELEMENTS:
        return items
    step = len(items) // NUM_SPOTS
    if isinstance(items, list | tuple):
        return [*items[::step], *items[-NUM_SPOTS:]]
    return [*itertools.islice(items, 0, None, step)]
