"""What to come back from: the newest version that is complete everywhere, and the cheapest copy of each bundle.

Pure. Called at recovery with what every reachable keeper holds and what storage lists. Returns a plan or the reasons
why nothing can be used; the same plan on every rank, because all are given the same facts. A copy that failed its
digest is quarantined by the caller and the plan is made again: next source, else next older version.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.core.lineage import Lineage
from holdfast.core.model import BundleRef, Decision, Seal, Topology, Version
from holdfast.core.spread import RANKS_PER_READER, upstreams

# How often one version is tried before an older one is taken (protocol section 7).
MAX_ATTEMPTS = 3


class Source(enum.IntEnum):
    """Where a bundle comes from, cheapest first."""

    SLOT = 0  # the rank's own slot
    NODE = 1  # another slot on the rank's node
    PRELOADED = 2  # what the rank's keeper fetched while the trainers started
    PEER = 3  # a keeper on another node
    STORAGE = 4  # the durable checkpoint


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """A sealed bundle in some node's memory. `rank`: whose slot holds it; None for a replica, or what was preloaded."""

    version: Version
    node: int
    rank: int | None
    seal: Seal
    preloaded: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """A durable version as its manifest tells it."""

    version: Version
    world_size: int
    table: tuple[BundleRef, ...]
    seals: Mapping[str, Seal]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Copies that failed: (version, bundle id, node or None for storage), and versions tried too often."""

    copies: frozenset[tuple[Version, str, int | None]] = frozenset()
    versions: frozenset[Version] = frozenset()


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known at a recovery.

    Attributes:
        memory: every sealed bundle of every reachable keeper.
        tables: per version the complete list of the job's bundles, as some keeper knows it.
        stored: durable versions.
        suspects: versions whose twins differ.
        ranks_per_reader: see `core.spread`.
    """

    memory: Sequence[MemoryCopy]
    tables: Mapping[Version, tuple[BundleRef, ...]]
    stored: Mapping[Version, Stored]
    lineage: Lineage
    topology: Topology
    suspects: frozenset[Version] = frozenset()
    quarantine: Quarantine = field(default_factory=Quarantine)
    ranks_per_reader: int = RANKS_PER_READER


@dataclass(frozen=True, slots=True)
class Choice:
    """The version that all ranks load.

    Attributes:
        bundles: every bundle of the job.
        seals: the agreed seal per bundle; loaded bytes must match it.
        holders: per bundle the memory copies with that seal.
        in_storage: whether the durable checkpoint may serve as a source.
        world_size: number of ranks that saved it.
    """

    version: Version
    bundles: tuple[BundleRef, ...]
    seals: Mapping[str, Seal]
    holders: Mapping[str, tuple[MemoryCopy, ...]]
    in_storage: bool
    world_size: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """One bundle for one rank: which copy, from which kind of place.

    Attributes:
        node: whose memory; None for storage.
        chunks: runs (first, end) of checksum chunks that are needed, ascending and apart; None is the whole image.
        via: of storage: the node that hands the bytes on as it gets them; None is reading storage oneself.
    """

    ref: BundleRef
    seal: Seal
    source: Source
    node: int | None
    chunks: tuple[tuple[int, int], ...] | None = None
    via: int | None = None


def choose_version(facts: Facts, *, wanted: Version | None = None) -> Decision[Choice | None]:
    """The newest usable version with the reason, or None with why each candidate was refused.

    Args:
        facts: what is known.
        wanted: only this version, because the user named it.
    """
    candidates = {copy.version for copy in facts.memory} | set(facts.stored)
    if wanted is not None:
        candidates &= {wanted}
    refused: list[str] = []
    for version in sorted(candidates, reverse=True):
        verdict = _judge(version, facts, explicit=wanted is not None)
        if verdict.value is not None:
            why = "; ".join([f"{version}: {verdict.reason}", *refused])
            return Decision(verdict.value, why)
        refused.append(f"{version} refused: {verdict.reason}")
    return Decision(None, "; ".join(refused) or "no version in memory and none in storage")


def fetches(choice: Choice, rank: int, facts: Facts) -> tuple[Fetch, ...]:
    """The cheapest usable copy of every bundle that `rank` needs in the layout that was saved."""
    found = [cheapest(ref, choice, rank, facts) for ref in choice.bundles if rank in ref.ranks]
    if all(fetch.source is not Source.STORAGE for fetch in found):
        return tuple(found)
    home, passed_on = facts.topology.node_of[rank], _upstreams(choice, facts)
    return tuple(
        replace(fetch, via=passed_on[fetch.ref.bundle_id][home]) if fetch.source is Source.STORAGE else fetch
        for fetch in found
    )


def explain(ways: Mapping[str, str], num_bytes: Mapping[str, int]) -> str:
    """Where the bundles of a rank come from and why from there, in one sentence; both by bundle id."""
    groups: dict[str, list[int]] = {}
    for bundle_id, text in ways.items():
        groups.setdefault(text, []).append(num_bytes.get(bundle_id, 0))
    return "; ".join(
        f"{len(sizes)} bundle{'s' * (len(sizes) > 1)} ({sum(sizes)} bytes) {text}" for text, sizes in groups.items()
    )


