"""Reads what torch keeps of thousands of tensors in one go: where they lie, what shape they have, how often they were written.

Asked one after the other, a tensor takes more than half a microsecond for its address, shape, strides and dtype: six milliseconds
of every save for ten thousand. The same numbers stand at fixed places in torch's own objects. Their addresses are listed once,
and one indexed read each brings them together, which lets the processor wait for many cache misses at the same time.

Where the numbers stand is not taken for granted. It is found once per process, by tensors that are made for that, and proved by
changing these. Then every tensor is compared with what torch itself says of it before it is read so. What does not agree is
asked in the old way, and so is everything where nothing is found.

MUST NOT read an object that may be gone: an object is read only after the one that holds it was found to hold it still. Nobody
may exchange the memory of these tensors in another thread meanwhile. Used by `checkpoint.state.change_detection`,
`checkpoint.capture.spot_check`, `checkpoint.capture.late_copy_check` and `checkpoint.survivors.unchanged_state`.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

logger = logging.getLogger(__name__)

# Torch's own classes: of another one the object may say less than its methods do.
_KINDS = (torch.Tensor, nn.Parameter)
# Up to so many dimensions torch keeps in the object itself.
_MOST_DIMS = 5
_WORD = 8
# So many bytes are searched of torch's tensor, its storage, and its counter of writes.
_SEARCHED, _SEARCHED_STORAGE, _SEARCHED_COUNTER = 192, 64, 24
# What the tensor that is searched has, in a memory of so many elements; no number stands there twice.
_SIZES, _STRIDES, _OFFSET, _ROOM = (2, 3, 5, 7, 11), (4001, 1301, 251, 31, 2), 203, 8192
# What torch calls int16, float16 and bfloat16.
_DTYPES = (2, 5, 15)
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
        tensor: in the object of Python, the address of torch's own.
        storage, counter: in torch's tensor, the addresses of its storage and of its counter of writes.
        dims, sizes, strides, offset, dtype: in torch's tensor; the offset is in elements, the type a number of 16 bits.
        data: in the storage, the address of its memory.
        count: in the counter, its number of 32 bits.
    """

    tensor: int
    storage: int
    counter: int
    dims: int
    sizes: int
    strides: int
    offset: int
    dtype: int
    data: int
    count: int


class TensorFacts:
    """Remembers the address, shape, strides and dtype of some tensors, which somebody else keeps alive.

    Args:
        tensors: on any devices.
        places: where torch keeps what; None: nobody knows.

    Attributes:
        others: which of the tensors, by number, have to be asked one by one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], places: Places | None) -> None:
        readable = _readable(tensors, places)
        self.others = sorted(set(range(len(tensors))).difference(readable))
        self._levels: list[Words] = []
        if places is not None and readable:
            chosen = [tensors[number] for number in readable]
            impls, dims = _impls(chosen), np.array([tensor.dim() for tensor in chosen])
            storages = Words(impls + places.storage).read().astype(np.int64)
            lengths = [impls[dims > dim] + places.sizes + _WORD * dim for dim in range(_MOST_DIMS)]
            strides = [impls[dims > dim] + places.strides + _WORD * dim for dim in range(_MOST_DIMS)]
            single = [impls + at for at in (places.storage, places.dims, places.offset)]
            # In this order: what a level says is the reason why the objects of the next one exist.
            self._levels = [
                Words(_objects(chosen) + places.tensor),
                Words(np.sort(np.concatenate([*single, *lengths, *strides]))),
                Words(impls + places.dtype, np.uint16),
                Words(storages + places.data),
            ]
        self._seen = [level.read() for level in self._levels]

    def unchanged(self) -> bool:
        """Return whether everything is as it was when this was made; of `others` nothing is said."""
        return all(np.array_equal(level.read(), seen) for level, seen in zip(self._levels, self._seen, strict=True))


class Addresses:
    """Tells where the memory of tensors is that nobody else has, so that nobody gives them another storage; kept alive here."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._words: Words | None = None
        places = find_places()
        if places is not None and len(_readable(tensors, places)) == len(tensors):
            self._words = Words(Words(_impls(tensors) + places.storage).read().astype(np.int64) + places.data)

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
        if places is not None and len(_readable(tensors, places)) == len(tensors):
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
            found = _search()
            if found is not None and _is_proved(found):
                return found
    except Exception as error:  # noqa: BLE001 - another torch, or a system that shows no memory: all is asked one by one
        logger.info("tensors are asked one by one: %s: %s", type(error).__name__, error)
    return None


def _objects(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(id, tensors), np.int64, len(tensors))


def _impls(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(_impl, tensors), np.int64, len(tensors))


