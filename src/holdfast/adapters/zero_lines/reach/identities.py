"""Finds the identities of objects in plain values: `id(x)`, and `hash(x)` where that is made of it.

They are other numbers in every process. So data that a script makes of them before its loop is compared by the objects that
they are of, and a value with one in it that changes in the loop cannot be carried.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.adapters.zero_lines.reach.plain_values import ATOM_SET, MAX_DEPTH

# Addresses of objects lie above this. Smaller numbers are counts, and are passed over quickly.
_LOWEST = 1 << 24
# How `hash(x)` of an object without a `__hash__` of its own is made of its address.
_HASH_BITS = 4


def named(value: Any, paths: Mapping[int, str]) -> Any:
    """Returns a plain value with the paths of objects in the place of their identities; the value itself if there are none.

    Args:
        value: numbers, texts, containers of these.
        paths: path of each object, by its `id`.
    """
    return _renamed(value, paths) if identity_in(value, paths) else value


def identity_in(value: Any, paths: Mapping[int, str]) -> str:
    """Returns the path of an object whose identity lies in a plain value; empty if there is none."""
    for number in _large(value, 0):
        if path := _path_of(number, paths):
            return path
    return ""


def _path_of(number: int, paths: Mapping[int, str]) -> str:
    return paths.get(number) or paths.get(number << _HASH_BITS, "")


def _large(value: Any, depth: int) -> Iterator[int]:
    if type(value) is int:
        if value >= _LOWEST:
            yield value
    elif isinstance(value, dict):
        yield from _large([*value], depth + 1)
        yield from _large([*value.values()], depth + 1)
    elif isinstance(value, list | tuple | set | frozenset | collections.deque) and depth <= MAX_DEPTH:
        kinds = set(map(type, value))
        if kinds == {int}:
            yield from (part for part in value if part >= _LOWEST)
        elif kinds == {tuple} and ATOM_SET.issuperset(map(type, itertools.chain.from_iterable(value))):
            yield from (each for part in value for each in part if type(each) is int and each >= _LOWEST)
        elif not kinds <= {float, str, bool, bytes, type(None)}:
            for part in value:
                yield from _large(part, depth + 1)


def _renamed(value: Any, paths: Mapping[int, str]) -> Any:
    if type(value) is int:
        return _path_of(value, paths) or value
    if isinstance(value, dict):
        return [[_renamed(key, paths), _renamed(part, paths)] for key, part in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return [_renamed(part, paths) for part in value]
    return value
