"""Verified bytes into live tensors: copied and hashed in one pass over the images, on two or more threads.

Digests cost more than half a copy when they are a pass of their own, and almost nothing in one pass: each thread takes
a chunk and goes through it in steps that fit into the cache, copies a step and hashes it. The chunk's digest is
compared with the seal when its last step is hashed, so bytes of a bad chunk may lie in tensors by then. They go no
further: every chunk of every image is compared, `fill` names the images that failed, and unless it names none the ranks
refuse the attempt together. No step of this may be left out, whatever is copied.

What was not read from storage yet is read here, by as many streams as the place is worth: each takes a chunk into a buffer
of its own, proves it there, and then copies it. Bytes of a bad chunk reach no tensor on this way.

In the layout that was saved every entry goes whole to its tensor; in another a copy takes a box of an entry, and of an
image only those chunks need be here that hold such a box. Tensors are filled in place, on whatever device they are. Host
memory takes bytes as they are, without a call into torch per piece; both hashing and copying release the interpreter's
lock. What goes to a device is hashed and queued from a slot that the driver knows, or from a buffer that it is copied into first
(`checkpoint.device.chunk_staging`).
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch.autograd.graph import increment_version

from holdfast.base.errors import CorruptError, HoldfastError, StorageBusy
from holdfast.checkpoint.device.chunk_staging import Staging, Starts, is_known, placed
from holdfast.checkpoint.entries.types import LiveTensor, torch_dtype
from holdfast.core.layout import reshard
from holdfast.core.model import Extent
from holdfast.keeper.rpc.client import Located
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES, Entry, Image
from holdfast.tiers.memory.usable_cores import usable_cores
from holdfast.tiers.storage.read_limit import ReadLimit
from holdfast.tiers.storage.unread_chunks import UnreadChunks

# More threads than memory channels do not copy faster.
MAX_THREADS = 4
# What a device copies is only hashed here, at some 7 GB/s a thread; more threads wait for the interpreter's lock.
MAX_THREADS_OF_DEVICE = 8
# What is copied and then hashed before the next: small enough for a core's own cache, large enough for few calls.
STEP_BYTES = 512 << 10
# How long storage may bring nothing, where nobody says it.
PATIENCE_S = 600.0

# Bytes to host memory: target address, source address, length.
_Move: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Source:
    """An image to load from.

    Attributes:
        located: where it lies; of an image in pieces one of them.
        image: what its header says.
        chunks: number and bytes of the chunks that are here, ascending.
        whole: they are all of it.
    """

    located: Located
    image: Image
    chunks: tuple[tuple[int, memoryview], ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Copy:
    """The elements of `box` (in the whole tensor), which `entry` holds, go to their place in `live`."""

    entry: Entry
    box: Extent
    live: LiveTensor


@dataclass(slots=True)
class _Chunk:
    """One chunk of image number `image`: what is copied after each step of it, and what once it is proven."""

    image: int
    index: int
    view: memoryview
    bytes: torch.Tensor
    steps: list[list[_Move]]
    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    @property
    def goes_to_device(self) -> bool:
        """Return whether a part of it goes to memory that is not the host's."""
        return any(not target.is_cpu for target in self.targets)


def read_sources(located: Sequence[Located]) -> list[Source]:
    """The headers of whole images. Structure only; `fill` proves content.

    Raises:
        CorruptError: not an image.
    """
    return [
        Source(
            item,
            image_format.read_image(item.view, item.ref.bundle_id),
            tuple(enumerate(image_format.chunks(item.view))),
        )
        for item in located
    ]


def fill(
    sources: Sequence[Source],
    tensors: Mapping[str, LiveTensor],
    progress: Callable[[int], None] = lambda _: None,
    *,
    patience_s: float = PATIENCE_S,
) -> dict[str, HoldfastError]:
    """Copies every entry into the tensor of its name; else as `fill_with`."""
    copies = [
        [
            Copy(entry, common, live)
            for entry in source.image.entries
            if (live := tensors.get(entry.name)) is not None
            and (common := reshard.overlap(Extent(entry.offsets, entry.shape), live.shard.extent)) is not None
        ]
        for source in sources
    ]
    return fill_with(sources, copies, progress, patience_s=patience_s)


