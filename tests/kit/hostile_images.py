"""Images that a reader must refuse."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from tiers.samples import bundle, piece, random_image, sample_bundle


def header_of(image: bytes | bytearray) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", image[:8])
    return json.loads(image[8 : 8 + length])


SAMPLE = bytes(random_image(sample_bundle(), stored_values={"lr": 0.1}))


def rewritten(change: Callable[[dict[str, Any]], None], *, payload: int = 16) -> bytes:
    """An image of two float tensors whose header was changed and spelt canonically again."""
    image = random_image(bundle("b", piece("v", "F32", (2,)), piece("w", "F32", (2,))))
    header = header_of(image)
    change(header)
    return spelt(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(), payload)


def spelt(text: bytes, payload: int = 16) -> bytes:
    text += b" " * (-(len(text) + 8) % 4096)
    return struct.pack("<Q", len(text)) + text + bytes(payload)


def set_in(name: str, field: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[name][field] = value

    return change


def set_note(field: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        note = json.loads(header["__metadata__"]["holdfast"])
        note[field] = value
        header["__metadata__"]["holdfast"] = json.dumps(note, separators=(",", ":"))

    return change


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"\x01" * 7,
    "header of 2^63": struct.pack("<Q", 1 << 63) + bytes(100),
    "header of 2^64-1": b"\xff" * 100,
    "header one byte too long": struct.pack("<Q", 93) + bytes(92),
    "zeros": bytes(8192),
    "no JSON": spelt(b"nonsense"),
    "deep JSON": spelt(b'{"__metadata__":' + b"[" * 1_000_000),
    "deep unknown field": spelt(b'{"x":' + b'{"a":' * 1_000_000),
    "a list": spelt(b"[]"),
    "no metadata": spelt(b"{}"),
    "a million names": spelt(b"{" + b",".join(b'"%d":{}' % i for i in range(1_000_000)) + b"}"),
    "no holdfast note": rewritten(lambda h: h["__metadata__"].pop("holdfast")),
    "no sharding note": rewritten(lambda h: h["__metadata__"].pop("DCP_SHARDING_INFO")),
    "sharding note of other names": rewritten(set_in("__metadata__", "DCP_SHARDING_INFO", '{"v":{"saved_offsets":[0]}}')),
    "overlap": rewritten(set_in("w", "data_offsets", [4, 12])),
    "overlap up to the end": rewritten(set_in("w", "data_offsets", [4, 12]), payload=12),
    "gap": rewritten(set_in("w", "data_offsets", [12, 20])),
    "negative offset": rewritten(set_in("v", "data_offsets", [-8, 0])),
    "reversed offsets": rewritten(set_in("v", "data_offsets", [8, 0])),
    "offsets beyond the file": rewritten(set_in("w", "data_offsets", [8, 1 << 62])),
    "offset of 400 bits": rewritten(set_in("w", "data_offsets", [8, 1 << 400])),
    "shape that is not the bytes": rewritten(set_in("w", "shape", [3])),
    "more bytes than the shape needs": rewritten(set_in("w", "shape", [1])),
    "dtype that is not the bytes": rewritten(set_in("w", "dtype", "F64")),
    "negative shape": rewritten(set_in("w", "shape", [-2])),
    "shape whose product overflows": rewritten(set_in("w", "shape", [1 << 62] * 60)),
    "fractional shape": rewritten(set_in("w", "shape", [2.0])),
    "a hundred dimensions": rewritten(set_in("w", "shape", [1] * 99 + [2])),
    "unknown dtype": rewritten(set_in("w", "dtype", "F4096")),
    "unknown field": rewritten(set_in("w", "extra", 1)),
    "metadata with a shape": rewritten(set_in("__metadata__", "shape", [1])),
    "doubled name": spelt(
        b'{"__metadata__":' + json.dumps(header_of(SAMPLE)["__metadata__"], separators=(",", ":")).encode()
        + b',"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}' * 2 + b"}",
        8,
    ),
    "trailing bytes": rewritten(lambda _: None, payload=17),
    "bundle named as a path": rewritten(set_note("bundle", "../../etc/passwd")),
    "format 0": rewritten(set_note("format_version", 0)),
    "global shape smaller than the piece": rewritten(set_note("global_shapes", {"w": [1]})),
    "global shape of another rank": rewritten(set_note("global_shapes", {"w": [2, 2]})),
    "lone surrogate": spelt(json.dumps(header_of(SAMPLE)).encode().replace(b"g0x1", b"\\ud800", 1)),
    "broken UTF-8": spelt(json.dumps(header_of(SAMPLE)).encode().replace(b"g0x1", b"\xff\xfe", 1)),
    "values of floats": bytes(random_image(bundle("b", piece("w", "F32", (2,)), has_values=True))).replace(
        b'"U8","shape":[1024]', b'"F16","shape":[512]'
    ),
    "values of another bundle": bytes(random_image(bundle("b", has_values=True))).replace(b"values/b", b"values/c"),
    "empty piece with bytes": rewritten(set_note("empty", {"z": {"dtype": "F32", "shape": [1], "offsets": [0]}})),
    "not padded to a page": struct.pack("<Q", 100) + b"{}".ljust(100) + bytes(16),
}  # fmt: skip
