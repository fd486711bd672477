"""State that is not a tensor, as closed typed JSON: learning rates, step counts, generator states, names.

Closed: only the types below exist, nothing is ever executed or imported by name, and a subclass is not its base.
Typed: what comes back has the type and the bits of what went in. Deterministic: equal values give equal bytes, so twins
compare digests. A value is plain JSON where JSON has it; everything else is an object with one key that starts with
`$`. Tensors do not belong here: they are entries, and a `TensorRef` stands in their place.

`decode` reads hostile bytes. Called by `checkpoint` for what objects return from `state_dict()`, and by `cli` to show it.
Specification: docs/spec/format.md, section 4.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.base.errors import CorruptError, UsageError
from holdfast.base.handler_errors import pass_on

MAX_DEPTH = 100
# -1 and -2 share a hash in Python; honest members hardly ever do.
MAX_SAME_HASH = 16
MAX_BYTES = 16 << 20
# Beyond this a JSON number is not safe in other languages (RFC 8259, section 6); larger ones are written in hex.
MAX_PLAIN_INT = 2**53 - 1

# NumPy scalar types that exist on every platform with the same bits.
NUMPY_TYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "float32", "float64", "complex64", "complex128"}
)

Json: TypeAlias = Any  # what json.dumps writes
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor that is stored as the entry `name`."""

    name: str


def encode(value: Any) -> bytes:
    """The bytes of a value.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict with string or integer keys,
            OrderedDict, Counter, NumPy scalars, TensorRef, nested at most MAX_DEPTH deep.

    Raises:
        UsageError: any other type; names the place, for example `scheduler.lr_lambdas[0]`.
    """
    text = _dump(_to_json(value, ()))
    if len(text) > MAX_BYTES:
        raise UsageError(
            f"{len(text)} bytes of values; at most {MAX_BYTES} are stored",
            remedy="keep long lists of numbers in a tensor",
        )
    return text.encode()


def decode(data: bytes | memoryview, *, where: str = "values") -> Any:
    """The value that `encode` wrote; spaces after it are ignored.

    Args:
        data: at most MAX_BYTES, spaces not counted.
        where: the file and place, for an error.

    Raises:
        CorruptError: not written by `encode`.
    """
    text = bytes(data).rstrip(b" ")
    if len(text) > MAX_BYTES:
        raise CorruptError(f"{len(text)} bytes of values; at most {MAX_BYTES} are stored", where=where)
    try:
        tree = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
        return _from_json(tree, 0)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, struct.error, binascii.Error) as error:
        pass_on(error)
        raise CorruptError(f"the values are not valid: {error}", where=where) from error


def renamed(tree: Any, rename: Callable[[str], str]) -> Any:
    """The same tree with other names in its references."""
    kind = type(tree)
    if kind is TensorRef:
        return TensorRef(rename(tree.name))
    if kind is dict or kind is OrderedDict:
        return kind((key, renamed(item, rename)) for key, item in tree.items())
    if kind is list or kind is tuple:
        return kind(renamed(item, rename) for item in tree)
    return tree


def _dump(tree: Json) -> str:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


# Writing. `path` names the place for an error and is its depth as well.

_Path: TypeAlias = tuple[str | int, ...]


def _to_json(value: Any, path: _Path) -> Json:
    kind = type(value)
    if kind is int or kind is float or kind is str:
        return _PLAIN[kind](value)
    if value is None or kind is bool:
        return value
    if len(path) > MAX_DEPTH:
        raise UsageError(f"values are nested deeper than {MAX_DEPTH}, or contain themselves", where=_spell(path))
    writer = _WRITERS.get(kind)
    if writer is not None:
        return writer(value, path)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in NUMPY_TYPES:
        return {"$numpy": [value.dtype.name, value.astype(value.dtype.newbyteorder("<")).tobytes().hex()]}
    raise UsageError(
        f"{kind.__module__}.{kind.__qualname__} cannot be stored as a value",
        where=_spell(path),
        remedy="return numbers, strings, bytes, lists, tuples, sets, dicts or tensors from state_dict()",
    )


def _int_to_json(value: int) -> Json:
    return value if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT else {"$int": hex(value)}


def _float_to_json(value: float) -> Json:
    # repr, which JSON uses, is exact for finite numbers and keeps the sign of zero; a NaN has bits of its own.
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _str_to_json(value: str) -> Json:
    return value if _is_text(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}


_PLAIN: dict[type, Callable[[Any], Json]] = {int: _int_to_json, float: _float_to_json, str: _str_to_json}