def fill_with(
    sources: Sequence[Source],
    copies: Sequence[Sequence[Copy]],
    progress: Callable[[int], None] = lambda _: None,
    *,
    patience_s: float = PATIENCE_S,
) -> dict[str, HoldfastError]:
    """Makes the copies of every source; returns bundle id -> what is wrong with its image, or why it could not be read.

    Args:
        sources: their chunks are proved, all of them, whatever is copied.
        copies: for each source, in order of the entries' places.
        progress: called with the bytes of each chunk, from several threads.
        patience_s: how long storage may bring nothing of what is read here; see `tiers.storage.read_limit`.

    After a fault the tensors hold a mixture; the caller fills them again from other copies or raises.
    """
    starts = Starts(copy.live.local for rows in copies for copy in rows)
    work = _Work(sources, progress, starts)
    to_device = any(not copy.live.local.is_cpu for rows in copies for copy in rows)
    num_threads = min(MAX_THREADS_OF_DEVICE if to_device else MAX_THREADS, usable_cores())
    unread: list[tuple[UnreadChunks, list[_Chunk]]] = []
    with ThreadPoolExecutor(num_threads, thread_name_prefix="holdfast-restore") as pool:
        try:  # else the pool waits for ever for those who wait for work
            helpers = [pool.submit(work.run) for _ in range(num_threads - 1)]
            for number, source in enumerate(sources):
                # All of an image at once: a thread that plans holds the lock that those who copy ask for at every step.
                planned, left = list(_chunks(number, source, copies[number])), source.located.unread
                for chunk in planned:
                    if left is None or chunk.index in left.here:
                        work.todo.put(chunk)
                if left is not None:
                    found = {chunk.index: chunk for chunk in planned if chunk.index not in left.here}
                    unread.append((left, [found[index] for index in left.order(list(found))]))
        finally:
            for _ in range(num_threads):
                work.todo.put(None)
        work.run()
        for helper in helpers:
            helper.result()
    work.read(unread, patience_s)
    # autograd has not seen who wrote by address
    increment_version([copy.live.local for rows in copies for copy in rows])
    return work.faults()


