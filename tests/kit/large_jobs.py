"""The layout of a job of very many ranks."""

from __future__ import annotations

from holdfast.core.model import Extent, Shard, Topology

WORLD = 16_384

PER_NODE = 8


def topology(world_size: int = WORLD) -> Topology:
    return Topology(
        tuple(f"n{node}" for node in range(world_size // PER_NODE)),
        tuple(rank // PER_NODE for rank in range(world_size)),
    )


def state_of(num_bytes: int, world_size: int = WORLD) -> list[Shard]:
    """So many bytes in 400 tensors, alike on all ranks."""
    columns = 4096
    rows = num_bytes // 400 // columns // 4
    extent = Extent((0, 0), (rows, columns))
    return [Shard(f"t{i:03}", "F32", (rows, columns), extent, tuple(range(world_size))) for i in range(400)]
