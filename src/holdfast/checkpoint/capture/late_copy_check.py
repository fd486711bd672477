"""Checks of late copies, for ever: that what lies in the slot is the state at the call, whoever writes in between.

Of every tensor that is copied late some elements are remembered at the call (`checkpoint.capture.spot_check`), with torch's count of
writes to it, and of one tensor after the other a whole stretch of memory. When the copy is complete, before anybody is
told, the slot must hold the same elements and the same stretch, and the live tensors must not have been written yet.
Else the version is given up, and the tensors that changed are copied at the call from then on. At the fence the live
tensors are looked at again: that finds a writer before its writes and a copy meet.

What is found: every write through torch that is counted, every tear by a write that begins or ends at an end of a tensor,
nearly every write of most of a tensor. What may be missed: a write past torch's counts (`.data`, another library) of a few
elements, until the stretch comes by. `verify_capture` compares everything.

Of tensors on devices the counts are compared once (`WriteCounts`): what is queued behind the copy is known to come behind it only
from the fence on. Their spots are taken by the device itself, in front of whatever is queued behind the call
(`checkpoint.device.device_spots`), and compared with the slot alone (`DeviceCheck`): 128 bytes of each tensor, of many tensors a
quarter in a save, the last ones in each, 1,024 at most, and others in the next. So a write past torch's counts is found there if it changes most of
many tensors, and else in its turn.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.base.terminal import some_of
from holdfast.checkpoint.capture.block_copies import as_copied
from holdfast.checkpoint.capture.copy_plan import Copies, Plan, SlotView, Split, Structure, rows_of
from holdfast.checkpoint.capture.mutation_check import MutationHistory, digest, digest_at
from holdfast.checkpoint.capture.spot_check import MemoryMoved, Spots, has_spots
from holdfast.checkpoint.device.device_spots import DeviceSpots, Turn
from holdfast.checkpoint.entries.tensor_words import Writes
from holdfast.checkpoint.entries.types import LiveTensor
from holdfast.core.model import Piece

# The stretch: this share of the bytes that are copied late, within bounds, and at most so many tensors.
STRETCH_SHARE = 1 / 1024
MIN_STRETCH_BYTES, MAX_STRETCH_BYTES = 4 << 10, 4 << 20
MAX_STRETCH_TENSORS = 8
# At one in so many fences the live tensors are looked at: who writes them outside of a step is seen within a few saves.
FENCES = 4
_WRITES = operator.attrgetter("_version")


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes of one part at the call: where they stand in the part, as it is saved, and their digest."""

    part: int
    start: int
    num_bytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """Holds what was seen of one version's late parts at the call.

    Attributes:
        turn: which spots were read.
    """

    _parts: _Parts
    turn: int
    _spots: tuple[Any, ...]
    _writes: npt.NDArray[Any]
    _stretches: tuple[_Stretch, ...]

    def torn(self, view: SlotView) -> set[str]:
        """Names of entries that are not in the slot as they were at the call, or were written before the copy ended."""
        parts, targets = self._parts, view.targets
        moved = self.moved()  # asked first: what is moved away is not read
        wrong = set(parts.spots.differing(self._spots, parts.spots_in(view).read_where_they_were(self.turn)))
        wrong |= self._written()
        wrong |= {
            s.part
            for s in self._stretches
            if digest_at(targets[parts.indices[s.part]].data_ptr() + s.start, s.num_bytes) != s.digest
        }
        return {parts.names[number] for number in wrong} | moved

    @property
    def looks(self) -> bool:
        """Return whether the live tensors are looked at when a step passes the fence."""
        return self.turn % FENCES == 0

    def moved(self) -> set[str]:
        """Names of entries whose live tensors are not those of the call any more."""
        parts = self._parts
        try:
            changed = parts.spots.differing(self._spots, parts.spots.read(self.turn))
        except MemoryMoved as error:
            changed = error.numbers
        return {parts.names[number] for number in changed}

    def _written(self) -> set[int]:
        return set(np.flatnonzero(self._parts.counts.read() != self._writes).tolist())


