"""May the job go on from what its survivors hold, instead of from what was saved? And who gives what to whom.

A replacement needs two things: what it shares with a twin (parameters, optimizer state), which a twin's live memory has,
and what was its own (random numbers, its place in the data), of which it left a note at every step. A step is agreed
on only if every rank has its note of that very step and somebody stands between two optimizer steps with the state
of it. Whoever went on, or was caught inside an optimizer step, takes the state from a twin like the replacement does.

Pure. Every rank is given the same offers and concludes the same; whether every shard has a giver is put to a vote.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.base.terminal import some_of
from holdfast.core.model import Decision, Version
from holdfast.core.versions.lineage import Lineage


@dataclass(frozen=True, slots=True)
class Offer:
    """Says what one rank has.

    Attributes:
        live: the version whose parameters and optimizer state lie in its memory; None if they cannot be trusted.
        notes: the versions of which its own small state is noted.
        why: why nothing of it is live; empty if something is.
    """

    live: Version | None = None
    notes: tuple[Version, ...] = ()
    why: str = ""


def agree(offers: Sequence[Offer], *, newest: Version | None, lineage: Lineage) -> Decision[Version | None]:
    """The version that all ranks go on from, or None with the reason why they take what was saved.

    Args:
        offers: by rank.
        newest: the newest version that was saved and can be used; None if there is none.
        lineage: of the job; what a later incarnation left behind is never gone back to.
    """
    candidates = sorted({offer.live for offer in offers if offer.live is not None}, reverse=True)
    refused = [f"rank {rank}: {offer.why}" for rank, offer in enumerate(offers) if offer.live is None and offer.why]
    for version in candidates:
        if newest is not None and version <= newest:
            refused.append(f"{newest} was saved")
            break
        if not lineage.is_live(version):
            refused.append(f"{version}: dead lineage")
            continue
        without = [rank for rank, offer in enumerate(offers) if version not in offer.notes]
        if without:
            refused.append(f"{version}: rank {without[0]} left no note of it")
            continue
        givers = [rank for rank, offer in enumerate(offers) if offer.live == version]
        return Decision(version, f"live in the memory of rank{'s' * (len(givers) > 1)} {some_of(givers, 4)}")
    return Decision(None, "; ".join(refused) or "nobody holds live state")


def giver(ranks: Sequence[int], live: Collection[int], receiver: int) -> int | None:
    """Return which rank of a redundancy group gives its shard to `receiver`; None if no twin is live. Receivers are
    dealt out.
    """
    twins = [rank for rank in ranks if rank in live]
    return twins[receiver % len(twins)] if twins else None
