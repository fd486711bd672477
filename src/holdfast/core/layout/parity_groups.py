"""Decides how a job survives the loss of a node in memory: whole replicas, parity over groups of nodes, or not at all.

`replica`: another node keeps a copy of what lives in one node only (`core.layout.replica_placement`). `parity:K`: nodes form
groups of K, and each keeps the XOR of one stripe of every other member (`core.layout.parity_stripes`): 1/(K-1) of the memory
of a replica, for the same guarantee of one lost node per group. `none`: neither; such a version is never called replicated.
Fewer than three nodes cannot share parity: they keep replicas.

Pure. Everybody works the groups out from the topology, so nobody has to be told.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from holdfast.core.model import BundleRef, Topology

REPLICA, NONE = "replica", "none"
# Two members would each keep a whole replica of the other.
LEAST_MEMBERS = 3
# What a node reports once its parity of a version stands, where it would name the replicas that it holds. No bundle
# bears such a name.
STANDS = "~parity"

_PARITY = re.compile(r"parity:([1-9]\d{0,3})\Z")


def members_wanted(redundancy: str) -> int:
    """Return K of `parity:K`; 0 for the other settings.

    Raises:
        ValueError: it is no setting of redundancy.
    """
    match = _PARITY.match(redundancy)
    if match is None and redundancy not in (REPLICA, NONE):
        raise ValueError(f"{redundancy!r} is neither replica, parity:K nor none")
    wanted = int(match[1]) if match else 0
    if match and wanted < LEAST_MEMBERS:
        raise ValueError(f"{redundancy}: a group of parity has at least {LEAST_MEMBERS} nodes")
    return wanted


def keeps_replicas(topology: Topology) -> bool:
    """Return whether another node keeps whole replicas of what lives in one node only."""
    if len(topology.nodes) < 2 or topology.redundancy == NONE:
        return False
    return topology.redundancy == REPLICA or not groups(topology)


def is_unprotected(topology: Topology) -> bool:
    """Return whether nothing is made to survive the loss of a node, by the settings or for lack of another node."""
    return len(topology.nodes) < 2 or topology.redundancy == NONE


@functools.lru_cache(16)
def groups(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return the groups of nodes that keep parity of each other, each ascending; none where the job keeps none.

    Each has between K and 2K-1 nodes, about equally many; fewer nodes than K make one group of all. The nodes of a rack are
    dealt over the groups, so that a rack takes as few of one group as possible.
    """
    wanted, num_nodes = members_wanted(topology.redundancy), len(topology.nodes)
    if not wanted or num_nodes < LEAST_MEMBERS:
        return ()
    count = max(1, num_nodes // wanted)
    racks = topology.racks or ("",) * num_nodes
    order = sorted(range(num_nodes), key=lambda node: (racks[node], node))
    return tuple(tuple(sorted(order[at::count])) for at in range(count))


def by_node(topology: Topology) -> dict[int, tuple[int, ...]]:
    """Return the group that each node is in, ascending; nothing where the job keeps no parity."""
    return {node: group for group in groups(topology) for node in group}


def single_node_bundles(
    refs: Iterable[BundleRef], group: tuple[int, ...], topology: Topology
) -> tuple[tuple[str, ...], ...]:
    """Return by member of the group the bundles that live in its node only, by id in order."""
    found: dict[int, list[str]] = {node: [] for node in group}
    for ref in refs:
        ranks = ref.ranks
        home = topology.node_of[ranks[0]]
        if home in found and all(topology.node_of[rank] == home for rank in ranks):
            found[home].append(ref.bundle_id)
    return tuple(tuple(sorted(found[node])) for node in group)


def in_words(topology: Topology) -> str:
    """Return what is kept, in one sentence, where it is not whole replicas or not what was asked for; else nothing."""
    if topology.redundancy == NONE:
        return "redundancy is none: what lives on one node only comes back from storage if that node is lost"
    wanted, found = members_wanted(topology.redundancy), groups(topology)
    if not wanted or len(topology.nodes) < 2:
        return ""
    if not found:
        return f"{topology.redundancy} needs {LEAST_MEMBERS} nodes, and the job has {len(topology.nodes)}: replicas are kept"
    sizes = sorted({len(group) for group in found})
    told = " or ".join(str(size) for size in sizes)
    fewer = f", fewer than the {wanted} that were asked for" if sizes[0] < wanted else ""
    return f"parity is kept in {len(found)} group{'s' * (len(found) > 1)} of {told} nodes{fewer}"
