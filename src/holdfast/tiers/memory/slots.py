"""Slots: memory of the keeper that outlives the trainers, shared by descriptor.

A slot is a memfd: a prefix, a header area, and the payload in which the images lie, each aligned to a page. It has no
name that could leak and does not count against /dev/shm. Its pages are allocated before anyone else maps it, so that a
lack of memory is an error here and not a SIGBUS there; every process that maps it populates its own mapping.

Invariants: a slot has no prefix before its last page is there, and without one nobody adopts it; the header is
invalidated before the first payload byte of a version is written, and written after the last one (by the keeper only); a
header that is half written reads as empty; one whose bytes changed raises CorruptError.
Layout and field list: docs/spec/keeper.md.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

import msgspec
import xxhash

from holdfast.base.errors import CorruptError, KeeperError, MemoryRefused
from holdfast.base.handler_errors import pass_on
from holdfast.core.model import BundleRef, Seal, Version
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.memory import memory_pages

PAGE = memory_pages.PAGE
# Pages are allocated in runs of this size; several threads share the runs of a slot, and between two they may be stopped.
RUN_BYTES = 64 << 20
# How long at most: reserving takes 0.6 s per GiB by one thread of a quiet machine, and several ranks may share its memory.
BASE_PATIENCE_S = 120.0
PATIENCE_S_PER_GIB = 4.0
# Room for values that grow (lists, counters) and headers with them, so that they do not need new slots at once.
SPARE_BYTES = 1 << 20
# Room for a header: some 300 bytes for each image, and a digest for each chunk. A large job cuts what its ranks share into up to
# one image for each rank (`core.layout.bundles`), of which none is so small that more than these bytes are needed per chunk.
HEADER_BYTES = 64 << 10
HEADER_BYTES_PER_CHUNK = 8 << 10

_MAGIC = b"HFSLOT01"
_PREFIX = struct.Struct("<8sQQ")  # magic, header bytes, payload bytes
# The record: length (0 = no header), xxh3_128 of the body, body. The length is written last, as one aligned word.
_LENGTH = struct.Struct("<Q")
_RECORD_AT = 64
_BODY_AT = _RECORD_AT + 8 + 16


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """A sealed image in a slot: which bundle, where in the payload, and the proof of its content."""

    ref: BundleRef
    offset: int
    seal: Seal


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """Says what a sealed slot holds.

    Attributes:
        job: digest of the job; a slot of another job is never adopted.
        rank: whose bundles these are.
        layout: layout fingerprint of the job when it was captured, `""` if it was not known yet.
        durable: whether the trainer asked for this version to be persisted.
        images: the images, in order of offset.
        replica: whether this is a copy made for another node, not the snapshot of a local rank.
    """

    job: str
    rank: int
    version: Version
    layout: str
    durable: bool
    images: tuple[ImagePlace, ...]
    replica: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SlotHeader)


class Slot:
    """One memfd, mapped and populated in this process.

    Attributes:
        fd: the descriptor; to be passed on, never closed by anyone but `close`.
        num_bytes: size of the payload.
        view: the payload, writable.
        slot_id: the keeper's number for it; -1 while it has none.
    """

    __slots__ = ("_map", "_readonly", "fd", "header_bytes", "num_bytes", "slot_id", "view")

    def __init__(self, fd: int, header_bytes: int, num_bytes: int, *, slot_id: int = -1) -> None:
        self.fd = fd
        self.header_bytes = header_bytes
        self.num_bytes = num_bytes
        self.slot_id = slot_id
        self._readonly = -1
        self._map = mmap.mmap(fd, header_bytes + num_bytes)
        memory_pages.want_huge(self._map)
        self.view = memoryview(self._map)[header_bytes:]

    @classmethod
    def create(cls, num_bytes: int, *, slot_id: int = -1) -> Slot:
        """Allocates a slot with room for `num_bytes` of images; every page of it exists when this returns.

        Raises:
            MemoryRefused: the kernel has no memory left for it, or this process no descriptor.
        """
        slot = cls.promise(num_bytes, slot_id=slot_id)
        try:
            for start, length in slot.runs():
                slot.allocate(start, length)
        except BaseException:
            slot.close()
            raise
        slot.complete()
        return slot

    @classmethod
    def promise(cls, num_bytes: int, *, slot_id: int = -1) -> Slot:
        """A slot with room for `num_bytes` of images without a page; `allocate` makes its runs, `complete` ends it.

        Raises:
            MemoryRefused: so much cannot be addressed, or this process has no descriptor left.
        """
        num_bytes = _round_up(max(num_bytes, 1), PAGE)
        try:
            return cls._promise(header_area(num_bytes), num_bytes, slot_id)
        except OSError as error:
            pass_on(error)
            raise _refused(error, num_bytes) from error

    @classmethod
    def _promise(cls, header_bytes: int, num_bytes: int, slot_id: int) -> Slot:
        fd = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, header_bytes + num_bytes)
            # Nobody who holds the descriptor can shrink it, so no mapping of it can ever raise SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            slot = cls(fd, header_bytes, num_bytes, slot_id=slot_id)
        except BaseException:
            os.close(fd)
            raise
        return slot

    def runs(self) -> list[tuple[int, int]]:
        """The runs, (start, length), that a new slot's pages are allocated in."""
        total = self.total_bytes
        return [(start, min(RUN_BYTES, total - start)) for start in range(0, total, RUN_BYTES)]

    def allocate(self, start: int, length: int) -> None:
        """Allocates the pages of one run of a slot that was promised. Any thread; releases the GIL meanwhile.

        Raises:
            MemoryRefused: the kernel has no memory left for them.
        """
        try:
            memory_pages.allocate(self._map, self.fd, start, length)
        except OSError as error:
            pass_on(error)
            raise _refused(error, self.num_bytes) from error

    def complete(self) -> None:
        """Every page is there: from here on it is a slot. MUST come after the last `allocate`, and before anyone has it."""
        self._map[: _PREFIX.size] = _PREFIX.pack(_MAGIC, self.header_bytes, self.num_bytes)

    @classmethod
    def adopt(cls, fd: int, *, slot_id: int = -1) -> Slot:
        """Maps a slot that another process made; takes over `fd`, also when it fails.

        Raises:
            KeeperError: not a slot, or its size does not fit its prefix.
        """
        try:
            header_bytes, num_bytes = _geometry(fd)
            slot = cls(fd, header_bytes, num_bytes, slot_id=slot_id)
            slot.populate()
        except BaseException:  # of a signal's handler, for one, which waits for the pages
            os.close(fd)
            raise
        return slot

    def populate(self) -> None:
        """Maps every page into this process now, so that the first copy does not pay for page faults."""
        memory_pages.populate(self._map)

    @property
    def total_bytes(self) -> int:
        """Bytes of memory that it takes, header included."""
        return self.header_bytes + self.num_bytes

    @property
    def readonly_fd(self) -> int:
        """A descriptor of the same memory through which nobody can write; closed with the slot."""
        if self._readonly < 0:
            self._readonly = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        return self._readonly

    def is_same(self, other: Slot) -> bool:
        """Return whether both are one memory, mapped twice."""
        return os.path.sameopenfile(self.fd, other.fd)

    def window(self, start: int, length: int) -> memoryview:
        """Bytes [start, start + length) of the whole slot, header included."""
        return memoryview(self._map)[start : start + length]

    def close(self) -> None:
        """Unmaps and closes. Views that others still hold keep the mapping (not the descriptor) until they go."""
        # Each number goes before it is closed: called again, as when a signal's handler raised here, nobody else's is closed.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        readonly, self._readonly = self._readonly, -1
        if readonly >= 0:
            os.close(readonly)
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # somebody still reads; the mapping goes with the last view