def _readable(tensors: Sequence[torch.Tensor], places: Places | None) -> list[int]:
    """Returns the numbers of the tensors of which everything is found where it should be."""
    if places is None:
        return []
    numbers = [
        i for i, t in enumerate(tensors) if type(t) in _KINDS and t.layout is torch.strided and t.dim() <= _MOST_DIMS
    ]
    chosen = [tensors[number] for number in numbers]
    impls = _impls(chosen)
    dims = np.array([tensor.dim() for tensor in chosen], np.int64)
    storages = Words(impls + places.storage).read().astype(np.int64)
    agrees = (Words(_objects(chosen) + places.tensor).read() == impls.astype(np.uint64)) & (storages != 0)
    agrees &= Words(impls + places.dims).read() == dims.astype(np.uint64)
    agrees &= Words(impls + places.offset).read() == np.array([t.storage_offset() for t in chosen], np.uint64)
    for dim in range(_MOST_DIMS):
        more = np.flatnonzero(dims > dim)
        lengths, strides = (Words(impls[more] + at + _WORD * dim).read() for at in (places.sizes, places.strides))
        agrees[more] &= lengths == np.array([chosen[i].shape[dim] for i in more], np.uint64)
        agrees[more] &= strides == np.array([chosen[i].stride(dim) for i in more], np.uint64)
    found = np.flatnonzero(agrees)
    memory = Words(storages[found] + places.data).read().tolist()
    return [numbers[i] for i, at in zip(found.tolist(), memory, strict=True) if _lies_at(chosen[i], at)]


def _lies_at(tensor: torch.Tensor, storage: int) -> bool:
    return not tensor.numel() or tensor.data_ptr() == storage + tensor.storage_offset() * tensor.element_size()


def _search() -> Places | None:
    """Looks for the facts of a tensor that has no number twice, in all that stands in torch's objects."""
    flat = torch.frombuffer(bytearray(2 * _ROOM), dtype=torch.int16)
    probe = flat.as_strided(_SIZES, _STRIDES, _OFFSET)
    storage = probe.untyped_storage()
    with open("/proc/self/mem", "rb", buffering=0) as memory:

        def at(address: int, num_bytes: int, dtype: npt.DTypeLike = np.uint64) -> npt.NDArray[Any]:
            return np.frombuffer(os.pread(memory.fileno(), num_bytes, address), dtype)

        def place(address: int, num_bytes: int, *numbers: int) -> int:
            """The one place where these numbers stand."""
            found = at(address, num_bytes).tolist()
            (where,) = (i for i in range(len(found)) if tuple(found[i : i + len(numbers)]) == numbers)
            return _WORD * where

        impl = _impl(probe)
        sizes, strides = (place(impl, _SEARCHED, *numbers) for numbers in (_SIZES, _STRIDES))
        kinds = [at(_impl(t), _SEARCHED, np.uint16) for t in (probe, *map(probe.view, (torch.float16, torch.bfloat16)))]
        (dtype,) = (i for i, numbers in enumerate(zip(*kinds, strict=True)) if numbers == _DTYPES)
        counter, count = _counter_of(probe, at)
        return Places(
            tensor=place(id(probe), type(probe).__basicsize__, impl),
            storage=place(impl, _SEARCHED, storage._cdata),
            counter=counter,
            dims=place(impl, _SEARCHED, len(_SIZES), *_SIZES),
            sizes=sizes,
            strides=strides,
            offset=place(impl, _SEARCHED, _OFFSET),
            dtype=2 * dtype,
            data=place(storage._cdata, _SEARCHED_STORAGE, storage.data_ptr()),
            count=count,
        )


def _counter_of(probe: torch.Tensor, at: Callable[..., npt.NDArray[Any]]) -> tuple[int, int]:
    """The place of the one number that rises with every write, and the place of the address of what it stands in."""
    alias = probe.detach()
    both = zip(at(_impl(probe), _SEARCHED).tolist(), at(_impl(alias), _SEARCHED).tolist(), strict=True)
    shared = {_WORD * i: one for i, (one, other) in enumerate(both) if one == other and one % _WORD == 0}

    def numbers() -> dict[tuple[int, int], int]:
        found = {}
        for place, address in shared.items():
            with suppress(OSError, OverflowError, ValueError):  # it is no address
                rows = at(address, _SEARCHED_COUNTER, np.uint32).tolist()
                found.update({(place, 4 * i): number for i, number in enumerate(rows)})
        return found

    before, count = numbers(), probe._version
    for _ in range(3):
        alias.zero_()
    after = numbers()
    (place,) = (at for at, number in before.items() if (number, after.get(at)) == (count, count + 3))
    return place


def _is_proved(places: Places) -> bool:
    """Return whether every change of a tensor is seen at these places."""
    tensor = nn.Parameter(torch.ones(4, 4, device="cpu"), requires_grad=False)

    def shrunk() -> torch.Tensor:
        tensor.untyped_storage().resize_(0)
        return tensor.data

    changes = [
        lambda: tensor.data.view(8, 2), tensor.t, lambda: tensor.data.view(torch.int32),
        lambda: tensor.data[1:], lambda: torch.ones_like(tensor.data), shrunk,
    ]  # fmt: skip
    for change in changes:
        facts = TensorFacts([tensor], places)
        if facts.others or not facts.unchanged():
            return False
        tensor.data = change()
        if facts.unchanged():
            return False
    return True
