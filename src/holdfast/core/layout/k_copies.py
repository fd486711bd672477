"""Decides which ranks save a slice when k copies of it are enough: balanced by bytes over all ranks.

Every rank works this out from the same list of slices, so nobody has to be told, and who misses a slice knows whom to
ask. Groups are dealt from the smallest, which have the least choice, to the largest, which even out what the small ones
left; within a group the largest slice goes first, to those of its ranks that have the least. Where groups overlap
without one lying in the other, they are dealt anew with all others in place until shares are equal. A slice is never
cut, so shares are equal only where no slice is large beside a share.

Pure; O(slices x copies x log ranks).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from holdfast.base.errors import UsageError
from holdfast.core.model import Shard

# Shares that exceed their mean by no more than this are equal.
TOLERANCE = 0.1
# How often all groups are dealt, at most. Groups of one mesh need one round, seldom two.
MAX_ROUNDS = 4


def share_table(slices: Iterable[Shard], copies: int) -> Mapping[Shard, tuple[int, ...]]:
    """The ranks that save each slice, ascending: `copies` of its group, or all of a group that is smaller. The slices
    are all of a job, in any order; a slice that is there twice counts once.

    Raises:
        UsageError: less than one copy.
    """
    if copies < 1:
        raise UsageError(f"{copies} copies of a slice are none", remedy="save at least one")
    groups: dict[tuple[int, ...], list[Shard]] = defaultdict(list)
    for shard in set(slices):
        groups[shard.ranks].append(shard)
    ordered = sorted(groups.items(), key=lambda item: (len(item[0]), item[0]))
    for _, members in ordered:
        members.sort(key=lambda shard: (-shard.num_bytes, shard.name, shard.extent.offsets, shard.extent.lengths))
    shares = {rank: 0 for ranks in groups for rank in ranks}
    table: dict[Shard, tuple[int, ...]] = {}
    for _ in range(MAX_ROUNDS):
        for ranks, members in ordered:
            _deal(ranks, members, min(copies, len(ranks)), shares, table)
        if max(shares.values(), default=0) * len(shares) <= (1 + TOLERANCE) * sum(shares.values()):
            break
    return table


def _deal(
    ranks: Sequence[int],
    members: Sequence[Shard],
    copies: int,
    shares: MutableMapping[int, int],
    table: MutableMapping[Shard, tuple[int, ...]],
) -> None:
    """The slices of one group, taken back first where they were dealt before."""
    for shard in members:
        for rank in table.get(shard, ()):
            shares[rank] -= shard.num_bytes
    heap = [(shares[rank], rank) for rank in ranks]
    heapq.heapify(heap)
    for shard in members:
        least = [heapq.heappop(heap) for _ in range(copies)]
        for share, rank in least:
            heapq.heappush(heap, (share + shard.num_bytes, rank))
        table[shard] = tuple(sorted(rank for _, rank in least))
    shares.update({rank: share for share, rank in heap})
