"""What tests of the training state share: a save into host memory and a restore from it, as capture and restore do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.entries.types import Group, LoadRecord, SavedTensor
from holdfast.checkpoint.state.training_state import State
from holdfast.core.model import Shard
from holdfast.tiers.format import values as codec


@dataclass(frozen=True)
class Saved:
    """A save of one rank, with nothing shared with the live objects."""

    shards: dict[str, Shard]
    tensors: dict[str, torch.Tensor]
    values: dict[Group, bytes]

    def offered(self) -> dict[str, SavedTensor]:
        return {n: SavedTensor(s.dtype, s.global_shape, (s.extent,)) for n, s in self.shards.items()}

    def decoded(self) -> dict[Group, dict[str, Any]]:
        return {group: codec.decode(data) for group, data in self.values.items()}


def save(state: State) -> Saved:
    gathered = state.gather()
    return Saved(
        {name: live.shard for name, live in gathered.tensors.items()},
        {name: live.local.clone() for name, live in gathered.tensors.items()},
        {group: codec.encode(dict(values)) for group, values in gathered.values.items()},
    )


def restore(state: State, saved: Saved, *, strict: bool = True) -> LoadRecord:
    values = saved.decoded()
    targets = state.create(state.fitting(saved.offered(), values, strict=strict))
    for name, live in targets.items():
        assert live.shard == saved.shards[name]
        live.local.copy_(saved.tensors[name])
    return state.apply(values, targets)


def same_bits(left: Saved, right: Saved) -> None:
    """Fails unless two saves hold the same entries, bytes and values."""
    assert left.shards.keys() == right.shards.keys(), left.shards.keys() ^ right.shards.keys()
    assert left.shards == right.shards
    for name, tensor in left.tensors.items():
        other = right.tensors[name]
        assert torch.equal(_bits(tensor), _bits(other)), name
    first, second = left.decoded(), right.decoded()
    different = {
        (group, path) for group in first for path in first[group] if first[group][path] != second[group].get(path)
    }
    assert left.values == right.values or not different, different


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def continues(
    make: Callable[[], tuple[dict[str, Any], Callable[[], None]]],
    *,
    before: int = 3,
    after: int = 4,
    whole: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> Saved:
    """Trains with and without an interruption and fails unless both end with the same bits.

    Args:
        make: fresh objects and a function that trains one step with them.
        before: steps before the save.
        after: steps between save and end.
        whole: everything exists right after the restore; not so what an object makes lazily at its first step.
        rank: this rank; in a job of several, all call this together.
        world_size: number of ranks.
    """
    torch.manual_seed(7)
    objects, step = make()
    state = State(objects, rank=rank, world_size=world_size)
    for _ in range(before):
        step()
    saved = save(state)
    for _ in range(after):
        step()
    expected = save(state)

    torch.manual_seed(1234)  # the second process starts elsewhere
    objects, step = make()
    state = State(objects, rank=rank, world_size=world_size)
    restore(state, saved)
    if whole:
        same_bits(save(state), saved)
    for _ in range(after):
        step()
    same_bits(save(state), expected)
    return saved
