"""The slots of this node: two or three per local rank, two per rank whose bundles we keep a replica of.

Knows what each holds and who needs its bytes (pins); decides nothing about overwriting (core.slots does). All methods
but `allocate` run under the keeper's one lock; `allocate` takes long and touches nothing shared but the budget. A slot
that was promised is in the budget at once; its pages come in the background, and until then it is offered to nobody.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from holdfast.base.errors import MemoryRefused
from holdfast.core.layout.parity_stripes import Piece
from holdfast.core.model import BundleRef, Seal, Version
from holdfast.core.versions.slot_guard import SlotState, SlotView
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.memory import slots
from holdfast.tiers.memory.memory_budget import Budget
from holdfast.tiers.memory.page_populate import Populator, share_of_cores
from holdfast.tiers.memory.slots import ImagePlace, Slot, SlotHeader

POPULATING = "populating"
# Stands for the rank of slots that hold parity.
PARITY_RANK = -1


@dataclass(frozen=True, slots=True)
class PieceOf:
    """Chunks [first, end) of an image, end to end from `offset` of a slot; proved against `seal` when they came."""

    ref: BundleRef
    seal: Seal
    first: int
    end: int
    offset: int

    @property
    def length(self) -> int:
        """Bytes of these chunks."""
        return min(self.end * CHUNK_BYTES, self.seal.length) - self.first * CHUNK_BYTES


@dataclass(slots=True, eq=False)
class HeldSlot:
    """One slot and what the keeper knows of it.

    Attributes:
        rank: whose bundles it is for.
        replica: a copy that is not the snapshot of a local rank: for another node's, or preloaded.
        preloaded: fetched before anybody asked (`keeper.fetch.prefetch`); it exists elsewhere and goes where memory is needed.
        copied: the trainer finished writing; hashing is under way.
        before: while it is being written, the sealed images of the version before: what nobody writes over stands.
        pins: why its bytes are needed, counted.
        condemned: images whose digest failed; not offered any more.
        outgrown: too small for the rank by now, or made beside its slots; freed as soon as the guard allows.
        transient: it holds pieces of images on their way into another layout; goes with its last pin.
        pieces: those that have come.
        parity: says what it is parity of, where it is; then it has one image, which is the parity, and no rank.
    """

    slot: Slot
    rank: int
    replica: bool = False
    preloaded: bool = False
    state: SlotState = SlotState.EMPTY
    version: Version | None = None
    durable: bool = False
    layout: str = ""
    copied: bool = False
    images: dict[str, ImagePlace] = field(default_factory=dict)
    before: dict[str, ImagePlace] = field(default_factory=dict)
    pins: Counter[str] = field(default_factory=Counter)
    condemned: set[str] = field(default_factory=set)
    outgrown: bool = False
    transient: bool = False
    pieces: list[PieceOf] = field(default_factory=list)
    parity: Piece | None = None

    @property
    def is_put_off(self) -> bool:
        """Return whether nobody makes its pages yet."""
        return self.state is SlotState.UNPOPULATED and POPULATING not in self.pins

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is in it, nobody has a use for it, and nobody makes its pages."""
        return self.is_put_off or (self.state is SlotState.EMPTY and not self.pins)

    @property
    def view(self) -> SlotView:
        """Return what the overwrite guard sees. Images that all failed their digest are worth nothing: it may be
        overwritten.
        """
        if self.state is SlotState.UNPOPULATED:
            return SlotView(self.slot.slot_id, self.state)
        if self.images and self.condemned.issuperset(self.images):
            return SlotView(self.slot.slot_id, SlotState.EMPTY, None, self.pins.total())
        return SlotView(self.slot.slot_id, self.state, self.version, self.pins.total())

    @property
    def is_untouched(self) -> bool:
        """Return whether a version was begun in it, and its rank has not told that all of it lies here."""
        return self.state is SlotState.WRITING and not self.copied

    def start(self, version: Version, *, layout: str, durable: bool) -> None:
        """Begins a new version in it. The header is invalidated first, before anyone may write a byte."""
        slots.invalidate(self.slot)
        sealed = self.images if self.state is SlotState.SEALED else {}
        self.before = {name: place for name, place in sealed.items() if name not in self.condemned}
        self.state, self.version = SlotState.WRITING, version
        self.layout, self.durable, self.copied = layout, durable, False
        self.images, self.parity = {}, None
        self.condemned = set()

    def claim(self, version: Version, why: str) -> HeldSlot:
        """Begins a version that is brought here, and pins it meanwhile; returns the slot."""
        self.start(version, layout="", durable=False)
        self.pins[why] += 1
        return self

    def seal(self, images: dict[str, ImagePlace], job: str) -> None:
        """Notes that these images stand in it, in its header first."""
        self.images = images
        slots.write_header(self.slot, self.header(job))
        self.state = SlotState.SEALED

    def clear(self) -> None:
        """Makes it empty."""
        slots.invalidate(self.slot)
        self.state, self.version, self.copied = SlotState.EMPTY, None, False
        self.images, self.before, self.parity = {}, {}, None

    def header(self, job: str) -> SlotHeader:
        """The header that seals it."""
        images = tuple(sorted(self.images.values(), key=lambda place: place.offset))
        version = self.version
        if version is None:
            raise AssertionError("an empty slot has no header")
        return SlotHeader(job, self.rank, version, self.layout, self.durable, images, self.replica)

    def unpin(self, why: str) -> None:
        """Takes one pin off."""
        self.pins[why] -= 1
        if self.pins[why] <= 0:
            del self.pins[why]


