"""The image of a bundle: one safetensors file that stock PyTorch reads and reshards, and the digests that prove it.

Memory, wire and disk hold these very bytes. An image starts with a header that is padded to a page, then the tensors
lie from the widest element to the narrowest, so each is aligned to its dtype; the bundle's values come last, as an
entry of bytes. The image is a function of the bundle and the bytes, whoever writes it. Its proof (the seal) lies
outside.

`read_image` reads hostile bytes: it refuses in well under a second, and nothing is allocated that the header's own
length does not bound. It does not prove content; `verify` does.

Specification: docs/spec/format.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Annotated, TypeAlias

import msgspec
import xxhash

from holdfast.base.errors import CorruptError, UsageError
from holdfast.core.model import DTYPE_BYTES, NAME_PATTERN, Bundle, Extent, Piece, Seal
from holdfast.tiers.format import strict_json

ALIGN = 4096
CHUNK_BYTES = 8 << 20
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 10**6
MAX_DIMS = 64
MAX_NAME_CHARS = 4096
VALUES_ALIGN = 1024

Bytes: TypeAlias = memoryview | bytes | bytearray

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
# Names without control characters: not empty, nothing below a space, no DEL.
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f]+").fullmatch
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Sizes: TypeAlias = tuple[_Size, ...]


class _Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A value of the header object: a tensor, or the metadata (which is the one without a dtype)."""

    dtype: str | None = None
    shape: _Sizes | None = None
    data_offsets: tuple[_Size, _Size] | None = None
    sharding: str | None = msgspec.field(default=None, name="DCP_SHARDING_INFO")
    format: str | None = None
    holdfast: str | None = None


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    saved_offsets: _Sizes


