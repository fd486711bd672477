"""Lists, deques and dicts that take up tensors or arrays in a loop: how they are stored, and come back.

    predictions = []
    for x, y in loader:
        ...
        predictions.append(output.detach())     # and behind the loop: torch.cat(predictions)

Their data is stored in blobs of about 1 MiB, each of tensors of one dtype, in order. A blob that has the bytes of one that an
earlier version has is that one: so a list that grows is copied once, and hashed at every step. Each part has to be one that
`held_arrays` could carry, of any size; together they may have 64 MiB.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from holdfast.adapters.zero_lines.reach.held_arrays import filled, is_held, item_bytes, remade
from holdfast.adapters.zero_lines.reach.plain_values import MAX_DEPTH, MAX_ELEMENTS, is_plain
from holdfast.checkpoint.entries.carried_tensors import MAX_BYTES

_KEY = "holdfast.grown"
_BLOB_BYTES, _SMALL_BYTES, _LEAST_BYTES = 1 << 20, 16 << 10, 4 << 10
_WITHIN: dict[type, str] = {list: "list", tuple: "tuple", dict: "dict", OrderedDict: "ordered"}
_KINDS = {name: kind for kind, name in _WITHIN.items()}
# What `state_dict()` of a module puts on what it returns.
_METADATA = "_metadata"

# What was stored, by the digest of its bytes, as long as a version has it.
_blobs: weakref.WeakValueDictionary[bytes, torch.Tensor] = weakref.WeakValueDictionary()


class _No(Exception):
    """Says why a container cannot be carried."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A container with tensors or arrays in it.

    Attributes:
        tree: what is in it; tensors and arrays by dtype and shape.
        parts: the tensors and arrays themselves, in order.
        num_bytes: of all of these.
        groups: dtype -> digest, and tensors and arrays, of each blob.
        token, data_token: equal as long as all of it is, or all tensors and arrays are.
    """

    tree: list[Any]
    parts: tuple[Any, ...]
    num_bytes: int
    groups: dict[str, list[tuple[bytes, list[Any]]]]
    token: str
    data_token: str

    def stored(self, before: Any = None) -> dict[str, Any]:
        """Returns it as it is stored, with its data in tensors.

        Args:
            before: what stood in its place when the loop began; it is noted which parts are still the same objects.
        """
        old = {id(part): place for place, part in enumerate(before.parts)} if isinstance(before, Grown) else {}
        same: list[list[int]] = []
        for place, part in enumerate(self.parts) if old else ():
            was = old.get(id(part))
            if was is None:
                continue
            if same and same[-1][0] + same[-1][2] == place and same[-1][1] + same[-1][2] == was:
                same[-1][2] += 1
            else:
                same.append([place, was, 1])
        data = {name: [_blob(*each) for each in blobs] for name, blobs in self.groups.items()}
        return {_KEY: self.tree, "same": same, "token": self.token, "data": data}


def grown(value: Any) -> Grown | str:
    """Returns what is in a container; why it cannot be carried, if it cannot."""
    parts: list[Any] = []
    try:
        tree = _tree(value, parts, 0)
    except _No as error:
        return str(error)
    num_bytes = sum(part.nbytes for part in parts)
    if num_bytes > MAX_BYTES:
        return f"it has more than {MAX_BYTES >> 20} MiB of tensors and arrays"
    if len({*map(id, parts)}) < len(parts):
        return "one of its tensors or arrays is in it twice"
    groups: dict[tuple[bool, Any], list[Any]] = {}
    for part in parts:
        groups.setdefault((isinstance(part, torch.Tensor), part.dtype), []).append(part)
    blobs = {_group_of(held[0]): [(_digest(each), each) for each in _cut(held)] for held in groups.values()}
    token = xxhash.xxh3_128()
    for name, each in blobs.items():
        token.update(name.encode() + b"".join(digest for digest, _ in each))
    data_token = token.hexdigest()
    token.update(repr(tree).encode())
    return Grown(tree, tuple(parts), num_bytes, blobs, token.hexdigest(), data_token)


def is_stored(value: Any) -> bool:
    """Tell whether this is a container with tensors as it is stored."""
    return type(value) is dict and _KEY in value


def without_data(value: Any) -> Any:
    """Returns what was stored as a plain value, with a token for its data; every other value as it is."""
    return {key: part for key, part in value.items() if key != "data"} if is_stored(value) else value


def apart(value: Any) -> Any:
    """Returns a stored or plain value that nobody changes: what is in containers is not that of the script."""
    if is_stored(value):
        return {**copy.deepcopy(without_data(value)), "data": value["data"]}
    return copy.deepcopy(value)


def brought(value: dict[str, Any], there: Any = None) -> Any:
    """Returns the container that was stored. Tensors and arrays of what stands in its place, `there`, that were the
    same objects since the loop began are filled and used.
    """
    old = there.parts if isinstance(there, Grown) else ()
    same = {place + i: old[was + i] for place, was, count in value["same"] for i in range(count) if was + i < len(old)}
    flat = {name: b"".join(bytes(blob.numpy()) for blob in blobs) for name, blobs in value["data"].items()}
    return _Maker(flat, same).made(value[_KEY])


class _Maker:
    """Makes a container of what was stored."""

    def __init__(self, flat: dict[str, bytes], same: dict[int, Any]) -> None:
        self._flat, self._same = flat, same
        self._at = dict.fromkeys(flat, 0)
        self._number = 0

    def made(self, tree: list[Any]) -> Any:
        kind, keys, nodes, *rest = tree
        parts = [part for node in nodes for part in self._parts(node)]
        if keys is None:
            return _KINDS[kind](parts)
        made = _KINDS[kind](zip(keys, parts, strict=True))
        if rest:
            vars(made)[_METADATA] = OrderedDict(rest[0]) if isinstance(rest[0], dict) else rest[0]
        return made

    def _parts(self, node: list[Any]) -> Iterator[Any]:
        what = node[0]
        if what == "plain":
            yield from node[1]
        elif what in _KINDS:
            yield self.made(node)
        else:
            _, dtype, shape, count = node
            for _ in range(count):
                yield self._next(what, dtype, shape)

    def _next(self, what: str, dtype: str, shape: Sequence[int]) -> Any:
        name, there = f"{what} {dtype}", self._same.get(self._number)
        self._number += 1
        end = self._at[name] + math.prod(shape) * item_bytes(what, dtype)
        data, self._at[name] = self._flat[name][self._at[name] : end], end
        return filled(there, remade(what, dtype, shape, data))


def _tree(value: Any, parts: list[Any], depth: int) -> list[Any]:
    """Returns kind, keys and parts of a container; like parts that follow each other are counted."""
    if depth > MAX_DEPTH or len(value) > MAX_ELEMENTS:
        raise _No("it is too deep, or has too many parts")
    kind = type(value)
    name = _WITHIN.get(kind)
    if name is None and depth:
        raise _No(f"it has a {kind.__qualname__} in it")
    if name is None:
        name = "dict" if isinstance(value, dict) else "list"
    keys = _keys(value) if isinstance(value, dict) else None
    nodes: list[list[Any]] = []
    node: list[Any] = []
    last: Any = None
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, torch.Tensor) or (type(part).__module__ == "numpy" and getattr(part, "shape", ()) != ()):
            _require_held(part)
            if type(last) is type(part) and nodes[-1] is node and (last.dtype, last.shape) == (part.dtype, part.shape):
                node[-1] += 1
            else:
                node = [*_facts(part), 1]
                nodes.append(node)
            parts.append(part)
            last = part
        elif is_plain(part, 1):
            if nodes and nodes[-1][0] == "plain":
                nodes[-1][1].append(part)
            else:
                nodes.append(["plain", [part]])
        elif type(part) in _WITHIN:
            nodes.append(_tree(part, parts, depth + 1))
        else:
            raise _No(f"it has a {type(part).__qualname__} in it")
    return [name, keys, nodes, *_attributes(value)]


def _keys(value: dict[Any, Any]) -> list[Any]:
    if not all(type(key) in (str, int) for key in value):
        raise _No("its keys are neither texts nor numbers")
    return list(value)


def _attributes(value: Any) -> list[Any]:
    """Returns what `state_dict()` of a module puts on a dict, if there is such."""
    if type(value) is not OrderedDict or not vars(value):
        return []
    held = vars(value).get(_METADATA)
    if vars(value).keys() != {_METADATA} or not is_plain(dict(held or {})):
        raise _No("it has attributes")
    return [held if held is None else dict(held)]


def _require_held(part: Any) -> None:
    if not is_held(part, any_size=True):
        raise _No(f"it has {_why_not(part)} in it")


def _facts(part: Any) -> list[Any]:
    if isinstance(part, torch.Tensor):
        return ["tensor", str(part.dtype).removeprefix("torch."), list(part.shape)]
    return ["array", part.dtype.str, list(part.shape)]


def _why_not(part: Any) -> str:
    if not isinstance(part, torch.Tensor):
        return "an array that is a view, of another class, or not of numbers"
    if type(part) is not torch.Tensor:
        return f"a tensor of the class {type(part).__qualname__}"
    if part.requires_grad:
        return "a tensor that requires a gradient"
    if part.device.type != "cpu":
        return f"a tensor on {part.device}"
    if part.is_inference():
        return "a tensor made in inference mode"
    return "a tensor that is a view, sparse or quantized, or has attributes"


def _group_of(part: Any) -> str:
    return f"tensor {str(part.dtype)[6:]}" if isinstance(part, torch.Tensor) else f"array {part.dtype.str}"


def _cut(parts: list[Any]) -> Iterator[list[Any]]:
    """Yields those of each blob. What is added at the end changes only the last one."""
    found: list[Any] = []
    size = 0
    for part in parts:
        found.append(part)
        size += part.nbytes
        if size >= _BLOB_BYTES:
            yield found
            found, size = [], 0
    if found:
        yield found


def _digest(parts: list[Any]) -> bytes:
    """Returns a digest of the bytes of a blob; small tensors are put together first, which is faster than one by one."""
    if isinstance(parts[0], torch.Tensor) and parts[0].nbytes < _SMALL_BYTES:
        return xxhash.xxh3_128_digest(memoryview(_joined(parts).numpy()))  # type: ignore[arg-type]  # an array has a buffer
    token = xxhash.xxh3_128()
    for part in parts:
        token.update(memoryview(_bytes_of(part).numpy()))  # type: ignore[arg-type]  # an array has a buffer
    return token.digest()


def _blob(digest: bytes, parts: list[Any]) -> torch.Tensor:
    found = _blobs.get(digest)
    if found is None:
        found = _blobs[digest] = _padded(_joined(parts))
    return found


def _padded(data: torch.Tensor) -> torch.Tensor:
    """Returns a blob with zeros behind it, if it is the last one. It seldom has another size then: a version's layout is planned anew by that."""
    size = data.numel()
    if size >= _BLOB_BYTES:
        return data
    whole = data.new_zeros(max(_LEAST_BYTES, 1 << (size - 1).bit_length()))
    whole[:size] = data
    return whole


def _joined(parts: list[Any]) -> torch.Tensor:
    if not isinstance(parts[0], torch.Tensor):
        return torch.cat([_bytes_of(part) for part in parts])
    with torch.no_grad():
        return torch.cat([part.flatten() for part in parts]).view(torch.uint8)


def _bytes_of(part: Any) -> torch.Tensor:
    if isinstance(part, torch.Tensor):
        return part.flatten().view(torch.uint8)
    return torch.from_numpy(part.reshape(-1).view("u1"))
