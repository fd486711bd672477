"""Which tensors of a slot are sent in one block. What a device does with them: `test_on_device`."""

from __future__ import annotations

import pytest
import torch

from holdfast.base.errors import LevelNotReached
from holdfast.checkpoint.capture import block_copies
from holdfast.checkpoint.capture.block_copies import BlockCopies, neighbours
from holdfast.checkpoint.capture.one_at_a_time import OneAtATime


def side_by_side(*sizes: int, gaps: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Tensors of so many bytes in one memory, each behind the one before; a byte is left free in front of those in `gaps`."""
    memory, found, at = torch.zeros(sum(sizes) + len(gaps), dtype=torch.uint8), [], 0
    for index, size in enumerate(sizes):
        at += index in gaps
        found.append(memory[at : at + size])
        at += size
    return found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copies, "BLOCK_BYTES", 100)
    monkeypatch.setattr(block_copies, "SMALL_BYTES", 40)


def test_a_block_ends_at_its_size_at_a_gap_and_at_a_large_tensor() -> None:
    assert neighbours(side_by_side(*[20] * 11)) == [range(5), range(5, 10)], (
        "a block has 100 bytes, and one is no block"
    )
    assert neighbours(side_by_side(*[10] * 10, gaps=(5,))) == [range(5), range(5, 10)]
    assert neighbours(side_by_side(*[10] * 5, 41, *[10] * 4)) == [range(5), range(6, 10)]
    assert neighbours(side_by_side(*[10] * 4, 41, *[10] * 3)) == [range(4)]
    assert neighbours([]) == []


def test_what_is_in_no_block_is_told_and_no_memory_is_taken_for_none() -> None:
    asked = []

    def memory() -> torch.Tensor | None:
        asked.append(1)
        return torch.zeros(100, dtype=torch.uint8)

    assert BlockCopies(side_by_side(41, 41, 10, 10, 10), memory).others == list(range(5))
    assert not asked
    targets = side_by_side(41, *[10] * 4, 41)
    blocks = BlockCopies(targets, memory)
    assert blocks.others == [0, 5]
    blocks.queue([torch.full_like(target, index) for index, target in enumerate(targets)])
    assert [int(target.max()) for target in targets] == [0, 1, 2, 3, 4, 0]
    assert [int(target.min()) for target in targets] == [0, 1, 2, 3, 4, 0]
    assert BlockCopies(targets, lambda: None).others == list(range(6)), "a full device: each goes alone"


def test_a_thread_in_the_middle_of_its_own_copy_is_refused_and_may_copy_later() -> None:
    turns = OneAtATime()

    def nested() -> None:
        turns.run(int)

    with pytest.raises(LevelNotReached, match="by the same thread"):
        turns.run(nested)
    assert turns.run(lambda: 3) == 3
