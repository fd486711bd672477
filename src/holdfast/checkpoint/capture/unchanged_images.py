"""Finds what need not be copied: images of still tensors whose live bytes are those that lie in the slot already.

Two slots take turns, so a slot that is begun anew holds this rank's save before the last. Of the images that it copied there
a saver keeps digests. Where the live tensors of an image have the same ones now, and the keeper says that the image stands
there as it was sealed, nothing of it is written, and the keeper does not hash it again.

Equality is proved by bytes alone: torch's counts of writes see neither `.data` nor addresses. Digests are taken of what lies in
the slot after a copy, and of the live tensors in the call of a save. An image counts as a whole, and only if all of it
is in host memory and copied in the call; whatever else it is, it is copied as ever.

An average that moves with every step would cost a digest each time and gain nothing: of an image that changed twice in a
slot only a few bytes are remembered, and all of it again once those stayed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import xxhash

from holdfast.checkpoint.capture.copy_plan import SHARED_BYTES, PlacedImage, Plan, SlotView, Split
from holdfast.checkpoint.capture.mutation_check import can_digest
from holdfast.checkpoint.capture.slot_record import Known, Record
from holdfast.checkpoint.entries.types import LiveTensor
from holdfast.core.layout.bundles import kind_of
from holdfast.core.model import Version
from holdfast.keeper.rpc.client import Begun

# So much of its smallest tensor tells whether an image moves.
PROBE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """An image of still tensors that is copied in the call, and which parts of the plan are in it."""

    image: PlacedImage
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Says what of one save is not copied.

    Attributes:
        split: what is copied.
        kept: bundles whose images stay as they lie in the slot.
        changed: images that might have stayed and did not: nothing of them was written yet.
    """

    split: Split
    kept: frozenset[str]
    changed: tuple[PlacedImage, ...]
    _known: Mapping[str, Known]
    _wholly: tuple[_Candidate, ...]
    _moving: tuple[_Candidate, ...]
    _num_threads: int

    def note(self, view: SlotView, client: object, version: Version) -> None:
        """Takes note of what lies in the slot, when the keeper was told that it is complete."""
        known = {bundle_id: replace(self._known[bundle_id], moved=False) for bundle_id in self.kept}
        wholly = [[view.targets[part] for part in each.parts] for each in self._wholly]
        for each, targets, digests in zip(self._wholly, wholly, _digests(wholly, self._num_threads), strict=True):
            probe, before = _probe(targets), self._known.get(each.image.ref.bundle_id)
            known[each.image.ref.bundle_id] = Known(probe, digests, before is not None and before.probe != probe)
        for each in self._moving:
            probe = _probe([view.targets[part] for part in each.parts])
            known[each.image.ref.bundle_id] = Known(probe, None, moved=True)
        view.record = Record(client, version, known)


