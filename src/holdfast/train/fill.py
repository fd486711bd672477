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
    """One chunk of image number `image`, and what is to be copied from it."""

    image: int
    index: int
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
    work = _Work(sources)
    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="holdfast-restore") as pool:
        helpers = [pool.submit(work.run) for _ in range(num_threads - 1)]
        try:
            for number, source in enumerate(sources):  # the others copy while this one still plans
                for chunk in _chunks(number, source, tensors):
                    work.todo.put(chunk)
        finally:
            for _ in range(num_threads):
                work.todo.put(None)
        work.run()
        for helper in helpers:
            helper.result()
    return work.faults()


class _Work:
    """The chunks that are planned, and what was found in those that are done."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._digests: list[dict[int, str]] = [{} for _ in sources]
        self._faults: dict[str, str] = {}
        self.todo: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Hashes, compares, copies, until the end of the queue."""
        while (chunk := self.todo.get()) is not None:
            located = self._sources[chunk.image].located
            digest = image_format.chunk_digest(chunk.view)
            self._digests[chunk.image][chunk.index] = digest
            try:
                image_format.check_chunk(chunk.index, digest, located.seal, located.ref.bundle_id)
            except CorruptError as error:
                self._faults.setdefault(located.seal.bundle_id, error.what)
                continue
            if chunk.targets:
                with torch.no_grad():
                    torch._foreach_copy_(chunk.targets, chunk.sources)

    def faults(self) -> dict[str, str]:
        """Bundle id -> what is wrong, once all chunks are done."""
        for source, found in zip(self._sources, self._digests, strict=True):
            if source.located.seal.bundle_id not in self._faults:
                _check_whole(source, tuple(found[index] for index in sorted(found)), self._faults)
        return self._faults


def _check_whole(source: Source, digests: tuple[str, ...], faults: dict[str, str]) -> None:
    seal = source.located.seal
    try:
        image_format.check_length(len(source.located.view), seal, seal.bundle_id)
        image_format.check_digest(digests, seal, seal.bundle_id)
    except CorruptError as error:
        faults[seal.bundle_id] = error.what


def _chunks(number: int, source: Source, tensors: Mapping[str, LiveTensor]) -> Iterator[_Chunk]:
    """The chunks of one image in order, each as soon as nothing more can be copied from it: entries lie in order."""
    chunks = [_Chunk(number, index, view) for index, view in enumerate(image_format.chunks(source.located.view))]
    base = as_tensor(source.located.view)
    done = 0
    for entry in source.image.entries:
        live = tensors.get(entry.name)
        if live is None or entry.start == entry.end:
            continue
        for move in _moves(base, entry, live):
            at = move.start // CHUNK_BYTES
            assert at >= done, "entries lie in order; read_image saw to it"
            yield from chunks[done:at]
            done = at
            chunks[at].targets.append(move.target)
            chunks[at].sources.append(move.source)
    yield from chunks[done:]


def _moves(base: torch.Tensor, entry: Entry, live: LiveTensor) -> Iterator[_Move]:
    """The copies of one entry, cut where the chunks end if memory is laid out so that it can be cut."""
    flat = base[entry.start : entry.end].view(live.local.dtype)
    whole = entry.offsets == live.shard.extent.offsets and entry.shape == live.shard.extent.lengths
    if whole and live.local.is_contiguous():
        target = live.local.view(-1)
    else:
        given = Extent(entry.offsets, entry.shape)
        target, source = _overlap(live.local, live.shard.extent, flat.view(entry.shape), given)
        if not target.numel():
            return
        if target.nbytes < entry.end - entry.start or not target.is_contiguous():
            yield _Move(entry.start, target, source)
            return
        target = target.view(-1)
    size = target.element_size()
    at = 0
    while at < len(target):
        length = min(len(target) - at, (CHUNK_BYTES - (entry.start + at * size) % CHUNK_BYTES) // size)
        if length == len(target):
            yield _Move(entry.start, target, flat)
        else:
            yield _Move(entry.start + at * size, target[at : at + length], flat[at : at + length])
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
