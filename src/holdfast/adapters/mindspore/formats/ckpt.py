"""`.ckpt` files: MindSpore's checkpoints in protocol buffers.

A file is a row of `Checkpoint` messages (https://gitee.com/mindspore/mindspore, checkpoint.proto). A tensor of more
than 512 MiB is several records of one name, each with the dimensions of the whole. Text is of type `str`, in UTF-32 as
numpy keeps it. A trailer may say the CRC-32 of all before it, which proves against accidents only.

Hostile bytes are refused in well under a second, apart from the time that the CRC of a long file takes; tensors are
views of the one buffer that holds the file. Parameters that are hash maps (`maptensor`) are not read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.adapters.mindspore.formats.files import Buffer
from holdfast.adapters.mindspore.formats.protobuf import Field, Message, Source, decode, prefix, varint
from holdfast.adapters.mindspore.formats.tensors import MINDSPORE_NAMES, Entry, HostTensor
from holdfast.base.errors import CorruptError, UsageError

SLICE_BYTES = 512 << 20
MAX_DIMS = 64

_TENSOR = Message(
    "TensorProto",
    Field(1, "dims", "int64", "repeated"),
    Field(2, "tensor_type", "text"),
    Field(3, "tensor_content", "bytes"),
)
_VALUE = Message(
    "Value",
    Field(1, "tag", "text"),
    Field(2, "tensor", _TENSOR, "optional"),
    Field(3, "maptensor", "bytes", "optional"),
)
_FILE = Message("Checkpoint", Field(1, "value", _VALUE, "repeated"))
_DTYPES = {theirs: ours for ours, theirs in MINDSPORE_NAMES.items()}
_DIMS_TAG = varint(1 << 3)  # before each number of field 1
_TEXT = "str"
_TEXT_CODEC = "utf-32-le"
_TRAILER = b"crc_num"
_TRAILER_BYTES = len(_TRAILER) + 10


def decode_ckpt(data: bytes, where: str, *, crc_check: bool) -> dict[str, Entry]:
    """Return what these bytes of a file hold, in file order.

    Raises:
        CorruptError: not a checkpoint, or (with `crc_check`) not the bytes that its CRC says.
        UsageError: it holds what is not supported.
    """
    end = len(data)
    if data[-_TRAILER_BYTES:].startswith(_TRAILER) and len(data) >= _TRAILER_BYTES:
        end -= _TRAILER_BYTES
        said = int.from_bytes(data[end + len(_TRAILER) :], "big")
        if crc_check and zlib.crc32(memoryview(data)[:end]) != said:
            raise CorruptError(f"the bytes do not have the CRC {said} that the file says", where=where)
    source = Source(data, where)
    records: dict[str, list[dict[str, Any]]] = {}
    last = None
    for value in decode(_FILE, source, 0, end)["value"]:
        tag = value["tag"]
        if value["tensor"] is None or value["maptensor"] is not None:
            raise _unsupported(value, where)
        if tag in records and tag != last:
            raise CorruptError(f"{tag!r} is there twice", where=where)
        records.setdefault(tag, []).append(value["tensor"])
        last = tag
    return {tag: _entry(parts, f"{where}, {tag}") for tag, parts in records.items()}


def _unsupported(value: dict[str, Any], where: str) -> Exception:
    if value["maptensor"] is None:
        return CorruptError(f"{value['tag']!r} has no tensor", where=where)
    return UsageError(f"{value['tag']!r} is a hash map", where=where, remedy="save it as a dense parameter")


def _entry(parts: list[dict[str, Any]], where: str) -> Entry:
    """One entry from its records."""
    dims, kind = parts[0]["dims"], parts[0]["tensor_type"]
    if any(part["dims"] != dims or part["tensor_type"] != kind for part in parts[1:]):
        raise CorruptError("its slices differ in shape or type", where=where)
    content = parts[0]["tensor_content"] if len(parts) == 1 else b"".join(part["tensor_content"] for part in parts)
    if kind == _TEXT:
        return _text(content, where)
    dtype = _DTYPES.get(kind)
    if dtype is None:
        raise UsageError(f"tensors of type {kind!r} are not supported", where=where)
    # Some versions of MindSpore spell a scalar as the shape [0].
    shape = () if dims == [0] and len(content) else tuple(dims)
    if len(shape) > MAX_DIMS:
        raise CorruptError(f"{len(shape)} dimensions", where=where)
    try:
        return HostTensor(dtype, shape, content)
    except UsageError as error:
        raise CorruptError(error.what, where=where) from error


def _text(content: Buffer, where: str) -> str:
    try:
        return bytes(content).decode(_TEXT_CODEC, "surrogatepass").rstrip("\0")
    except UnicodeDecodeError as error:
        raise CorruptError(f"its text is damaged at byte {error.start}", where=where) from None


def encode_ckpt(entries: Mapping[str, Entry], *, crc_check: bool) -> Iterator[Buffer]:
    """The bytes of the file in pieces; tensors are not copied.

    Raises:
        UsageError: a dtype that MindSpore does not have.
    """
    crc = 0
    for tag, entry in entries.items():
        for piece in _records(tag, entry):
            crc = zlib.crc32(piece, crc) if crc_check else 0
            yield piece
    if crc_check:
        yield _TRAILER + crc.to_bytes(_TRAILER_BYTES - len(_TRAILER), "big")


def _records(tag: str, entry: Entry) -> Iterator[Buffer]:
    dims: tuple[int, ...]
    if isinstance(entry, str):
        # numpy has no text of no length, so an empty one is a single zero.
        kind, dims, content = _TEXT, (0,), memoryview((entry or "\0").encode(_TEXT_CODEC, "surrogatepass"))
    elif entry.dtype in MINDSPORE_NAMES:
        kind, dims, content = MINDSPORE_NAMES[entry.dtype], entry.shape, entry.view()
    else:
        raise UsageError(f"MindSpore has no {entry.dtype}", where=tag, remedy="convert it before")
    name, kind_bytes = tag.encode(), kind.encode()
    shape = b"".join(_DIMS_TAG + varint(length) for length in dims) + prefix(2, len(kind_bytes)) + kind_bytes
    for start in range(0, len(content) or 1, SLICE_BYTES):
        piece = content[start : start + SLICE_BYTES]
        tensor = shape + prefix(3, len(piece))
        value = prefix(1, len(name)) + name + prefix(2, len(tensor) + len(piece)) + tensor
        yield prefix(1, len(value) + len(piece)) + value
        yield piece
