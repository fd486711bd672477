"""A version's tensors put together from their pieces, whatever layout saved them, into one file, in bounded memory.

What single ranks had of their own under one name (`rank0/x`, `rank1/x`) becomes `x` if one rank had it or all had the
same; where they differ every rank's stays under its own name, so nothing is lost and nothing is mixed. Pieces that
stand in several bundles are read once. The file is of the safetensors format; every chunk of the checkpoint is read
once, proved, and put where it belongs, so the memory that is needed does not grow with the state.

No torch; numpy only while bytes are moved.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash

from holdfast.base.errors import CorruptError, MismatchError, StorageError, StorageFull, UsageError
from holdfast.core.layout import reshard
from holdfast.core.model import DTYPE_BYTES, Extent, Version
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.format.image import CHUNK_BYTES, Entry
from holdfast.tiers.format.values import TensorRef
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.version_store import Storage

# Of the file that is written so much is mapped at a time.
WINDOW_BYTES = 32 << 20

_OWNED = re.compile(r"rank(\d+)/(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of a bundle's file."""

    file: BundleFile
    entry: Entry


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor as a whole: bytes `start` to `end` of the payload, and the boxes of pieces that make it up."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    parts: tuple[tuple[Piece, Extent], ...]


@dataclass(frozen=True, slots=True)
class Content:
    """All that is exported of a version."""

    version: Version
    manifest: Manifest
    tensors: tuple[Whole, ...]
    values: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else 0


@dataclass(frozen=True, slots=True)
class _Copy:
    piece: Piece
    box: Extent
    whole: Whole


def content_of(storage: Storage, manifest: Manifest, *, only: str = "") -> Content:
    """Return what there is to export: names merged over ranks, pieces chosen, places given.

    Args:
        storage: where the version is.
        manifest: of the version.
        only: names that begin so; all by default.

    Raises:
        CorruptError: a file is damaged, or parts of a tensor are in no file. UsageError: nothing begins with `only`.
        MismatchError: groups that did not know of each other saved other bytes under one name.
    """
    pieces: dict[str, list[Piece]] = defaultdict(list)
    found: dict[str, Any] = {}
    for file in manifest.bundles:
        image = storage.bundles.image(manifest.version, file)
        for entry in image.entries:
            pieces[entry.name].append(Piece(file, entry))
        if image.values is not None:
            raw = storage.bundles.read_entry(manifest.version, file, image.values)
            for name, value in value_codec.decode(raw, where=file.file).items():
                found.setdefault(name, value)
    renamed: dict[str, str | None] = {}  # None: another name holds the same
    for path, names in _by_path(pieces).items():
        digests = {_digest(storage, manifest.version, pieces[name]) for name in names if len(names) > 1}
        renamed.update(_names(path, names, alike=len(digests) <= 1))
        if path.startswith(only):
            _check_groups(storage, manifest.version, pieces[names[0]])
    values: dict[str, Any] = {}
    called: dict[str, str] = {}  # tensors of which only another name (tied weights) is exported
    for path, names in _by_path(found).items():
        # What has no name of its own is under the plain one.
        trees = {
            name: value_codec.renamed(found[name], lambda other: renamed.get(other) or _split(other)[1])
            for name in names
        }
        alike = all(tree == trees[names[0]] for tree in trees.values())
        for old, new in _names(path, names, alike=alike).items():
            if new is not None and path.startswith(only):
                tree = trees[old]
                if type(tree) is TensorRef and not tree.name.startswith(only):
                    called[tree.name] = new
                else:
                    values[new] = tree
    chosen = {old: new for old, new in renamed.items() if _split(old)[1].startswith(only)}
    chosen |= {old: called[new] for old, new in renamed.items() if new in called}
    tensors = list(_wholes(chosen, pieces))
    if not tensors and not values:
        raise UsageError(
            f"the version has nothing that begins with {only!r}",
            where=str(manifest.version),
            remedy="`holdfast inspect` shows the names",
        )
    return Content(manifest.version, manifest, tuple(tensors), values)


def _split(name: str) -> tuple[int, str]:
    match = _OWNED.match(name)
    return (int(match[1]), match[2]) if match else (-1, name)