def header_area(num_bytes: int) -> int:
    """Bytes before the payload of a slot of this size."""
    chunks = -(-num_bytes // CHUNK_BYTES)
    return _round_up(HEADER_BYTES + HEADER_BYTES_PER_CHUNK * chunks, PAGE)


def slot_bytes(num_bytes: int) -> int:
    """Memory that a slot with this payload takes."""
    payload = _round_up(max(num_bytes, 1), PAGE)
    return header_area(payload) + payload


def patience_s(num_bytes: int) -> float:
    """Return how long at most somebody waits until so much memory is reserved, or was proved."""
    return BASE_PATIENCE_S + PATIENCE_S_PER_GIB * num_bytes / (1 << 30)


def invalidate(slot: Slot) -> None:
    """Makes the header read as empty. MUST come before the first payload byte of the next version."""
    slot.window(_RECORD_AT, _LENGTH.size)[:] = _LENGTH.pack(0)


def write_header(slot: Slot, header: SlotHeader) -> None:
    """Seals the slot: body first, its length last. MUST come after the last payload byte.

    Raises:
        KeeperError: the header does not fit into its area.
    """
    body = _encoder.encode(header)
    if _BODY_AT + len(body) > slot.header_bytes:
        raise KeeperError(
            f"the slot's header needs {len(body)} bytes, its area has {slot.header_bytes - _BODY_AT}",
            where=f"rank {header.rank}, {header.version}, {len(header.images)} images",
        )
    slot.window(_BODY_AT, len(body))[:] = body
    slot.window(_RECORD_AT + 8, 16)[:] = xxhash.xxh3_128_digest(body)
    slot.window(_RECORD_AT, _LENGTH.size)[:] = _LENGTH.pack(len(body))


def read_header(slot: Slot) -> SlotHeader | None:
    """The header of a sealed slot; None if it is empty or being written.

    Raises:
        CorruptError: the header's bytes are not what was written.
    """
    (length,) = _LENGTH.unpack(slot.window(_RECORD_AT, _LENGTH.size))
    if length == 0:
        return None
    if _BODY_AT + length > slot.header_bytes:
        raise CorruptError("the length in the slot's header lies outside its area", where=f"slot {slot.slot_id}")
    body = bytes(slot.window(_BODY_AT, length))
    if xxhash.xxh3_128_digest(body) != bytes(slot.window(_RECORD_AT + 8, 16)):
        raise CorruptError("the slot's header does not match its checksum", where=f"slot {slot.slot_id}")
    try:
        header = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"the slot's header is not readable: {error}", where=f"slot {slot.slot_id}") from error
    for image in header.images:
        if image.offset < 0 or image.offset + image.seal.length > slot.num_bytes:
            raise CorruptError("an image lies outside its slot", where=f"slot {slot.slot_id}, {image.ref.bundle_id}")
    return header


