"""Tells what a layout costs on given nodes: who copies, writes and backs up how much, and what a lost node takes along.

The same rules as `core.layout.bundles` and `core.versions.coordinator_board` apply at every save, summed over a job by kinds of groups. Bytes are
those of tensors; image headers and values come on top. *Alone* is what lives in one node only: its twins cannot save
it, the replica on the next node does, and where there is no other node nothing does.

Pure; 16,384 ranks in under a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from holdfast.core.layout import bundles, parity_groups, replica_placement
from holdfast.core.layout.job_layout import JobLayout, offsets
from holdfast.core.layout.redundancy_groups import Census
from holdfast.core.model import BundleRef, Topology
from holdfast.core.rank_runs import runs_of

# Stands for the rank that a node keeps something of, where that is parity.
PARITY = -1


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Bytes per rank.

    Attributes:
        held: the state in the rank's own memory.
        copied: what it copies into a slot at every save; its twins on the node copy the rest.
        replicated: of that, what another node keeps a replica of.
    """

    held: tuple[int, ...]
    copied: tuple[int, ...]
    replicated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """Bytes per node, of one version.

    Attributes:
        copied: what its ranks copy; what a replacement of the node has to get back.
        written: what it writes to storage.
        kept: replicas, or parity, that it keeps for other nodes. Parity is up to one checksum chunk more.
        alone: what lives in this node only, by the tensors' own redundancy.
    """

    copied: tuple[int, ...]
    written: tuple[int, ...]
    kept: tuple[int, ...]
    alone: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """Tells what is gone of a tensor: how many of its different parts, and their bytes."""

    name: str
    num_slices: int
    num_bytes: int


@dataclass(slots=True)
class _Ledger:
    """Sums while the groups are gone through."""

    held: list[int]
    copied: list[int]
    replicated: list[int]
    written: list[int]
    alone: list[Counter[int]]
    num_bundles: int = 0


