"""Forms of bytes that a fuzzer can take apart and put together again.

A form opens bytes into a tree of dicts, lists, text, numbers and bytes, and closes any tree into bytes of which lengths
and checksums are right, so that a change gets past the first check. What cannot be opened is changed as bare bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

Tree = Any


def _keep(data: bytes) -> bytes:
    return data


@dataclass(frozen=True)
class Form:
    """How bytes are taken apart, and put together.

    Attributes:
        open: the tree in the bytes; any Exception if there is none.
        close: the bytes of a tree; any Exception if it has none.
        seal: makes checksums right again in bytes that were changed as bytes.
    """

    open: Callable[[bytes], Tree]
    close: Callable[[Tree], bytes]
    seal: Callable[[bytes], bytes] = _keep


def spelt(tree: Tree) -> bytes:
    """JSON as holdfast spells it; not by msgspec, whose 0.22.0 ended this process now and then (cause not known)."""
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False, default=_hex).encode(errors="surrogatepass")


def _hex(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _checked(body: bytes) -> bytes:
    return body + b',"checksum":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()


_CHECKSUM_BYTES = len(_checked(b""))
_SIZE = struct.Struct("<Q")

BARE = Form(lambda data: [data[at : at + 8] for at in range(0, len(data), 8)], b"".join)
JSON = Form(json.loads, spelt)
LINES = Form(
    lambda data: [json.loads(line) for line in data.splitlines()],
    lambda tree: b"\n".join(spelt(row) for row in tree) + b"\n",
)
TEXT = Form(lambda data: data.decode().splitlines(), lambda tree: "\n".join(map(str, tree)).encode())
MSGPACK = Form(msgspec.msgpack.decode, msgspec.msgpack.encode)
RECORD = Form(
    lambda data: json.loads(data[:-_CHECKSUM_BYTES] + b"}"),
    lambda tree: _checked(spelt(tree)[:-1]),
    lambda data: _checked(data[:-_CHECKSUM_BYTES]),
)


def _open_header(data: bytes) -> Tree:
    (length,) = _SIZE.unpack_from(data)
    header = json.loads(data[8 : 8 + length])
    inner = header.get("__metadata__", {})
    for name in ("holdfast", "DCP_SHARDING_INFO", "holdfast.values"):
        if name in inner:
            inner[name] = json.loads(inner[name])
    return [header, data[8 + length :]]


def _close_header(align: int) -> Callable[[Tree], bytes]:
    def close(tree: Tree) -> bytes:
        header, payload = tree
        inner = header.get("__metadata__")
        if isinstance(inner, dict):
            told = {name: text if isinstance(text, str) else spelt(text).decode() for name, text in inner.items()}
            header = {**header, "__metadata__": told}
        text = spelt(header)
        text += b" " * (-(len(text) + 8) % align)
        return _SIZE.pack(len(text)) + text + bytes(payload)

    return close


IMAGE = Form(_open_header, _close_header(4096))
SAFETENSORS = Form(_open_header, _close_header(8))


def _sealed(name: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:-16] + xxhash.xxh3_128_digest(name + data[:-16])


def trailer(name: bytes) -> Form:
    """The trailer of an encrypted file: fixed fields, and a digest over the file's name and them."""
    seal = _sealed(name)
    return Form(BARE.open, lambda tree: seal(b"".join(tree)), seal)


def _open_archive(data: bytes) -> Tree:
    begin = 8 + int.from_bytes(data[:8], "little")
    return [json.loads(data[8:begin]), data[begin:]]


def _close_archive(tree: Tree) -> bytes:
    head = spelt(tree[0])
    return len(head).to_bytes(8, "little") + head + bytes(tree[1])


ARCHIVE = Form(_open_archive, _close_archive)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _open_fields(data: bytes, depth: int = 0) -> list[list[Any]]:
    """Fields as [number, value]; bytes that are fields themselves are opened too."""
    found: list[list[Any]] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
            found.append([tag >> 3, value])
        elif tag & 7 == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise ValueError("cut off")
            content, at = data[at : at + length], at + length
            found.append([tag >> 3, _inner(content, depth)])
        else:
            raise ValueError("another wire type")
        if not found[-1][0]:
            raise ValueError("no field")
    return found


def _inner(content: bytes, depth: int) -> Tree:
    if not content or depth > 5:
        return content
    try:
        return _open_fields(content, depth + 1)
    except (ValueError, IndexError):
        return content


def _spelt_varint(value: int) -> bytes:
    value &= (1 << 70) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _close_fields(tree: Tree) -> bytes:
    found = bytearray()
    for number, value in tree:
        if isinstance(value, int):
            found += _spelt_varint(number << 3) + _spelt_varint(value)
        else:
            content = value if isinstance(value, bytes) else _content(value)
            found += _spelt_varint(number << 3 | 2) + _spelt_varint(len(content)) + content
    return bytes(found)


def _content(value: Tree) -> bytes:
    return value.encode(errors="surrogatepass") if isinstance(value, str) else _close_fields(value)


PROTO = Form(_open_fields, _close_fields)