class _Work:
    """The chunks that are planned, and what was found in those that are done."""

    def __init__(self, sources: Sequence[Source], progress: Callable[[int], None], starts: Starts) -> None:
        self._sources = sources
        self._progress = progress
        self._starts = starts
        self._digests: list[dict[int, str]] = [{} for _ in sources]
        self._faults: dict[str, HoldfastError] = {}
        self._idle: queue.SimpleQueue[tuple[Staging, torch.Tensor]] = queue.SimpleQueue()
        self.todo: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Copies, hashes, compares, until the end of the queue; then what devices were sent is there."""
        with contextlib.closing(Staging(self._starts, CHUNK_BYTES)) as staging:
            self._run(staging)

    def _run(self, staging: Staging) -> None:
        while (chunk := self.todo.get()) is not None:
            located = self._sources[chunk.image].located
            lies_ready = chunk.goes_to_device and is_known(chunk.sources[0])
            buffer = staging.take(len(chunk.view)) if chunk.goes_to_device and not lies_ready else None
            digest = _copy_and_hash(chunk, buffer)
            self._digests[chunk.image][chunk.index] = digest
            self._progress(len(chunk.view))
            try:
                image_format.check_chunk(chunk.index, digest, located.seal, located.ref.bundle_id)
            except CorruptError as error:
                self._faults.setdefault(located.seal.bundle_id, error)
                continue
            if buffer is not None:
                found = [placed(source, chunk.address, buffer) for source in chunk.sources]
                staging.send(buffer, chunk.targets, found)
            elif lies_ready:
                staging.send_in_place(chunk.targets, chunk.sources)
            else:
                _copy_boxes(chunk.targets, chunk.sources)

    def read(self, unread: Sequence[tuple[UnreadChunks, list[_Chunk]]], patience_s: float) -> None:
        """Reads, proves and copies what is not here yet, by several streams; then what devices were sent is there."""
        try:
            for left, chunks in unread:
                limit = left.limit(patience_s)
                try:
                    limit.run(partial(self._read_bundle, left, chunks, limit))
                except StorageBusy as error:
                    self._faults.setdefault(left.file.ref.bundle_id, error)
        finally:
            while not self._idle.empty():
                self._idle.get()[0].close()

    def _read_bundle(self, left: UnreadChunks, chunks: Sequence[_Chunk], limit: ReadLimit) -> None:
        with left.streams(self._progress) as streams:
            for chunk in chunks:
                streams.put(partial(self._read_and_copy, left, chunk, limit))

    def _read_and_copy(self, left: UnreadChunks, chunk: _Chunk, limit: ReadLimit) -> int:
        if limit.has_ended() or left.file.ref.bundle_id in self._faults:
            return 0
        try:
            staging, own = self._idle.get_nowait()
        except queue.Empty:
            staging = Staging(self._starts, CHUNK_BYTES)
            own = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")
        try:
            buffer = (staging.take(len(chunk.view)) if chunk.goes_to_device else own)[: len(chunk.view)]
            digest = left.read(chunk.index, buffer.numpy().data)
            limit.moved(len(chunk.view))
            with limit.writing() as is_wanted:
                if not is_wanted:
                    return 0
                self._copy(chunk, buffer, staging)
                self._digests[chunk.image][chunk.index] = digest
        except HoldfastError as error:
            if not (error.condemns or error.retryable):
                raise
            self._faults.setdefault(left.file.ref.bundle_id, error)
        finally:
            if limit.has_ended():
                staging.close()
            else:
                self._idle.put((staging, own))
        return len(chunk.view)

    def _copy(self, chunk: _Chunk, buffer: torch.Tensor, staging: Staging) -> None:
        """Copies what was read into a buffer to where it goes."""
        shift = buffer.data_ptr() - chunk.address
        for moves in chunk.steps:
            for target, source, length in moves:
                ctypes.memmove(target, source + shift, length)
        found = [placed(source, chunk.address, buffer) for source in chunk.sources]
        if chunk.goes_to_device:
            staging.send(buffer, chunk.targets, found)
        else:
            _copy_boxes(chunk.targets, found)

    def faults(self) -> dict[str, HoldfastError]:
        """Bundle id -> what is wrong, once all chunks are done."""
        for source, found in zip(self._sources, self._digests, strict=True):
            if source.whole and source.located.seal.bundle_id not in self._faults:
                _check_whole(source, tuple(found[index] for index in sorted(found)), self._faults)
        return self._faults


def _copy_and_hash(chunk: _Chunk, buffer: torch.Tensor | None) -> str:
    """The digest of the chunk, whose bytes are where they go then; or in the buffer, if there is one."""
    digest = image_format.start_digest()
    if buffer is None and not any(chunk.steps):  # in one call: each takes the interpreter's lock again
        digest.update(chunk.view)
        return digest.hexdigest()
    read = chunk.view if buffer is None else buffer.numpy().data
    at = 0
    for moves in chunk.steps:
        for move in moves:
            ctypes.memmove(*move)
        if buffer is not None:
            ctypes.memmove(buffer.data_ptr() + at, chunk.address + at, min(STEP_BYTES, len(chunk.view) - at))
        digest.update(read[at : at + STEP_BYTES])
        at += STEP_BYTES
    return digest.hexdigest()


def _copy_boxes(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def _check_whole(source: Source, digests: tuple[str, ...], faults: dict[str, HoldfastError]) -> None:
    seal = source.located.seal
    try:
        image_format.check_length(len(source.located.view), seal, seal.bundle_id)
        image_format.check_digest(digests, seal, seal.bundle_id)
    except CorruptError as error:
        faults[seal.bundle_id] = error


def _chunks(number: int, source: Source, copies: Sequence[Copy]) -> Iterator[_Chunk]:
    """The chunks of one image in order, each as soon as nothing more can be copied from it: entries lie in order."""
    chunks = {
        index: _Chunk(number, index, view, as_tensor(view), [[] for _ in range(0, len(view), STEP_BYTES)])
        for index, view in source.chunks
    }
    order = list(chunks)
    done = 0
    for copy in copies:
        first = copy.entry.start // CHUNK_BYTES
        while done < len(order) and order[done] < first:
            yield chunks[order[done]]
            done += 1
        if copy.box.num_elements:
            _plan(chunks, copy)
    for index in order[done:]:
        yield chunks[index]


def _plan(chunks: Mapping[int, _Chunk], copy: Copy) -> None:
    """One copy, cut where chunks end."""
    entry, box = copy.entry, copy.box
    target = _narrow(copy.live.local, copy.live.shard.extent, box)
    is_whole = box.lengths == entry.shape and target.is_contiguous()
    by_address = is_whole and _is_plain(target)
    flat = target.view(-1) if is_whole and not target.is_cpu else None
    planned = 0
    for index in range(entry.start // CHUNK_BYTES, (entry.end - 1) // CHUNK_BYTES + 1):
        chunk = chunks.get(index)
        if chunk is None:
            continue  # no byte of the box lies there, or the count below is short
        begin = index * CHUNK_BYTES
        first, last = max(entry.start, begin), min(entry.end, begin + len(chunk.view))
        if by_address:
            _plan_moves(chunk, first - begin, target.data_ptr() + first - entry.start, last - first)
            planned += (last - first) // target.element_size()
        elif flat is not None and (first - begin) % flat.element_size() == 0:
            chunk.targets.append(
                flat[(first - entry.start) // flat.element_size() :][: (last - first) // flat.element_size()]
            )
            chunk.sources.append(chunk.bytes[first - begin : last - begin].view(flat.dtype))
            planned += len(chunk.sources[-1])
        else:
            planned += _plan_boxes(chunk, copy, target, (first, last))
    assert planned == box.num_elements, f"{entry.name}: {planned} of {box.num_elements} elements have a source"


def _is_plain(target: torch.Tensor) -> bool:
    """Return whether the tensor is its bytes, one after the other, in host memory."""
    return target.is_cpu and target.is_contiguous() and not target.is_conj() and not target.is_neg()


def _plan_moves(chunk: _Chunk, at: int, place: int, length: int) -> None:
    """Bytes of a chunk to the address `place`, cut where steps end."""
    end = at + length
    while at < end:
        until = min(end, at - at % STEP_BYTES + STEP_BYTES)
        chunk.steps[at // STEP_BYTES].append((place, chunk.address + at, until - at))
        place += until - at
        at = until


def _plan_boxes(chunk: _Chunk, copy: Copy, target: torch.Tensor, span: tuple[int, int]) -> int:
    """Plan what the box has of bytes `span` of the image, by torch, once the chunk is proven; returns the elements."""
    entry, dtype = copy.entry, torch_dtype(copy.entry.dtype)
    begin = chunk.index * CHUNK_BYTES
    first, last = ((at - entry.start) // dtype.itemsize for at in span)
    planned = 0
    for number, there, common in reshard.blocks_in(copy.box, entry.extent, first, last):
        at = entry.start + number * dtype.itemsize - begin
        view = chunk.view[at : at + there.num_elements * dtype.itemsize]
        source = as_tensor(view).view(dtype).view(there.lengths)
        chunk.targets.append(_narrow(target, copy.box, common))
        chunk.sources.append(_narrow(source, there, common))
        planned += common.num_elements
    return planned


def _narrow(tensor: torch.Tensor, extent: Extent, box: Extent) -> torch.Tensor:
    """The part of a tensor, which holds `extent`, that holds `box`."""
    for dim, (start, length, first, count) in enumerate(
        zip(extent.offsets, extent.lengths, box.offsets, box.lengths, strict=True)
    ):
        if count != length:
            tensor = tensor.narrow(dim, first - start, count)
    return tensor


def as_tensor(view: memoryview) -> torch.Tensor:
    """The bytes as a tensor that nobody may write to; it keeps the memory alive.

    torch has no read-only tensors and warns about read-only buffers, so the buffer is named by its address.
    """
    array = np.frombuffer(view, dtype=np.uint8)
    if not len(array):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = (ctypes.c_char * len(array)).from_address(array.ctypes.data)
    memory.keep = array  # type: ignore[attr-defined]  # ctypes objects take attributes; this one holds the mapping
    return torch.frombuffer(memory, dtype=torch.uint8)
