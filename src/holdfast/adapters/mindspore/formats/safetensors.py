"""`.safetensors` files as MindSpore writes them: the common format, with three words of its own in the metadata.

`format` is `ms`; `remove_redundancy` says whether ranks save disjoint shares; `crc_num` is a CRC-32 over names and
bytes in sorted order of names. The format: https://github.com/huggingface/safetensors. Own code and not that package's,
because through numpy it knows no bfloat16, and because hostile headers must be refused before they cost anything.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Annotated, TypeAlias

import msgspec

from holdfast.adapters.mindspore.formats.files import Buffer
from holdfast.adapters.mindspore.formats.tensors import HostTensor
from holdfast.base.errors import CorruptError, UsageError
from holdfast.base.handler_errors import pass_on
from holdfast.core.model import DTYPE_BYTES

MAX_HEADER_BYTES = 16 << 20
MAX_DIMS = 64
# MindSpore takes the CRC of `bytes(array)`, and of a whole number n without dimensions Python makes n zeros. So many are
# followed; beyond, the CRC is not checked, because it would take longer than a second.
MAX_ZEROS = 1 << 28

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_CRC = "crc_num"
_ALIGN = 8
_ZEROS = bytes(1 << 20)
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


def decode_safetensors(data: bytes, where: str, *, crc_check: bool) -> tuple[dict[str, HostTensor], dict[str, str]]:
    """The tensors in the order of their bytes, and the metadata.

    Raises:
        CorruptError: not such a file, or (with `crc_check`) not the bytes that its CRC says.
    """
    items, metadata, payload = _header(data, where)
    tensors: dict[str, HostTensor] = {}
    at = 0
    for name, item in sorted(items.items(), key=lambda named: named[1].data_offsets):
        start, stop = item.data_offsets
        if start != at or not start <= stop <= len(payload):
            raise CorruptError(f"its bytes {start} to {stop} do not follow byte {at}", where=f"{where}, {name}")
        if item.dtype not in DTYPE_BYTES or len(item.shape) > MAX_DIMS:
            raise CorruptError(f"{item.dtype} with {len(item.shape)} dimensions", where=f"{where}, {name}")
        try:
            tensors[name] = HostTensor(item.dtype, item.shape, payload[start:stop])
        except UsageError as error:
            raise CorruptError(error.what, where=f"{where}, {name}") from error
        at = stop
    if at != len(payload):
        raise CorruptError(f"{len(payload) - at} bytes belong to no tensor", where=where)
    if crc_check and _CRC in metadata:
        possible = _possible_crcs(tensors)
        if possible and metadata[_CRC] not in possible:
            raise CorruptError(f"the tensors do not have the CRC {metadata[_CRC]} that the file says", where=where)
    return tensors, metadata


def _header(data: bytes, where: str) -> tuple[dict[str, _Item], dict[str, str], memoryview]:
    if len(data) < _LENGTH.size:
        raise CorruptError(f"{len(data)} bytes are no safetensors file", where=where)
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if length > MAX_HEADER_BYTES or end > len(data):
        raise CorruptError(f"a header of {length} bytes in a file of {len(data)}", where=where)
    view = memoryview(data)
    try:
        parts = msgspec.json.decode(view[_LENGTH.size : end], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop(_METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        items = {name: msgspec.json.decode(raw, type=_Item) for name, raw in parts.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        pass_on(error)
        raise CorruptError(f"the header is damaged: {error}", where=where) from error
    return items, metadata, view[end:]


def encode_safetensors(
    tensors: Mapping[str, HostTensor], *, crc_check: bool, remove_redundancy: bool | None
) -> Iterator[Buffer]:
    """The bytes of the file in pieces, widest dtypes first; tensors are not copied.

    Raises:
        UsageError: a CRC is asked for that MindSpore could not check.
    """
    metadata = {"format": "ms"}
    if remove_redundancy is not None:
        metadata["remove_redundancy"] = str(remove_redundancy)
    if crc_check:
        possible = _possible_crcs(tensors)
        if not possible:
            what = "MindSpore cannot take the CRC of a whole number without dimensions that is negative or large"
            raise UsageError(what, remedy="give it the shape [1], or store it in a `.ckpt` file")
        metadata[_CRC] = possible[-1]
    order = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    header: dict[str, object] = {_METADATA: metadata}
    at = 0
    for name in order:
        tensor = tensors[name]
        header[name] = _Item(tensor.dtype, tensor.shape, (at, at + tensor.num_bytes))
        at += tensor.num_bytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGN)
    yield _LENGTH.pack(len(text)) + text
    for name in order:
        yield tensors[name].view()


def _possible_crcs(tensors: Mapping[str, HostTensor]) -> tuple[str, ...]:
    """The CRC of the tensors' bytes and, last, the one that MindSpore computes; nothing if it cannot be said."""
    plain = theirs = num_zeros = 0
    for name in sorted(tensors):
        tensor, text = tensors[name], name.encode()
        plain = zlib.crc32(tensor.view(), zlib.crc32(text, plain))
        theirs = zlib.crc32(text, theirs)
        if tensor.shape or tensor.dtype[0] not in "IU":
            theirs = zlib.crc32(tensor.view(), theirs)
            continue
        number = int.from_bytes(tensor.view(), "little", signed=tensor.dtype[0] == "I")
        num_zeros += abs(number)
        if number < 0 or num_zeros > MAX_ZEROS:
            return ()
        theirs = _crc_of_zeros(number, theirs)
    return (str(plain), str(theirs))


def _crc_of_zeros(count: int, crc: int) -> int:
    for start in range(0, count, len(_ZEROS)):
        crc = zlib.crc32(_ZEROS[: count - start], crc)
    return crc
