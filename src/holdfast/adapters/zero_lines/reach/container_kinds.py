"""Classes of plain containers: what comes to be one of another class in the loop is stored with that, or refused.

    self.window = deque(maxlen=20)          # in the loop, where there was nothing, or a deque of another length

A container that has the class of the one that stands there when the loop begins is refilled in place, so its class need not be stored.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

_KEY = "holdfast.kind"
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}
# Read by these, and not as a subclass has it.
_LENGTH, _FACTORY = vars(deque)["maxlen"], vars(defaultdict)["default_factory"]
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, OrderedDict, Counter, deque, defaultdict)}

# A class, and what else its constructor is told: a length, or what makes a missing part.
Kind = tuple[type, Any]


def kind_of(value: Any) -> Kind:
    """Returns what a container keeps when it is cleared."""
    if isinstance(value, deque):
        return type(value), _LENGTH.__get__(value)
    if not isinstance(value, defaultdict):
        return type(value), None
    makes = _FACTORY.__get__(value)
    is_simple = type(makes) is types.FunctionType and not (makes.__closure__ or makes.__defaults__ or vars(makes))
    return type(value), makes.__code__ if is_simple else makes


def is_same(kind: Kind | None, other: Kind | None) -> bool:
    """Tell whether two are the same; what makes missing parts is not asked."""
    if kind is None or other is None:
        return kind is other
    (one, more), (two, less) = kind, other
    return one is two and (more is less or (type(more) is type(less) in (int, types.CodeType) and more == less))


def stored(value: Any, kind: Kind, before: Kind | None) -> Any:
    """Returns a container as it is stored; None if it cannot be.

    Args:
        value: what is in it, in a list, a dict or a set.
        kind: its own.
        before: of the one that stood in its place when the loop began; None if there was none.
    """
    if is_same(kind, before or (type(value), None)):
        return value
    name = kind[0].__name__
    if _KINDS.get(name) is not kind[0]:
        return None
    if kind[0] is defaultdict and kind[1] is not None:
        makes = getattr(kind[1], "__name__", "")
        return {_KEY: name, "more": makes, "items": value} if _FACTORIES.get(makes) is kind[1] else None
    return {_KEY: name, "more": kind[1], "items": value}


def is_stored(value: Any) -> bool:
    """Tell whether this is a container that was stored with its class."""
    return type(value) is dict and _KEY in value


def brought(value: dict[str, Any]) -> Any:
    """Returns the container that was stored."""
    kind, more, items = _KINDS[value[_KEY]], value["more"], value["items"]
    if kind is deque:
        return deque(items, more)
    if kind is defaultdict:
        return defaultdict(_FACTORIES.get(more), items)
    return kind(items)
