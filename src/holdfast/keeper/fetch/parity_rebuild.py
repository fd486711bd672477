"""Makes chunks of a bundle anew from parity: those of the piece that it is in, and of every other member of the group.

All members are read at the same time, by a thread each. All that is read is proved by its own seal, and every chunk that comes out by the seal of the lost image, which
the members of the group know. Members that do not say the same of the group are refused: their parity is of other bytes.
One thread uses one of these, and has others help it.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable

from holdfast.base.errors import CorruptError, HoldfastError
from holdfast.core.layout.parity_groups import LEAST_MEMBERS
from holdfast.core.layout.parity_stripes import Chunk, Piece, Row, Striping, piece_name
from holdfast.core.model import Seal, Version
from holdfast.core.recovery.version_choice import Fetch
from holdfast.keeper.replication.image_transfer import PeerReader, require
from holdfast.keeper.replication.xor_sources import Parts, xor_sources
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.memory.xor import clear


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
            self._rebuild(version, fetch, piece, seal, first, view, progress)
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
        self, version: Version, fetch: Fetch, piece: Piece, seal: Seal, first: int, view: memoryview,
        progress: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Fills `view` with lost chunks: each is its row of parity and the other chunks of the row, XORed."""
        lost, striping = fetch.parity.index(-1), self._striping(piece)
        wanted: defaultdict[int, list[tuple[int, int, Row | Chunk]]] = defaultdict(list)  # by member: place, length
        missing: Counter[int] = Counter()
        told = threading.Lock()
        for at in range(0, len(view), CHUNK_BYTES):
            length = min(CHUNK_BYTES, len(view) - at)
            keeper, row = striping.row_of(lost, fetch.ref.bundle_id, first + at // CHUNK_BYTES)
            wanted[keeper].append((at, length, row))
            for member, chunk in row.chunks.items():
                if member != lost:
                    wanted[member].append((at, length, chunk))
            missing[at] = len(row.chunks)

        def came(at: int) -> None:
            missing[at] -= 1
            if missing[at]:
                return
            chunk = view[at : at + CHUNK_BYTES]
            digest = image_format.chunk_digest(chunk)
            image_format.check_chunk(first + at // CHUNK_BYTES, digest, seal, f"parity of {version}")
            with told:
                progress(len(chunk))

        clear(view)
        members = [self._parts(version, fetch.parity[member], member, piece, parts) for member, parts in wanted.items()]
        xor_sources(view, members, len(members), came)

    def _parts(
        self, version: Version, node: int, member: int, piece: Piece, wanted: list[tuple[int, int, Row | Chunk]]
    ) -> Parts:
        """Reads what one member has of the rows: chunks of its own images, and rows of its piece."""
        sealed = {seal.bundle_id: seal for seal in piece.covers[member]}
        name = piece_name(member, piece.digest)
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for at, length, part in wanted:
            if isinstance(part, Row):
                yield at, self._row(version, node, name, part.offset, scratch[:length])
                continue
            seal = self._seal(node, version, part.bundle_id)
            if seal.digest != sealed[part.bundle_id].digest:
                raise CorruptError("the parity was made of other bytes than are there", where=f"node {node}")
            yield at, self._chunk(node, version, seal, part.index, scratch[: part.length])[:length]

    def _chunk(self, node: int, version: Version, seal: Seal, index: int, view: memoryview) -> memoryview:
        self._peer(node).read_chunks_into(version, seal, index, view)
        return view

    def _row(self, version: Version, node: int, name: str, begin: int, view: memoryview) -> memoryview:
        """Fills `view` with bytes of a member's piece: proved in chunks of the piece, of which they may touch two."""
        seal = self._seal(node, version, name)
        end = begin + len(view)
        if end > seal.length:
            raise CorruptError("the piece of parity is too short", where=f"node {node}")
        for index in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            start = index * CHUNK_BYTES
            last = self._last.get(name)
            if last is None or last[0] != index:
                size = min(CHUNK_BYTES, seal.length - start)
                last = index, self._chunk(node, version, seal, index, memoryview(bytearray(size)))
                self._last[name] = last
            low, high = max(begin, start), min(end, start + CHUNK_BYTES)
            view[low - begin : high - begin] = last[1][low - start : high - start]
        return view

    def _seal(self, node: int, version: Version, name: str) -> Seal:
        key = node, version, name
        if key not in self._seals:
            self._seals[key] = require(self._peer(node).seals(version, (name,)), name, f"node {node}")
        return self._seals[key]
