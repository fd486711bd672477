"""Spots: the same few elements of many tensors, read in one call.

Two readings at different times tell that somebody wrote a tensor; readings of a tensor and of its copy tell that the copy
is another state; readings of two ranks tell that their tensors differ. The first and the last element of a tensor are
always read, for whoever writes a whole tensor begins at one of them; the others change from turn to turn. A large tensor
has one more for each MiB.

Reading costs some 50 ns a spot where nothing is in the processor's caches: the addresses are worked out once, and one
indexed read per element size follows. Before it every tensor is asked where its memory is, for torch moves that in place
(`share_memory`, a tensor that is sent to another process) or takes it away (`resize_(0)` of a storage). Tensors on devices
have theirs in `checkpoint.device.device_spots`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from holdfast.base.errors import LevelNotReached
from holdfast.checkpoint.entries.sharding import span_bytes
from holdfast.checkpoint.entries.tensor_words import Addresses, foreign

# Elements that are read of each tensor: the first, the last, and others in turn; one of the others more for so many bytes.
SPOTS = 3
SPOT_BYTES = 1 << 20
# So many times the others change before they are the first ones again: their places are worked out once.
TURNS = 16
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Fractions of 2**32 that are far from each other for consecutive numbers (R. Knuth, TAOCP 3, 6.4: Fibonacci hashing).
_GOLDEN = 0x9E3779B1
# A prime of xxHash, to fold words into one.
_PRIME = np.uint64(0x9E3779B185EBCA87)

Words: TypeAlias = npt.NDArray[np.uint64]


class MemoryMoved(LevelNotReached):
    """Tensors do not have the memory any more that they had; nothing was read."""

    def __init__(self, numbers: Sequence[int], names: Sequence[str]) -> None:
        self.numbers = list(numbers)
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        remedy = "call settle() before tensors are shared with another process, or their memory is taken away"
        super().__init__(f"the memory of {shown} was moved or taken away", remedy=remedy)


def has_spots(tensor: torch.Tensor) -> bool:
    """Returns whether the elements of a tensor can be read by their addresses: in host memory, as they are."""
    return (
        tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.data_ptr() % tensor.element_size() == 0
        and tensor.element_size() in _WORDS
    )


class _Group:
    """Tensors of one element size: their numbers, and the memory from the first of their elements to the last.

    Args:
        size: bytes of an element.
        salts: one each, from which its positions are drawn.
        elements: which element of its tensor each spot is, by turn; kept here, and shared with copies of the tensors.
    """

    def __init__(
        self,
        size: int,
        numbers: Sequence[int],
        tensors: Sequence[torch.Tensor],
        salts: Sequence[int],
        elements: dict[int, npt.NDArray[np.int64]],
    ) -> None:
        self.numbers = np.array(numbers, dtype=np.intp)
        spots = np.array([SPOTS + tensor.nbytes // SPOT_BYTES for tensor in tensors], dtype=np.intp)
        self.firsts = np.cumsum(spots) - spots
        self.owners = np.repeat(np.arange(len(tensors)), spots)
        # Which spot of its tensor each one is: the first two are the ends.
        self._which = np.arange(len(self.owners)) - self.firsts[self.owners]
        # Equal elements at two spots of a tensor must not cancel each other in its word.
        self.salt = (self._which.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) << np.uint64(16)
        self._counts = np.array([tensor.numel() for tensor in tensors], dtype=np.int64)
        self._salts = np.array(salts, dtype=np.uint64)
        self._strided = [(i, t.shape, t.stride()) for i, t in enumerate(tensors) if t.dim() and not t.is_contiguous()]
        starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        ends = [tensor.data_ptr() + span_bytes(tensor) for tensor in tensors]
        first = int(starts.min())
        self._starts = (starts - first) // size
        self._memory = foreign(first, max(ends), _WORDS[size])
        self.elements = elements
        self._places: dict[int, npt.NDArray[np.int64]] = {}

    def read(self, turn: int) -> npt.NDArray[Any]:
        """Returns the spots of every tensor, one after the other."""
        turn %= TURNS
        if turn not in self._places:
            if turn not in self.elements:
                self.elements[turn] = self._drawn(turn)
            self._places[turn] = self._placed(self.elements[turn])
        return self._memory.take(self._places[turn], mode="clip")

    def _drawn(self, turn: int) -> npt.NDArray[np.int64]:
        counts, others = self._counts[self.owners], np.maximum(self._which - 2, 0).astype(np.uint64)
        number = self._salts[self.owners] + np.uint64(turn) + np.uint64(TURNS) * others
        drawn = (number * np.uint64(_GOLDEN)) & np.uint64(0xFFFFFFFF)
        elements = (drawn.astype(np.float64) / 2**32 * counts).astype(np.int64)
        return np.where(self._which == 0, 0, np.where(self._which == 1, counts - 1, elements))

    def _placed(self, elements: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        places = elements.copy() if self._strided else elements
        for index, shape, strides in self._strided:
            mine = slice(self.firsts[index], self.firsts[index] + np.count_nonzero(self.owners == index))
            rows = np.unravel_index(places[mine], shape)
            places[mine] = sum(row * stride for row, stride in zip(rows, strides, strict=True))
        return self._starts[self.owners] + places


class Spots:
    """The spots of a fixed list of tensors. Nobody may move their memory in another thread while it is read.

    Args:
        tensors: each with `has_spots`.
        names: one each; tensors of one name and number of elements have their spots at the same elements everywhere.
        copied: the spots of the tensors of which these are copies; what was worked out for them is not worked out again.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str], *, copied: Spots | None = None) -> None:
        self.num_tensors = len(tensors)
        self._tensors = tuple(tensors)  # kept alive: they are read by their addresses
        self._names = tuple(names)
        self._where = Addresses(tensors if copied is None else ())  # nobody moves copies
        self._addresses = self._where.read()
        by_size: dict[int, list[int]] = {}
        for number, tensor in enumerate(tensors):
            by_size.setdefault(tensor.element_size(), []).append(number)
        drawn: list[dict[int, npt.NDArray[np.int64]]] = [{} for _ in by_size]
        if copied is not None:
            drawn = [group.elements for group in copied._groups]
        rows = zip(sorted(by_size.items()), drawn, strict=True)
        self._groups: list[_Group] = [self._group(size, numbers, names, elements) for (size, numbers), elements in rows]

    def _group(
        self, size: int, numbers: Sequence[int], names: Sequence[str], elements: dict[int, npt.NDArray[np.int64]]
    ) -> _Group:
        salts = [zlib.crc32(names[number].encode()) for number in numbers]
        return _Group(size, numbers, [self._tensors[number] for number in numbers], salts, elements)

    def read(self, turn: int) -> tuple[npt.NDArray[Any], ...]:
        """Reads all spots; which elements these are depends on `turn`. For `differing` and `folded`.

        Raises:
            MemoryMoved: a tensor has other memory than it had.
        """
        if moved := self.moved():
            raise MemoryMoved(moved, [self._names[number] for number in moved])
        return self.read_where_they_were(turn)

    def read_where_they_were(self, turn: int) -> tuple[npt.NDArray[Any], ...]:
        """Read as `read` does, without asking where the memory is: for tensors whose memory nobody can move."""
        return tuple(group.read(turn) for group in self._groups)

    def moved(self) -> list[int]:
        """Returns the numbers of the tensors whose memory is not where it was."""
        return np.flatnonzero(self._where.read() != self._addresses).tolist()

    def differing(self, left: Sequence[npt.NDArray[Any]], right: Sequence[npt.NDArray[Any]]) -> list[int]:
        """Returns the numbers of the tensors of which two readings of one turn differ."""
        found: list[int] = []
        for group, one, other in zip(self._groups, left, right, strict=True):
            if not np.array_equal(one, other):
                found += group.numbers[np.unique(group.owners[one != other])].tolist()
        return sorted(found)

    def folded(self, reading: Sequence[npt.NDArray[Any]]) -> Words:
        """Folds a reading into one word of 64 bits per tensor, in the order of the tensors."""
        words = np.zeros(self.num_tensors, dtype=np.uint64)
        for group, spots in zip(self._groups, reading, strict=True):
            folded = (spots.astype(np.uint64) + group.salt) * _PRIME
            folded ^= folded >> np.uint64(32)
            words[group.numbers] = np.bitwise_xor.reduceat(folded * _PRIME, group.firsts)
        return words