def way(fetch: Fetch, nodes: Sequence[str]) -> str:
    """Where one bundle comes from and why from there."""
    if fetch.via is not None:
        return f"handed on by {nodes[fetch.via]}, so that storage is read once"
    if fetch.source is Source.PEER and fetch.node is not None:
        return f"from the memory of {nodes[fetch.node]}, as none is on this node"
    return _WAYS[fetch.source]


_WAYS = {
    Source.SLOT: "from the rank's own slot",
    Source.NODE: "from another slot of this node",
    Source.PRELOADED: "from the keeper of this node, which fetched them while the trainers started",
    Source.STORAGE: "from storage, as no memory holds them and this node reads them for the others",
}


def _upstreams(choice: Choice, facts: Facts) -> Mapping[str, Mapping[int, int | None]]:
    """For every bundle of the job that only storage holds."""
    stored = [ref for ref in choice.bundles if not choice.holders[ref.bundle_id]]
    return upstreams(stored, facts.topology.node_of, ranks_per_reader=facts.ranks_per_reader)


def _judge(version: Version, facts: Facts, *, explicit: bool) -> Decision[Choice | None]:
    if version in facts.quarantine.versions:
        return Decision(None, f"failed {MAX_ATTEMPTS} times")
    if not explicit and not facts.lineage.is_live(version):
        return Decision(None, "dead lineage: a later incarnation resumed from before it")
    if version in facts.suspects:
        return Decision(None, "suspect: twins sealed different bytes")
    stored = facts.stored.get(version)
    table = stored.table if stored else facts.tables.get(version, ())
    if not table:
        return Decision(None, "no keeper knows all of its bundles and no manifest is committed")
    return _complete(version, table, facts)


def _complete(version: Version, table: tuple[BundleRef, ...], facts: Facts) -> Decision[Choice | None]:
    """Whether every bundle has a copy that is not quarantined, all with one seal per bundle."""
    stored = facts.stored.get(version)
    found = _copies_by_bundle(version, facts)
    seals: dict[str, Seal] = {}
    holders: dict[str, tuple[MemoryCopy, ...]] = {}
    for ref in table:
        copies = found.get(ref.bundle_id, [])
        durable = stored.seals.get(ref.bundle_id) if stored else None
        digests = {copy.seal.digest for copy in copies}
        if durable is None and len(digests) > 1:
            return Decision(None, f"copies of bundle {ref.bundle_id} differ")
        seal = durable or (copies[0].seal if copies else None)
        agreeing = tuple(copy for copy in copies if seal and copy.seal.digest == seal.digest)
        storage_bad = (version, ref.bundle_id, None) in facts.quarantine.copies
        if seal is None or (not agreeing and (durable is None or storage_bad)):
            return Decision(None, f"no usable copy of bundle {ref.bundle_id} (ranks {_short(ref.ranks)})")
        seals[ref.bundle_id], holders[ref.bundle_id] = seal, agreeing
    where = "memory" if all(holders.values()) else "memory and storage" if any(holders.values()) else "storage"
    world_size = stored.world_size if stored else 1 + max(rank for ref in table for rank in ref.ranks)
    return Decision(Choice(version, table, seals, holders, stored is not None, world_size), f"complete in {where}")


def _copies_by_bundle(version: Version, facts: Facts) -> dict[str, list[MemoryCopy]]:
    found: dict[str, list[MemoryCopy]] = {}
    for copy in facts.memory:
        bad = (version, copy.seal.bundle_id, copy.node) in facts.quarantine.copies
        if copy.version == version and not bad:
            found.setdefault(copy.seal.bundle_id, []).append(copy)
    return found


def cheapest(ref: BundleRef, choice: Choice, rank: int, facts: Facts) -> Fetch:
    """The cheapest usable copy of a bundle for `rank`."""
    home = facts.topology.node_of[rank]
    seal = choice.seals[ref.bundle_id]
    options: list[tuple[Source, int, int | None]] = []
    for copy in choice.holders[ref.bundle_id]:
        if copy.node == home:
            near = Source.PRELOADED if copy.preloaded else Source.NODE
            options.append((Source.SLOT if copy.rank == rank else near, 0, copy.node))
        else:
            # Readers spread over the holders, so that no node serves everybody.
            options.append((Source.PEER, (copy.node - home) % len(facts.topology.nodes), copy.node))
    if choice.in_storage and (choice.version, ref.bundle_id, None) not in facts.quarantine.copies:
        options.append((Source.STORAGE, 0, None))
    source, _, node = min(options, key=lambda option: option[:2])
    return Fetch(ref, seal, source, node)


def _short(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in ranks]
    return ", ".join(listed) if len(listed) <= 4 else f"{', '.join(listed[:3])} and {len(listed) - 3} more"