def _is_text(value: str) -> bool:
    """False for lone surrogates: JSON would join two of them into another character."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _list_to_json(value: list[Any] | tuple[Any, ...], path: _Path) -> Json:
    if all(type(item) is int and -MAX_PLAIN_INT <= item <= MAX_PLAIN_INT for item in value):
        return list(value)  # generator states are long lists of these, and this runs at every save
    return [_to_json(item, (*path, index)) for index, item in enumerate(value)]


def _set_to_json(value: set[Any] | frozenset[Any], path: _Path) -> Json:
    _require_spread_at(value, path)
    return sorted((_to_json(item, (*path, 0)) for item in value), key=_dump)


def _dict_to_json(value: dict[Any, Any], path: _Path) -> Json:
    if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
        return {key: _to_json(item, (*path, key)) for key, item in value.items()}
    return {"$dict": _pairs_to_json(value, path)}


def _pairs_to_json(value: dict[Any, Any], path: _Path) -> Json:
    for key in value:
        if type(key) is not str and type(key) is not int:
            what = f"a key of type {type(key).__qualname__} cannot be stored; keys are strings or whole numbers"
            raise UsageError(what, where=_spell(path))
    _require_spread_at(value, path)
    return [[_PLAIN[type(key)](key), _to_json(item, (*path, key))] for key, item in value.items()]


def _require_spread_at(members: Collection[Any], path: _Path) -> None:
    if not _is_spread(members):
        raise UsageError(
            f"more than {MAX_SAME_HASH} members share a hash, and would not be read back",
            where=_spell(path),
            remedy="number the keys of a dict, or the members of a set, otherwise",
        )


_WRITERS: dict[type, Callable[[Any, _Path], Json]] = {
    list: _list_to_json,
    dict: _dict_to_json,
    tuple: lambda value, path: {"$tuple": _list_to_json(value, path)},
    set: lambda value, path: {"$set": _set_to_json(value, path)},
    frozenset: lambda value, path: {"$frozenset": _set_to_json(value, path)},
    OrderedDict: lambda value, path: {"$ordered": _pairs_to_json(value, path)},
    Counter: lambda value, path: {"$counter": _pairs_to_json(value, path)},
    bytes: lambda value, _: {"$bytes": base64.b64encode(value).decode()},
    complex: lambda value, _: {"$complex": [_float_to_json(value.real), _float_to_json(value.imag)]},
    TensorRef: lambda value, _: {"$tensor": _str_to_json(value.name)},
}


def _spell(path: _Path) -> str:
    """`scheduler.lr_lambdas[0]`"""
    text = ""
    for step in path[:12]:
        if isinstance(step, str) and (not text or _IDENTIFIER.match(step)):
            text += f".{step}" if text else step
        else:
            text += f"[{step!r}]"
    return text + ("..." if len(path) > 12 else "")


# Reading. Any error inside is a ValueError or TypeError and becomes a CorruptError at the border.


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names a key twice")
    return found


def _refuse_constant(text: str) -> Json:
    raise ValueError(f"{text} is not JSON")


def _from_json(tree: Json, depth: int) -> Any:
    if depth > MAX_DEPTH + 2:  # plain values in the deepest container, and the parts of one there, were written
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if type(tree) is list:
        return [_from_json(item, depth + 1) for item in tree]
    if type(tree) is not dict:
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {key: _from_json(item, depth + 1) for key, item in tree.items()}
    if len(tree) != 1 or tag not in _READERS:
        raise ValueError(f"{tag[:20]} is not a known type")
    return _READERS[tag](tree[tag], depth)


def _items(tree: Json, depth: int) -> list[Any]:
    if type(tree) is not list:
        raise ValueError("a list was expected")
    return [_from_json(item, depth + 1) for item in tree]


def _pairs(tree: Json, depth: int) -> dict[Any, Any]:
    keys = [_key(key) for key, _ in tree]
    _require_spread(keys)
    found = {key: _from_json(item, depth + 1) for key, (_, item) in zip(keys, tree, strict=True)}
    if type(tree) is not list or len(found) != len(tree):
        raise ValueError("a dict names a key twice, or is not a list of pairs")
    return found


def _key(tree: Json) -> str | int:
    key = _from_json(tree, MAX_DEPTH)
    if type(key) is not str and type(key) is not int:
        raise ValueError("keys are strings or whole numbers")
    return key


def _set(tree: Json, depth: int) -> set[Any]:
    items = _items(tree, depth)
    _require_spread(items)
    found = set(items)
    if len(found) != len(items):
        raise ValueError("a set names a member twice")
    return found


def _require_spread(members: Sequence[Any]) -> None:
    if not _is_spread(members):
        raise ValueError(f"more than {MAX_SAME_HASH} members share a hash")


def _is_spread(members: Collection[Any]) -> bool:
    """Tells whether few share one hash. Multiples of 2**61 - 1 do: each would be compared with all others."""
    return len(members) <= MAX_SAME_HASH or max(Counter(map(hash, members)).values()) <= MAX_SAME_HASH


def _float(tree: Json) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(_text(tree)))
    return float(value)


def _complex(tree: Json, depth: int) -> complex:
    parts = _items(tree, depth)
    if len(parts) != 2 or not all(type(part) is float for part in parts):
        raise ValueError("a complex number has two parts")
    return complex(*parts)


def _numpy(tree: Json) -> Any:
    name, raw = tree
    if _text(name) not in NUMPY_TYPES:
        raise ValueError(f"{name[:20]} is not a known NumPy type")
    import numpy as np  # noqa: PLC0415 - heavy, and only needed where the values hold NumPy scalars

    return np.frombuffer(bytes.fromhex(_text(raw)), np.dtype(name).newbyteorder("<")).astype(name).reshape(())[()]


def _text(tree: Json) -> str:
    if type(tree) is not str:
        raise ValueError("a string was expected")
    return tree


_READERS: dict[str, Callable[[Json, int], Any]] = {
    "$int": lambda tree, _: int(_text(tree), 16),
    "$float": lambda tree, _: _float(tree),
    "$str": lambda tree, _: bytes.fromhex(_text(tree)).decode("utf-8", "surrogatepass"),
    "$bytes": lambda tree, _: base64.b64decode(_text(tree), validate=True),
    "$complex": _complex,
    "$tuple": lambda tree, depth: tuple(_items(tree, depth)),
    "$set": _set,
    "$frozenset": lambda tree, depth: frozenset(_set(tree, depth)),
    "$dict": _pairs,
    "$ordered": lambda tree, depth: OrderedDict(_pairs(tree, depth)),
    "$counter": lambda tree, depth: Counter(_pairs(tree, depth)),
    "$numpy": lambda tree, _: _numpy(tree),
    "$tensor": lambda tree, _: TensorRef(_text(_from_json(tree, MAX_DEPTH))),
}
