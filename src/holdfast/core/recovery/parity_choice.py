"""Decides which bundles of a version can be made anew from parity, and whom to ask for it.

One member of a group may lack what it had: its node is gone, or one of its copies proved bad. All others must have their
piece of parity and every image that it was made of, with the digests that the pieces name: pieces that were made of other
bytes do not fit together, and count as not there. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from holdfast.core.layout.parity_stripes import PieceCopy
from holdfast.core.model import Seal, Version

# Where a bundle comes from that is made of parity: no node has it. Beside None, which is storage.
REBUILT = -2


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A bundle that can be made of parity.

    Attributes:
        nodes: by member of the group, the node that has its piece and its images; -1 for the one that lacks the bundle.
        digest: `Piece.digest` of the pieces: a node may have others of the same version, made in another group.
    """

    seal: Seal
    nodes: tuple[int, ...]
    digest: str


def rebuildable(
    version: Version, pieces: Iterable[PieceCopy], held: Collection[tuple[int, str, str]]
) -> tuple[Mapping[str, Rebuilt], Mapping[str, str]]:
    """Return by bundle how it can be made, and of those that cannot, why.

    Args:
        version: of the bundles.
        pieces: parity that nodes hold, of any version.
        held: node, bundle and digest of every copy of the version that can be used.
    """
    groups: dict[tuple[str, int], dict[int, PieceCopy]] = {}
    for copy in pieces:
        if copy.version == version and 0 <= copy.member < copy.size:
            there = groups.setdefault((copy.digest, copy.size), {})
            before = there.get(copy.member)  # on the node where that member was before the nodes changed places
            if before is None or not _is_whole(before, held):
                there[copy.member] = copy
    found: dict[str, Rebuilt] = {}
    refused: dict[str, str] = {}
    for (digest, size), there in groups.items():
        lacking = [member for member in range(size) if member not in there or not _is_whole(there[member], held)]
        if len(lacking) == 1:
            nodes = tuple(-1 if member in lacking else there[member].node for member in range(size))
            before = there[(lacking[0] - 1) % size]
            found.update((seal.bundle_id, Rebuilt(seal, nodes, digest)) for seal in before.successor)
        elif lacking:
            why = f"{len(lacking)} of the {size} nodes of its parity group lack what they had, and parity makes up for one"
            refused.update((seal.bundle_id, why) for copy in there.values() for seal in (*copy.own, *copy.successor))
    return found, {name: why for name, why in refused.items() if name not in found}


def _is_whole(copy: PieceCopy, held: Collection[tuple[int, str, str]]) -> bool:
    return all((copy.node, seal.bundle_id, seal.digest) in held for seal in copy.own)