class _Empty(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: _Sizes
    offsets: _Sizes


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The metadata field "holdfast": what stock readers do not need."""

    format_version: int
    bundle: str
    global_shapes: dict[str, _Sizes] = {}
    empty: dict[str, _Empty] = {}


class _Version(msgspec.Struct):
    format_version: int


class _PeekedMetadata(msgspec.Struct):
    holdfast: str


class _Peeked(msgspec.Struct):
    metadata: _PeekedMetadata = msgspec.field(name=_METADATA)


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Says where everything of a bundle goes.

    Attributes:
        header: the first bytes of the image, ready to copy; a multiple of ALIGN.
        spans: entry name -> (offset from the start of the image, bytes); every piece of the bundle is in it.
        values_span: the same for the bundle's values, if it has any.
        length: bytes of the image.
    """

    header: bytes
    spans: dict[str, tuple[int, int]]
    values_span: tuple[int, int] | None
    length: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in an image: the box at `offsets` of a tensor of `global_shape`; bytes `start` to `end` of the image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    end: int

    @property
    def extent(self) -> Extent:
        """Its box in the whole tensor."""
        return Extent(self.offsets, self.shape)


@dataclass(frozen=True, slots=True)
class Image:
    """Says what an image holds. `entries` are its tensors, pieces without rows included; `values` is apart."""

    bundle_id: str
    entries: tuple[Entry, ...]
    values: Entry | None
    length: int


def values_name(bundle_id: str) -> str:
    """The entry that carries a bundle's values."""
    return f"values/{bundle_id}"


def pad_values(raw: bytes) -> bytes:
    """Values as they lie in an image: padded with spaces, so that a longer number does not move the image's end."""
    return raw + b" " * (-len(raw) % VALUES_ALIGN)


def plan_image(bundle: Bundle, values_bytes: int = 0) -> ImagePlan:
    """The header and the places of a bundle's image.

    Args:
        bundle: its pieces may have any order.
        values_bytes: length of the padded values; 0 if the bundle carries none.

    Raises:
        UsageError: a name that cannot be stored, two pieces of one name, or too many entries.
    """
    placed = sorted(_placed(bundle, values_bytes))
    sharding: dict[str, _Saved] = {}
    items: dict[str, _Item] = {}
    note = _Note(strict_json.FORMAT_VERSION, bundle.bundle_id, {}, {})
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    for _, _, name, dtype, shape, offsets, global_shape in placed:
        size = prod(shape) * DTYPE_BYTES[dtype]
        spans[name] = (end, size)
        if _is_left_out(shape, global_shape):
            note.empty[name] = _Empty(dtype, shape, offsets)
        else:
            items[name] = _Item(dtype, shape, (end, end + size))
            sharding[name] = _Saved(offsets)
        if shape != global_shape:
            note.global_shapes[name] = global_shape
        end += size
    if len(spans) != len(placed):
        raise UsageError("a bundle holds two pieces of one name", where=bundle.bundle_id)
    metadata = _Item(
        sharding=strict_json.encode(sharding).decode(), format="pt", holdfast=strict_json.encode(note).decode()
    )
    header = _pad_header(strict_json.encode({_METADATA: metadata, **items}), bundle.bundle_id)
    spans = {name: (len(header) + start, size) for name, (start, size) in spans.items()}
    values_span = spans.pop(values_name(bundle.bundle_id)) if values_bytes else None
    return ImagePlan(header, spans, values_span, len(header) + end)


_Placed: TypeAlias = tuple[int, bool, str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _placed(bundle: Bundle, values_bytes: int) -> Iterator[_Placed]:
    """Everything that gets a place, led by what the payload is sorted by: widest element, values last, name."""
    for piece in bundle.pieces:
        yield _placed_piece(piece)
    if values_bytes:
        shape = (values_bytes,)
        yield (-1, True, values_name(bundle.bundle_id), "U8", shape, (0,), shape)


def _placed_piece(piece: Piece) -> _Placed:
    shard, extent = piece.shard, piece.extent
    if not _is_name(shard.name) or shard.name.startswith(values_name("")):
        remedy = "rename the module or the key of the state dict"
        raise UsageError(f"{shard.name!r} cannot be the name of an entry", remedy=remedy)
    if shard.dtype not in DTYPE_BYTES:
        raise UsageError(f"{shard.name} has dtype {shard.dtype}, which safetensors does not know", where=shard.name)
    return (
        -DTYPE_BYTES[shard.dtype],
        False,
        shard.name,
        shard.dtype,
        extent.lengths,
        extent.offsets,
        shard.global_shape,
    )


def _is_name(name: str) -> bool:
    return len(name) <= MAX_NAME_CHARS and name != _METADATA and _PRINTABLE(name) is not None


def _is_left_out(shape: tuple[int, ...], global_shape: tuple[int, ...]) -> bool:
    """Return whether a piece is only noted.

    The stock reader keeps one piece per (name, offsets), so a piece without rows at the offsets of a full one would
    hide it. A tensor that is empty as a whole must be there, or it would be missing.
    """
    return 0 in shape and 0 not in global_shape


def _pad_header(text: bytes, where: str) -> bytes:
    padded = text + b" " * (-(len(text) + _LENGTH.size) % ALIGN)
    if len(padded) > MAX_HEADER_BYTES:
        raise UsageError(
            f"the header of a bundle would have {len(padded)} bytes; {MAX_HEADER_BYTES} are allowed",
            where=where,
            remedy="store fewer, larger tensors (many small ones can be stacked into one)",
        )
    return _LENGTH.pack(len(padded)) + padded


def read_image(view: Bytes, where: str) -> Image:
    """Return what the image in `view` (exactly one whole image) holds. Proves structure, not content.

    Raises:
        NewerFormat: of a newer format.
        CorruptError: not exactly what `plan_image` lays out.
    """
    view = memoryview(view)
    header_bytes = header_length(view[: _LENGTH.size], len(view), where)
    return read_header(view[:header_bytes], len(view), where)


def header_length(prefix: Bytes, length: int, where: str) -> int:
    """Bytes of the header, prefix included, from the first eight bytes of an image of `length` bytes.

    Raises:
        CorruptError: impossible for an image.
    """
    if len(prefix) < _LENGTH.size:
        raise CorruptError(f"{length} bytes are too short for an image", where=where)
    (claimed,) = _LENGTH.unpack(bytes(prefix[: _LENGTH.size]))
    if claimed > MAX_HEADER_BYTES:
        raise CorruptError(f"the header claims {claimed} bytes; {MAX_HEADER_BYTES} are allowed", where=where)
    if claimed + _LENGTH.size > length:
        raise CorruptError(f"the header claims {claimed} bytes and the image has {length}", where=where)
    return int(claimed) + _LENGTH.size


def read_header(header: Bytes, length: int, where: str) -> Image:
    """Return what an image of `length` bytes holds, from its header alone (`header_length` bytes).

    Raises:
        NewerFormat: of a newer format.
        CorruptError: not exactly what `plan_image` lays out.
    """
    text = bytes(header[_LENGTH.size :]).rstrip(b" ")
    peeked = strict_json.peek(text, _Peeked, where, "the header").metadata.holdfast
    strict_json.check_version(strict_json.peek(peeked, _Version, where, "the note in the header").format_version, where)
    items: dict[str, _Item] = strict_json.decode(text, dict[str, _Item], where, "the header")
    if len(header) != _LENGTH.size + len(text) + (-(len(text) + _LENGTH.size) % ALIGN) or len(items) > MAX_TENSORS:
        raise CorruptError("the header is not padded to a page, or names too many tensors", where=where)
    metadata = items.pop(_METADATA)
    sharding = strict_json.decode(metadata.sharding or "", dict[str, _Saved], where, "the sharding note")
    note: _Note = strict_json.decode(metadata.holdfast or "", _Note, where, "the note in the header")
    if metadata != _Item(sharding=metadata.sharding, format="pt", holdfast=metadata.holdfast):
        raise CorruptError("the header's metadata has fields of a tensor", where=where)
    if not NAME_PATTERN.match(note.bundle) or sharding.keys() != items.keys():
        raise CorruptError("the header names no bundle, or its sharding note names other tensors", where=where)
    entries = tuple(_read_entries(items, sharding, note, (len(header), length), where))
    values = entries[-1] if entries and entries[-1].name == values_name(note.bundle) else None
    tensors = entries[:-1] if values else entries
    stray = any(entry.name.startswith(values_name("")) for entry in tensors)
    if stray or (values is not None and (values.dtype != "U8" or values.shape != values.global_shape)):
        raise CorruptError("the values are not one entry of bytes at the end", where=where)
    return Image(note.bundle, tensors + tuple(_read_empty(note, len(header), where)), values, length)


def _read_entries(
    items: dict[str, _Item], sharding: dict[str, _Saved], note: _Note, payload: tuple[int, int], where: str
) -> Iterator[Entry]:
    """The tensors of the header, which must lie end to end and in order from `payload[0]` to `payload[1]`."""
    cursor = base = payload[0]
    for name, item in items.items():
        if item.dtype is None or item.shape is None or item.data_offsets is None:
            raise CorruptError(f"entry {name[:100]!r} lacks dtype, shape or offsets", where=where)
        offsets = sharding[name].saved_offsets
        global_shape = note.global_shapes.get(name, item.shape)
        size = _checked_size(name, item.dtype, (item.shape, offsets, global_shape), where)
        start, end = (base + offset for offset in item.data_offsets)
        if end - start != size:
            what = f"entry {name[:100]!r} has {end - start} bytes; {item.dtype} x {item.shape} needs {size}"
            raise CorruptError(what, where=where)
        if start != cursor:
            what = f"entry {name[:100]!r} starts at byte {start}, not {cursor}: entries overlap or leave a gap"
            raise CorruptError(what, where=where)
        cursor = end
        yield Entry(name, item.dtype, item.shape, global_shape, offsets, start, end)
    if cursor != payload[1]:
        raise CorruptError(f"the entries end at byte {cursor} and the image at {payload[1]}", where=where)


def _read_empty(note: _Note, base: int, where: str) -> Iterator[Entry]:
    """The pieces without rows, which have no bytes and stand in the note only."""
    for name, empty in note.empty.items():
        global_shape = note.global_shapes.get(name, empty.shape)
        if _checked_size(name, empty.dtype, (empty.shape, empty.offsets, global_shape), where):
            raise CorruptError(f"entry {name[:100]!r} is noted as empty and is not", where=where)
        yield Entry(name, empty.dtype, empty.shape, global_shape, empty.offsets, base, base)


def _checked_size(name: str, dtype: str, box: tuple[_Sizes, _Sizes, _Sizes], where: str) -> int:
    """Bytes of an entry whose name, dtype and box (shape, offsets, global shape) are possible."""
    shape, offsets, global_shape = box
    if not _is_name(name) or dtype not in DTYPE_BYTES:
        raise CorruptError(f"entry {name[:100]!r} of dtype {dtype[:20]!r}: no such name or dtype", where=where)
    if not len(shape) == len(offsets) == len(global_shape) <= MAX_DIMS:
        raise CorruptError(f"entry {name[:100]!r}: shape, offsets and global shape differ in rank", where=where)
    is_part = shape != global_shape or any(offsets)
    if is_part and any(o + n > whole for o, n, whole in zip(offsets, shape, global_shape, strict=True)):
        raise CorruptError(f"entry {name[:100]!r} reaches beyond its global shape {global_shape}", where=where)
    return prod(shape) * DTYPE_BYTES[dtype]


def chunk_digest(chunk: Bytes) -> str:
    """Digest of one chunk (at most CHUNK_BYTES). Releases the GIL, so chunks can be hashed beside other work."""
    return xxhash.xxh3_128_hexdigest(chunk)


def start_digest() -> xxhash.xxh3_128:
    """The digest of one chunk for who reads it piece by piece: `update` with each in order, then `hexdigest`."""
    return xxhash.xxh3_128()


def chunks(view: Bytes) -> Iterator[memoryview]:
    """The chunks of an image, in order; the last one may be shorter."""
    whole = memoryview(view).cast("B")
    return (whole[at : at + CHUNK_BYTES] for at in range(0, len(whole), CHUNK_BYTES))


def num_chunks(length: int) -> int:
    """Return the number of chunks of an image of this length."""
    return -(-length // CHUNK_BYTES)


def image_digest(chunk_digests: tuple[str, ...]) -> str:
    """Digest of an image from those of its chunks, so that chunks can be hashed and checked in any order."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex("".join(chunk_digests)))


def seal(
    bundle_id: str,
    view: Bytes,
    *,
    before: Callable[[int], object] = lambda _: None,
    each: Callable[[Callable[[memoryview], str], Iterable[memoryview]], Iterable[str]] = map,
) -> Seal:
    """Returns the proof of what `view` holds now.

    Args:
        bundle_id: whose image it is.
        view: the whole image.
        before: called before each chunk, with its length in bytes.
        each: hashes all chunks and gives their digests in the chunks' order, as `map` does; an executor's does it on threads.
    """

    def digest(chunk: memoryview) -> str:
        before(len(chunk))
        return chunk_digest(chunk)

    digests = tuple(each(digest, chunks(view)))
    return Seal(bundle_id, memoryview(view).nbytes, image_digest(digests), digests)


def verify(view: Bytes, seal: Seal, where: str) -> None:
    """Proves that `view` holds what was sealed.

    Raises:
        CorruptError: it does not; names the chunk and its bytes.
    """
    check_length(memoryview(view).nbytes, seal, where)
    digests = []
    for index, chunk in enumerate(chunks(view)):
        digests.append(chunk_digest(chunk))
        check_chunk(index, digests[-1], seal, where)
    check_digest(tuple(digests), seal, where)


def check_digest(chunk_digests: tuple[str, ...], seal: Seal, where: str) -> None:
    """Refuses an image whose chunks, together, are not what was sealed.

    Raises:
        CorruptError: they are not.
    """
    if image_digest(chunk_digests) != seal.digest:
        raise CorruptError(f"image {seal.bundle_id} differs from its seal", where=where)


def check_length(length: int, seal: Seal, where: str) -> None:
    """Refuses an image that is too short or too long for its seal.

    Raises:
        CorruptError: it is.
    """
    if length != seal.length:  # who reads a longer one stops behind one byte too many
        found = "more bytes" if length > seal.length else f"{length} bytes"
        raise CorruptError(f"image {seal.bundle_id} has {found}; {seal.length} were sealed", where=where)


def check_chunk(index: int, digest: str, seal: Seal, where: str) -> None:
    """Refuses a chunk whose digest is not the sealed one. A seal without chunk digests refuses nothing here.

    Raises:
        CorruptError: it is not; names the chunk and its bytes.
    """
    if seal.chunk_digests and (index >= len(seal.chunk_digests) or digest != seal.chunk_digests[index]):
        first = index * CHUNK_BYTES
        last = min(first + CHUNK_BYTES, seal.length) - 1
        what = f"chunk {index} of image {seal.bundle_id} (bytes {first} to {last}) differs from its seal"
        raise CorruptError(what, where=where, remedy="use another copy or an older version")