class JobPlan:
    """The costs of a job.

    Attributes:
        census: its groups.
        ranks, nodes: the costs.
        num_bundles: files of one version.
        parity_groups: by node the nodes that keep parity of each other; empty in a job that keeps none.
    """

    def __init__(self, layout: JobLayout, topology: Topology) -> None:
        self.layout = layout
        self.topology = topology
        self.census = Census(layout)
        self._sizes = [kind.num_bytes for kind in self.census.kinds]
        # What each node keeps replicas of: bytes by the rank that captures them; of parity by PARITY.
        self._kept: list[Counter[int]] = [Counter() for _ in topology.nodes]
        self.parity_groups = parity_groups.by_node(topology)
        self._backups: list[replica_placement.Shares] = []
        # Of groups that live in a node whose replicas are spread: the nodes that keep their shares.
        self._spread: dict[tuple[int, ...], set[int]] = {}
        self._shares: dict[tuple[int, int], list[tuple[int, int]]] = {}
        world, nodes = range(topology.world_size), range(len(topology.nodes))
        ledger = _Ledger(
            [0] * len(world), [0] * len(world), [0] * len(world), [0] * len(nodes), [Counter() for _ in nodes]
        )
        for members, kind in self._groups():
            if len(members) == 1:
                self._add_single(ledger, members[0], kind)
            else:
                self._add_group(ledger, members, kind)
        self.num_bundles = ledger.num_bundles
        self.ranks = RankCosts(tuple(ledger.held), tuple(ledger.copied), tuple(ledger.replicated))
        self._alone = ledger.alone
        self.nodes = self._node_costs(ledger)

    @property
    def unique_bytes(self) -> int:
        """The whole state once; what one version takes in storage."""
        return sum(
            self._sizes[kind] * count
            for groups in self.census.groups.values()
            for kind, count in Counter(groups.values()).items()
        )

    def slots(self, node: int, num_slots: int, *, spare_bytes: int = 0) -> list[int]:
        """Payload bytes of every slot of a node: its ranks' own, each with room to grow, and two for each rank that it
        keeps replicas of, or for parity.
        """
        own = [self.ranks.copied[rank] + spare_bytes for rank in self.topology.ranks_on(node)]
        kept = [size for _, size in sorted(self._kept[node].items()) if size]
        return [size for size in own for _ in range(num_slots)] + [size for size in kept for _ in range(2)]

    def backup(self, node: int) -> int | None:
        """The node that keeps the (first) replicas of what lives in `node` only; None if there is no other."""
        return self._backups[node][0][0] if self._backups else None

    def alone_on(self, node: int) -> list[str]:
        """The tensors of which a part lives in `node` only, sorted: unprotected, but for a replica."""
        return sorted({name for kind in self._alone[node] for name in self.census.names(self.census.kinds[kind])})

    def nodes_alike(self) -> list[tuple[int, ...]]:
        """The nodes in classes that have the same costs and hold the same kinds of groups alone; ascending."""
        rows = zip(self.nodes.copied, self.nodes.written, self.nodes.kept, self.nodes.alone, self._alone, strict=True)
        found: dict[tuple[object, ...], list[int]] = {}
        for node, (*costs, kinds) in enumerate(rows):
            found.setdefault((*costs, frozenset(kinds.items())), []).append(node)
        return [tuple(nodes) for nodes in found.values()]

    def lost(self, nodes: Collection[int], *, replicas: bool = True) -> tuple[Loss, ...]:
        """Return what is in no memory any more when all these nodes are gone at once; by name. `replicas`: the version
        was replicated before they died.
        """
        gone = set(nodes)
        found: Counter[int] = Counter()
        for members, kind in self._groups():
            homes = {self.topology.node_of[rank] for rank in members}
            if homes <= gone and not (replicas and len(homes) == 1 and self._survives(members, min(homes), gone)):
                found[kind] += 1
        return self._losses(found)

    def lost_with(self, ranks: Collection[int]) -> tuple[Loss, ...]:
        """Return what no other rank holds when these ranks' state is gone; slots and replicas not counted."""
        gone = set(ranks)
        return self._losses(Counter(kind for members, kind in self._groups() if gone.issuperset(members)))

    def _survives(self, members: Sequence[int], home: int, gone: Collection[int]) -> bool:
        group = self.parity_groups.get(home)
        if group is not None:  # all the others are needed
            return not any(node in gone for node in group if node != home)
        backup = self.backup(home)
        return backup is not None and self._spread.get(tuple(members), {backup}).isdisjoint(gone)

    def _losses(self, kinds: Counter[int]) -> tuple[Loss, ...]:
        slices: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for kind, count in kinds.items():
            for holding in self.census.holdings(self.census.kinds[kind]):
                if holding.num_bytes:
                    for tensor in holding.tensors:
                        slices[tensor.name] += count
                        sizes[tensor.name] += count * holding.num_bytes
        return tuple(Loss(name, slices[name], sizes[name]) for name in sorted(slices))

    def _groups(self) -> Iterator[tuple[Sequence[int], int]]:
        """Every group: its ranks and its kind."""
        for form, groups in self.census.groups.items():
            steps = offsets(form)
            for base, kind in groups.items():
                yield [base + step for step in steps], kind

    def _add_single(self, ledger: _Ledger, rank: int, kind: int) -> None:
        """A group of one: half of all groups in most jobs, and most of them where everything is sharded."""
        size, home = self._sizes[kind], self.topology.node_of[rank]
        ledger.num_bundles += 1
        ledger.held[rank] += size
        ledger.copied[rank] += size
        ledger.written[home] += size
        if size:
            ledger.replicated[rank] += size
            ledger.alone[home][kind] += 1

    def _add_group(self, ledger: _Ledger, members: Sequence[int], kind: int) -> None:
        size = self._sizes[kind]
        for rank in members:
            ledger.held[rank] += size
        count = bundles.num_shares(members, size, self.topology)
        shares = self._shares_of(kind, count)
        ledger.num_bundles += len(shares)
        runs = runs_of(tuple(members))
        for index, num_bytes in shares:
            writer = bundles.representative(BundleRef("", (), index, count, num_bytes, "", runs=runs))
            ledger.written[self.topology.node_of[writer]] += num_bytes
        by_home: dict[int, list[int]] = {}
        for rank in members:
            by_home.setdefault(self.topology.node_of[rank], []).append(rank)
        dealt: dict[int, Counter[int]] = {}
        for local in by_home.values():
            if len(local) not in dealt:
                dealt[len(local)] = _dealt(shares, count, len(local))
            for place, num_bytes in dealt[len(local)].items():
                ledger.copied[local[place]] += num_bytes
                if len(by_home) == 1:
                    ledger.replicated[local[place]] += num_bytes
        if len(by_home) == 1 and size:
            ledger.alone[next(iter(by_home))][kind] += 1

    def _shares_of(self, kind: int, count: int) -> list[tuple[int, int]]:
        """Index and bytes of every bundle that a group of the kind is cut into; shares that nothing fell to are none."""
        if count == 1:
            return [(0, self._sizes[kind])]
        if (kind, count) not in self._shares:
            pieces = bundles.cut(self.census.shards(self.census.kinds[kind]), count)
            self._shares[kind, count] = [
                (i, sum(p.num_bytes for p in share)) for i, share in enumerate(pieces) if share
            ]
        return self._shares[kind, count]

    def _node_costs(self, ledger: _Ledger) -> NodeCosts:
        num_nodes = len(self.topology.nodes)
        copied, alone, kept = [0] * num_nodes, [0] * num_nodes, [0] * num_nodes
        for rank, home in enumerate(self.topology.node_of):
            copied[home] += ledger.copied[rank]
            alone[home] += ledger.replicated[rank]
        for group in parity_groups.groups(self.topology):
            for node in group:
                others = max(alone[other] for other in group if other != node)
                self._kept[node][PARITY] = -(-others // (len(group) - 1))
        if parity_groups.keeps_replicas(self.topology):
            self._backups = replica_placement.shares(alone, self.topology)
            for rank, home in enumerate(self.topology.node_of):
                if len(self._backups[home]) == 1:
                    self._kept[self._backups[home][0][0]][rank] += ledger.replicated[rank]
            if any(len(shares) > 1 for shares in self._backups):
                self._spread_replicas()
        kept = [counter.total() for counter in self._kept]
        return NodeCosts(tuple(copied), tuple(ledger.written), tuple(kept), tuple(alone))

    def _spread_replicas(self) -> None:
        """Nodes whose bytes go to several: their bundles one by one, as `backups.place` deals them."""
        single_node: dict[int, list[BundleRef]] = {}
        for members, kind in self._groups():
            homes = {self.topology.node_of[rank] for rank in members}
            if len(homes) == 1 and len(self._backups[home := min(homes)]) > 1:
                ranks = tuple(members)
                count = bundles.num_shares(ranks, self._sizes[kind], self.topology) if len(ranks) > 1 else 1
                for index, num_bytes in self._shares_of(kind, count):
                    single_node.setdefault(home, []).append(BundleRef("", ranks, index, count, num_bytes, ""))
        for home, refs in single_node.items():
            refs.sort(key=lambda ref: (ref.ranks, ref.index))
            for ref, node in replica_placement.deal(refs, self._backups[home]):
                self._spread.setdefault(ref.ranks, set()).add(node)
                rank = bundles.capturer(ref, home, self.topology)
                if rank is not None:
                    self._kept[node][rank] += ref.num_bytes


def _dealt(shares: Sequence[tuple[int, int]], count: int, num_local: int) -> Counter[int]:
    """Bytes that each of the ranks of one node copies, by place among them; see `bundles.capturer`."""
    found: Counter[int] = Counter()
    for index, num_bytes in shares:
        found[index * num_local // count] += num_bytes
    return found


def uniform(world_size: int, ranks_per_node: int, redundancy: str = parity_groups.REPLICA) -> Topology:
    """Nodes of equally many ranks, in order; the last one may have fewer."""
    num_nodes = -(-world_size // ranks_per_node)
    return Topology(
        tuple(f"node{node}" for node in range(num_nodes)),
        tuple(rank // ranks_per_node for rank in range(world_size)),
        redundancy=redundancy,
    )
