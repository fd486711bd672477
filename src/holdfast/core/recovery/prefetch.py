"""Decides what a keeper fetches while its trainers still start: what they will ask it for, as far as that can be known
by then.

The facts are those of a restore, only earlier: what storage lists, and what the keepers of other nodes hold if their
addresses are known. So is the choice (`core.recovery.version_choice`), and with it who reads what: each node reads its own part of
storage, and storage is still read once. What the restore then finds in memory it takes from there; a restore that
chooses another version finds nothing of it, and has lost nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.model import Decision
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Choice, Facts, Fetch, Source

# Two slots of a rank take twice what it saves. Whoever preloads more than this share of the free memory takes theirs.
SHARE = 3


def to_preload(choice: Choice, node: int, facts: Facts) -> Decision[tuple[Fetch, ...]]:
    """Return what `node` brings into its memory before anybody asks, in the order of the bundles; and why.

    Of what storage alone holds only that which this node reads for the others; what other nodes hold in memory, all
    that its ranks need. Nothing in another number of ranks than the one that saved: what will be needed then is not known.
    """
    world_size = facts.topology.world_size
    if choice.world_size != world_size:
        return Decision((), f"{choice.version} was saved by {choice.world_size} ranks, and {world_size} come")
    found: dict[str, Fetch] = {}
    for rank in facts.topology.ranks_on(node):
        for fetch in version_choice.fetches(choice, rank, facts):
            reads = fetch.source is Source.STORAGE and fetch.via is None
            if reads or fetch.source in (Source.PEER, Source.PARITY):
                found[fetch.ref.bundle_id] = fetch
    return Decision(tuple(found[name] for name in sorted(found)), f"{choice.version} is what a restore would choose")


def that_fit(wanted: Iterable[Fetch], free_bytes: int) -> tuple[Fetch, ...]:
    """Those that leave room for the slots: the first of them, up to a third of the memory that is free."""
    room, found = free_bytes // SHARE, []
    for fetch in wanted:
        room -= fetch.seal.length
        if room < 0:
            break
        found.append(fetch)
    return tuple(found)
