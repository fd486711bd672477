"""Keeps what a rank leaves behind at every step, for whoever takes its place: its own small state, in memory that
outlives it.

Of the state of a step, parameters and optimizer state lie in the memory of twins as well. The rest (random numbers, the
place in the data, learning rates, buffers) is small, and nobody else has it. At every step it is written into a page
that the launcher gave to this worker slot, so it is still there when the process was killed; the next process of the worker slot
reads it, and the process itself when it was interrupted.

The page holds the two newest notes in two halves, each with its own head, written last, and a digest: a writer that is
killed in the middle leaves the note before. Notes that would cost more than a hundredth of the run are left out, and so
is state that is too large for one. Without `holdfast run` there is no page, and nothing is written.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash

from holdfast.base.errors import CorruptError, HoldfastError
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries.sharding import bits_of
from holdfast.checkpoint.entries.types import Gathered, Group
from holdfast.core.model import Shard, Version
from holdfast.tiers.backends.own_descriptor import OwnDescriptor
from holdfast.tiers.format import values as value_codec

# More is not noted: such a state is saved, not noted.
MAX_BYTES = 4 << 20
# More of gradients is not noted, and the step that left them neither; the next one may be.
GRADIENT_BYTES = 1 << 20
# Of a run's time, and what may be spent before there was any.
SHARE, CREDIT_S = 0.01, 1.0
MAGIC = 0x48464E31
# magic, incarnation, step, bytes, digest
_HEAD = struct.Struct("<IIQQ16s")
_PAGE = mmap.PAGESIZE


class SnapshotRow(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the state: what it is, and whether twins or the note have its bytes."""

    shard: Shard
    late: bool


class StepSnapshot(msgspec.Struct, frozen=True):
    """One step of one rank.

    Attributes:
        job, rank, world_size: whose.
        rows: every tensor of the rank's state, by name.
        values: of every group of the rank, encoded.
        small: bytes of the tensors that no optimizer owns.
    """

    job: str
    rank: int
    world_size: int
    rows: msgspec.Raw
    values: list[tuple[tuple[int, ...], bytes]]
    small: dict[str, bytes]

    def tensors(self) -> list[SnapshotRow]:
        """The rows, read.

        Raises:
            CorruptError: they are no rows.
        """
        try:
            return msgspec.msgpack.decode(bytes(self.rows), type=list[SnapshotRow])
        except _NO_MESSAGE as error:
            raise CorruptError(f"its rows are not valid: {error}", where="a note") from error

    def decoded(self) -> dict[Group, Mapping[str, Any]]:
        """Values by group, as a save has them.

        Raises:
            CorruptError: they are no values.
        """
        return {ranks: value_codec.decode(data, where="a note") for ranks, data in self.values}


_NO_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_note_of = msgspec.msgpack.Decoder(StepSnapshot)


