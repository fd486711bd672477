"""Pulling images from another keeper, straight into a slot, every chunk checked as it arrives.

One plain connection, one request at a time: the receiver asks, so it alone decides the pace, and the sender keeps no
state but a pin on the slot. Used for replicas and for restoring.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.base.errors import CorruptError, KeeperError, KeeperLost, VersionNotFound
from holdfast.core.model import Seal, Version
from holdfast.node.messages import (
    AnyMessage,
    AskLanding,
    AskSeals,
    Bulk,
    Hello,
    Landed,
    Message,
    Pull,
    PullLanding,
    Refusal,
    Seals,
    Welcome,
    decode,
    encode,
    raise_refusal,
)
from holdfast.tiers import format as image_format
from holdfast.tiers import wire

# A peer that does not deliver 8 MiB within this is as good as dead.
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
        security: what proves us, where the address is on another machine.

    Raises:
        KeeperLost: nobody answers there. Fenced: we belong to the past. KeeperError: it serves another job.
    """

    def __init__(
        self, address: str, hello: Hello, stopping: Callable[[], bool], security: wire.Security | None = None
    ) -> None:
        self._stopping = stopping
        self._channel = wire.connect(address, timeout_s=ANSWER_TIMEOUT_S, security=security)
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
        digests = []
        for index, chunk in enumerate(image_format.chunks(view)):
            digests.append(self._read_chunk(version, seal, index, chunk))
            progress(len(chunk))
        if image_format.image_digest(tuple(digests)) != seal.digest:
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
        for index, chunk in enumerate(image_format.chunks(view), first):
            self._read_chunk(version, seal, index, chunk)
            progress(len(chunk))

    def _read_chunk(self, version: Version, seal: Seal, index: int, chunk: memoryview) -> str:
        where = f"{version} of {self._channel.where}"
        if self._stopping():
            raise KeeperLost("this keeper stops, or its job is over", where=where)
        start = index * image_format.CHUNK_BYTES
        request = Pull(id=1, version=version, bundle_id=seal.bundle_id, start=start, length=len(chunk))
        reply = self._ask(request)
        if not isinstance(reply, Bulk) or reply.length != len(chunk):
            raise KeeperError("the peer sent another piece than was asked for", where=where)
        self._channel.receive_bulk(chunk, timeout_s=CHUNK_TIMEOUT_S)
        digest = image_format.chunk_digest(chunk)
        image_format.check_chunk(index, digest, seal, where)
        return digest

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
        try:
            body, fds = self._channel.receive(timeout_s=ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            raise KeeperLost("the peer does not answer", where=self._channel.where) from error
        wire.close_fds(fds)
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
