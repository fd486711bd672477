"""The job comes together: who runs where, one incarnation, one keeper per node, all told the same.

Rank 0 claims the root, keeps other jobs out and registers the incarnation; the first rank of each node starts its keeper or finds it; then
every rank connects and tells its keeper about the job. A fault on one rank is raised by all. Called by
`train.checkpointer` at every restore; a second restore in the same process is a new incarnation over the same keepers.
"""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.base.config import Config
from holdfast.base.errors import UsageError
from holdfast.core.lineage import Lineage
from holdfast.core.model import Topology, Version
from holdfast.core.spread import RANKS_PER_READER
from holdfast.node.client import Assembly
from holdfast.node.places import absolute_root, place_of
from holdfast.tiers.storage import Storage
from holdfast.train import agree
from holdfast.train.agree import Ranks
from holdfast.train.link import Link

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """The job of one incarnation, as every rank knows it."""

    group: Ranks
    assembly: Assembly
    ranks_per_reader: int = RANKS_PER_READER

    @property
    def incarnation(self) -> int:
        """Its number."""
        return self.assembly.incarnation

    @property
    def topology(self) -> Topology:
        """Who runs where."""
        return self.assembly.topology

    @property
    def lineage(self) -> Lineage:
        """What the incarnations before this one resumed from."""
        return Lineage(dict(self.assembly.lineage))

    def version(self, step: int) -> Version:
        """`step` of this incarnation."""
        return Version(self.incarnation, step)


def assemble(group: Ranks, root: str, config: Config, *, storage: Storage, link: Link) -> Job:
    """Brings the job together. Collective.

    Raises:
        HoldfastError: what any rank met, on every rank.
    """
    topology = _meet(group, root, config)
    registered = json.loads(agree.share(group, lambda: _register(storage, config.run_id)))
    first = topology.ranks_on(topology.node_of[group.rank])[0] == group.rank
    # The first rank of a node starts the keeper while the others wait, instead of all starting one.
    agree.together(group, lambda: link.open() if first and link.client is None else None)
    agree.together(group, lambda: link.open() if link.client is None else None)
    addresses = _addresses(group, topology, link)
    assembly = Assembly(
        incarnation=registered["incarnation"],
        root=absolute_root(root),
        job_id=registered["job_id"],
        topology=topology,
        addresses=addresses,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        lineage=tuple((number, Version.parse(text) if text else None) for number, text in registered["lineage"]),
    )
    agree.together(group, lambda: link.require().assemble(assembly))
    link.assembly, link.layout, link.resumed = assembly, None, None
    return Job(group, assembly, config.ranks_per_reader)


def _meet(group: Ranks, root: str, config: Config) -> Topology:
    """Who runs where."""
    place = place_of(root, config)
    rows = agree.gather_json(
        group, [absolute_root(root), config.run_id, place.node, config.rack_label, config.backup_node]
    )
    different = sorted({(row[0], row[1]) for row in rows})
    if len(different) > 1:
        raise UsageError(
            f"the ranks name different jobs: {' and '.join(f'{path} (run {run})' for path, run in different)}",
            remedy="give every rank the same path and run id",
        )
    nodes = tuple(dict.fromkeys(row[2] for row in rows))
    firsts = [next(row for row in rows if row[2] == node) for node in nodes]
    racks = tuple(row[3] for row in firsts)
    return Topology(
        nodes,
        tuple(nodes.index(row[2]) for row in rows),
        racks if any(racks) else (),
        _named_backups(nodes, [row[4] for row in firsts]),
    )


def _named_backups(nodes: tuple[str, ...], names: list[str]) -> tuple[int, ...]:
    """The nodes that were named as backups, by index.

    Raises:
        UsageError: a name that no node of the job bears, or a node's own.
    """
    for node, name in zip(nodes, names, strict=True):
        if name and (name not in nodes or name == node):
            raise UsageError(
                f"node {node} names {name!r} as its backup", remedy=f"name another node of the job: {', '.join(nodes)}"
            )
    return tuple(nodes.index(name) if name else -1 for name in names) if any(names) else ()


def _addresses(group: Ranks, topology: Topology, link: Link) -> tuple[str, ...]:
    """Where the keepers find each other; each knows its own address, its port being the kernel's choice."""
    rows = agree.gather_json(group, [link.require().address, _machine()])
    firsts = [rows[topology.ranks_on(node)[0]] for node in range(len(topology.nodes))]
    deaf = [node for node, (address, _) in enumerate(firsts) if not address.startswith("tcp:")]
    if group.rank == 0 and deaf and len({machine for _, machine in firsts}) > 1:
        logger.warning(
            "the nodes stand on different machines, but the keeper of %s listens on none of its addresses: no replica "
            "reaches or leaves it; give --listen and --secret-file",
            topology.nodes[deaf[0]],
        )
    return tuple(address for address, _ in firsts)


def _machine() -> str:
    """What no two machines share; containers of one machine do."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _register(storage: Storage, run_id: str) -> bytes:
    """Rank 0: the root is ours, nobody else works on it, and this incarnation has a number.

    In this order: a number that a second job took would fence the first.
    """
    job_id = storage.claim()
    storage.occupy(run_id)
    lineage = storage.lineage()
    facts: dict[str, Any] = {
        "job_id": job_id,
        "incarnation": storage.register_incarnation(),
        "lineage": [[number, str(version) if version else ""] for number, version in sorted(lineage.items())],
    }
    return json.dumps(facts).encode()
