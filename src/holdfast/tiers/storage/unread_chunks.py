"""A bundle of storage of which a rank reads only what tells what is where, and the rest into buffers of its own.

`open_bundle` reads and proves the chunks with the header and the values. They lie in an address range as large as the image,
in which nothing else is touched, so it takes no other memory. All other chunks are read when they are wanted, several
at once. No byte is handed over before its chunk is proved. What is unread is read by `checkpoint.restore.tensor_fill`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.core.model import Version
from holdfast.tiers.backends.interface import NotCachedError
from holdfast.tiers.backends.parallel_streams import Streams, requests_at_once
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.read_limit import ReadLimit
from holdfast.tiers.storage.shared_reads import SharedReads
from holdfast.tiers.storage.stored_bundles import StoredBundles

_UNTOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True, slots=True)
class UnreadChunks:
    """Reads the chunks of a bundle's file that are not in its view; any thread may.

    Attributes:
        here: numbers of the chunks that are; all of them: nothing is left to read.
        shared: other processes of this node that read the same; None: there are none.
    """

    bundles: StoredBundles
    version: Version
    file: BundleFile
    shared: SharedReads | None = None
    here: set[int] = field(default_factory=set)
    _cached: list[int] = field(default_factory=list)

    def read(self, index: int, chunk: memoryview) -> str:
        """Fills `chunk` with chunk `index`, proves it, and returns its digest.

        Raises:
            CorruptError: missing, cut short, or damaged; names the bytes. StorageError: the path refuses.
            StorageBusy: another process reads it, and does not end in time.
        """

        def stored() -> str:
            return self.bundles.read_chunk(self.version, self.file, index, chunk)

        if self.shared is None:
            return stored()

        def cached() -> str | None:
            try:
                digest = self.bundles.read_chunk(self.version, self.file, index, chunk, cached=True)
            except NotCachedError:
                return None
            self._cached.append(len(chunk))
            return digest

        where = self.bundles.where(self.version, self.file)
        return self.shared.read(self.file.ref.bundle_id, index, cached, stored, where)

    def order(self, chunks: Sequence[int]) -> list[int]:
        """Return the numbers of these chunks in the order in which they are read."""
        return list(chunks) if self.shared is None else self.shared.plan.order(self.file.ref.bundle_id, chunks)

    def streams(self, done: Callable[[int], None]) -> Streams:
        """Streams to read it by; who shares it holds a share of the buffers."""
        return self.bundles.streams(self.file.length // self._num_ranks, done, buffered=True)

    def limit(self, patience_s: float) -> ReadLimit:
        """Return a limit for reading it; ranks that share it are several, and each asks for a part at once."""
        at_once = requests_at_once(self.file.length // self._num_ranks) * self._num_ranks
        return ReadLimit(
            patience_s, min(self.file.length, at_once * CHUNK_BYTES), self.bundles.where(self.version, self.file)
        )

    @property
    def _num_ranks(self) -> int:
        return 1 if self.shared is None else self.shared.plan.num_ranks

    @property
    def cached_bytes(self) -> int:
        """Return the bytes that were read from the page cache, after another process had read them from storage."""
        return sum(self._cached)

    @property
    def stored_bytes(self) -> int:
        """Return the bytes that this process reads from storage itself, once all is read."""
        return self.file.length - self.cached_bytes


def open_bundle(
    bundles: StoredBundles,
    version: Version,
    file: BundleFile,
    shared: SharedReads | None = None,
    moved: Callable[[int], None] = lambda _: None,
) -> tuple[memoryview, UnreadChunks]:
    """Returns the image, of which the header and the values are here, and how the rest is read; `moved` hears of each chunk.

    Raises:
        CorruptError: missing, cut short, or damaged. StorageError: the path refuses.
    """
    view = memoryview(mmap.mmap(-1, max(1, file.length), flags=_UNTOUCHED))[: file.length]
    unread = UnreadChunks(bundles, version, file, shared)
    here = unread.here

    def bring(start: int, end: int) -> None:
        for index in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            if index not in here:
                unread.read(index, view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
                here.add(index)
                moved(CHUNK_BYTES)

    where = bundles.where(version, file)
    bring(0, min(CHUNK_BYTES, file.length))
    header_bytes = image_format.header_length(view[:8], file.length, where)
    bring(0, header_bytes)
    values = image_format.read_header(view[:header_bytes], file.length, where).values
    if values is not None:
        bring(values.start, values.end)
    return view.toreadonly(), unread
