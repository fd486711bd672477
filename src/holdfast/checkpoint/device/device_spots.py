"""Spots of tensors on devices: a few bytes of each, which one call of a device brings together.

A device runs behind its host, so nobody can read such elements at the call. They are copied, on the stream on which whatever comes behind
the call is queued too, into a small piece of the device's memory, and from there to the slot with the rest. When all is there, the
tensors in the slot must have the same bytes at the same places.

Looked at is what an optimizer owns: what is copied late, and what the current streams wait for, for a stream that waits for nothing
may write it meanwhile. Of each tensor this is one run of neighbours in memory: the last ones, the first ones, or some in between, from
save to save. Of few tensors it is all three. Every tensor takes the host up to a microsecond, so of many a quarter is looked at in a
save, MOST_TENSORS at most, and others in the next. Those that a device copies last are looked at in every save, all three runs, for
whoever writes all tensors too early tears these: the last ones of all, and the last ones behind the blocks
(`checkpoint.capture.block_copies`). The views are made once and kept, for making them takes longer than all else.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

# Of each tensor so many bytes at most. In one save a quarter of the tensors, within these bounds.
RUN_BYTES = 128
FEWEST_TENSORS, MOST_TENSORS = 64, 1024
# What a save takes of a device's memory, and in a slot behind the images.
ROOM_BYTES = RUN_BYTES * MOST_TENSORS
# The last, the first, and others; all of them where these are no more runs than this.
KINDS, FEW_RUNS = 3, 64
# The last tensors that a device copies, which every save looks at.
LAST_TENSORS = 12
# And of those that somebody writes beside a copy.
MOST_WRITTEN = 64
# So many turns, but no more runs than this in all, or one of each tensor.
MOST_TURNS, KEPT_RUNS = 12, 4096
# Fractions of 2**32 that are far from each other for consecutive numbers (R. Knuth, TAOCP 3, 6.4: Fibonacci hashing).
_GOLDEN = 0x9E3779B1


@dataclass(frozen=True, slots=True)
class _Run:
    """Some elements of a tensor that are neighbours in its memory.

    Attributes:
        number: which tensor.
        view: them, as bytes.
        at: the first byte of the first one in the slot.
        step: how many bytes lie from one to the next in the slot.
        size: bytes of an element.
    """

    number: int
    view: torch.Tensor
    at: int
    step: int
    size: int

    def places(self) -> npt.NDArray[np.int64]:
        """Return where each byte of it is in the slot."""
        firsts = self.at + self.step * np.arange(self.view.numel() // self.size)
        return (firsts[:, None] + np.arange(self.size)).reshape(-1)


@dataclass(slots=True)
class Turn:
    """The runs of one save.

    Attributes:
        views: them by device, as bytes.
        sizes: how many bytes those of each device are together; in a slot they lie in this order.
        together: where those of each device are brought together; whoever does that keeps it here.
    """

    views: dict[torch.device, list[torch.Tensor]]
    sizes: dict[torch.device, int]
    num_bytes: int
    _runs: list[_Run]
    together: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    _places: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, runs: Sequence[_Run]) -> Turn:
        """The turn of these runs."""
        views: dict[torch.device, list[torch.Tensor]] = {}
        for run in runs:
            views.setdefault(run.view.device, []).append(run.view)
        order = {device: number for number, device in enumerate(views)}
        sizes = {device: sum(view.nbytes for view in mine) for device, mine in views.items()}
        return cls(views, sizes, sum(sizes.values()), sorted(runs, key=lambda run: order[run.view.device]))

    def differing(self, payload: npt.NDArray[np.uint8], begin: int) -> set[int]:
        """Returns the numbers of tensors that a slot holds with other bytes than their runs, which lie there from `begin` on."""
        if not len(self._places) and self._runs:
            self._places = np.concatenate([run.places() for run in self._runs])
        wrong = payload[self._places] != payload[begin : begin + self.num_bytes]
        if not wrong.any():
            return set()
        owners = np.repeat([run.number for run in self._runs], [run.view.nbytes for run in self._runs])
        return set(owners[wrong].tolist())


class DeviceSpots:
    """The spots of a fixed list of tensors, in turns.

    Args:
        tensors: on devices. Their bits are their values.
        starts: the first byte of each in a slot, where it lies in order.
        copied: their numbers as they are copied in blocks; a device without memory for blocks copies them one after the other.
        written: the numbers of those that somebody writes beside a copy: they are looked at in every save, MOST_WRITTEN at most.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        starts: Sequence[int],
        copied: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> None:
        self._tensors, self._starts = tuple(tensors), tuple(starts)
        count = len(self._tensors)
        self._num_turns = min(MOST_TURNS, max(1, KEPT_RUNS // max(1, count)))
        self._kinds = KINDS if count * KINDS <= FEW_RUNS else 1
        last = self._last_of(range(count)) | self._last_of(copied)
        self._always = last.union(written[:MOST_WRITTEN])
        most = max(FEWEST_TENSORS, MOST_TENSORS - KINDS * len(self._always))
        self._num_groups = max(1, -(-count // min(most, max(FEWEST_TENSORS, count // 4))))
        self._made: dict[int, Turn] = {}
        self._next = itertools.count()

    def _last_of(self, copied: Sequence[int]) -> set[int]:
        numbers: dict[torch.device, list[int]] = {}
        for number in copied:
            numbers.setdefault(self._tensors[number].device, []).append(number)
        return {number for mine in numbers.values() for number in mine[-LAST_TENSORS:]}

    def next(self) -> Turn:
        """Returns what is looked at in this save."""
        number = next(self._next) % (self._num_groups * self._num_turns)
        if number not in self._made:
            turn, group = divmod(number, self._num_groups)
            chosen = sorted(self._always.union(range(group, len(self._tensors), self._num_groups)))
            with torch.no_grad():
                runs = [self._run(each, each + turn + k, turn) for each in chosen for k in range(self._kinds_of(each))]
            self._made[number] = Turn.of(runs)
        return self._made[number]

    def _kinds_of(self, number: int) -> int:
        return KINDS if number in self._always else self._kinds

    def _run(self, number: int, kind: int, turn: int) -> _Run:
        tensor = self._tensors[number]
        size = tensor.element_size()
        shape: Sequence[int] = (tensor.numel(),)
        strides: Sequence[int] = (1,)
        along = 0
        if not tensor.is_contiguous():
            shape, strides = tensor.shape, tensor.stride()
            # Along this dimension neighbours in memory are one step from each other in the slot.
            along = next((dim for dim, stride in enumerate(strides) if stride == 1 and shape[dim] > 1), -1)
        steps = [size * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        length = min(shape[along], RUN_BYTES // size) if along >= 0 else 1
        ends = [count - (length if dim == along else 1) for dim, count in enumerate(shape)]
        index = (ends, [0] * len(ends), self._drawn(ends, number, turn))[kind % KINDS]
        offset = tensor.storage_offset() + sum(map(operator.mul, index, strides))
        view = tensor.as_strided((length,), (1,), offset).view(torch.uint8)
        at = self._starts[number] + sum(map(operator.mul, index, steps))
        return _Run(number, view, at, steps[along], size)

    @staticmethod
    def _drawn(ends: Sequence[int], number: int, turn: int) -> list[int]:
        """An index between the first one and the last one in each dimension."""
        drawn = [((number * MOST_TURNS + turn) * 8 + dim + 1) * _GOLDEN & 0xFFFFFFFF for dim in range(len(ends))]
        return [(end + 1) * word >> 32 for end, word in zip(ends, drawn, strict=True)]