class SnapshotPage:
    """The two halves behind a descriptor of the launcher's. Reading and writing are the trainer's thread's."""

    def __init__(self, own: OwnDescriptor) -> None:
        self._fd, self._own = own.number, own
        self._next = -1  # the half that is written next; -1: the one with the older note

    def is_ours(self) -> bool:
        """Return whether the page is still behind its descriptor: a script may have closed it, and opened a file there."""
        return self._own.is_ours()

    def write(self, version: Version, blob: bytes) -> None:
        """Replaces the older of the two notes."""
        half = self._half()
        if _HEAD.size + len(blob) > half:
            half = 2 * -(-(_HEAD.size + len(blob)) // _PAGE) * _PAGE
            os.ftruncate(self._fd, 0)  # both notes go: their places do
            os.ftruncate(self._fd, 2 * half)
        at = half * (self._next if self._next >= 0 else self._older(half))
        self._next = 0 if at else 1
        head = _HEAD.pack(MAGIC, version.incarnation, version.step, len(blob), xxhash.xxh3_128_digest(blob))
        os.pwrite(self._fd, bytes(_HEAD.size), at)
        os.pwrite(self._fd, blob, at + _HEAD.size)
        os.pwrite(self._fd, head, at)

    def read(self) -> dict[Version, StepSnapshot]:
        """The notes that are whole."""
        half, found = self._half() if self.is_ours() else 0, {}
        for index in range(2 if half else 0):
            magic, incarnation, step, length, digest = self._head(half * index)
            if magic != MAGIC or _HEAD.size + length > half:
                continue
            blob = os.pread(self._fd, length, half * index + _HEAD.size)
            if xxhash.xxh3_128_digest(blob) != digest:
                continue
            try:
                found[Version(incarnation, step)] = _note_of.decode(blob)
            except _NO_MESSAGE:
                continue
        return found

    def _older(self, half: int) -> int:
        heads = [self._head(half * index) for index in range(2)]
        return min(range(2), key=lambda index: heads[index][1:3] if heads[index][0] == MAGIC else (0, 0))

    def _half(self) -> int:
        return os.fstat(self._fd).st_size // 2

    def _head(self, at: int) -> tuple[int, int, int, int, bytes]:
        data = os.pread(self._fd, _HEAD.size, at).ljust(_HEAD.size, b"\0")
        magic, incarnation, step, length, digest = _HEAD.unpack(data)
        return magic, incarnation, step, length, digest


def make_page() -> int:
    """A descriptor of a new page, empty; inherited only by a fork."""
    return os.memfd_create("holdfast-notes", os.MFD_CLOEXEC)


@dataclass(slots=True)
class _Seat:
    """The page of this process; its own descriptor."""

    own: OwnDescriptor | None = None


_worker_slot = _Seat()


def attach(fd: int) -> None:
    """Notes go to this page from now on; the descriptor is ours."""
    if _worker_slot.own is not None:
        _worker_slot.own.close()
    _worker_slot.own = OwnDescriptor.of(fd) if fd >= 0 else None


def page() -> SnapshotPage | None:
    """The page of this process, if its launcher gave it one."""
    own = _worker_slot.own
    return SnapshotPage(own) if own is not None and own.is_ours() else None


class SnapshotWriter:
    """Writes the notes of one rank.

    Attributes:
        refused: why there are none; empty if there are.
    """

    def __init__(self, page: SnapshotPage, *, job: str, rank: int, world_size: int) -> None:
        self._page = page
        self._job, self._rank, self._world_size = job, rank, world_size
        self._began_s = time.monotonic()
        self._spent_s = self._last_s = 0.0
        self._structure = -1
        self._rows = msgspec.Raw(b"")
        self.refused = ""

    def affordable(self) -> bool:
        """Return whether another note like the last one keeps to its share of the run's time."""
        allowed = SHARE * (time.monotonic() - self._began_s) + CREDIT_S
        return not self.refused and self._spent_s + self._last_s <= allowed

    def write(self, version: Version, gathered: Gathered, *, passing: int = 0) -> bool:
        """Notes the state; whether that was possible. `passing`: bytes of it that live from this step to the next one
        alone, as added gradients do.
        """
        started = time.perf_counter()
        if not self._page.is_ours():
            self.refused = "the script closed the descriptor of its notes"
            return False
        try:
            blob = self._encode(gathered, passing)
        except HoldfastError as error:
            self.refused = str(error)
            return False
        if not self.refused:
            try:
                self._page.write(version, blob)
            except OSError as error:
                pass_on(error)
                self.refused = f"its page cannot be written: {error.strerror}"
        self._last_s = time.perf_counter() - started
        self._spent_s += self._last_s
        return not self.refused

    def _encode(self, gathered: Gathered, passing: int) -> bytes:
        small = [live for live in gathered.tensors.values() if not live.late]
        num_bytes = sum(live.local.nbytes for live in small) - passing
        if num_bytes > MAX_BYTES:
            self.refused = f"{num_bytes} bytes of state belong to no optimizer, at most {MAX_BYTES} are noted"
        elif any(live.local.device.type != "cpu" for live in small):
            self.refused = "state that belongs to no optimizer lies on a device"
        if self.refused:
            return b""
        if gathered.structure != self._structure:
            rows = [SnapshotRow(live.shard, live.late) for live in gathered.tensors.values()]
            self._rows, self._structure = msgspec.Raw(msgspec.msgpack.encode(rows)), gathered.structure
        note = StepSnapshot(
            self._job,
            self._rank,
            self._world_size,
            self._rows,
            [(group, value_codec.encode(dict(values))) for group, values in gathered.values.items()],
            {live.shard.name: as_bytes(live.local) for live in small},
        )
        return msgspec.msgpack.encode(note)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in host memory, row by row."""
    return bytes(bits_of(tensor).numpy())


def lasting(shards: Sequence[SnapshotRow]) -> dict[str, Shard]:
    """The tensors that twins hold too."""
    return {row.shard.name: row.shard for row in shards if row.late}
