"""A bundle of storage of which a rank reads only what tells what is where, and the rest into buffers of its own.

`open_bundle` reads and proves the chunks with the header and the values. They lie in an address range as large as the image,
in which nothing else is touched, so it takes no other memory. All other chunks are read when they are wanted, several
at once. No byte is handed over before its chunk is proved. Called by `checkpoint.restore.storage_source`; what is
unread is read by `checkpoint.restore.tensor_fill`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.model import Version
from holdfast.tiers.backends.parallel_streams import Streams
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.version_store import Storage

_UNTOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True, slots=True)
class UnreadChunks:
    """Reads the chunks of a bundle's file that are not in its view; any thread may.

    Attributes:
        here: numbers of the chunks that are.
    """

    storage: Storage
    version: Version
    file: BundleFile
    here: frozenset[int]

    def read(self, index: int, chunk: memoryview) -> str:
        """Fills `chunk` with chunk `index`, proves it, and returns its digest; raises as `Storage.read_chunk`."""
        return self.storage.read_chunk(self.version, self.file, index, chunk)

    def streams(self, done: Callable[[int], None]) -> Streams:
        """Streams to read it by."""
        return self.storage.streams(self.file.length, done, buffered=True)


def open_bundle(storage: Storage, version: Version, file: BundleFile) -> tuple[memoryview, UnreadChunks | None]:
    """Returns the image, of which the header and the values are here, and how the rest is read; None: all is here.

    Raises:
        CorruptError: missing, cut short, or damaged. StorageError: the path refuses.
    """
    view, here = memoryview(mmap.mmap(-1, max(1, file.length), flags=_UNTOUCHED))[: file.length], set[int]()

    def bring(start: int, end: int) -> None:
        for index in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            if index not in here:
                storage.read_chunk(version, file, index, view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
                here.add(index)

    where = f"{storage.where}/{version}/{file.file}"
    bring(0, min(CHUNK_BYTES, file.length))
    header_bytes = image_format.header_length(view[:8], file.length, where)
    bring(0, header_bytes)
    values = image_format.read_header(view[:header_bytes], file.length, where).values
    if values is not None:
        bring(values.start, values.end)
    is_all = len(here) * CHUNK_BYTES >= file.length
    return view.toreadonly(), None if is_all else UnreadChunks(storage, version, file, frozenset(here))
