"""One connection to the keeper of another node for bulk bytes, every chunk checked as it arrives.

The receiver asks for pieces, a few ahead, and the sender answers them in order, so nothing is queued that was not asked
for, and the sender keeps no state but a pin on the slot. Of several lines (`keeper.replication.image_transfer`) each asks for
the chunks that it is dealt. Which these are is not its business.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.base.errors import CorruptError, KeeperError, KeeperLost
from holdfast.core.layout.parity_stripes import Piece
from holdfast.core.model import Seal, Version
from holdfast.keeper.rpc.messages import (
    AnyMessage,
    AskLanding,
    AskParity,
    AskSeals,
    Bulk,
    Hello,
    Landed,
    Message,
    ParityOf,
    Pull,
    PullLanding,
    Refusal,
    Seals,
    Welcome,
    decode,
    encode,
    raise_refusal,
)
from holdfast.tiers.format import image as image_format
from holdfast.tiers.wire import frames

# Small enough that a slow line shows progress, large enough that asking costs nothing.
PIECE_BYTES = 2 << 20
# Asked for before the first of them is here, so that the line is never idle while we check what came.
PIECES_AHEAD = 4
# Checked right after it came, while it is in the cache of the core that received it.
BLOCK_BYTES = 256 << 10
# A peer that does not deliver a block within this is as good as dead. At 1 Mbit/s a block takes 2 s.
BLOCK_TIMEOUT_S = 10.0
# The same of a whole chunk that is handed on while it still arrives there.
CHUNK_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 5.0
# A peer that hands on what arrives there, and where nothing at all arrives for so long, is given up.
LANDING_PATIENCE_S = 15.0


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Chunks of one image of a peer that follow one another, and the memory that they go to.

    Attributes:
        first: number of the chunk at the beginning of `view`.
    """

    version: Version
    seal: Seal
    first: int
    view: memoryview

    @property
    def num_chunks(self) -> int:
        return -(-len(self.view) // image_format.CHUNK_BYTES)


class PeerLine:
    """A connection to another keeper for bulk bytes. One thread uses it; any may abort it.

    Args:
        hello: the greeting of this one.
        stopping: asked before each piece.
        security: what proves us, where the address is on another node.
        urgent: somebody waits for it (a restore): the sender does not pace it.

    Raises:
        KeeperLost: nobody answers there. Fenced: we belong to the past. KeeperError: it serves another job, or serves
            enough lines.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        stopping: Callable[[], bool],
        security: frames.Security | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        self._stopping = stopping
        self._urgent = urgent
        self._channel = frames.connect(address, timeout_s=ANSWER_TIMEOUT_S, security=security)
        try:
            reply = self._ask(hello)
            if not isinstance(reply, Welcome):
                raise KeeperError("the peer did not welcome us", where=address)
        except BaseException:
            self._channel.close()
            raise

    def seals(self, version: Version, bundle_ids: tuple[str, ...]) -> dict[str, Seal]:
        """Seals, with chunk digests, of those bundles that the peer holds."""
        reply = self._ask(AskSeals(id=1, version=version, bundle_ids=bundle_ids))
        if not isinstance(reply, Seals):
            raise KeeperError(f"the peer answered AskSeals with {type(reply).__name__}")
        return {seal.bundle_id: seal for seal in reply.seals}

    def parity(self, version: Version, bundle_id: str, name: str, *, known: bool = False) -> tuple[Piece | None, Seal]:
        """The peer's piece of parity of that name, unless it is `known`, and the seal of a bundle that is in it.

        Raises:
            VersionNotFound: it has none.
        """
        reply = self._ask(AskParity(id=1, version=version, bundle_id=bundle_id, name=name, known=known))
        if not isinstance(reply, ParityOf) or reply.seal.bundle_id != bundle_id:
            raise KeeperError("the peer did not say what parity it has", where=self.where)
        return reply.piece, reply.seal

    def read(self, part: ImagePart, chunks: Iterator[int], came: Callable[[int, str], None]) -> None:
        """Reads chunks of `part` as they are dealt, and tells the number in it and the digest of each that came.

        Raises:
            VersionNotFound: the peer no longer holds it. KeeperLost: the peer is gone, too slow, or we are stopping.
                BaseException: what `came` raises.
        """
        digest = image_format.start_digest()
        for start, end, is_last in self._pieces(part, chunks):
            for at in range(start, end, BLOCK_BYTES):
                block = part.view[at : min(at + BLOCK_BYTES, end)]
                self._channel.receive_bulk(block, timeout_s=BLOCK_TIMEOUT_S)
                digest.update(block)
            if is_last:
                came(start // image_format.CHUNK_BYTES, digest.hexdigest())
                digest.reset()

    def _pieces(self, part: ImagePart, chunks: Iterator[int]) -> Iterator[tuple[int, int, bool]]:
        """Start and end in the part of each piece, and whether its chunk ends with it; its bytes are next on the line.

        The pieces behind it are asked for already.
        """
        pieces, offset = _cut(part, chunks), part.first * image_format.CHUNK_BYTES
        asked: deque[tuple[int, int, bool]] = deque()
        while True:
            while len(asked) < PIECES_AHEAD and (piece := next(pieces, None)) is not None:
                asked.append(piece)
                start, end, _ = piece
                pull = Pull(
                    id=start // PIECE_BYTES + 1,
                    version=part.version,
                    bundle_id=part.seal.bundle_id,
                    start=offset + start,
                    length=end - start,
                    urgent=self._urgent,
                )
                self._channel.send(encode(pull), timeout_s=ANSWER_TIMEOUT_S)
            if not asked:
                return
            if self._stopping():
                raise KeeperLost("this keeper stops, or its job is over", where=self._channel.where)
            (start, end, is_last), reply = asked.popleft(), self._answer()
            if not isinstance(reply, Bulk) or (reply.id, reply.length) != (start // PIECE_BYTES + 1, end - start):
                raise KeeperError("the peer sent another piece than was asked for", where=self._channel.where)
            yield start, end, is_last

    def read_landing_into(
        self,
        version: Version,
        bundle_id: str,
        view: memoryview,
        known: Callable[[Seal], None],
        proved: Callable[[int], None],
    ) -> Seal:
        """Fills `view` with a bundle that may still be arriving at the peer, and proves it chunk by chunk.

        Args:
            version: of the bundle.
            bundle_id: its name.
            view: has the image's length.
            known: told the seal before the first byte comes.
            proved: told the bytes of each chunk.

        Raises:
            VersionNotFound: it failed there. CorruptError: a chunk is not what was sealed.
            KeeperLost: the peer is gone, nothing moves there any more, or we are stopping.
        """
        where = f"{version} of {self._channel.where}"
        at, seal, moved, moved_s = 0, None, -1, time.monotonic()
        while at < len(view):
            if self._stopping():
                raise KeeperLost("this keeper stops, or its job is over", where=where)
            reply = self._ask(AskLanding(id=1, version=version, bundle_id=bundle_id, beyond=at))
            if not isinstance(reply, Landed):
                raise KeeperError("the peer did not say how far it is", where=where)
            if seal is None and reply.seal is not None:
                seal = reply.seal
                image_format.check_length(len(view), seal, where)
                if image_format.image_digest(seal.chunk_digests) != seal.digest:
                    raise CorruptError(f"the seal of image {bundle_id} does not prove its chunks", where=where)
                known(seal)
            if reply.moved != moved or (seal is not None and reply.ready > at):
                moved, moved_s = reply.moved, time.monotonic()
            elif time.monotonic() - moved_s > LANDING_PATIENCE_S:
                raise KeeperLost("nothing arrives there any more", where=where)
            while seal is not None and at < min(reply.ready, len(view)):
                at += self._pull_landing(version, seal, view, at)
                proved(at - (at - 1) // image_format.CHUNK_BYTES * image_format.CHUNK_BYTES)
        if seal is None:
            raise CorruptError(f"image {bundle_id} has no bytes", where=where)
        return seal

    def _pull_landing(self, version: Version, seal: Seal, view: memoryview, at: int) -> int:
        """One proved chunk from `at` on; returns its length."""
        where = f"{version} of {self._channel.where}"
        chunk = view[at : at + image_format.CHUNK_BYTES]
        reply = self._ask(PullLanding(id=1, version=version, bundle_id=seal.bundle_id, start=at, length=len(chunk)))
        if not isinstance(reply, Bulk) or reply.length != len(chunk):
            raise KeeperError("the peer sent another piece than was asked for", where=where)
        self._channel.receive_bulk(chunk, timeout_s=CHUNK_TIMEOUT_S)
        image_format.check_chunk(at // image_format.CHUNK_BYTES, image_format.chunk_digest(chunk), seal, where)
        return len(chunk)

    @property
    def where(self) -> str:
        return self._channel.where

    def abort(self) -> None:
        """Cuts the connection, and wakes who waits for it. Any thread."""
        self._channel.abort()

    def close(self) -> None:
        """Ends the connection; the peer takes its pins off."""
        self._channel.close()

    def _ask(self, request: Message) -> AnyMessage:
        self._channel.send(encode(request), timeout_s=ANSWER_TIMEOUT_S)
        return self._answer()

    def _answer(self) -> AnyMessage:
        try:
            body, fds = self._channel.receive(timeout_s=ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            raise KeeperLost("the peer does not answer", where=self._channel.where) from error
        frames.close_fds(fds)
        reply = decode(body)
        if isinstance(reply, Refusal):
            raise_refusal(reply)
        return reply


def _cut(part: ImagePart, chunks: Iterator[int]) -> Iterator[tuple[int, int, bool]]:
    """Start and end of each piece of these chunks, and whether it is the last of its chunk."""
    for chunk in chunks:
        begin = chunk * image_format.CHUNK_BYTES
        end = min(begin + image_format.CHUNK_BYTES, len(part.view))
        for start in range(begin, end, PIECE_BYTES):
            yield start, min(start + PIECE_BYTES, end), start + PIECE_BYTES >= end
