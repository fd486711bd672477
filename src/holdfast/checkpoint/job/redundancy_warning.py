"""The warning at the start of a job: what lives in one node only, and where it would come back from.

Twins on two nodes protect each other from the first step on. What only one node holds is safe against its loss no
earlier than its replica on another node, or the next durable version; whoever runs the job should know before it runs.
Called at every restore, with the facts of all ranks; rank 0 says it, once per node.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.base.events import Events
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.core.layout import parity_groups
from holdfast.core.layout.bundles import single_node
from holdfast.core.model import Shard, Topology

logger = logging.getLogger(__name__)

# Names of one rank that are told; the rest is a count.
MAX_NAMES = 4


def warn(group: Ranks, topology: Topology, shards: Sequence[Shard], events: Events) -> None:
    """Tells what one node alone holds. Collective.

    Args:
        group: all ranks.
        topology: who runs where.
        shards: what this rank holds of all that is trained.
        events: hears of every node that holds something alone.
    """
    alone = single_node(shards, topology)
    # Twins of one node hold it once: the lowest of them speaks for all.
    mine = [shard for shard in alone if shard.ranks[0] == group.rank]
    told = [len(mine), sum(shard.num_bytes for shard in mine), [shard.name for shard in mine[:MAX_NAMES]]]
    rows = collectives.gather_json(group, told)
    for node, label in enumerate(topology.nodes):
        here = [rows[rank] for rank in topology.ranks_on(node)]
        count, size = sum(row[0] for row in here), sum(row[1] for row in here)
        if not size:
            continue
        names = list(dict.fromkeys(name for row in here for name in row[2]))[:MAX_NAMES]
        events.emit("unprotected", node=label, slices=count, size_bytes=size, names=", ".join(names))
        if group.rank == 0:
            _say(topology, node, count, f"{size / 2**20:.1f} MiB in {', '.join(names)}{'...' * (count > len(names))}")


def _say(topology: Topology, node: int, count: int, what: str) -> None:
    label = topology.nodes[node]
    if len(topology.nodes) == 1:
        # So it is on every single machine; nobody has to be warned of that each time.
        logger.info("all state lives on node %s: if it is lost, storage is what is left", label)
        return
    way = "a replica on another node, as far as that was made, else from storage"
    if parity_groups.is_unprotected(topology):
        way = "storage, as redundancy is none"
    elif not parity_groups.keeps_replicas(topology):
        way = "parity on the other nodes of its group, as far as that was made, else from storage"
    logger.warning(
        "no twin on another node: %d slices (%s) live on node %s only; if it dies they come back from %s",
        count,
        what,
        label,
        way,
    )
