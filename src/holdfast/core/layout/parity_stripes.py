"""Decides which chunks of which images are XORed together, and which member of a parity group keeps the result.

The images that live in one member only are cut into their checksum chunks, so that every chunk can be proved against its
seal before it is used. The chunks of a member are sorted by length and dealt in turn to K-1 stripes; stripe j of
member m is for member (m + 1 + j) mod K. So each member keeps one stripe of every other one and none of its own. Row i of what
it keeps is the XOR of the i-th chunks of those stripes; a shorter chunk counts as if zeros followed. A lost
chunk is the XOR of its row and of the other chunks in it.

Pure. Everybody works this out from what a piece of parity says of itself: the seals of all images of all members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from holdfast.core.model import Seal, Version

# By member: the seals of the images that live in it only.
Covers = tuple[tuple[Seal, ...], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk number `index` of an image."""

    bundle_id: str
    index: int
    length: int


@dataclass(frozen=True, slots=True)
class Row:
    """A run of bytes of a member's parity: the XOR of one chunk of each of these members, padded with zeros.

    Attributes:
        offset: where it lies in the parity.
        length: of its longest chunk.
    """

    offset: int
    length: int
    chunks: Mapping[int, Chunk]


@dataclass(frozen=True, slots=True)
class Piece:
    """Says what one member's parity of a version is of.

    Attributes:
        member: whose it is: its place in the group.
        covers: seals of all members' images, its own included.
    """

    version: Version
    member: int
    covers: Covers

    @property
    def name(self) -> str:
        """Return the name of its bytes, where images have those of bundles; no bundle bears such a one."""
        return piece_name(self.member, self.digest)

    @property
    def digest(self) -> str:
        """Return what all pieces of the same images have in common, and no others."""
        rows = [[(seal.bundle_id, seal.length, seal.digest) for seal in seals] for seals in self.covers]
        return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()

    @property
    def brief(self) -> Piece:
        """Return it without the digests of chunks."""
        covers = tuple(tuple(replace(seal, chunk_digests=()) for seal in seals) for seals in self.covers)
        return replace(self, covers=covers)


def piece_name(member: int, digest: str) -> str:
    """Return the name of the bytes of a member's piece (`Piece.name`) by what all pieces of its group have in common."""
    return f"~parity-{member}-{digest}"


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """A piece of parity in some node's memory, as others are told of it.

    Each member names the images of two, so that those of a lost one are known and a job of many nodes is told briefly.

    Attributes:
        member: whose it is, of `size`.
        own, successor: seals of that member's images and of the next one's, without digests of chunks.
    """

    node: int
    version: Version
    member: int
    size: int
    digest: str
    own: tuple[Seal, ...]
    successor: tuple[Seal, ...]

    @classmethod
    def of(cls, node: int, piece: Piece) -> PieceCopy:
        """Return what `node` tells of its piece."""
        covers, size = piece.brief.covers, len(piece.covers)
        own, successor = covers[piece.member], covers[(piece.member + 1) % size]
        return cls(node, piece.version, piece.member, size, piece.digest, own, successor)


@dataclass(frozen=True)
class Striping:
    """Tells who keeps the parity of which chunks.

    Args:
        covers: by member, the images that live in it only.
        chunk_bytes: of a checksum chunk.
    """

    covers: Covers
    chunk_bytes: int
    _rows: dict[int, tuple[Row, ...]] = field(default_factory=dict, compare=False)

    @property
    def size(self) -> int:
        """Return how many members the group has."""
        return len(self.covers)

    @cached_property
    def _stripes(self) -> tuple[tuple[tuple[Chunk, ...], ...], ...]:
        """Return by member its stripes."""
        return tuple(self._cut(seals) for seals in self.covers)

    def _cut(self, seals: Sequence[Seal]) -> tuple[tuple[Chunk, ...], ...]:
        chunks = [
            Chunk(seal.bundle_id, start // self.chunk_bytes, min(self.chunk_bytes, seal.length - start))
            for seal in seals
            for start in range(0, seal.length, self.chunk_bytes)
        ]
        chunks.sort(key=lambda chunk: -chunk.length)  # stable: equals stay in order
        return tuple(tuple(chunks[stripe :: self.size - 1]) for stripe in range(self.size - 1))

    def stripe_for(self, member: int, keeper: int) -> tuple[Chunk, ...]:
        """The chunks of `member` that `keeper`, another one, keeps parity of."""
        return self._stripes[member][(keeper - member - 1) % self.size]

    def rows(self, keeper: int) -> tuple[Row, ...]:
        """Return what `keeper` keeps, from the beginning on."""
        if keeper not in self._rows:
            stripes = {member: self.stripe_for(member, keeper) for member in range(self.size) if member != keeper}
            rows: list[Row] = []
            offset = 0
            for at in range(max(map(len, stripes.values()))):
                chunks = {member: stripe[at] for member, stripe in stripes.items() if at < len(stripe)}
                rows.append(Row(offset, max(chunk.length for chunk in chunks.values()), chunks))
                offset += rows[-1].length
            self._rows[keeper] = tuple(rows)
        return self._rows[keeper]

    def num_bytes(self, keeper: int) -> int:
        """Bytes that `keeper` keeps."""
        rows = self.rows(keeper)
        return rows[-1].offset + rows[-1].length if rows else 0

    def row_of(self, member: int, bundle_id: str, index: int) -> tuple[int, Row]:
        """Return who keeps the parity of a chunk, and the row that it is in.

        Raises:
            KeyError: the member has no such chunk.
        """
        keeper, at = self._places[member, bundle_id, index]
        return keeper, self.rows(keeper)[at]

    @cached_property
    def _places(self) -> dict[tuple[int, str, int], tuple[int, int]]:
        return {
            (member, chunk.bundle_id, chunk.index): ((member + 1 + number) % self.size, at)
            for member, stripes in enumerate(self._stripes)
            for number, stripe in enumerate(stripes)
            for at, chunk in enumerate(stripe)
        }