def _by_path(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by what they are without regard to ranks; nobody's own first, then in order of rank."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=_split):
        found[_split(name)[1]].append(name)
    return found


def _names(path: str, names: Sequence[str], *, alike: bool) -> dict[str, str | None]:
    """Old name -> new name, for everything that is called `path` on some rank."""
    if alike:
        return {names[0]: path, **dict.fromkeys(names[1:])}
    return {name: name for name in names}


def _digest(storage: Storage, version: Version, pieces: Sequence[Piece]) -> str:
    """Return the digest of the bytes of a tensor that one rank had whole, cut along rows at most."""
    state = xxhash.xxh3_128()
    first = pieces[0].entry
    state.update(repr((first.dtype, first.global_shape)).encode())
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for piece in sorted(pieces, key=lambda p: p.entry.offsets):
        entry = piece.entry
        for chunk in range(entry.start // CHUNK_BYTES, -(-entry.end // CHUNK_BYTES)):
            begin = chunk * CHUNK_BYTES
            view = buffer[: min(CHUNK_BYTES, piece.file.length - begin)]
            storage.bundles.read_chunks_into(version, piece.file, chunk, view)
            state.update(view[max(0, entry.start - begin) : entry.end - begin])
    return state.hexdigest()


def _check_groups(storage: Storage, version: Version, pieces: Sequence[Piece]) -> None:
    """Check that what several groups had under one name, each the whole of it, is the same where they cut it alike."""
    first = pieces[0].entry
    layers = reshard.layers(first.global_shape, [piece.entry.extent for piece in pieces])
    cuts: dict[tuple[Extent, ...], set[str]] = defaultdict(set)
    for layer in layers if len(layers) > 1 else ():
        found = sorted((pieces[number] for number in layer), key=lambda piece: piece.entry.extent.offsets)
        cuts[tuple(piece.entry.extent for piece in found)].add(_digest(storage, version, found))
    if any(len(digests) > 1 for digests in cuts.values()):
        raise MismatchError(
            "it was saved several times with other bytes, and an export has one place for it",
            where=first.name,
            remedy="give a module that differs from rank to rank a name of its own on each, or leave it out with --only",
        )


def _wholes(renamed: Mapping[str, str | None], pieces: Mapping[str, list[Piece]]) -> Iterator[Whole]:
    """Tensors from the widest element to the narrowest, so that each is aligned to its dtype."""
    wanted = [(new, pieces[old]) for old, new in renamed.items() if new is not None and old in pieces]
    at = 0
    for name, found in sorted(wanted, key=lambda item: (-DTYPE_BYTES[item[1][0].entry.dtype], item[0])):
        first = found[0].entry
        forms = {(p.entry.dtype, p.entry.global_shape) for p in found}
        whole = Extent((0,) * len(first.global_shape), first.global_shape)
        parts = reshard.cover(whole, [p.entry.extent for p in found]) if len(forms) == 1 else None
        if parts is None:
            raise CorruptError("parts of the tensor are in no file, or they differ in shape or dtype", where=name)
        size = prod(first.global_shape) * DTYPE_BYTES[first.dtype]
        chosen = tuple((found[part.piece], part.box) for part in parts)
        yield Whole(name, first.dtype, first.global_shape, at, at + size, chosen)
        at += size


def header_of(content: Content) -> bytes:
    """The header of the merged file; the values and the version are in its metadata."""
    text = value_codec.encode(dict(content.values)).decode()
    items: dict[str, Any] = {
        "__metadata__": {"format": "pt", "holdfast.version": str(content.version), "holdfast.values": text}
    }
    for tensor in content.tensors:
        offsets = [tensor.start, tensor.end]
        items[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    data = json.dumps(items, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


def write_merged(storage: Storage, content: Content, fd: int, progress: Callable[[int], None] = lambda _: None) -> None:
    """Writes the merged file to an empty file. `progress` is told the bytes that were read.

    Raises:
        CorruptError: a file of the version is damaged; names the bytes. StorageFull, StorageError: it cannot be written.
    """
    header = header_of(content)
    try:
        os.posix_fallocate(fd, 0, max(1, len(header) + content.num_bytes))
        os.pwrite(fd, header, 0)
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for file, copies in _by_file(content).items():
            for chunk in sorted(copies):
                view = buffer[: min(CHUNK_BYTES, file.length - chunk * CHUNK_BYTES)]
                storage.bundles.read_chunks_into(content.version, file, chunk, view)
                for copy in copies[chunk]:
                    _put(fd, len(header), copy, view, chunk * CHUNK_BYTES)
                progress(len(view))
        os.fsync(fd)
    except OSError as error:
        kind = StorageFull if error.errno in (28, 122) else StorageError
        raise kind(f"the export cannot be written: {error.strerror}") from error


def bytes_to_read(content: Content) -> int:
    """Return how many bytes of the checkpoint's files are read."""
    return sum(
        min(CHUNK_BYTES, file.length - chunk * CHUNK_BYTES)
        for file, copies in _by_file(content).items()
        for chunk in copies
    )


def _by_file(content: Content) -> dict[BundleFile, dict[int, list[_Copy]]]:
    """File -> chunk -> what is taken from it."""
    found: dict[str, dict[int, list[_Copy]]] = defaultdict(lambda: defaultdict(list))
    for tensor in content.tensors:
        size = DTYPE_BYTES[tensor.dtype]
        for piece, box in tensor.parts:
            start = piece.entry.start
            spans = reshard.spans(piece.entry.extent, box, size, CHUNK_BYTES)
            runs = reshard.chunk_runs(((start + first, start + end) for first, end in spans), CHUNK_BYTES)
            for first, end in runs:
                for chunk in range(first, end):
                    found[piece.file.file][chunk].append(_Copy(piece, box, tensor))
    return {file: dict(found[file.file]) for file in content.manifest.bundles if file.file in found}


def _put(fd: int, base: int, copy: _Copy, view: memoryview, begin: int) -> None:
    """Put in place what one chunk, whose first byte is number `begin` of its image, has of one box."""
    import numpy as np  # noqa: PLC0415 - commands that only look do not pay for it

    entry, size = copy.piece.entry, DTYPE_BYTES[copy.whole.dtype]
    first = (max(entry.start, begin) - entry.start) // size
    last = (min(entry.end, begin + len(view)) - entry.start) // size
    for number, there, common in reshard.blocks_in(copy.box, entry.extent, first, last):
        at = entry.start + number * size - begin
        source = np.frombuffer(view, np.uint8, there.num_elements * size, at).reshape(*there.lengths, size)
        inside = tuple(
            slice(a - b, a - b + n) for a, b, n in zip(common.offsets, there.offsets, common.lengths, strict=True)
        )
        _put_box(fd, base + copy.whole.start, copy.whole, common, source[inside])


def _put_box(fd: int, base: int, whole: Whole, box: Extent, source: Any) -> None:
    """One box of a tensor into the file, through windows of bounded size."""
    import numpy as np  # noqa: PLC0415 - as above

    size = DTYPE_BYTES[whole.dtype]
    everything = Extent((0,) * len(whole.shape), whole.shape)
    ((first, end),) = reshard.spans(everything, box, size, 1 << 62)
    if end - first == source.nbytes:
        data = memoryview(np.ascontiguousarray(source).tobytes())
        while data:
            written = os.pwrite(fd, data, base + first)
            data, first = data[written:], first + written
        return
    dim = next(dim for dim, length in enumerate(box.lengths) if length > 1)
    stride = size * prod(whole.shape[dim + 1 :])
    if end - first > WINDOW_BYTES and box.lengths[dim] > 1:
        step = max(1, WINDOW_BYTES // stride)
        if step < box.lengths[dim]:
            for at in range(0, box.lengths[dim], step):
                count = min(step, box.lengths[dim] - at)
                offsets = tuple(o + at * (d == dim) for d, o in enumerate(box.offsets))
                lengths = tuple(count if d == dim else n for d, n in enumerate(box.lengths))
                rows = source[tuple(slice(at, at + count) if d == dim else slice(None) for d in range(dim + 1))]
                _put_box(fd, base, whole, Extent(offsets, lengths), rows)
            return
    offset = (base + first) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(fd, base + end - offset, offset=offset) as window:
        strides = (*(size * prod(whole.shape[d + 1 :]) for d in range(len(whole.shape))), 1)
        target = np.ndarray(source.shape, np.uint8, window, base + first - offset, strides)
        target[...] = source
        del target
