"""Decides who reads a bundle from storage, and from whom every other node gets it: each byte is read once in the whole
job.

Pure, and the same on every rank, because all are given the same bundles. Readers are balanced by bytes. From its reader a
bundle goes down a tree of two branches, and a node passes on what it has proved while the rest still arrives: so storage
is read once, no node sends more than twice what it takes, and the last of n nodes starts log2(n) chunks after the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.core.model import BundleRef
from holdfast.core.rank_runs import Runs

BRANCHES = 2
# One reader for so many ranks of a group. A single stream out of storage feeds them all until its node becomes the
# bottleneck of a very large group.
RANKS_PER_READER = 512


def upstreams(
    bundles: Iterable[BundleRef],
    node_of: Sequence[int],
    *,
    ranks_per_reader: int = RANKS_PER_READER,
) -> Mapping[str, Mapping[int, int | None]]:
    """Bundle id -> node -> the node that hands the bundle on to it; None: it reads storage itself.

    Args:
        bundles: those that storage alone holds.
        node_of: the node of each rank.
        ranks_per_reader: a group of more ranks has more readers.
    """
    load = dict.fromkeys(node_of, 0)
    found: dict[str, Mapping[int, int | None]] = {}
    homes: dict[Runs, list[int]] = {}  # groups recur, and may have very many members
    for ref in sorted(bundles, key=lambda ref: (-ref.num_bytes, ref.bundle_id)):
        if ref.runs not in homes:
            homes[ref.runs] = sorted({node_of[rank] for rank in ref.ranks if rank < len(node_of)})
        nodes = homes[ref.runs]
        num_readers = min(len(nodes), -(-len(ref.ranks) // ranks_per_reader))
        tree: dict[int, int | None] = {}
        for part in _parts(nodes, num_readers):
            reader = min(part, key=lambda node: (load[node], node))
            load[reader] += ref.num_bytes
            at = part.index(reader)
            order = part[at:] + part[:at]
            tree |= {node: order[(i - 1) // BRANCHES] if i else None for i, node in enumerate(order)}
        found[ref.bundle_id] = tree
    return found


def _parts(nodes: Sequence[int], count: int) -> Iterable[list[int]]:
    """The nodes in `count` parts of equal size, give or take one."""
    return (list(nodes[len(nodes) * i // count : len(nodes) * (i + 1) // count]) for i in range(count))
