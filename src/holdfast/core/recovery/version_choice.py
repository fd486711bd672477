"""Decides what to come back from: the newest version that is complete everywhere, and the cheapest copy of each bundle.

Pure. Called at recovery with what every reachable keeper holds and what storage lists. Returns a plan or the reasons
why nothing can be used; the same plan on every rank, because all are given the same facts. A copy that failed its
digest is quarantined by the caller and the plan is made again: next source, else next older version. What cannot be
reached for now is not damaged: while a version may be good nothing older is chosen, and the caller is told to wait.
"""

from __future__ import annotations

import enum
from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from holdfast.core.layout.parity_stripes import PieceCopy
from holdfast.core.model import BundleRef, Decision, Seal, Topology, Version
from holdfast.core.rank_runs import Runs, count_in, is_in, runs_of, spread
from holdfast.core.recovery import parity_choice
from holdfast.core.recovery.broadcast_tree import RANKS_PER_READER, upstreams
from holdfast.core.versions.lineage import Lineage

# One copy: of a bundle of a version, on a node (None: in storage; REBUILT: on none, it is made of parity).
Copy: TypeAlias = tuple[Version, str, int | None]


class Source(enum.IntEnum):
    """Names where a bundle comes from, cheapest first."""

    SLOT = 0  # the rank's own slot
    NODE = 1  # another slot on the rank's node
    PRELOADED = 2  # what the rank's keeper fetched while the trainers started
    PEER = 3  # a keeper on another node
    PARITY = 4  # made of what keepers on other nodes hold: their parity and their images
    STORAGE = 5  # the durable checkpoint


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """A sealed bundle in some node's memory; of twins, the same bytes in that of many nodes.

    Attributes:
        nodes: who hold it, as runs (`core.rank_runs`): 512 nodes are three numbers.
        ranks: whose slots hold it, likewise; empty for a replica, or what was preloaded.
    """

    version: Version
    nodes: Runs
    ranks: Runs
    seal: Seal
    preloaded: bool = False

    @classmethod
    def at(cls, version: Version, node: int, rank: int | None, seal: Seal) -> MemoryCopy:
        """Return the copy of one node."""
        return cls(version, runs_of([node]), runs_of([] if rank is None else [rank]), seal)

    def without(self, nodes: Collection[int | None]) -> MemoryCopy:
        """Return it as the others hold it."""
        return replace(self, nodes=runs_of([node for node in spread(self.nodes) if node not in nodes]))