class WriteCounts:
    """Torch's counts of writes to tensors on devices, as they are when this is made.

    Asked as soon as the copy is complete or somebody is about to pass the fence, whichever comes first: the host queues
    writes ahead of the device, and those behind the fence are no fault. Writes past torch's counts are not seen.

    Args:
        names: of what is copied late from devices.
        tensors: that, or views of it, which share its counts.
        trust: told of what was written.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor], trust: MutationHistory) -> None:
        self._names, self._tensors, self._trust = names, tensors, trust
        self._then = list(map(_WRITES, tensors))
        self._lock = threading.RLock()  # a signal's handler may save here
        self._found: str | None = None

    def written(self) -> str:
        """Returns which were written by the time this was called first, as the reason to give the copy up; empty if none."""
        with self._lock:
            if self._found is None:
                rows = zip(self._names, self._then, map(_WRITES, self._tensors), strict=True)
                names = sorted({name for name, then, now in rows if then != now})
                self._trust.judge((), names)
                self._found = f"written while it was copied: {some_of(names)}" if names else ""
                self._tensors = ()
            return self._found


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """Holds what one version's late parts on devices were at the call, once the copy is complete: it lies in the slot.

    Attributes:
        names: of the parts.
    """

    names: Sequence[str]
    spots: Turn

    def torn(self, view: SlotView) -> set[str]:
        """Names of entries that are not in the slot as they were at the call."""
        payload = np.frombuffer(view.slot.view, np.uint8)
        return {self.names[number] for number in self.spots.differing(payload, view.plan.num_bytes)}


class _Parts:
    """The late parts of one structure, as long as their memory stays.

    Args:
        indices: which parts of the plan they are.
        pieces: of which entries, and which rows of them.
        tensors: the live entries, by name.
    """

    def __init__(
        self, indices: Sequence[int], pieces: Sequence[tuple[str, Piece]], tensors: Mapping[str, LiveTensor]
    ) -> None:
        sources = [(index, pieces[index][0], rows_of(tensors[pieces[index][0]], pieces[index][1])) for index in indices]
        sources = [row for row in sources if has_spots(row[2])]
        self.indices = [index for index, _, _ in sources]
        self.names = [name for _, name, _ in sources]
        self.spots = Spots([source for _, _, source in sources], self.names)
        self.counts = Writes([tensors[name].local for name in self.names])
        num_bytes = sum(source.nbytes for _, _, source in sources)
        self._most = int(min(max(num_bytes * STRETCH_SHARE, MIN_STRETCH_BYTES), MAX_STRETCH_BYTES))
        self._stretches = [
            (part, start, piece)
            for part, (_, _, source) in enumerate(sources)
            for start, piece in _stretches(source, self._most)
        ]
        self._next = 0

    def spots_in(self, view: SlotView) -> Spots:
        """The same spots in a slot; worked out once per slot."""
        owner, spots = view.spots
        if owner is not self or spots is None:
            targets = [view.targets[index] for index in self.indices]
            spots = Spots(targets, self.names, copied=self.spots)
            view.spots = self, spots
        return spots

    def look(self, turn: int) -> CopyCheck:
        """Return what they are now. The state was gathered for this save, so their memory is where it was."""
        return CopyCheck(self, turn, self.spots.read_where_they_were(turn), self.counts.read(), tuple(self._take()))

    def _take(self) -> list[_Stretch]:
        """The next stretch of memory, as digests: half of what a copy of it would read and write."""
        taken: list[_Stretch] = []
        left = self._most
        while left > 0 and len(taken) < min(MAX_STRETCH_TENSORS, len(self._stretches)):
            part, start, piece = self._stretches[self._next % len(self._stretches)]
            if taken and piece.nbytes > left:
                break
            self._next += 1
            left -= piece.nbytes
            taken.append(_Stretch(part, start, piece.nbytes, digest(piece.contiguous())))
        return taken


def _stretches(tensor: torch.Tensor, most: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Cuts a tensor into stretches of `most` bytes, each with its first byte; one that is large and not in order has none."""
    if tensor.is_contiguous():
        size = tensor.element_size()
        flat, step = tensor.view(-1), max(1, most // size)
        yield from ((start * size, flat[start : start + step]) for start in range(0, flat.numel(), step))
    elif tensor.nbytes <= MAX_STRETCH_BYTES:
        yield 0, tensor


class LateCopyChecker:
    """Makes the checks of one rank's saves."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Holds no tensor of the state any more, until the next look."""
        self._key: object = None
        self._parts: _Parts | None = None
        self._of: tuple[Split, Plan] | None = None
        self._on_devices = DeviceSpots((), ())
        self._names: list[str] = []

    def look(
        self, key: object, structure: Structure, late: Sequence[int], tensors: Mapping[str, LiveTensor], *, turn: int
    ) -> CopyCheck | None:
        """Remembers what the late parts are now; None if there are none in host memory.

        Args:
            key: changes whenever the structure, the late parts, or the memory of their tensors does.
            structure: what is saved.
            late: which of its pieces are copied late.
            tensors: the state.
            turn: which spots are looked at; the step that is saved.
        """
        if key != self._key:
            self._key, self._parts = key, _Parts(late, structure.pieces, tensors)
        return self._parts.look(turn) if self._parts is not None and self._parts.indices else None

    def on_devices(
        self, split: Split, plan: Plan, now: Copies, late: Copies, seen: Callable[[], tuple[set[str], set[str]]]
    ) -> DeviceCheck:
        """Chooses what is looked at of parts on devices; the caller sees to it that it is read.

        Args:
            split: another object whenever other parts are copied late, or the memory of their tensors changes.
            plan: where they lie in a slot.
            now: what the current streams wait for, and others do not.
            late: what they wait for at the fence.
            seen: tells which names of the former are looked at as well, and which of these in every save.
        """
        if self._of is None or self._of[0] is not split or self._of[1] is not plan:
            names, always = seen() if now.device_parts else (set(), set())
            first = [place for place, index in enumerate(now.device_parts) if plan.parts[index].name in names]
            sources = [*(now.device_sources[place] for place in first), *late.device_sources]
            parts = [plan.parts[index] for index in (*(now.device_parts[place] for place in first), *late.device_parts)]
            self._names = [part.name for part in parts]
            copied = [len(first) + place for place in as_copied(late.device_targets, late.device_sources)]
            written = [number for number, _ in enumerate(first) if self._names[number] in always]
            self._on_devices = DeviceSpots(sources, [part.start for part in parts], copied, written)
            self._of = split, plan
        return DeviceCheck(self._names, self._on_devices.next())
