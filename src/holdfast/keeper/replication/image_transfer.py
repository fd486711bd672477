"""Pulling images from another keeper, straight into a slot, by one line or several.

A network often gives one connection a part of what it gives many. How many lines one peer is worth is learnt as for streams
of storage (`tiers.backends.parallel_streams`): one at first, twice as many as long as that makes it faster by a tenth.
Chunks are dealt to whichever line is free, so a slow one gets few. Every chunk is proved by its own digest, at its own place,
whichever line brought it. The first error ends all lines; when a call returns or raises, nothing writes to its memory.

The further lines belong to the first: the sender pins slots for that one, counts what moves on any of them, and cuts them
together (`keeper.service.peer_requests`). It may refuse further ones; then those that there are bring it all.
Used for replicas and for restoring.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from holdfast.base.errors import CorruptError, HoldfastError, VersionNotFound
from holdfast.core.layout.parity_stripes import Piece
from holdfast.core.model import Seal, Version
from holdfast.keeper.replication.peer_line import ImagePart, PeerLine
from holdfast.keeper.rpc.messages import Hello
from holdfast.tiers.backends.parallel_streams import UNITS_PER_TRIAL, StreamCount
from holdfast.tiers.format import image as image_format
from holdfast.tiers.wire import frames

logger = logging.getLogger(__name__)

# One interpreter serves all lines of a keeper: more of them would only take turns.
MOST_LINES = 8
# A line is worth its greeting for so many chunks: what is smaller than twice as much goes by one.
CHUNKS_PER_LINE = 4


def count_lines() -> StreamCount:
    """A number of lines to one peer that is still to be learnt."""
    return StreamCount(first=1, most=MOST_LINES)


class PeerReader:
    """Reads from another keeper. One thread uses it, and has others help it during a call.

    Args:
        hello: the greeting of this one.
        stopping: asked before each piece.
        security: what proves us, where the address is on another node.
        urgent: somebody waits for it (a restore): the sender does not pace it.
        count: how many lines the peer is worth, as far as it is known; it learns from this.

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
        count: StreamCount | None = None,
    ) -> None:
        self._address = address
        self._hello = msgspec.structs.replace(hello, transfer=1 + secrets.randbits(48))
        self._stopping = stopping
        self._security = security
        self._urgent = urgent
        self._count = count or count_lines()
        self._most = MOST_LINES  # fewer where one could not be had
        self._lines = {0: self._dial()}

    def seals(self, version: Version, bundle_ids: tuple[str, ...]) -> dict[str, Seal]:
        """Seals, with chunk digests, of those bundles that the peer holds."""
        return self._lines[0].seals(version, bundle_ids)

    def parity(self, version: Version, bundle_id: str, name: str, *, known: bool = False) -> tuple[Piece | None, Seal]:
        """The peer's piece of parity of that name, and the seal of a bundle that is in it; see PeerLine."""
        return self._lines[0].parity(version, bundle_id, name, known=known)

    def read_into(
        self, version: Version, seal: Seal, view: memoryview, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """Fills `view`, which has the image's length, and proves it chunk by chunk; tells the bytes of each.

        Raises:
            VersionNotFound: the peer no longer holds it. CorruptError: a chunk is not what was sealed.
            KeeperLost: the peer is gone, too slow, or we are stopping.
        """
        where = f"{version} of {self._lines[0].where}"
        image_format.check_length(len(view), seal, where)
        digests = self._read(ImagePart(version, seal, 0, view.cast("B")), progress)
        if image_format.image_digest(digests) != seal.digest:
            raise CorruptError(f"image {seal.bundle_id} differs from its seal", where=where)

    def read_chunks_into(
        self,
        version: Version,
        seal: Seal,
        first: int,
        view: memoryview,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Fills `view` with as many chunks, beginning with number `first`, and proves each; as `read_into` else.

        Raises:
            CorruptError: the seal has no digests of chunks that could prove them.
        """
        if image_format.image_digest(seal.chunk_digests) != seal.digest:
            raise CorruptError(f"the seal of image {seal.bundle_id} does not prove its chunks", where=str(version))
        self._read(ImagePart(version, seal, first, view.cast("B")), progress)

    def read_landing_into(
        self,
        version: Version,
        bundle_id: str,
        view: memoryview,
        known: Callable[[Seal], None],
        proved: Callable[[int], None],
    ) -> Seal:
        """Fills `view` with a bundle that may still be arriving at the peer, by one line; see PeerLine."""
        return self._lines[0].read_landing_into(version, bundle_id, view, known, proved)

    def close(self) -> None:
        """Ends the connections; the peer takes its pins off."""
        for line in self._lines.values():
            line.close()

    def _dial(self) -> PeerLine:
        return PeerLine(self._address, self._hello, self._stopping, self._security, urgent=self._urgent)

    def _read(self, part: ImagePart, progress: Callable[[int], None]) -> tuple[str, ...]:
        """Reads and proves a part; the digests of its chunks."""
        most = max(1, min(self._most, part.num_chunks // CHUNKS_PER_LINE))
        deal = _Deal(part, self._count, most, f"{part.version} of {self._lines[0].where}", progress)
        threads: list[threading.Thread] = []

        def came(chunk: int, digest: str) -> None:
            deal.came(chunk, digest)
            self._get_help(deal, threads)

        self._get_help(deal, threads)
        self._work(0, deal, came)
        for thread in threads:
            thread.join()  # each of its waits has a deadline, and an error has cut its line
        error, deal.error = deal.error, None
        if error is None:
            return deal.digests()
        if threads and isinstance(error, HoldfastError) and not error.condemns and not self._stopping():
            self._count.failed(self._count.now)
        try:
            raise error
        finally:
            del error  # which would else keep itself, and the memory that was read into

    def _get_help(self, deal: _Deal, threads: list[threading.Thread]) -> None:
        """Lets as many lines work as are worth it. Where the system allows no thread, those that there are do."""
        while deal.is_short(number := 1 + len(threads)):
            thread = threading.Thread(target=self._help, args=(number, deal), name="holdfast line", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._do_without(number, deal)
                return
            threads.append(thread)

    def _help(self, number: int, deal: _Deal) -> None:
        """Has one more line work, in a thread of its own."""
        try:
            if number not in self._lines:
                self._lines[number] = self._dial()
        except (HoldfastError, OSError) as error:  # those that there are go on
            logger.info("no further line to %s: %s", self._lines[0].where, error)
            self._do_without(number, deal)
            return
        self._work(number, deal, deal.came)

    def _do_without(self, number: int, deal: _Deal) -> None:
        """A line cannot be had: neither it nor any after it."""
        self._most = min(self._most, number)
        deal.most = min(deal.most, number)

    def _work(self, number: int, deal: _Deal, came: Callable[[int, str], None]) -> None:
        """Reads what is dealt to one line; the first error ends all."""
        deal.begin()
        try:
            self._lines[number].read(deal.part, deal.chunks(number), came)
        except BaseException as error:  # noqa: BLE001  # raised by whoever asked for the part
            deal.fail(error)
            for line in tuple(self._lines.values()):
                line.abort()
        finally:
            deal.end()


class _Deal:
    """Deals the chunks of one part to whichever line is free, and takes what came. Any thread.

    Args:
        part: what is read.
        count: how many lines are worth it; it learns from this.
        most: lines that this part may have.
        where: for errors.
        progress: told the bytes of each chunk, by one thread at a time.
    """

    def __init__(
        self, part: ImagePart, count: StreamCount, most: int, where: str, progress: Callable[[int], None]
    ) -> None:
        self.part = part
        self.most = most
        self.error: BaseException | None = None
        self._count = count
        self._where = where
        self._progress = progress
        self._lock = threading.Lock()
        self._next = 0
        self._digests = [""] * part.num_chunks
        self._working = 0
        self._units, self._bytes, self._began_s = 0, 0, 0.0

    def is_short(self, have: int) -> bool:
        """Return whether one more line than so many is worth it."""
        with self._lock:
            return have < self._wanted() and self.error is None and self._next < len(self._digests)

    def chunks(self, number: int) -> Iterator[int]:
        """The chunks that one line is dealt."""
        while (chunk := self._take(number)) is not None:
            yield chunk

    def _take(self, number: int) -> int | None:
        with self._lock:
            if self.error is not None or self._next >= len(self._digests) or number >= self._wanted():
                return None
            self._next += 1
            return self._next - 1

    def _wanted(self) -> int:
        return max(1, min(self._count.now, self.most))

    def begin(self) -> None:
        """One more line works."""
        self._change(1)

    def end(self) -> None:
        """A line works no more."""
        self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            self._working += by
            self._units = -self._working

    def came(self, chunk: int, digest: str) -> None:
        """A chunk is here.

        Raises:
            CorruptError: it is not what was sealed.
        """
        image_format.check_chunk(self.part.first + chunk, digest, self.part.seal, self._where)
        num_bytes = min(image_format.CHUNK_BYTES, len(self.part.view) - chunk * image_format.CHUNK_BYTES)
        with self._lock:
            self._digests[chunk] = digest
            self._progress(num_bytes)
            self._measure(num_bytes)

    def fail(self, error: BaseException) -> None:
        """A line broke, or brought something wrong; the first such error counts."""
        with self._lock:
            self.error = self.error or error

    def digests(self) -> tuple[str, ...]:
        """The digest of each chunk. All came."""
        return tuple(self._digests)

    def _measure(self, num_bytes: int) -> None:
        """A trial begins when each line has brought one chunk: what had come of it before would count as quicker."""
        if self._working != self._count.now:
            self._units = -self._working
            return
        self._units += 1
        if self._units > 0:
            self._bytes += num_bytes
            if self._units < UNITS_PER_TRIAL * self._working:
                return
            now = time.monotonic()
            self._count.learn(self._working, self._bytes / max(now - self._began_s, 1e-6))
            self._units = 0
        if self._units == 0:
            self._bytes, self._began_s = 0, time.monotonic()


def require(seals: dict[str, Seal], bundle_id: str, where: str) -> Seal:
    """The seal of a bundle that the peer was said to hold.

    Raises:
        VersionNotFound: it does not (any more).
    """
    if bundle_id not in seals:
        raise VersionNotFound(f"the peer does not hold bundle {bundle_id} any more", where=where)
    return seals[bundle_id]
