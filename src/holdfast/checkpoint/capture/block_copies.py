"""Small tensors that lie side by side in a slot are put side by side on their device first, and sent in one copy.

A copy of its own costs the host some microseconds and a place in the device's queue. That queue holds about a thousand entries, and
who queues more waits until the device has come so far: a save of 10,000 tensors took as long as its copy. A block is filled
by few kernels instead, within the device's own memory, and takes one copy. The blocks of a device are one piece of memory:
all is queued on one stream, so a block is filled when the copy of the one before has ended. MUST NOT be filled by two threads at once.

What the device has to work out first (`is_plain`) goes the same way, piece by piece, so it takes no other memory of the device.

Within a device bytes are copied as whole numbers: torch's one kernel for many tensors computes in float32 where a type is
narrower, so what is no number there gets other bits, and it has no unsigned types but bytes.

What lies where in a slot is planned once (`checkpoint.capture.copy_plan`), and so are the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.checkpoint.state.change_detection import same_objects

# The memory of a device that this takes. Ten gigabytes are 430 blocks, with two entries in the queue each.
BLOCK_BYTES = 24 << 20
# Larger tensors are sent from where they lie, and so are fewer neighbours than this.
SMALL_BYTES = 4 << 20
FEWEST = 4
# As which type the bytes of another are copied exactly.
_EXACT = {
    torch.bool: torch.uint8, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8,
    torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.uint16: torch.int16,
    torch.uint32: torch.int32, torch.uint64: torch.int64,
}  # fmt: skip


@dataclass(slots=True)
class Block:
    """Neighbours in a slot that are sent together.

    Attributes:
        first, last: their places in the list of targets; `last` is behind them.
        target: all their bytes in the slot.
        staged: where each goes on the device.
        source: all of those, as bytes.
        seen: what was to be copied last time; of the very same tensors nothing is worked out again.
        pairs: those, with the place of each, as they are copied together.
        turned: those of which the device has to work out the conjugate or the negative.
    """

    first: int
    last: int
    target: torch.Tensor
    staged: list[torch.Tensor]
    source: torch.Tensor
    seen: list[torch.Tensor] = field(default_factory=list)
    pairs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    turned: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Queues what puts these side by side."""
        if not same_objects(sources, self.seen):
            both = list(zip(self.staged, sources, strict=True))
            self.turned = [(to, of) for to, of in both if of.is_conj() or of.is_neg()]
            together = [_exact(to, of) for to, of in both if not (of.is_conj() or of.is_neg())]
            self.pairs = [to for to, _ in together], [of for _, of in together]
            self.seen = list(sources)
        if self.pairs[0]:
            torch._foreach_copy_(*self.pairs)
        for to, of in self.turned:
            to.copy_(of)


class BlockCopies:
    """The blocks of some targets in one slot.

    Args:
        memory_of: gives BLOCK_BYTES of a device, of dtype uint8; None: it has none left, and each goes alone.

    Attributes:
        others: places of the targets that are in no block.
    """

    def __init__(self, targets: Sequence[torch.Tensor], memory_of: Callable[[], torch.Tensor | None]) -> None:
        found = neighbours(targets)
        memory = memory_of() if found else None
        self._blocks = [_block(targets, places, memory) for places in found] if memory is not None else []
        inside = {index for block in self._blocks for index in range(block.first, block.last)}
        self.others = [index for index in range(len(targets)) if index not in inside]

    def queue(self, sources: Sequence[torch.Tensor]) -> None:
        """Queues the copies of what is in blocks on the current stream; `sources` are those of all targets."""
        for block in self._blocks:
            block.fill(sources[block.first : block.last])
            block.target.copy_(block.source, non_blocking=True)


def is_plain(source: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory as it is saved, so that no device has to work anything out."""
    return source.is_contiguous() and not source.is_conj() and not source.is_neg()


def as_copied(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[int]:
    """Returns their places in the order of their copies: blocks first, what the device has to work out last."""
    inside: set[int] = set()
    if len({source.device for source in sources}) == 1:  # else there are no blocks
        inside = {place for places in neighbours(targets) for place in places}
    return sorted(range(len(targets)), key=lambda place: (place not in inside, not is_plain(sources[place])))


def send_in_order(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], memory: torch.Tensor) -> None:
    """Queues copies of what is not plain, through `memory` of its device; each pair fits in there."""
    for target, source in pairs:
        staged = memory[: target.nbytes].view(target.dtype).view(target.shape)
        to, of = (staged, source) if source.is_conj() or source.is_neg() else _exact(staged, source)
        to.copy_(of)
        target.copy_(staged, non_blocking=True)


def _exact(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = _EXACT.get(target.dtype)
    return (target, source) if dtype is None else (target.view(dtype), source.view(dtype))


def neighbours(targets: Sequence[torch.Tensor]) -> list[range]:
    """Returns the places of small targets of which each begins where the one before it ends, as many as a block holds."""
    found: list[range] = []
    first = num_bytes = end = 0
    for index, target in enumerate(targets):
        size, at = target.nbytes, target.data_ptr()
        if size <= SMALL_BYTES and at == end and num_bytes + size <= BLOCK_BYTES:
            num_bytes += size
        else:
            found.append(range(first, index))
            first, num_bytes = index, size
        end = at + size if size <= SMALL_BYTES else 0
    found.append(range(first, len(targets)))
    return [places for places in found if len(places) >= FEWEST]


def _block(targets: Sequence[torch.Tensor], places: range, memory: torch.Tensor) -> Block:
    inside = targets[places.start : places.stop]
    begin = inside[0].data_ptr()
    num_bytes = sum(target.nbytes for target in inside)
    whole = inside[0].view(-1).view(torch.uint8).as_strided((num_bytes,), (1,))
    staged = [
        memory.narrow(0, target.data_ptr() - begin, target.nbytes).view(target.dtype).view(target.shape)
        for target in inside
    ]
    return Block(places.start, places.stop, whole, staged, memory[:num_bytes])