class UnchangedImages:
    """Finds what of a save need not be copied; one per rank.

    Args:
        num_threads: take digests.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._key: tuple[Plan, Split] | None = None
        self._candidates: tuple[_Candidate, ...] = ()
        self._splits: dict[frozenset[str], Split] = {}

    def look(self, view: SlotView, tensors: Mapping[str, LiveTensor], split: Split) -> Look:
        """Compares what is live now with what lies in the slot. The caller MUST copy what `split` of the answer says."""
        self._plan_for(view.plan, split)
        sources = {each: _sources(each, view, tensors) for each in self._candidates}
        possible = {each: found for each, found in sources.items() if found is not None}
        alike: list[_Candidate] = []
        wholly: list[_Candidate] = []
        moving: list[_Candidate] = []
        for each, live in possible.items():
            before = view.known.get(each.image.ref.bundle_id)
            if before is not None and _probe(live) != before.probe:
                (moving if before.moved else wholly).append(each)
            elif before is not None and before.parts is not None:
                alike.append(each)
            else:
                wholly.append(each)
        now = _digests([possible[each] for each in alike], self._num_threads)
        same = [each for each, d in zip(alike, now, strict=True) if d == view.known[each.image.ref.bundle_id].parts]
        wholly += [each for each in alike if each not in same]
        kept = frozenset(each.image.ref.bundle_id for each in same)
        changed = tuple(
            image for image in view.plan.images if image.ref.bundle_id in view.known and image.ref.bundle_id not in kept
        )
        return Look(
            self._without(split, kept, same), kept, changed, view.known, tuple(wholly), tuple(moving), self._num_threads
        )

    def _plan_for(self, plan: Plan, split: Split) -> None:
        if self._key is not None and self._key[0] is plan and self._key[1] is split:
            return
        self._key, self._splits = (plan, split), {}
        still = [image for image in plan.images if kind_of(image.ref.bundle_id) and image.plan.values_span is None]
        now = set(split.now) if still else set()
        found = []
        for image in still:
            end = image.start + image.plan.length
            parts = tuple(i for i, part in enumerate(plan.parts) if image.start <= part.start < end)
            if parts and now.issuperset(parts):
                found.append(_Candidate(image, parts))
        self._candidates = tuple(found)

    def _without(self, split: Split, kept: frozenset[str], same: Sequence[_Candidate]) -> Split:
        """The split without what is kept; the same object for the same, by which copies are known again."""
        if not kept:
            return split
        if kept not in self._splits:
            left = {part for each in same for part in each.parts}
            self._splits[kept] = Split(tuple(part for part in split.now if part not in left), split.late)
        return self._splits[kept]


def stands(view: SlotView, client: object, begun: Begun) -> dict[str, Known]:
    """Takes away what is known of a slot that was begun anew, and returns what of it the keeper says as well.

    From here on nothing is known of the slot until a save into it is complete.
    """
    record, view.record = view.record, None
    if record is None or record.client is not client or record.version != begun.version:
        return {}
    there = {(image.bundle_id, image.offset, image.length) for image in begun.there}
    return {
        image.ref.bundle_id: record.known[image.ref.bundle_id]
        for image in view.plan.images
        if image.ref.bundle_id in record.known and (image.ref.bundle_id, image.start, image.plan.length) in there
    }


def _sources(candidate: _Candidate, view: SlotView, tensors: Mapping[str, LiveTensor]) -> list[torch.Tensor] | None:
    """The live tensors of an image; None if their bytes cannot be compared with what lies in the slot."""
    found = []
    for index in candidate.parts:
        part, target = view.plan.parts[index], view.targets[index]
        source = part.of(tensors[part.name])
        if not can_digest(source) or source.is_conj() or source.is_neg() or not source.data_ptr():
            return None
        if (source.dtype, source.nbytes) != (target.dtype, target.nbytes):
            return None
        found.append(source)
    return found


def _probe(tensors: Sequence[torch.Tensor]) -> bytes:
    return _digest(min(tensors, key=lambda tensor: tensor.nbytes), PROBE_BYTES)


def _digests(images: Sequence[Sequence[torch.Tensor]], num_threads: int) -> list[tuple[bytes, ...]]:
    """The digests of all parts of some images, by several threads if it is much."""
    tensors = [tensor for image in images for tensor in image]
    if num_threads < 2 or len(tensors) < 2 or sum(tensor.nbytes for tensor in tensors) < SHARED_BYTES:
        each = iter([_digest(tensor) for tensor in tensors])
    else:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="holdfast-digest") as pool:
            each = iter(list(pool.map(_digest, tensors)))
    return [tuple(next(each) for _ in image) for image in images]


def _digest(tensor: torch.Tensor, most: int | None = None) -> bytes:
    """Digest of a contiguous tensor in host memory, or of its first bytes; releases the interpreter's lock."""
    size = tensor.nbytes if most is None else min(most, tensor.nbytes)
    return xxhash.xxh3_128_digest(memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())))