class SlotPool:
    """All slots of this node within the memory budget."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._populator = Populator(share_of_cores())
        self._numbers = itertools.count(1)
        self._held: dict[int, HeldSlot] = {}
        self.make_room: Callable[[], bool] = lambda: False

    def __iter__(self) -> Iterator[HeldSlot]:
        return iter(tuple(self._held.values()))

    def get(self, slot_id: int) -> HeldSlot | None:
        return self._held.get(slot_id)

    def of_rank(self, rank: int, *, replica: bool = False) -> list[HeldSlot]:
        """The rank's slots, oldest first."""
        return [held for held in self._held.values() if held.rank == rank and held.replica is replica]

    def in_use(self, rank: int, *, replica: bool = False) -> list[HeldSlot]:
        """The rank's slots that new versions go into, oldest first: those that are not outgrown."""
        return [held for held in self.of_rank(rank, replica=replica) if not held.outgrown]

    def writing(self, rank: int, version: Version) -> HeldSlot | None:
        """The rank's slot that `version` is being written into."""
        for held in self.of_rank(rank):
            if held.state is SlotState.WRITING and held.version == version:
                return held
        return None

    def same_memory(self, slot: Slot, rank: int) -> HeldSlot | None:
        """The rank's slot that is this memory already, under a number of its own."""
        return next((held for held in self.of_rank(rank) if held.slot.is_same(slot)), None)

    def find(self, version: Version, bundle_id: str, rank: int | None = None) -> tuple[HeldSlot, ImagePlace] | None:
        """A sealed copy of the bundle; the rank's own slot first, then other ranks', then replicas."""
        best: tuple[HeldSlot, ImagePlace] | None = None
        for held in self.sealed():
            place = held.images.get(bundle_id)
            if place is None or held.version != version or bundle_id in held.condemned:
                continue
            if held.rank == rank and not held.replica:
                return held, place
            if best is None or (best[0].replica and not held.replica):
                best = held, place
        return best

    def find_pieces(self, version: Version, seal: Seal) -> list[tuple[HeldSlot, PieceOf]]:
        """Return what is here of an image that was not fetched whole."""
        return [
            (held, piece)
            for held in self._held.values()
            if held.transient and held.version == version
            for piece in held.pieces
            if piece.seal.bundle_id == seal.bundle_id and seal.digest in ("", piece.seal.digest)
        ]

    def piece(self, version: Version, name: str) -> Piece | None:
        """The piece of parity here whose bytes bear this name. There may be others of the version, of other groups."""
        found = self.find(version, name)
        return found[0].parity if found else None

    def sealed(self) -> list[HeldSlot]:
        """Slots whose header and digests stand."""
        return [held for held in self._held.values() if held.state is SlotState.SEALED]

    def allocate(self, num_bytes: int, what: str) -> Slot:
        """A new slot within the budget; not yet known to the slot pool. Takes about half a second per GiB.

        Raises:
            MemoryRefused: with the numbers.
        """
        slot = self._promise(num_bytes, what)
        try:
            self._populator.fill(slot)
        except BaseException:
            slot.close()
            self.budget.release(slot.total_bytes, to_come=True)
            raise
        self.budget.came(slot.total_bytes)
        return slot

    def promise(self, rank: int, num_bytes: int, num_slots: int, what: str) -> list[HeldSlot]:
        """New slots of a rank within the budget, without a page: all of them or none. `populate` makes the pages.

        Raises:
            MemoryRefused: with the numbers.
        """
        made: list[HeldSlot] = []
        try:
            for _ in range(num_slots):
                made.append(self.add(self._promise(num_bytes, what), rank))
                made[-1].state = SlotState.UNPOPULATED
        except BaseException:
            for held in made:
                self.drop(held)
            raise
        return made

    def populate(self, held: HeldSlot, turn: int, done: Callable[[MemoryRefused | None], None]) -> None:
        """Begins to make the pages of a slot that was promised; calls `done` in another thread, which calls `populated`."""
        held.pins[POPULATING] += 1
        self._populator.start(held.slot, done, turn=turn)

    def first_turn_alone(self) -> AbstractContextManager[None]:
        """Make no page of a second slot of a rank in the block."""
        return self._populator.first_turn_alone()

    def populated(self, held: HeldSlot, fault: MemoryRefused | None) -> None:
        """All pages of a slot are there, or will never be, and then it goes."""
        if self.get(held.slot.slot_id) is not held:
            return  # it was dropped meanwhile
        held.unpin(POPULATING)
        if fault is not None:
            self.drop(held)
            return
        self.budget.came(held.slot.total_bytes)
        held.state = SlotState.EMPTY

    def _promise(self, num_bytes: int, what: str) -> Slot:
        total = slots.slot_bytes(num_bytes)
        self.with_room(lambda: self.budget.reserve(total, what, to_come=True))
        try:
            return Slot.promise(num_bytes, slot_id=next(self._numbers))
        except BaseException:
            self.budget.release(total, to_come=True)
            raise

    def with_room(self, reserve: Callable[[], None]) -> None:
        """Reserves; where that is refused once more without what was preloaded, which nobody has a right to.

        Raises:
            MemoryRefused: there is no room all the same.
        """
        try:
            reserve()
        except MemoryRefused:
            if not self.make_room():
                raise
            reserve()

    def add(self, slot: Slot, rank: int, *, replica: bool = False) -> HeldSlot:
        """Makes a slot known; its memory is in the budget already."""
        if slot.slot_id < 0:
            slot.slot_id = next(self._numbers)
        held = HeldSlot(slot, rank, replica)
        self._held[slot.slot_id] = held
        return held

    def drop(self, held: HeldSlot) -> None:
        """Gives a slot's memory back."""
        del self._held[held.slot.slot_id]
        total = held.slot.total_bytes
        held.slot.close()
        self.budget.release(total, to_come=held.state is SlotState.UNPOPULATED)

    def collect(self, is_free: Callable[[HeldSlot], bool]) -> None:
        """Frees outgrown slots that may be overwritten."""
        for held in self:
            if held.transient:
                gone = not held.pins
            else:
                gone = held.outgrown and (held.is_empty or is_free(held))
            if gone:
                self.drop(held)

    def close(self) -> None:
        """Gives everything back."""
        self._populator.stop()
        for held in self:
            held.slot.close()
        self._held.clear()
        self.budget.close()
