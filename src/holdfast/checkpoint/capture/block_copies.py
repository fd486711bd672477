"""Small tensors that lie side by side in a slot are put side by side on their device first, and sent in one copy.

A copy of its own costs the host some microseconds and a place in the device's queue. That queue holds about a thousand entries, and
who queues more waits until the device has come so far: a save of 10,000 tensors took as long as its copy. A block is filled
by few kernels instead, within the device's own memory, and takes one copy. The blocks of a device are one piece of memory:
all is queued on one stream, so a block is filled when the copy of the one before has ended.

What lies where in a slot is planned once (`checkpoint.capture.copy_plan`), and so are the blocks. Used by
`checkpoint.capture.side_stream_copy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# The memory of a device that this takes. Ten gigabytes are 430 blocks, with two entries in the queue each.
BLOCK_BYTES = 24 << 20
# Larger tensors are sent from where they lie, and so are fewer neighbours than this.
SMALL_BYTES = 4 << 20
FEWEST = 4


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbours in a slot that are sent together.

    Attributes:
        first, last: their places in the list of targets; `last` is behind them.
        target: all their bytes in the slot.
        staged: where each goes on the device.
        source: all of those, as bytes.
    """

    first: int
    last: int
    target: torch.Tensor
    staged: list[torch.Tensor]
    source: torch.Tensor


class BlockCopies:
    """The blocks of some targets in one slot.

    Args:
        targets: in the slot.
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
            torch._foreach_copy_(block.staged, list(sources[block.first : block.last]))
            block.target.copy_(block.source, non_blocking=True)


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
