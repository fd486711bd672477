"""Verified bytes into live tensors: copied and hashed in one pass over the images, on two or more threads.

Digests cost more than half a copy when they are a pass of their own, and almost nothing in one pass: each thread takes
a chunk and goes through it in steps that fit into the cache, copies a step and hashes it. The chunk's digest is
compared with the seal when its last step is hashed, so bytes of a bad chunk may lie in tensors by then. They go no
further: every chunk of every image is compared, `fill` names the images that failed, and unless it names none the ranks
refuse the attempt together. No step of this may be left out, whatever is copied.

Tensors are filled in place, on whatever device they are. Host memory takes bytes as they are, without a call into
torch per piece; both hashing and copying release the interpreter's lock. Called by `train.restore`.
"""

from __future__ import annotations

import ctypes
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch.autograd.graph import increment_version

from holdfast.base.errors import CorruptError
from holdfast.core.model import Extent
from holdfast.node.client import Located
from holdfast.tiers import format as image_format
from holdfast.tiers.format import CHUNK_BYTES, Entry, Image
from holdfast.train.live import LiveTensor, torch_dtype

# More threads than memory channels do not copy faster.
MAX_THREADS = 4
# What is copied and then hashed before the next: small enough for a core's own cache, large enough for few calls.
STEP_BYTES = 512 << 10

# Bytes to host memory: target address, source address, length.
_Move: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Source:
    """An image to load from: where it lies and what its header says."""

    located: Located
    image: Image


@dataclass(slots=True)
class _Chunk:
    """One chunk of image number `image`: what is copied after each step of it, and what once it is proven."""

    image: int
    index: int
    view: memoryview
    steps: list[list[_Move]]
    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)


def read_sources(located: Sequence[Located]) -> list[Source]:
    """The headers of images. Structure only; `fill` proves content.

    Raises:
        CorruptError: not an image.
    """
    return [Source(item, image_format.read_image(item.view, item.ref.bundle_id)) for item in located]


def fill(
    sources: Sequence[Source], tensors: Mapping[str, LiveTensor], progress: Callable[[int], None] = lambda _: None
) -> dict[str, str]:
    """Copies every entry into the tensor of its name; returns bundle id -> what is wrong with its image.

    `progress` is called with the bytes of each chunk, from several threads.

    After a fault the tensors hold a mixture; the caller fills them again from other copies or raises.
    """
    work = _Work(sources, progress)
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
    increment_version([live.local for live in tensors.values()])  # autograd has not seen who wrote by address
    return work.faults()


class _Work:
    """The chunks that are planned, and what was found in those that are done."""

    def __init__(self, sources: Sequence[Source], progress: Callable[[int], None]) -> None:
        self._sources = sources
        self._progress = progress
        self._digests: list[dict[int, str]] = [{} for _ in sources]
        self._faults: dict[str, str] = {}
        self.todo: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Copies, hashes, compares, until the end of the queue."""
        while (chunk := self.todo.get()) is not None:
            located = self._sources[chunk.image].located
            digest = _copy_and_hash(chunk)
            self._digests[chunk.image][chunk.index] = digest
            self._progress(len(chunk.view))
            try:
                image_format.check_chunk(chunk.index, digest, located.seal, located.ref.bundle_id)
            except CorruptError as error:
                self._faults.setdefault(located.seal.bundle_id, error.what)
                continue
            with torch.no_grad():
                for target, source in zip(chunk.targets, chunk.sources, strict=True):
                    target.copy_(source)

    def faults(self) -> dict[str, str]:
        """Bundle id -> what is wrong, once all chunks are done."""
        for source, found in zip(self._sources, self._digests, strict=True):
            if source.located.seal.bundle_id not in self._faults:
                _check_whole(source, tuple(found[index] for index in sorted(found)), self._faults)
        return self._faults


def _copy_and_hash(chunk: _Chunk) -> str:
    digest = image_format.start_digest()
    at = 0
    for moves in chunk.steps:
        for move in moves:
            ctypes.memmove(*move)
        digest.update(chunk.view[at : at + STEP_BYTES])
        at += STEP_BYTES
    return digest.hexdigest()


def _check_whole(source: Source, digests: tuple[str, ...], faults: dict[str, str]) -> None:
    seal = source.located.seal
    try:
        image_format.check_length(len(source.located.view), seal, seal.bundle_id)
        image_format.check_digest(digests, seal, seal.bundle_id)
    except CorruptError as error:
        faults[seal.bundle_id] = error.what


def _chunks(number: int, source: Source, tensors: Mapping[str, LiveTensor]) -> Iterator[_Chunk]:
    """The chunks of one image in order, each as soon as nothing more can be copied from it: entries lie in order."""
    chunks = [
        _Chunk(number, index, view, [[] for _ in range(0, len(view), STEP_BYTES)])
        for index, view in enumerate(image_format.chunks(source.located.view))
    ]
    base = as_tensor(source.located.view)
    address = base.data_ptr()
    done = 0
    for entry in source.image.entries:
        live = tensors.get(entry.name)
        if live is None or entry.start == entry.end:
            continue
        first = entry.start // CHUNK_BYTES
        if first > done:
            yield from chunks[done:first]
            done = first
        assert first == done, "entries lie in order; read_image saw to it"
        extent = live.shard.extent
        if entry.offsets == extent.offsets and entry.shape == extent.lengths:
            target, box = live.local, None
        else:
            target, box = _overlap(live.local, extent, _typed(base, entry), Extent(entry.offsets, entry.shape))
        if _is_plain(target) and target.nbytes == entry.end - entry.start:
            _plan_moves(chunks, address, entry, target.data_ptr())
        elif target.numel():
            _plan_copies(chunks, entry, target, _typed(base, entry) if box is None else box)
    yield from chunks[done:]


def _is_plain(target: torch.Tensor) -> bool:
    """Whether the tensor is its bytes, one after the other, in host memory."""
    return target.is_cpu and target.is_contiguous() and not target.is_conj() and not target.is_neg()


def _typed(base: torch.Tensor, entry: Entry) -> torch.Tensor:
    """An entry as a tensor."""
    return base[entry.start : entry.end].view(torch_dtype(entry.dtype)).view(entry.shape)


def _plan_moves(chunks: Sequence[_Chunk], address: int, entry: Entry, place: int) -> None:
    """All bytes of one entry to the address `place`, cut where steps end."""
    start = entry.start
    while start < entry.end:
        end = min(entry.end, start - start % STEP_BYTES + STEP_BYTES)
        step = chunks[start // CHUNK_BYTES].steps[start % CHUNK_BYTES // STEP_BYTES]
        step.append((place, address + start, end - start))
        place += end - start
        start = end


def _plan_copies(chunks: Sequence[_Chunk], entry: Entry, target: torch.Tensor, source: torch.Tensor) -> None:
    """The same by torch, for other devices and strides; cut where chunks end if memory is laid out so that it can be."""
    if target.nbytes < entry.end - entry.start or not target.is_contiguous():
        chunk = chunks[entry.start // CHUNK_BYTES]
        chunk.targets.append(target)
        chunk.sources.append(source)
        return
    target, source = target.view(-1), source.view(-1)
    size = target.element_size()
    done = 0
    while done < len(target):
        start = entry.start + done * size
        end = done + min(len(target) - done, (CHUNK_BYTES - start % CHUNK_BYTES) // size)
        chunks[start // CHUNK_BYTES].targets.append(target[done:end])
        chunks[start // CHUNK_BYTES].sources.append(source[done:end])
        done = end


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
