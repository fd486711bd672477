"""Decides which bundles the ranks of one node read from storage together, and in which order each reads their chunks.

A bundle that only ranks of one node want need not lie in that node's memory as well: each chunk is read from storage by one
rank and by the others from the page cache of the machine. Every rank begins with chunks of its own, so that storage is
read by all at once, and takes those of the others after them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.model import BundleRef, Seal
from holdfast.core.recovery.version_choice import Fetch, Source

# Chunks of its own that a rank reads before it takes those of the others: as many as streams begin with.
OWN_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """Says who of a node reads what.

    Attributes:
        first: bundle id -> number of its first chunk, where the chunks of all bundles are counted through.
        turn: which of the ranks this one is, from 0 on.
        num_ranks: ranks on the node.
    """

    first: Mapping[str, int]
    turn: int
    num_ranks: int

    def order(self, bundle_id: str, chunks: Sequence[int]) -> list[int]:
        """Return these chunks of a bundle in the order in which this rank reads them.

        A rank is never far ahead of what the others have read, while all are equally fast: what one of them read may leave
        the page cache again.
        """
        window, first = OWN_AT_ONCE * self.num_ranks, self.first[bundle_id]
        return sorted(chunks, key=lambda chunk: (chunk // window, (first + chunk - self.turn) % self.num_ranks, chunk))


def plan_reading(rank: int, node_of: Sequence[int], num_chunks: Mapping[str, int]) -> ReadingPlan:
    """Return who reads what; the same on every rank of a node but for its turn. `num_chunks` has all bundles of the
    job.
    """
    first, at = {}, 0
    for bundle_id in sorted(num_chunks):
        first[bundle_id] = at
        at += num_chunks[bundle_id]
    neighbours = [other for other, node in enumerate(node_of) if node == node_of[rank]]
    return ReadingPlan(first, neighbours.index(rank), len(neighbours))


def is_read_together(fetch: Fetch, node_of: Sequence[int]) -> bool:
    """Return whether several ranks want a bundle of storage, and all of them are on one node."""
    if fetch.source is not Source.STORAGE or fetch.via is not None or fetch.chunks is not None or fetch.is_straight:
        return False
    return _is_on_one_node(fetch.ref, node_of)


def _is_on_one_node(ref: BundleRef, node_of: Sequence[int]) -> bool:
    home = node_of[ref.runs[0][0]]
    return all(rank < len(node_of) and node_of[rank] == home for rank in ref.ranks)


def chunks_of_all(seals: Mapping[str, Seal], chunk_bytes: int) -> dict[str, int]:
    """Return bundle id -> number of its chunks."""
    return {bundle_id: -(-seal.length // chunk_bytes) for bundle_id, seal in seals.items()}
