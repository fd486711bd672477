"""Changes to inputs, drawn from a random generator: of trees where the form is known, of bytes elsewhere."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

from fuzz.forms import BARE, Form, Tree

MAX_INPUT_BYTES = 256 << 10
_NUMBERS = [0, 1, -1, 2, 7, 127, 128, 255, 256, 4096, 65535, 2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**61 - 1]
_NUMBERS += [2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), -(2**63) - 1, 10**30, 10**400]
_FLOATS = [0.0, -0.0, 0.5, -1.5, 1e300, -1e300, 5e-324, 1e22, 123456789012345678.0]
_TEXTS = ["", "a", "..", "../x", "/etc/passwd", "a/b", "a\0b", "\x1b[2J", "\u202e", "\x9b", "\ud800", "é" * 200, "$set"]
_TEXTS += ["$dict", "$tensor", "$int", "$float", "$numpy", "float64", "U8", "BF16", "00" * 16, "0x" + "f" * 5000, "NaN"]
_TEXTS += [
    "__metadata__",
    "format_version",
    "holdfast",
    "9" * 5000,
    "Infinity",
    "-1",
    "1_0",
    "0" * 32,
    "x" * 5000,
    "{}",
]
_OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"": None}, {"$set": []}, b"", b"\xff\xfe", b"\0" * 16]


def drawn(pick: random.Random, pool: Sequence[bytes], form: Form) -> bytes:
    """A sample of the pool with one to six changes; at most MAX_INPUT_BYTES."""
    data = pick.choice(pool)
    if pick.random() < 0.75:
        data = _as_tree(pick, data, pool, form)
    if pick.random() < 0.4:
        for _ in range(pick.choice((1, 1, 2, 4))):
            data = _changed_bytes(pick, data[:MAX_INPUT_BYTES], pick.choice(pool))
        if pick.random() < 0.6:
            data = form.seal(data)
    return data[:MAX_INPUT_BYTES]


def _as_tree(pick: random.Random, data: bytes, pool: Sequence[bytes], form: Form) -> bytes:
    try:
        opened = form if form is not BARE or pick.random() < 0.3 else BARE
        tree = opened.open(data)
        for _ in range(pick.choice((1, 1, 1, 2, 3, 6))):
            tree = _changed_tree(pick, tree, lambda: form.open(pick.choice(pool)))
        return opened.close(tree)
    except Exception:  # noqa: BLE001 - a tree of that kind cannot be spelt in this form, or the sample is no such form
        return _changed_bytes(pick, data, pick.choice(pool))


def _places(tree: Tree) -> list[tuple[Any, Any]]:
    """Every place below the root as (container, key)."""
    found: list[tuple[Any, Any]] = []
    left = [tree]
    while left and len(found) < 5000:
        node = left.pop()
        keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            left.append(node[key])
    return found


def _changed_tree(pick: random.Random, tree: Tree, other: Any) -> Tree:
    places = _places(tree)
    if not places:
        return _anything(pick)
    node, key = pick.choice(places)
    what = pick.randrange(9)
    if what == 0:
        node[key] = _anything(pick)
    elif what in (1, 2):
        node[key] = _near(pick, node[key])
    elif what == 3:
        del node[key]
    elif what == 4:
        _add(pick, node, key, 3000 if len(places) < 500 else 1)
    elif what == 5:
        there, at = pick.choice(places)
        node[key] = _copied(there[at])
    elif what == 6:
        strange = _places(other())
        if strange:
            there, at = pick.choice(strange)
            node[key] = _copied(there[at])
    elif what == 7:
        node[key] = _deep(pick, node[key])
    elif isinstance(node, dict):
        node[_near(pick, str(key))] = node.pop(key)
    else:
        pick.shuffle(node)
    return tree


def _anything(pick: random.Random) -> Any:
    return _copied(pick.choice(pick.choice((_NUMBERS, _FLOATS, _TEXTS, _OTHERS))))


def _copied(value: Any) -> Any:
    """A copy, so that no node comes to lie in itself."""
    return copy.deepcopy(value) if isinstance(value, dict | list) else value


def _near(pick: random.Random, value: Any) -> Any:
    """A value of the same type that differs little, or much."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return pick.choice((value + 1, value - 1, -value, value * 2, value << 32, pick.choice(_NUMBERS)))
    if isinstance(value, float):
        return pick.choice((-value, value * 1e300, pick.choice(_FLOATS)))
    if isinstance(value, str):
        at = pick.randrange(len(value) + 1)
        return pick.choice((value[:at], value[:at] + pick.choice(_TEXTS) + value[at:], value + value, value.upper()))
    if isinstance(value, bytes):
        return _changed_bytes(pick, value, value)
    return _anything(pick)


def _add(pick: random.Random, node: Any, key: Any, most: int) -> None:
    """The item at a key once more, or very often."""
    # Copies, and few of what is large: what is shared would grow without bound at the next change. An input is cut later
    # anyhow, and msgspec ends the process where there is no memory for what it encodes.
    places = _places([node[key]])
    num_bytes = sum(len(there[at]) for there, at in places if isinstance(there[at], str | bytes))
    most = min(most, 6000 // len(places), 2 * MAX_INPUT_BYTES // max(1, num_bytes))
    times = max(1, min(most, pick.choice((1, 1, 2, 40, 3000))))
    if isinstance(node, list):
        node[key:key] = [_copied(node[key]) for _ in range(times)]
    else:
        for number in range(times):
            node[f"{key}{number}"] = _copied(node[key])


def _deep(pick: random.Random, value: Any) -> Any:
    for _ in range(pick.choice((1, 3, 99, 101, 400))):
        value = [value] if pick.random() < 0.5 else {pick.choice(("a", "$tuple", "$set", "$dict")): value}
    return value


def _changed_bytes(pick: random.Random, data: bytes, other: bytes) -> bytes:
    at = pick.randrange(len(data) + 1)
    end = min(len(data), at + pick.choice((1, 1, 2, 4, 8, 64)))
    what = pick.randrange(8)
    if what == 0 and data:
        flipped = bytearray(data)
        flipped[at % len(data)] ^= 1 << pick.randrange(8)
        return bytes(flipped)
    if what == 1:
        return data[:at]
    if what == 2:
        return data[:at] + data[end:]
    if what == 3:
        return data[:at] + pick.randbytes(pick.choice((1, 2, 4, 8, 40))) + data[end:]
    if what == 4:
        return data[:at] + data[at:end] * pick.choice((2, 3, 1000)) + data[end:]
    if what == 5:
        return data[:at] + other[pick.randrange(len(other) + 1) :]
    if what == 6:
        number = pick.choice(_NUMBERS[:23]) % (1 << 64)
        size = pick.choice((1, 2, 4, 8))
        return data[:at] + (number % (1 << 8 * size)).to_bytes(size, pick.choice(("little", "big"))) + data[at + size :]
    return data[:at] + pick.choice((b"[", b"{", b'{"a":', b"\x91", b"\x81\xa1a", b"\n")) * 30000 + data[at:]