def map_readonly(fd: int, offset: int, length: int) -> memoryview:
    """Maps part of a slot that belongs to somebody else, read-only and populated. The caller keeps `fd`."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(fd, length + offset - start, prot=mmap.PROT_READ, offset=start)
    memory_pages.populate_readonly(mapping)
    return memoryview(mapping)[offset - start :]


def _refused(error: OSError, size: int) -> MemoryRefused:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return MemoryRefused(
            f"there is no descriptor for {size} bytes of snapshot memory: {error.strerror}",
            remedy="raise the limit of open files (ulimit -n), or save to storage only",
        )
    return MemoryRefused(
        f"the kernel has no room for {size} bytes of snapshot memory: {error.strerror or error}",
        remedy="free memory on this node, raise the cgroup's limit, or save to storage only",
    )


def _geometry(fd: int) -> tuple[int, int]:
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
        raise KeeperError("the descriptor is not a slot", remedy="use the same holdfast on both sides")
    _, header_bytes, num_bytes = _PREFIX.unpack(prefix)
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted != wanted:
        raise KeeperError("the slot's size is not sealed; mapping it would not be safe")
    is_whole = os.fstat(fd).st_size == header_bytes + num_bytes  # how much room a header has its maker decides
    if num_bytes <= 0 or header_bytes < PAGE or header_bytes % PAGE or not is_whole:
        raise KeeperError("the slot's size does not fit its prefix")
    return header_bytes, num_bytes


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