@dataclass(frozen=True, slots=True)
class Stored:
    """A durable version as its manifest tells it.

    Attributes:
        files: name of the file of every bundle.
    """

    version: Version
    world_size: int
    table: tuple[BundleRef, ...]
    seals: Mapping[str, Seal]
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Copies that were proven bad, and versions that are passed over, each with the reason."""

    copies: frozenset[Copy] = frozenset()
    versions: Mapping[Version, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Holds what cannot be read or asked for now. It says nothing of what is there, so it condemns nothing.

    Attributes:
        manifests: committed versions, with the reason why their manifest cannot be read.
        copies: copies that could not be had, with the reason.
        keepers: labels of nodes whose keepers do not answer; they may hold versions that nobody else knows.
    """

    manifests: Mapping[Version, str] = field(default_factory=dict)
    copies: Mapping[Copy, str] = field(default_factory=dict)
    keepers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known at a recovery.

    Attributes:
        memory: every sealed bundle of every reachable keeper.
        tables: per version the complete list of the job's bundles, as some keeper knows it.
        stored: durable versions.
        suspects: versions whose twins differ.
        unreachable: what may be there besides.
        ranks_per_reader: see `core.recovery.broadcast_tree`.
        parity: every piece of parity of every reachable keeper.
    """

    memory: Sequence[MemoryCopy]
    tables: Mapping[Version, tuple[BundleRef, ...]]
    stored: Mapping[Version, Stored]
    lineage: Lineage
    topology: Topology
    suspects: frozenset[Version] = frozenset()
    quarantine: Quarantine = field(default_factory=Quarantine)
    unreachable: Unreachable = field(default_factory=Unreachable)
    ranks_per_reader: int = RANKS_PER_READER
    parity: Sequence[PieceCopy] = ()

    def is_out(self, copy: Copy) -> bool:
        """Return whether a copy is not used now."""
        return copy in self.quarantine.copies or copy in self.unreachable.copies


@dataclass(frozen=True, slots=True)
class Choice:
    """The version that all ranks load.

    Attributes:
        bundles: every bundle of the job.
        seals: the agreed seal per bundle; loaded bytes must match it.
        holders: per bundle the memory copies with that seal.
        in_storage: whether the durable checkpoint may serve as a source.
        world_size: number of ranks that saved it.
        files: of the durable checkpoint, the name of every bundle's file.
        rebuilt: of bundles that no memory holds and parity can make, how.
    """

    version: Version
    bundles: tuple[BundleRef, ...]
    seals: Mapping[str, Seal]
    holders: Mapping[str, tuple[MemoryCopy, ...]]
    in_storage: bool
    world_size: int = 0
    files: Mapping[str, str] = field(default_factory=dict)
    rebuilt: Mapping[str, parity_choice.Rebuilt] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChoiceDeferred:
    """Nothing is chosen yet: what cannot be reached now may be newer than all that can.

    Attributes:
        version: what is waited for; None: whatever keepers hold that do not answer.
        reason: why it cannot be had.
        durable: whether its manifest stands. Then nothing older may ever take its place unless somebody says so; of
            what is in memory only, a keeper that stays silent is as good as lost.
    """

    version: Version | None
    reason: str
    durable: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """One bundle for one rank: which copy, from which kind of place.

    Attributes:
        node: whose memory; None for storage; REBUILT for parity.
        chunks: runs (first, end) of checksum chunks that are needed, ascending and apart; None is the whole image.
        via: of storage: the node that hands the bytes on as it gets them; None is reading storage oneself.
        file: the name of the bundle's file in storage, wherever these bytes come from; empty: it has none.
        parity: of parity: the nodes to ask, as in `parity_choice.Rebuilt`.
        pieces: of parity: the digest of their pieces, from there too.
    """

    ref: BundleRef
    seal: Seal
    source: Source
    node: int | None
    chunks: tuple[tuple[int, int], ...] | None = None
    via: int | None = None
    file: str = ""
    parity: tuple[int, ...] = ()
    pieces: str = ""

    @property
    def is_straight(self) -> bool:
        """Return whether the rank reads it from storage itself: nobody else wants it, so no memory of the node need hold it."""
        return self.source is Source.STORAGE and self.via is None and count_in(self.ref.runs) == 1


# What is to be loaded, what is waited for, or neither; with the reason.
Judged: TypeAlias = Decision[Choice | ChoiceDeferred | None]


def choose_version(facts: Facts, *, wanted: Version | None = None) -> Judged:
    """Returns the newest usable version with the reason, what has to be waited for, or None and why each was refused.
    `wanted`: only this version, because the user named it.
    """
    candidates = {copy.version for copy in facts.memory} | set(facts.stored) | set(facts.unreachable.manifests)
    if wanted is not None:
        candidates &= {wanted}
    silent = ", ".join(facts.unreachable.keepers)
    refused: list[str] = []
    for version in sorted(candidates, reverse=True):
        verdict = _judge(version, facts, explicit=wanted is not None)
        if verdict.value is None:
            refused.append(f"{version} refused: {verdict.reason}")
            continue
        why = "; ".join([f"{version}: {verdict.reason}", *refused])
        if silent and wanted is None and isinstance(verdict.value, Choice):
            return _awaited(None, f"{silent} may hold a newer version than {version}, and does not answer", why)
        return Decision(verdict.value, why)
    why = "; ".join(refused) or "no version in memory and none in storage"
    if silent:
        return _awaited(wanted, f"{silent} may hold a version, and does not answer", why)
    return Decision(None, why)


def _awaited(version: Version | None, reason: str, why: str, *, durable: bool = False) -> Judged:
    return Decision(ChoiceDeferred(version, reason, durable), f"{reason}; {why}" if why else reason)


def fetches(choice: Choice, rank: int, facts: Facts) -> tuple[Fetch, ...]:
    """The cheapest usable copy of every bundle that `rank` needs in the layout that was saved."""
    found = [cheapest(ref, choice, rank, facts) for ref in choice.bundles if ref.has(rank)]
    if all(fetch.source is not Source.STORAGE for fetch in found):
        return tuple(found)
    home, passed_on = facts.topology.node_of[rank], _upstreams(choice, facts)
    return tuple(
        replace(fetch, via=passed_on[fetch.ref.bundle_id][home]) if fetch.source is Source.STORAGE else fetch
        for fetch in found
    )


def explain(ways: Mapping[str, str], num_bytes: Mapping[str, int]) -> str:
    """Return where the bundles of a rank come from and why from there, in one sentence; both by bundle id."""
    groups: dict[str, list[int]] = {}
    for bundle_id, text in ways.items():
        groups.setdefault(text, []).append(num_bytes.get(bundle_id, 0))
    return "; ".join(
        f"{len(sizes)} bundle{'s' * (len(sizes) > 1)} ({sum(sizes)} bytes) {text}" for text, sizes in groups.items()
    )


def way(fetch: Fetch, nodes: Sequence[str]) -> str:
    """Return where one bundle comes from and why from there."""
    if fetch.via is not None:
        return f"handed on by {nodes[fetch.via]}, so that storage is read once"
    if fetch.is_straight:
        return "from storage, as no memory holds them and no other rank wants them"
    if fetch.source is Source.PEER and fetch.node is not None:
        return f"from the memory of {nodes[fetch.node]}, as none is on this node"
    return _WAYS[fetch.source]


def place(node: int | None, nodes: Sequence[str]) -> str:
    """Return the name of the place of a copy."""
    return "storage" if node is None else "parity" if node == parity_choice.REBUILT else nodes[node]


_WAYS = {
    Source.SLOT: "from the rank's own slot",
    Source.NODE: "from another slot of this node",
    Source.PRELOADED: "from the keeper of this node, which fetched them while the trainers started",
    Source.PARITY: "from parity on other nodes, as no node holds them any more",
    Source.STORAGE: "from storage, as no memory holds them and this node reads them for the others",
}


def _upstreams(choice: Choice, facts: Facts) -> Mapping[str, Mapping[int, int | None]]:
    """Return the upstreams of every bundle of the job that only storage holds."""
    stored = [ref for ref in choice.bundles if not choice.holders[ref.bundle_id]]
    return upstreams(stored, facts.topology.node_of, ranks_per_reader=facts.ranks_per_reader)


def _judge(version: Version, facts: Facts, *, explicit: bool) -> Judged:
    if version in facts.quarantine.versions:
        return Decision(None, facts.quarantine.versions[version])
    if not explicit and not facts.lineage.is_live(version):
        cut = facts.lineage.cut
        if cut is not None and version.incarnation < cut:
            return Decision(None, f"nothing is recorded of incarnation {cut}, so it is not known to be an ancestor")
        return Decision(None, "dead lineage: a later incarnation resumed from before it")
    if version in facts.suspects:
        return Decision(None, "suspect: twins sealed different bytes")
    stored = facts.stored.get(version)
    table = stored.table if stored else facts.tables.get(version, ())
    if table:
        verdict = _complete(version, table, facts)
    else:
        verdict = Decision(None, "no keeper knows all of its bundles and no manifest is committed")
    unread = facts.unreachable.manifests.get(version)
    if unread is not None and not isinstance(verdict.value, Choice):
        return _awaited(version, f"its manifest cannot be read: {unread}", "", durable=True)
    return verdict


def _complete(version: Version, table: tuple[BundleRef, ...], facts: Facts) -> Judged:
    """Return whether every bundle has a copy that is not out, all with one seal per bundle."""
    stored = facts.stored.get(version)
    found = _copies_by_bundle(version, facts)
    made, unmade = _made_of_parity(version, found, facts)
    rebuilt: dict[str, parity_choice.Rebuilt] = {}
    seals: dict[str, Seal] = {}
    holders: dict[str, tuple[MemoryCopy, ...]] = {}
    away = ""
    for ref in table:
        copies = found.get(ref.bundle_id, [])
        durable = stored.seals.get(ref.bundle_id) if stored else None
        digests = {copy.seal.digest for copy in copies}
        if durable is None and len(digests) > 1:
            return Decision(None, f"copies of bundle {ref.bundle_id} differ")
        way = None if copies else made.get(ref.bundle_id)
        seal = durable or (copies[0].seal if copies else way.seal if way else None)
        agreeing = tuple(copy for copy in copies if seal and copy.seal.digest == seal.digest)
        if way is not None and seal is not None and way.seal.digest == seal.digest:
            rebuilt[ref.bundle_id] = way
        elif seal is None or (not agreeing and (durable is None or facts.is_out((version, ref.bundle_id, None)))):
            # There may be a copy later; but if another bundle has none for good, nobody need wait.
            reasons = [why for copy, why in facts.unreachable.copies.items() if copy[:2] == (version, ref.bundle_id)]
            if not reasons:
                why = f": {unmade[ref.bundle_id]}" if ref.bundle_id in unmade else ""
                return Decision(None, f"no usable copy of bundle {ref.bundle_id} (ranks {_short(ref.ranks)}){why}")
            away = away or f"bundle {ref.bundle_id}: {' and '.join(dict.fromkeys(reasons))}"
            continue
        seals[ref.bundle_id], holders[ref.bundle_id] = seal, agreeing
    if away:
        return _awaited(version, away, "", durable=stored is not None)
    in_memory = [bool(held) or name in rebuilt for name, held in holders.items()]
    where = "memory" if all(in_memory) else "memory and storage" if any(in_memory) else "storage"
    if rebuilt:
        where += f", {len(rebuilt)} bundles of it by parity"
    world_size = stored.world_size if stored else 1 + max(ref.runs[-1][1] for ref in table)
    files = stored.files if stored else {}
    return Decision(
        Choice(version, table, seals, holders, stored is not None, world_size, files, rebuilt), f"complete in {where}"
    )


def _made_of_parity(
    version: Version, found: Mapping[str, Sequence[MemoryCopy]], facts: Facts
) -> tuple[Mapping[str, parity_choice.Rebuilt], Mapping[str, str]]:
    """Return how bundles can be made of parity; those of which that failed are left out."""
    if not facts.parity:
        return {}, {}
    names = {seal.bundle_id for piece in facts.parity if piece.version == version for seal in piece.own}
    held = {
        (node, name, copy.seal.digest)
        for name in names & found.keys()
        for copy in found[name]
        for node in spread(copy.nodes)
    }
    made, unmade = parity_choice.rebuildable(version, facts.parity, held)
    out = parity_choice.REBUILT
    return {name: way for name, way in made.items() if not facts.is_out((version, name, out))}, unmade


def _copies_by_bundle(version: Version, facts: Facts) -> dict[str, list[MemoryCopy]]:
    out: dict[str, set[int | None]] = {}
    for other, bundle_id, node in (*facts.quarantine.copies, *facts.unreachable.copies):
        if other == version:
            out.setdefault(bundle_id, set()).add(node)
    found: dict[str, list[MemoryCopy]] = {}
    for copy in facts.memory:
        if copy.version == version:
            bundle_id = copy.seal.bundle_id
            left = copy.without(out[bundle_id]) if bundle_id in out else copy
            if left.nodes:
                found.setdefault(bundle_id, []).append(left)
    return found


def cheapest(ref: BundleRef, choice: Choice, rank: int, facts: Facts) -> Fetch:
    """The cheapest usable copy of a bundle for `rank`."""
    home = facts.topology.node_of[rank]
    seal = choice.seals[ref.bundle_id]
    options: list[tuple[Source, int, int | None]] = []
    for copy in choice.holders[ref.bundle_id]:
        if is_in(home, copy.nodes):
            near = Source.PRELOADED if copy.preloaded else Source.NODE
            options.append((Source.SLOT if is_in(rank, copy.ranks) else near, 0, home))
        else:
            # Readers spread over the holders, so that no node serves everybody: each takes the next one round.
            holders = spread(copy.nodes)
            nearest = holders[bisect(holders, home) % len(holders)]
            options.append((Source.PEER, (nearest - home) % len(facts.topology.nodes), nearest))
    made = choice.rebuilt.get(ref.bundle_id)
    if made is not None and not facts.is_out((choice.version, ref.bundle_id, parity_choice.REBUILT)):
        options.append((Source.PARITY, 0, parity_choice.REBUILT))
    if choice.in_storage and not facts.is_out((choice.version, ref.bundle_id, None)):
        options.append((Source.STORAGE, 0, None))
    source, _, node = min(options, key=lambda option: option[:2])
    file = choice.files.get(ref.bundle_id, "")
    if made is None or source is not Source.PARITY:
        return Fetch(ref, seal, source, node, file=file)
    return Fetch(ref, seal, source, node, file=file, parity=made.nodes, pieces=made.digest)


def _short(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in ranks]
    return ", ".join(listed) if len(listed) <= 4 else f"{', '.join(listed[:3])} and {len(listed) - 3} more"
