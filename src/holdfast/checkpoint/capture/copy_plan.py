"""One rank's state into one slot: what is copied where, worked out once per structure, copied in few calls per save.

A save must cost little more than the copy itself, so everything that depends only on names, shapes and groups is
planned once: the bundles this rank captures, their images, and for every slot the tensors that view it. Per save the
sources are looked up and copied in one call that does not hold the interpreter's lock; headers and values follow.

Invariants: every byte is copied at most once; nothing is written outside the images of the plan; a plan fits exactly
one structure of the state and one size of each group's values.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from typing import cast

import numpy as np
import torch

from holdfast.base.errors import UsageError
from holdfast.checkpoint.capture.block_copies import BlockCopies
from holdfast.checkpoint.capture.slot_record import Known, Record
from holdfast.checkpoint.capture.spot_check import Spots
from holdfast.checkpoint.entries.types import Gathered, Group, LiveTensor, LiveTensors, torch_dtype
from holdfast.core.layout import bundles as bundle_layout
from holdfast.core.model import Bundle, BundleRef, Piece, RankLayout, Shard, Topology
from holdfast.keeper.rpc.client import ImageSpan
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.format.image import ImagePlan
from holdfast.tiers.memory.slots import Slot

# A background copy stops, and takes the interpreter's lock, between batches of this size: at 10 GB/s every 3 ms.
BATCH_BYTES = 32 << 20
# What is copied in the call is shared out over threads from so many bytes on, in so many parts for each.
SHARED_BYTES, SHARES = 32 << 20, 4
# Where copies keep to the waits of a pipeline, a batch is what a mispredicted wait can cost: 0.2 ms at 10 GB/s.
PACED_BATCH_BYTES = 2 << 20
_on_host = attrgetter("is_cpu")
# So many sources that objects made anew (states of random generators) are looked up among all; more are listed anew.
MAX_REPLACED = 4


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a live tensor and its place in the slot.

    Attributes:
        piece: which rows.
        start: first byte, counted from the start of the slot's payload.
    """

    name: str
    piece: Piece
    start: int

    @property
    def is_whole(self) -> bool:
        """Return whether it is all that this rank has of the tensor."""
        lengths = self.piece.shard.extent.lengths
        return not lengths or self.piece.num_rows == lengths[0]

    def of(self, live: LiveTensor) -> torch.Tensor:
        """The rows of the live tensor that belong to this part; shares its memory."""
        return rows_of(live, self.piece)

    def view_in(self, base: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Its place in memory that holds the payload from byte `begin` on."""
        flat = base.narrow(0, self.start - begin, self.piece.num_bytes).view(torch_dtype(self.piece.shard.dtype))
        return flat.view(self.piece.extent.lengths)


def rows_of(live: LiveTensor, piece: Piece) -> torch.Tensor:
    """Returns the rows of a live tensor that a piece of it has; shares its memory."""
    local = live.local
    if not local.dim() or piece.num_rows == local.shape[0]:
        return local
    return local.narrow(0, piece.start_row, piece.num_rows)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and where it begins in the slot's payload."""

    ref: BundleRef
    plan: ImagePlan
    start: int


class Sources:
    """Knows where the parts of a plan come from: found once for all slots, and again only for what objects make anew.

    Attributes:
        tensors: the rows of a live tensor for each part, in order.
        changed: parts that had another one since `generation` rose.
        generation: rises when all are found anew, or more than MAX_REPLACED have changed.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._names = [part.name for part in parts]
        self._divided = [index for index, part in enumerate(parts) if not part.is_whole]
        self.generation = 0
        self.forget()

    def forget(self) -> None:
        """Holds no tensor of the state any more, until the next look."""
        self.tensors: list[torch.Tensor] = []
        self.changed: set[int] = set()
        self._live: list[LiveTensor] = []
        self._lasting: Mapping[str, LiveTensor] | None = None
        self._fresh_names: frozenset[str] = frozenset()
        self._fresh: list[int] = []  # the parts of those names

    def look_up(self, tensors: LiveTensors) -> None:
        """Finds the tensor of each part."""
        names, live, fresh = self._names, self._live, tensors.fresh
        if live and tensors.lasting is self._lasting and fresh.keys() == self._fresh_names:
            changed = [index for index in self._fresh if fresh[names[index]] is not live[index]]
            for index in changed:
                live[index] = fresh[names[index]]
        else:
            self._lasting, self._fresh_names = tensors.lasting, frozenset(fresh)
            now = list(map(tensors.lasting.get, names))
            if not any(name in tensors.lasting for name in fresh):
                self._fresh = [index for index, tensor in enumerate(now) if tensor is None]
            else:
                self._fresh = [index for index, name in enumerate(names) if name in fresh]
            for index in self._fresh:
                now[index] = fresh[names[index]]
            self._live = cast("list[LiveTensor]", now)
            changed = [index for index, (new, old) in enumerate(zip(now, live, strict=False)) if new is not old]
        if not self.tensors:
            self.tensors = [tensor.local for tensor in self._live]
            self.generation, self.changed, changed = self.generation + 1, set(), self._divided
        elif len(self.changed.union(changed)) > MAX_REPLACED:
            self.generation, self.changed = self.generation + 1, set()
        else:
            self.changed.update(changed)
        for index in changed:
            self.tensors[index] = self._parts[index].of(self._live[index])


@dataclass(frozen=True, slots=True)
class Plan:
    """All that this rank copies at a save: images, one after the other, and the parts in them.

    Attributes:
        sources: where the parts come from now.
    """

    images: tuple[PlacedImage, ...]
    parts: tuple[Part, ...]
    num_bytes: int
    sources: Sources = field(compare=False, repr=False)

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        """The images as the keeper is told them."""
        return tuple(ImageSpan(image.ref, image.start, image.plan.length) for image in self.images)


class Structure:
    """Tells what the state is made of, as far as saving is concerned; holds until the state's structure changes.

    Args:
        value_groups: the groups that carry values.
        still: names of tensors that may stay as they are for many versions.

    Attributes:
        layout: this rank's bundles, for the keeper.
        value_groups: groups whose values this rank writes, with the bundle that carries them.
        pieces: what this rank copies, as (entry name, rows), in the order of the parts of every plan.
    """

    def __init__(
        self,
        shards: Iterable[Shard],
        value_groups: Iterable[Group],
        *,
        rank: int,
        topology: Topology,
        still: Container[str] = (),
    ) -> None:
        self._shards = {shard.name: shard for shard in shards}
        self._groups = frozenset(value_groups)
        planned = bundle_layout.plan_bundles(
            self._shards.values(), values_of=self._groups, topology=topology, still=still
        )
        self.layout: RankLayout = bundle_layout.rank_layout(planned, rank, topology)
        mine = set(self.layout.captures)
        self._bundles = tuple(bundle for bundle in planned if bundle.bundle_id in mine)
        self._refs = {ref.bundle_id: ref for ref in self.layout.bundles}
        self.value_groups = {bundle.ranks: bundle.bundle_id for bundle in self._bundles if bundle.has_values}
        self.pieces = tuple((p.shard.name, p) for bundle in self._bundles for p in bundle.pieces if p.num_bytes)
        self._plans: dict[tuple[int, ...], Plan] = {}

    def fits(self, gathered: Gathered) -> bool:
        """Return whether this is the structure of that state."""
        return self._groups == gathered.values.keys() and self._shards == {
            name: live.shard for name, live in gathered.tensors.items()
        }

    def encode(self, gathered: Gathered) -> dict[str, bytes]:
        """The values of every group that this rank writes, by bundle id, padded so that their size rarely changes.

        Raises:
            UsageError: a value of a type that cannot be saved; names it.
        """
        return {
            bundle_id: image_format.pad_values(value_codec.encode(dict(gathered.values[group])))
            for group, bundle_id in self.value_groups.items()
        }

    def plan(self, values: Mapping[str, bytes]) -> Plan:
        """The plan for values of these sizes."""
        key = tuple(len(values.get(bundle.bundle_id, b"")) for bundle in self._bundles)
        if key not in self._plans:
            self._plans = {key: _place(self._bundles, self._refs, dict(zip(self._ids, key, strict=True)))}
        return self._plans[key]

    @property
    def _ids(self) -> tuple[str, ...]:
        return tuple(bundle.bundle_id for bundle in self._bundles)


def _place(bundles: Sequence[Bundle], refs: Mapping[str, BundleRef], value_bytes: Mapping[str, int]) -> Plan:
    images: list[PlacedImage] = []
    parts: list[Part] = []
    end = 0
    for bundle in bundles:
        plan = image_format.plan_image(bundle, value_bytes[bundle.bundle_id])
        images.append(PlacedImage(refs[bundle.bundle_id], plan, end))
        for piece in bundle.pieces:
            first, num_bytes = plan.spans[piece.shard.name]
            if num_bytes:
                parts.append(Part(piece.shard.name, piece, end + first))
        end += -(-plan.length // image_format.ALIGN) * image_format.ALIGN
    return Plan(tuple(images), tuple(parts), end, Sources(parts))


@dataclass(frozen=True, slots=True)
class Split:
    """Tells which parts of a plan, by index, are copied in the call, and which may be copied until the fence."""

    now: tuple[int, ...]
    late: tuple[int, ...]


class SlotView:
    """A slot seen as tensors, one per part of a plan; made once per slot and plan.

    Attributes:
        targets: where each part goes.
        record: what the last complete save left in it; None while it is being written (`checkpoint.capture.unchanged_images`).
        known: what of that may be believed in the save that is being made, by bundle.
        spots: those of its late parts, and for which parts they were worked out (`checkpoint.capture.late_copy_check`).
    """

    def __init__(self, slot: Slot, plan: Plan) -> None:
        if plan.num_bytes > slot.num_bytes:
            raise UsageError(f"the slot has {slot.num_bytes} bytes, the images need {plan.num_bytes}")
        self.slot = slot
        self.plan = plan
        base = (
            torch.frombuffer(slot.view, dtype=torch.uint8)
            if slot.num_bytes
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        self.targets = [part.view_in(base) for part in plan.parts]
        self._behind = base[plan.num_bytes :]
        self._places: dict[int, torch.Tensor | None] = {}  # there, by their bytes
        self.record: Record | None = None
        self.known: Mapping[str, Known] = {}
        self.spots: tuple[object, Spots | None] = (None, None)
        self._sizes = array("q", [part.piece.num_bytes for part in plan.parts])
        self._generation = 0
        self._put: dict[int, torch.Tensor] = {}  # sources that were put in since
        self._copies: tuple[Split, Copies, Copies] | None = None

    def assign(self, tensors: Mapping[str, LiveTensor], split: Split) -> tuple[Copies, Copies]:
        """Return what is copied now and what late. Of tensors that are the same objects as last time nothing is looked
        at.
        """
        found = self.plan.sources
        found.look_up(LiveTensors.of(tensors))
        copies, is_new = self._copies, found.generation != self._generation
        fresh = [index for index in found.changed if self._put.get(index) is not found.tensors[index]]
        if copies is None or copies[0] is not split or is_new or not self._replace(fresh):
            now, late = (
                Copies.of(self.targets, found.tensors, chosen, self._sizes) for chosen in (split.now, split.late)
            )
            copies, self._generation = (split, now, late), found.generation
            self._copies = copies
        self._put = {index: found.tensors[index] for index in found.changed}
        return copies[1], copies[2]

    def forget(self) -> None:
        """Holds no tensor of the state any more, until the next `assign`."""
        self.plan.sources.forget()
        self._copies, self._put, self.spots = None, {}, (None, None)

    def _replace(self, fresh: Collection[int]) -> bool:
        """Puts the new sources of these parts where the old ones stand; False if one has no place to be put."""
        assert self._copies is not None
        _, now, late = self._copies
        sources = self.plan.sources.tensors
        return all(
            now.replace(i, self.targets[i], sources[i]) or late.replace(i, self.targets[i], sources[i]) for i in fresh
        )

    def write_frames(self, values: Mapping[str, bytes], *, but: Container[str] = ()) -> None:
        """Headers and values of all images but those of some bundles: everything that is not a tensor."""
        memory = self.slot.view
        for image in self.plan.images:
            if image.ref.bundle_id in but:
                continue
            self.write_header(image)
            if image.plan.values_span is not None:
                first, num_bytes = image.plan.values_span
                start = image.start + first
                memory[start : start + num_bytes] = values[image.ref.bundle_id]

    def behind_images(self, num_bytes: int) -> torch.Tensor | None:
        """The bytes of the slot behind the images, where nobody looks but who writes there; None: it has not so many."""
        if num_bytes not in self._places:
            room = self._behind.narrow(0, 0, num_bytes) if num_bytes <= len(self._behind) else None
            self._places[num_bytes] = room
        return self._places[num_bytes]

    def write_header(self, image: PlacedImage) -> None:
        header = image.plan.header
        self.slot.view[image.start : image.start + len(header)] = header


@dataclass(slots=True)
class Batch:
    """Tensors to copy in one call."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(slots=True)
class Copies:
    """Targets in a slot with their sources, in host memory and on devices; sources may be replaced, targets stay.

    So what is worked out of sizes alone is worked out once, for thousands of tensors are asked theirs in milliseconds.

    Attributes:
        num_bytes: of all targets whose source is in host memory.
        device_parts: which parts of the plan the targets on devices are.
        blocks: those on devices that are sent together; worked out when they are first copied.
    """

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    device_targets: list[torch.Tensor] = field(default_factory=list)
    device_sources: list[torch.Tensor] = field(default_factory=list)
    num_bytes: int = 0
    device_parts: list[int] = field(default_factory=list)
    blocks: dict[torch.device, BlockCopies] = field(default_factory=dict)
    _sizes: Sequence[int] = ()
    _smallest: list[int] | None = None
    _parts: Sequence[int] = ()
    _dealt: dict[int, _Dealt] = field(default_factory=dict)

    def replace(self, part: int, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Puts `source` beside the `target` of a part, if that is one of these and its source stays where it was."""
        on_host = source.device.type == "cpu"
        targets, sources = (self.targets, self.sources) if on_host else (self.device_targets, self.device_sources)
        place = bisect_left(self._parts if on_host else self.device_parts, part)  # they are in order
        if place >= len(targets) or targets[place] is not target:
            return False
        sources[place] = source
        if on_host:
            self._dealt = {most: dealt for most, dealt in self._dealt.items() if dealt.replace(place, source)}
        return True

    def batches(self, most: int) -> list[Batch]:
        """Returns what is copied from host memory in calls of at most so many bytes; not to be changed."""
        dealt = self._dealt.get(most)
        if dealt is None:
            dealt = self._dealt[most] = _deal(self.targets, self.sources, most, self._sizes)
        return dealt.batches

    def smallest(self, most: int) -> list[int]:
        """Returns the places of the smallest targets of devices, so many at most; worked out once."""
        if self._smallest is None:
            self._smallest = sorted(range(len(self.device_targets)), key=lambda at: self.device_targets[at].nbytes)
        return self._smallest[:most]

    @classmethod
    def of(
        cls,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        chosen: Sequence[int],
        sizes: Sequence[int] | None = None,
    ) -> Copies:
        """The chosen ones, in order; `sizes` are the bytes of all targets, where they are known.

        Where all are chosen the lists themselves serve: who puts another source in puts it into both.
        """
        if len(chosen) == len(targets) and sizes is not None and all(map(_on_host, sources)):
            return cls(targets, sources, num_bytes=sum(sizes), _parts=chosen, _sizes=sizes)
        on_host = [index for index in chosen if sources[index].is_cpu]
        copies = cls([targets[index] for index in on_host], [sources[index] for index in on_host])
        copies._sizes = [targets[index].nbytes if sizes is None else sizes[index] for index in on_host]
        copies._parts = on_host
        copies.num_bytes = sum(copies._sizes)
        if len(on_host) < len(chosen):
            copies.device_parts = sorted(set(chosen).difference(on_host))
            copies.device_targets = [targets[index] for index in copies.device_parts]
            copies.device_sources = [sources[index] for index in copies.device_parts]
        return copies


@dataclass(frozen=True, slots=True)
class _Dealt:
    """Batches, and where every target stands in them.

    Attributes:
        numbers: the batch of each target.
        places: where it stands in that; -1 if it was cut.
    """

    batches: list[Batch]
    numbers: Sequence[int]
    places: Sequence[int]

    def replace(self, index: int, source: torch.Tensor) -> bool:
        """Puts in another source; False if the target was cut, so that all have to be dealt anew."""
        place = self.places[index]
        if place >= 0:
            self.batches[self.numbers[index]].sources[place] = source
        return place >= 0


def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies in one call without the interpreter's lock; returns when host memory holds the bytes."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


def copy_at_once(copies: Copies, num_threads: int) -> None:
    """Copy as `copy` does, by so many threads if it is much: one core does not fill a memory's bandwidth."""
    if num_threads < 2 or copies.num_bytes < SHARED_BYTES:
        copy(copies.targets, copies.sources)
        return
    todo = deque(copies.batches(-(-copies.num_bytes // (SHARES * num_threads))))

    def work() -> None:
        while todo:
            try:
                batch = todo.popleft()
            except IndexError:  # another thread was quicker
                return
            copy(batch.targets, batch.sources)

    with ThreadPoolExecutor(num_threads - 1, thread_name_prefix="holdfast-copy") as pool:
        helpers = [pool.submit(work) for _ in range(num_threads - 1)]
        work()
    for helper in helpers:
        helper.result()


def batches(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, most: int = BATCH_BYTES
) -> list[Batch]:
    """The same copies in calls of at most so many bytes; a tensor that is larger is cut."""
    return _deal(targets, sources, most, [target.nbytes for target in targets]).batches


def _deal(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], most: int, sizes: Sequence[int]) -> _Dealt:
    if max(sizes, default=0) <= most:
        return _deal_whole(targets, sources, most, sizes)
    result: list[Batch] = []
    numbers, places = array("q"), array("q")
    batch = Batch()
    for target, source, size in zip(targets, sources, sizes, strict=True):
        whole = size <= most
        for piece, origin in ((target, source),) if whole else cut(target, source, most):
            num_bytes = size if whole else piece.nbytes
            if batch.num_bytes and batch.num_bytes + num_bytes > most:
                result.append(batch)
                batch = Batch()
            batch.targets.append(piece)
            batch.sources.append(origin)
            batch.num_bytes += num_bytes
        numbers.append(len(result))
        places.append(len(batch.targets) - 1 if whole else -1)
    return _Dealt([*result, batch] if batch.targets else result, numbers, places)


def _deal_whole(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], most: int, sizes: Sequence[int]
) -> _Dealt:
    """The same where nothing has to be cut: ten thousand tensors by their sizes alone."""
    ends = np.cumsum(np.array(sizes, np.int64))
    firsts, begin, held = [0], 0, 0
    while begin < len(sizes):
        begin = int(np.searchsorted(ends, held + most, side="right"))
        held = int(ends[begin - 1])
        firsts.append(begin)
    result = [
        Batch(list(targets[begin:end]), list(sources[begin:end]), sum(sizes[begin:end]))
        for begin, end in itertools.pairwise(firsts)
    ]
    lengths = np.diff(firsts)
    numbers = np.repeat(np.arange(len(result)), lengths)
    places = np.arange(len(sizes)) - np.repeat(np.array(firsts[:-1], np.int64), lengths)
    return _Dealt(result, numbers.tolist(), places.tolist())


def as_in_memory(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns the dimensions of both so that `source`, if it is dense, is read in the order of memory: no device has to sort it."""
    order = sorted(range(source.dim()), key=source.stride, reverse=True)
    turned = source.permute(order)
    return (target.permute(order), turned) if turned.is_contiguous() else (target, source)


def cut(target: torch.Tensor, source: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cuts two tensors of one shape into pieces of at most so many bytes; where memory is not in order, along rows."""
    if target.nbytes <= most:
        yield target, source
    elif source.is_contiguous() and target.is_contiguous():
        step = max(1, most // target.element_size())
        yield from zip(torch.split(target.view(-1), step), torch.split(source.view(-1), step), strict=True)
    elif rows := most * len(target) // target.nbytes:
        yield from zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    else:
        for mine, theirs in zip(target.unbind(), source.unbind(), strict=True):
            yield from cut(mine, theirs, most)
