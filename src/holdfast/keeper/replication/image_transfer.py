"""Pulling images from another keeper, straight into a slot, every chunk checked as it arrives.

One connection: the receiver asks for pieces, a few ahead, and the sender answers them in order, so nothing is queued
that was not asked for, and the sender keeps no state but a pin on the slot. Used for replicas and for restoring.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from holdfast.base.errors import CorruptError, KeeperError, KeeperLost, VersionNotFound
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


class PeerReader:
    """A connection to another keeper for bulk bytes. One thread uses it.

    Args:
        address: of the keeper.
        hello: the greeting of this one.
        stopping: asked before each chunk.
        security: what proves us, where the address is on another node.
        urgent: somebody waits for it (a restore): the sender does not pace it.

    Raises:
        KeeperLost: nobody answers there. Fenced: we belong to the past. KeeperError: it serves another job.
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

    def parity(self, version: Version, bundle_id: str) -> tuple[Piece, Seal]:
        """The peer's piece of parity that a bundle is in, and the bundle's seal.

        Raises:
            VersionNotFound: it has none.
        """
        reply = self._ask(AskParity(id=1, version=version, bundle_id=bundle_id))
        if not isinstance(reply, ParityOf) or reply.seal.bundle_id != bundle_id:
            raise KeeperError("the peer did not say what parity it has", where=self._channel.where)
        return reply.piece, reply.seal

    def read_into(
        self, version: Version, seal: Seal, view: memoryview, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """Fills `view`, which has the image's length, and proves it chunk by chunk; tells the bytes of each.

        Raises:
            VersionNotFound: the peer no longer holds it. CorruptError: a chunk is not what was sealed.
            KeeperLost: the peer is gone, too slow, or we are stopping.
        """
        where = f"{version} of {self._channel.where}"
        image_format.check_length(len(view), seal, where)
        digests = self._read(version, seal, 0, view, progress)
        if image_format.image_digest(digests) != seal.digest:
            raise CorruptError(f"image {seal.bundle_id} differs from its seal", where=where)

    def read_chunks_into(
        self, version: Version, seal: Seal, first: int, view: memoryview, progress: Callable[[int], None]
    ) -> None:
        """Fills `view` with as many chunks, beginning with number `first`, and proves each; as `read_into` else.

        Raises:
            CorruptError: the seal has no digests of chunks that could prove them.
        """
        if image_format.image_digest(seal.chunk_digests) != seal.digest:
            raise CorruptError(f"the seal of image {seal.bundle_id} does not prove its chunks", where=str(version))
        self._read(version, seal, first, view, progress)

    def _read(
        self, version: Version, seal: Seal, first: int, view: memoryview, progress: Callable[[int], None]
    ) -> tuple[str, ...]:
        """Reads and proves the chunks from number `first` on; their digests."""
        where = f"{version} of {self._channel.where}"
        digests: list[str] = []
        view, digest, begin = view.cast("B"), image_format.start_digest(), 0
        for piece, length in self._pieces(version, seal, first * image_format.CHUNK_BYTES, len(view)):
            end = piece + length
            for start in range(piece, end, BLOCK_BYTES):
                block = view[start : min(start + BLOCK_BYTES, end)]
                self._channel.receive_bulk(block, timeout_s=BLOCK_TIMEOUT_S)
                digest.update(block)
            if end % image_format.CHUNK_BYTES == 0 or end == len(view):
                image_format.check_chunk(first + len(digests), digest.hexdigest(), seal, where)
                digests.append(digest.hexdigest())
                digest.reset()
                progress(end - begin)
                begin = end
        return tuple(digests)

    def _pieces(self, version: Version, seal: Seal, offset: int, size: int) -> Iterator[tuple[int, int]]:
        """Start and length of each piece of the `size` bytes from `offset` on, in order, its bytes next on the line.

        The pieces behind it are asked for already.
        """
        starts = iter(range(0, size, PIECE_BYTES))
        asked: deque[tuple[int, Pull]] = deque()
        while True:
            while len(asked) < PIECES_AHEAD and (start := next(starts, None)) is not None:
                pull = Pull(
                    id=start // PIECE_BYTES + 1,
                    version=version,
                    bundle_id=seal.bundle_id,
                    start=offset + start,
                    length=min(PIECE_BYTES, size - start),
                    urgent=self._urgent,
                )
                asked.append((start, pull))
                self._channel.send(encode(pull), timeout_s=ANSWER_TIMEOUT_S)
            if not asked:
                return
            if self._stopping():
                raise KeeperLost("this keeper stops, or its job is over", where=self._channel.where)
            (start, pull), reply = asked.popleft(), self._answer()
            if not isinstance(reply, Bulk) or (reply.id, reply.length) != (pull.id, pull.length):
                raise KeeperError("the peer sent another piece than was asked for", where=self._channel.where)
            yield start, pull.length

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


def require(seals: dict[str, Seal], bundle_id: str, where: str) -> Seal:
    """The seal of a bundle that the peer was said to hold.

    Raises:
        VersionNotFound: it does not (any more).
    """
    if bundle_id not in seals:
        raise VersionNotFound(f"the peer does not hold bundle {bundle_id} any more", where=where)
    return seals[bundle_id]
