"""Verified bytes into live tensors: every chunk is hashed and then copied while it is still in the cache.

Digests cost about half a copy, and almost nothing behind it: two threads go through the chunks, each hashes one,
compares it with the seal, and copies it. Both steps release the interpreter's lock. A chunk that is not what was
sealed is not copied; its image is reported and the others go on, so that one look finds all that is bad.

Tensors are filled in place, on whatever device they are. Called by `train.restore`.
"""

from __future__ import annotations

import ctypes
import os
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast.base.errors import CorruptError
from holdfast.core.model import Extent
from holdfast.node.client import Located
from holdfast.tiers import format as image_format
from holdfast.tiers.format import CHUNK_BYTES, Entry, Image
from holdfast.train.live import LiveTensor

# More threads than memory channels do not copy faster.
MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class Source:
    """An image to load from: where it lies and what its header says."""

    located: Located
    image: Image


@dataclass(slots=True)
class _Chunk:
    view: memoryview
    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Move:
    """Bytes [start, ...) of an image to a part of a live tensor."""

    start: int
    target: torch.Tensor
    source: torch.Tensor


def read_sources(located: Sequence[Located]) -> list[Source]:
    """The headers of images. Structure only; `fill` proves content.

    Raises:
        CorruptError: not an image.
    """
    return [Source(item, image_format.read_image(item.view, item.ref.bundle_id)) for item in located]


def fill(sources: Sequence[Source], tensors: Mapping[str, LiveTensor]) -> dict[str, str]:
    """Copies every entry into the tensor of its name; returns bundle id -> what is wrong with its image.

    After a fault the tensors hold a mixture; the caller fills them again from other copies or raises.
    """
    plans = [_chunks(source, tensors) for source in sources]
    digests: list[list[str]] = [[""] * len(chunks) for chunks in plans]
    faults: dict[str, str] = {}
    todo: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for number, chunks in enumerate(plans):
        for index in range(len(chunks)):
            todo.put((number, index))

    def work() -> None:
        while True:
            try:
                number, index = todo.get_nowait()
            except queue.Empty:
                return
            seal = sources[number].located.seal
            try:
                digests[number][index] = _load(plans[number][index], index, sources[number])
            except CorruptError as error:
                faults.setdefault(seal.bundle_id, error.what)

    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-restore") as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()
    for source, found in zip(sources, digests, strict=True):
        _check_whole(source, tuple(found), faults)
    return faults


def _load(chunk: _Chunk, index: int, source: Source) -> str:
    """Hashes, compares, copies."""
    digest = image_format.chunk_digest(chunk.view)
    image_format.check_chunk(index, digest, source.located.seal, source.located.ref.bundle_id)
    if chunk.targets:
        with torch.no_grad():
            torch._foreach_copy_(chunk.targets, chunk.sources)
    return digest


def _check_whole(source: Source, digests: tuple[str, ...], faults: dict[str, str]) -> None:
    seal = source.located.seal
    if seal.bundle_id in faults:
        return
    try:
        image_format.check_length(len(source.located.view), seal, seal.bundle_id)
        image_format.check_digest(digests, seal, seal.bundle_id)
    except CorruptError as error:
        faults[seal.bundle_id] = error.what


def _chunks(source: Source, tensors: Mapping[str, LiveTensor]) -> list[_Chunk]:
    chunks = [_Chunk(view) for view in image_format.chunks(source.located.view)]
    base = as_tensor(source.located.view)
    for entry in source.image.entries:
        live = tensors.get(entry.name)
        if live is None or entry.start == entry.end:
            continue
        for move in _moves(base, entry, live):
            chunk = chunks[move.start // CHUNK_BYTES]
            chunk.targets.append(move.target)
            chunk.sources.append(move.source)
    return chunks


def _moves(base: torch.Tensor, entry: Entry, live: LiveTensor) -> Iterator[_Move]:
    """The copies of one entry, cut where the chunks end if memory is laid out so that it can be cut."""
    source = base[entry.start : entry.end].view(live.local.dtype).view(entry.shape)
    target, source = _overlap(live.local, live.shard.extent, source, Extent(entry.offsets, entry.shape))
    if not target.numel():
        return
    if target.numel() * target.element_size() < entry.end - entry.start or not target.is_contiguous():
        yield _Move(entry.start, target, source)
        return
    flat, origin, size = target.view(-1), source.view(-1), target.element_size()
    at = 0
    while at < flat.numel():
        left = CHUNK_BYTES - (entry.start + at * size) % CHUNK_BYTES
        length = min(flat.numel() - at, left // size)
        yield _Move(entry.start + at * size, flat[at : at + length], origin[at : at + length])
        at += length


def _overlap(
    target: torch.Tensor, wanted: Extent, source: torch.Tensor, given: Extent
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of both that covers the same box of the global tensor."""
    for dim, (w_start, w_len, g_start, g_len) in enumerate(
        zip(wanted.offsets, wanted.lengths, given.offsets, given.lengths, strict=True)
    ):
        first, last = max(w_start, g_start), min(w_start + w_len, g_start + g_len)
        length = max(0, last - first)
        if length != w_len:
            target = target.narrow(dim, min(max(0, first - w_start), w_len), length)
        if length != g_len:
            source = source.narrow(dim, min(max(0, first - g_start), g_len), length)
    return target, source


def as_tensor(view: memoryview) -> torch.Tensor:
    """The bytes as a tensor that nobody may write to; it keeps the memory alive.

    torch has no read-only tensors and warns about read-only buffers, so the buffer is named by its address.
    """
    array = np.frombuffer(view, dtype=np.uint8)
    if not len(array):
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_char * len(array)).from_address(array.ctypes.data)
    memory.keep = array  # type: ignore[attr-defined]  # ctypes objects take attributes; this one holds the mapping
    return torch.frombuffer(memory, dtype=torch.uint8)
