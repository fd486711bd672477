"""`groups`: who holds what, in a saved version or a running job: redundancy groups, interchangeable ranks, and what lives
in one node only.

Of a version everything is read from the manifest and the headers of its files; no tensor is touched. Nodes are not part
of a version, so they are asked for: `--ranks-per-node`. A running job is asked through its keepers (`cli.running_job`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.base.errors import UsageError
from holdfast.base.events import Events
from holdfast.cli import console, rank_ranges
from holdfast.cli.running_job import live_job
from holdfast.cli.stored.versions import choose
from holdfast.core.layout import parity_groups, replica_placement
from holdfast.core.layout.cost_plan import uniform
from holdfast.core.model import Extent, Shard, Topology
from holdfast.tiers.format.image import Entry
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage

MAX_ROWS = 40

_Groups: TypeAlias = dict[tuple[int, ...], list[Shard]]


@dataclass(frozen=True, slots=True)
class _Subject:
    """A version, or a running job."""

    title: str
    world_size: int
    shards: Sequence[Shard]
    topology: Topology | None


def groups(root: str | None, version: str | None, *, job: str | None, ranks_per_node: int | None, as_json: bool) -> int:
    """`holdfast groups`; the exit code: 1 if something would be lost, or have been, with a single node."""
    if root is not None and job is not None:
        raise UsageError(
            "a checkpoint and a running job are two questions", remedy="give ROOT alone, or --job ROOT alone"
        )
    subject = _live(job) if root is None else _saved(root, version, ranks_per_node)
    found = _by_group(subject.shards)
    twins = _twins(subject.world_size, found)
    topology = subject.topology
    alone = {} if topology is None else _alone(found, topology)
    if as_json:
        console.print_json(_document(subject, found, twins) | _nodes_document(topology, alone))
    else:
        _print_groups(subject, found)
        rank_ranges.print_stand_ins(twins, topology)
        if topology is not None:
            _print_alone(alone, topology)
    return (
        console.PROBLEM if alone and topology is not None and parity_groups.is_unprotected(topology) else console.GOOD
    )


def _saved(root: str, version: str | None, ranks_per_node: int | None) -> _Subject:
    storage = open_storage(root, Events())
    manifest = storage.manifest(choose(storage, version))
    topology = None if ranks_per_node is None else uniform(manifest.world_size, ranks_per_node)
    return _Subject(str(manifest.version), manifest.world_size, saved_shards(storage, manifest), topology)


def _live(job: str | None) -> _Subject:
    live = live_job(job)
    title = f"{live.root}, incarnation {live.incarnation}, running"
    return _Subject(title, live.topology.world_size, live.shards, live.topology)


def saved_shards(storage: Storage, manifest: Manifest) -> list[Shard]:
    """Every different part of every tensor of a version, from the headers of its files; pieces put together again.

    Raises:
        CorruptError: a header is damaged.
    """
    pieces: dict[tuple[str, tuple[int, ...]], list[Entry]] = defaultdict(list)
    for file in manifest.bundles:
        for entry in storage.bundles.image(manifest.version, file).entries:
            pieces[entry.name, file.ref.ranks].append(entry)
    return [_joined(found, ranks) for (_, ranks), found in sorted(pieces.items())]


def _joined(pieces: Sequence[Entry], ranks: tuple[int, ...]) -> Shard:
    first = min(pieces, key=lambda piece: piece.offsets)
    rows = () if not first.shape else (sum(piece.shape[0] for piece in pieces),)
    extent = Extent(first.offsets, (*rows, *first.shape[1:]))
    return Shard(first.name, first.dtype, first.global_shape, extent, ranks)


def _by_group(shards: Iterable[Shard]) -> _Groups:
    found: _Groups = defaultdict(list)
    for shard in shards:
        found[shard.ranks].append(shard)
    return dict(sorted(found.items()))


def _twins(world_size: int, found: _Groups) -> list[tuple[int, ...]]:
    """Per rank the ranks that hold all that it holds; see `core.layout.redundancy_groups`."""
    member_of: list[list[tuple[int, ...]]] = [[] for _ in range(world_size)]
    for ranks in found:
        for rank in ranks:
            member_of[rank].append(ranks)
    sets = {ranks: frozenset(ranks) for ranks in found}
    known: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}
    for own in member_of:
        key = tuple(own)
        if key and key not in known:
            smallest, *others = sorted((sets[ranks] for ranks in own), key=len)
            known[key] = tuple(sorted(smallest.intersection(*others)))
    return [known[tuple(own)] if own else (rank,) for rank, own in enumerate(member_of)]


def _alone(found: _Groups, topology: Topology) -> dict[int, list[Shard]]:
    """Return by node what no other node held."""
    alone: dict[int, list[Shard]] = defaultdict(list)
    for ranks, shards in found.items():
        homes = {topology.node_of[rank] for rank in ranks}
        if len(homes) == 1:
            alone[homes.pop()] += [shard for shard in shards if shard.num_bytes]
    return {node: shards for node, shards in sorted(alone.items()) if shards}


def _keepers(alone: Mapping[int, Sequence[Shard]], topology: Topology) -> dict[int, list[int]]:
    """Return, by node that holds something alone, the nodes that keep its replicas or parity; empty where nothing does."""
    if groups := parity_groups.by_node(topology):
        return {node: [other for other in groups[node] if other != node] for node in alone}
    if not parity_groups.keeps_replicas(topology):
        return {}
    totals = [sum(shard.num_bytes for shard in alone.get(node, ())) for node in range(len(topology.nodes))]
    shares = replica_placement.shares(totals, topology)
    return {node: [keeper for keeper, _ in shares[node]] for node in alone}


def _document(subject: _Subject, found: _Groups, twins: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    return {
        "version": subject.title,
        "world_size": subject.world_size,
        "groups": [
            {
                "ranks": ranks,
                "bytes": sum(shard.num_bytes for shard in shards),
                "entries": [_shard_document(shard) for shard in shards],
            }
            for ranks, shards in found.items()
        ],
        "interchangeable": rank_ranges.stand_ins_document(twins),
    }


def _shard_document(shard: Shard) -> dict[str, Any]:
    return {
        "name": shard.name,
        "dtype": shard.dtype,
        "shape": shard.global_shape,
        "offsets": shard.extent.offsets,
        "lengths": shard.extent.lengths,
        "bytes": shard.num_bytes,
    }


def _nodes_document(topology: Topology | None, alone: Mapping[int, Sequence[Shard]]) -> dict[str, Any]:
    if topology is None:
        return {}
    nodes = [
        {
            "node": node,
            "ranks": topology.ranks_on(node),
            "alone_bytes": sum(shard.num_bytes for shard in alone.get(node, ())),
            "alone": _names(alone.get(node, ())),
            **_protection(_keepers(alone, topology).get(node, []), topology),
        }
        for node in range(len(topology.nodes))
    ]
    lost = [shard for shards in alone.values() for shard in shards] if parity_groups.is_unprotected(topology) else []
    return {"nodes": nodes, "unprotected": _names(lost)}


def _protection(keepers: Sequence[int], topology: Topology) -> dict[str, Any]:
    if parity_groups.by_node(topology):
        return {"replica_on": None, "parity_on": keepers}
    return {"replica_on": next(iter(keepers), None)}


def _names(shards: Iterable[Shard]) -> list[str]:
    return sorted({shard.name for shard in shards})


def _print_groups(subject: _Subject, found: _Groups) -> None:
    num_entries = len({shard.name for shards in found.values() for shard in shards})
    ranks, groups = rank_ranges.count_text(subject.world_size, "rank"), rank_ranges.count_text(len(found), "group")
    console.say(f"{subject.title}: {num_entries} entries, {ranks} in {groups}")
    rows = [
        (
            rank_ranges.ranks_text(ranks),
            len(shards),
            console.size_text(sum(shard.num_bytes for shard in shards)),
            rank_ranges.names_text([shard.name for shard in shards][:1]),
        )
        for ranks, shards in found.items()
    ]
    console.print_table(("ranks that hold the same", "entries", "size", "the first of them"), rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        console.say(f"... and {len(rows) - MAX_ROWS} more groups; --json shows all")


def _print_alone(alone: Mapping[int, Sequence[Shard]], topology: Topology) -> None:
    console.say()
    if not alone:
        console.say("Every part is held by at least two nodes: any one of them may die.")
    for node, shards in list(alone.items())[:MAX_ROWS]:
        names, size = _names(shards), console.size_text(sum(shard.num_bytes for shard in shards))
        if not parity_groups.is_unprotected(topology):
            keepers = ", ".join(topology.nodes[keeper] for keeper in _keepers(alone, topology)[node])
            kind = "parity" if parity_groups.by_node(topology) else "a replica"
            rescue = f"{kind} on {keepers} saves it"
        elif len(topology.nodes) > 1:
            rescue = "UNPROTECTED, but for what is in storage: redundancy is none"
        else:
            rescue = "UNPROTECTED, but for what is in storage: there is no other node"
        console.say(f"{topology.nodes[node]} alone holds {size} of {len(names)} entries; {rescue}")
        console.say(f"  {rank_ranges.names_text(names)}")
    if len(alone) > MAX_ROWS:
        console.say(f"... and {len(alone) - MAX_ROWS} more nodes; --json shows all")
