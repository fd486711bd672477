"""Makes chunks of a bundle anew from parity: those of the piece that it is in, and of every other member of the group.

All that is read is proved by its own seal, and every chunk that comes out by the seal of the lost image, which
the members of the group know. Members that do not say the same of the group are refused: their parity is of other bytes.
Used by `keeper.fetch.fetch_sources` and `keeper.fetch.fetch_chunks`; one thread uses one of these.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.base.errors import CorruptError, HoldfastError
from holdfast.core.layout.parity_groups import LEAST_MEMBERS
from holdfast.core.layout.parity_stripes import Chunk, Piece, Row, Striping, piece_name
from holdfast.core.model import Seal, Version
from holdfast.core.recovery.version_choice import Fetch
from holdfast.keeper.replication.image_transfer import PeerReader, require
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.memory.xor import xor_into


class ParityReader:
    """Reads bundles that only parity has, for one fetch.

    Args:
        peer: gives the connection to a node's keeper.
    """

    def __init__(self, peer: Callable[[int], PeerReader]) -> None:
        self._peer = peer
        self._seals: dict[tuple[int, Version, str], Seal] = {}
        self._pieces: dict[tuple[Version, str, tuple[int, ...]], Piece] = {}
        self._stripes: Striping | None = None
        self._last: dict[str, tuple[int, memoryview]] = {}  # of each piece the chunk that was read last

    def read(
        self, version: Version, fetch: Fetch, first: int, view: memoryview, progress: Callable[[int], None]
    ) -> Seal:
        """Fills `view` with chunks of the bundle from number `first` on, each proved; returns the seal that proves them.

        Raises:
            VersionNotFound: a member lacks what is needed. KeeperLost: it does not answer.
            CorruptError: what is there is not what was sealed, or is parity of something else.
        """
        bundle_id = fetch.ref.bundle_id
        try:
            piece, seal = self._known(version, fetch)
            lost, striping = fetch.parity.index(-1), self._striping(piece)
            for at in range(0, len(view), CHUNK_BYTES):
                index = first + at // CHUNK_BYTES
                chunk = view[at : min(at + CHUNK_BYTES, len(view))]
                keeper, row = striping.row_of(lost, bundle_id, index)
                self._rebuild(version, fetch, (lost, keeper, row), piece, chunk)
                image_format.check_chunk(index, image_format.chunk_digest(chunk), seal, f"parity of {version}")
                progress(len(chunk))
        except HoldfastError as error:
            raise type(error)(
                f"parity, bundle {bundle_id}: {error.what}", where=error.where, remedy=error.remedy
            ) from error
        return seal

    def _known(self, version: Version, fetch: Fetch) -> tuple[Piece, Seal]:
        """Return as `_agreed`; what all members said of one bundle they need not say again of the next.

        Raises:
            CorruptError: as `_agreed`.
        """
        if fetch.parity.count(-1) != 1 or len(fetch.parity) < LEAST_MEMBERS:
            raise CorruptError("not one member of its group is named as lost")
        piece = self._pieces.get((version, fetch.pieces, fetch.parity))
        if piece is None or not any(s.bundle_id == fetch.ref.bundle_id for s in piece.covers[fetch.parity.index(-1)]):
            piece, seal = self._agreed(version, fetch)
            self._pieces[version, fetch.pieces, fetch.parity] = piece
        else:
            member, node = next((member, node) for member, node in enumerate(fetch.parity) if node >= 0)
            name = piece_name(member, fetch.pieces)
            _, seal = self._peer(node).parity(version, fetch.ref.bundle_id, name, known=True)
        self._require_agreed(fetch, seal)
        return piece, seal

    def _striping(self, piece: Piece) -> Striping:
        if self._stripes is None or self._stripes.covers != piece.covers:
            self._stripes = Striping(piece.covers, CHUNK_BYTES)
        return self._stripes

    @staticmethod
    def _require_agreed(fetch: Fetch, seal: Seal) -> None:
        if seal.digest != fetch.seal.digest or image_format.image_digest(seal.chunk_digests) != seal.digest:
            raise CorruptError("its parity is not of the bytes that were agreed on")

    def _agreed(self, version: Version, fetch: Fetch) -> tuple[Piece, Seal]:
        """Return what the members say of the group, and of the bundle.

        Raises:
            CorruptError: they differ, or it is not of the member that lacks the bundle.
        """
        told = [
            (member, node, *self._peer(node).parity(version, fetch.ref.bundle_id, piece_name(member, fetch.pieces)))
            for member, node in enumerate(fetch.parity)
            if node >= 0
        ]
        _, _, piece, seal = told[0]
        for member, node, other, theirs in told:
            if (
                other is None
                or piece is None
                or (other.version, other.member, other.covers) != (version, member, piece.covers)
                or theirs != seal
            ):
                raise CorruptError("the pieces of parity do not fit together", where=f"node {node}")
        self._require_agreed(fetch, seal)
        if piece is None or len(piece.covers) != len(fetch.parity):
            raise CorruptError("the group has another number of members")
        lost = piece.covers[fetch.parity.index(-1)]
        if not any(each.bundle_id == fetch.ref.bundle_id for each in lost):
            raise CorruptError("it is not of the member that is lost")
        return piece, seal

    def _rebuild(
        self, version: Version, fetch: Fetch, at: tuple[int, int, Row], piece: Piece, view: memoryview
    ) -> None:
        """Fills `view` with a lost chunk: its row of parity, and the other chunks of the row taken out again."""
        lost, keeper, row = at
        view[:] = self._row(version, fetch, keeper, piece, row, len(view))
        for member, chunk in row.chunks.items():
            if member == lost:
                continue
            node = fetch.parity[member]
            seal = self._seal(node, version, chunk.bundle_id)
            expected = next(s for s in piece.covers[member] if s.bundle_id == chunk.bundle_id)
            if seal.digest != expected.digest:
                raise CorruptError("the parity was made of other bytes than are there", where=f"node {node}")
            xor_into(view, self._chunk(node, version, seal, chunk)[: len(view)])

    def _chunk(self, node: int, version: Version, seal: Seal, chunk: Chunk) -> memoryview:
        found = memoryview(bytearray(chunk.length))
        self._peer(node).read_chunks_into(version, seal, chunk.index, found, _unheard)
        return found

    def _row(self, version: Version, fetch: Fetch, keeper: int, piece: Piece, row: Row, length: int) -> bytes:
        """Bytes of a row of a member's piece: proved in chunks of the piece, of which it may touch two."""
        node = fetch.parity[keeper]
        name = Piece(version, keeper, piece.covers).name
        seal = self._seal(node, version, name)
        end = row.offset + length
        if end > seal.length:
            raise CorruptError("the piece of parity is too short", where=f"node {node}")
        found = bytearray()
        for index in range(row.offset // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            begin = index * CHUNK_BYTES
            last = self._last.get(name)
            if last is None or last[0] != index:
                size = min(CHUNK_BYTES, seal.length - begin)
                last = index, self._chunk(node, version, seal, Chunk(name, index, size))
                self._last[name] = last
            found += last[1][max(0, row.offset - begin) : end - begin]
        return bytes(found)

    def _seal(self, node: int, version: Version, name: str) -> Seal:
        key = node, version, name
        if key not in self._seals:
            self._seals[key] = require(self._peer(node).seals(version, (name,)), name, f"node {node}")
        return self._seals[key]


def _unheard(_: int) -> None:
    """The progress that counts is that of what comes out."""
