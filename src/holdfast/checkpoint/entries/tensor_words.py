"""Reads where thousands of tensors lie, and how often torch counted a write to them, in one go.

Asked one after the other, a tensor takes a tenth of a microsecond and more for each, most of it waiting for memory. The same
numbers stand at fixed places in torch's own objects. Their addresses are listed once, and one indexed read brings them
together, which lets the processor wait for many cache misses at the same time.

Where the numbers stand is not taken for granted. It is found once per process, by a tensor that is made for that, and every
tensor is compared with what torch itself says of it before it is read so. What does not agree is asked in the old way, and so is
everything where nothing is found.

MUST NOT read an object that may be gone. So the tensors that are given are aliases that nobody else has (`detach()`): each holds its
storage and its counter of writes for as long as it lives, and it lives here. What others hold is never read in this way: another
thread might exchange or free it in the middle.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.base.handler_errors import forgive, pass_on

logger = logging.getLogger(__name__)

_WORD = 8
_FEW = 4096  # bytes
# So many bytes are searched of torch's tensor, its storage, and its counter of writes.
_SEARCHED, _SEARCHED_STORAGE, _SEARCHED_COUNTER = 192, 64, 24
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcmp.restype = ctypes.c_int
# Of few bytes, to give the interpreter's lock away and take it again would be most of the time.
_few = ctypes.PyDLL(None).memcmp
_few.argtypes, _few.restype = _libc.memcmp.argtypes, ctypes.c_int
_count, _impl = operator.attrgetter("_version"), operator.attrgetter("_cdata")


@dataclass(frozen=True, slots=True)
class _Memory:
    """An array interface (numpy's protocol, version 3) of memory that belongs to others."""

    __array_interface__: dict[str, Any]


def foreign(first: int, end: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns the memory from one address to another as an array; what is not read need not be there."""
    kind = np.dtype(dtype)
    shape = ((end - first) // kind.itemsize,)
    interface = {"data": (first, True), "shape": shape, "typestr": kind.str, "version": 3}
    return np.asarray(_Memory(interface))


def same_memory(one: int, other: int | bytes, num_bytes: int) -> bool:
    """Return whether the bytes from two addresses on are the same; ends at the first that differs, and releases the interpreter's lock for many."""
    compare = _few if num_bytes <= _FEW else _libc.memcmp
    return not num_bytes or bool(compare(one, other, num_bytes) == 0)


class Words:
    """Numbers of one type at fixed addresses, each a multiple of its size."""

    def __init__(self, addresses: npt.NDArray[np.int64], dtype: npt.DTypeLike = np.uint64) -> None:
        self._memory, self._at = np.zeros(0, dtype), addresses
        if len(addresses):
            size, first = self._memory.itemsize, int(addresses.min())
            self._memory = foreign(first, int(addresses.max()) + size, dtype)
            self._at = (addresses - first) // size

    def read(self) -> npt.NDArray[Any]:
        """Returns the numbers as they are now, in order."""
        return self._memory.take(self._at, mode="clip") if len(self._at) else self._memory


@dataclass(frozen=True, slots=True)
class Places:
    """Tells where torch keeps what, in bytes from the beginning of an object.

    Attributes:
        storage, counter: in torch's tensor, the addresses of its storage and of its counter of writes.
        data: in the storage, the address of its memory.
        count: in the counter, its number of 32 bits.
    """

    storage: int
    counter: int
    data: int
    count: int


class Addresses:
    """Tells where the memory of tensors is that nobody else has; they are kept alive here."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._words = _memory_of(self._tensors, find_places())

    def read(self) -> npt.NDArray[Any]:
        """Returns a number for each tensor, which is the same as long as its memory is."""
        if self._words is not None:
            return self._words.read()
        return np.fromiter(map(torch.Tensor.data_ptr, self._tensors), np.uint64, len(self._tensors))


class Writes:
    """Tells torch's counts of writes to such tensors; they do not see every write."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._words: Words | None = None
        places = find_places()
        if places is not None and _memory_of(self._tensors, places) is not None:
            counters = Words(_impls(tensors) + places.counter).read().astype(np.int64)
            words = Words(counters + places.count, np.uint32) if counters.all() else None
            if words is not None and words.read().tolist() == self._asked():
                self._words = words

    def read(self) -> npt.NDArray[Any]:
        """Returns the count of each tensor."""
        return np.array(self._asked(), np.uint32) if self._words is None else self._words.read()

    def _asked(self) -> list[int]:
        return list(map(_count, self._tensors))


@functools.cache
def find_places() -> Places | None:
    """Returns where torch keeps what, as this process has found it; None if it is not certain."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _search()
    except Exception as error:  # noqa: BLE001 - another torch, or a system that shows no memory: all is asked one by one
        pass_on(error)
        logger.info("tensors are asked one by one: %s: %s", type(error).__name__, error)
    return None


def _impls(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(_impl, tensors), np.int64, len(tensors))


def _memory_of(tensors: Sequence[torch.Tensor], places: Places | None) -> Words | None:
    """Returns the addresses of the memory of tensors; None if one of them is not found where it should be."""
    if places is None or not all(type(t) is torch.Tensor and t.layout is torch.strided for t in tensors):
        return None
    storages = [tensor.untyped_storage() for tensor in tensors]
    told = [storage._cdata for storage in storages]
    if Words(_impls(tensors) + places.storage).read().tolist() != told:
        return None
    words = Words(np.array(told, np.int64) + places.data)
    return words if words.read().tolist() == [storage.data_ptr() for storage in storages] else None


def _search() -> Places:
    """Looks for the facts of one tensor in all that stands in torch's objects."""
    probe = torch.frombuffer(bytearray(64), dtype=torch.uint8)
    storage = probe.untyped_storage()
    with open("/proc/self/mem", "rb", buffering=0) as memory:

        def at(address: int, num_bytes: int, dtype: npt.DTypeLike = np.uint64) -> npt.NDArray[Any]:
            return np.frombuffer(os.pread(memory.fileno(), num_bytes, address), dtype)

        def place(address: int, num_bytes: int, number: int) -> int:
            """The one place where this number stands."""
            (where,) = np.flatnonzero(at(address, num_bytes) == number).tolist()
            return _WORD * where

        counter, count = _counter_of(probe, at)
        return Places(
            storage=place(_impl(probe), _SEARCHED, storage._cdata),
            counter=counter,
            data=place(storage._cdata, _SEARCHED_STORAGE, storage.data_ptr()),
            count=count,
        )


def _counter_of(probe: torch.Tensor, at: Callable[..., npt.NDArray[Any]]) -> tuple[int, int]:
    """The place of the address of the one object in which a number rises with every write, and the place of that number."""
    alias = probe.detach()
    both = zip(at(_impl(probe), _SEARCHED).tolist(), at(_impl(alias), _SEARCHED).tolist(), strict=True)
    shared = {_WORD * i: one for i, (one, other) in enumerate(both) if one == other and one % _WORD == 0}

    def numbers() -> dict[tuple[int, int], int]:
        found = {}
        for place, address in shared.items():
            with forgive(OSError, OverflowError, ValueError):  # it is no address
                rows = at(address, _SEARCHED_COUNTER, np.uint32).tolist()
                found.update({(place, 4 * i): number for i, number in enumerate(rows)})
        return found

    before, count = numbers(), probe._version
    for _ in range(3):
        alias.zero_()
    after = numbers()
    (place,) = (at for at, number in before.items() if (number, after.get(at)) == (count, count + 3))
    return place
