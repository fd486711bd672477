"""Storage, read by a rank itself: where it has no keeper, and whatever no rank of another node wants.

Stands in for the keeper's client where there is none. Of a whole bundle the header and the values are read; the rest goes
from storage straight into tensors (`tiers.storage.unread_chunks`). So no page of a slot is made for it, and a state larger
than the memory that is left can be restored. Without a keeper chunks of a bundle are read into a file without a name and
mapped, and nothing is handed on between ranks: twins each read what they need. With a keeper the ranks of its node
read what they all want between them (`tiers.storage.shared_reads`). Which files there are was told with the
choice.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Sequence

from holdfast.base.errors import VersionNotFound
from holdfast.core.model import BundleRef, Version
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.keeper.rpc.client import Inventory, Located
from holdfast.tiers.backends.parallel_streams import MOST_STREAMS
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.read_limit import ReadLimit
from holdfast.tiers.storage.shared_reads import SharedReads
from holdfast.tiers.storage.unread_chunks import UnreadChunks, open_bundle
from holdfast.tiers.storage.version_store import Storage


class StorageSource:
    """Reads bundles of storage; the only source of a rank that has no keeper.

    Args:
        shared: other ranks of this node that read the same whole bundles; None: there are none.
    """

    alive = True

    def __init__(self, storage: Storage, shared: SharedReads | None = None) -> None:
        self._storage = storage
        self._shared = shared

    def answers(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Nobody has to."""
        return True

    def inventory(self, *, wide: bool = True) -> Inventory:  # noqa: ARG002 - as keepers are asked
        """Nothing is in memory."""
        return Inventory((), (), (), (), ())

    def obtain(self, version: Version, fetches: Sequence[Fetch], *, timeout_s: float) -> tuple[Located, ...]:
        """Whole bundles, or the runs of chunks that were asked for. What is read is proved; the caller reads the rest.

        Raises:
            CorruptError: missing or damaged. VersionNotFound: it has no file, or was retired. StorageError: the path refuses.
            StorageBusy: it brought nothing for this time, and as long besides as the slowest storage takes for what is asked.
        """
        found: list[Located] = []
        for fetch in fetches:
            seal = fetch.seal
            if not fetch.file:
                raise VersionNotFound(f"bundle {fetch.ref.bundle_id} of {version} has no file in storage")
            file = BundleFile(fetch.ref, fetch.file, seal.length, seal.digest, seal.chunk_digests)
            for run in fetch.chunks or (None,):
                started, unread = time.perf_counter(), None
                if run is None:
                    view, unread = self._open(version, file, timeout_s)
                else:
                    view = self._read(version, file, run, timeout_s)
                seconds = time.perf_counter() - started
                found.append(Located(fetch.ref, seal, view, Source.STORAGE, seconds, run, unread))
        return tuple(found)

    def release(self) -> None:
        """Do nothing: what was read goes when nobody refers to it any more."""

    def quarantine(self, version: Version, bundle_id: str, *, node: int | None, reason: str) -> None:
        """There is nobody else to warn."""

    def resume(
        self, incarnation: int, version: Version | None, table: Sequence[BundleRef] = (), *, read_bytes: int = 0
    ) -> None:
        """No keeper has to know."""

    def _open(self, version: Version, file: BundleFile, timeout_s: float) -> tuple[memoryview, UnreadChunks]:
        num_ranks = 1 if self._shared is None else self._shared.plan.num_ranks
        limit = ReadLimit(timeout_s, num_ranks * image_format.CHUNK_BYTES, self._storage.where)
        return limit.run(lambda: open_bundle(self._storage.bundles, version, file, self._shared, limit.moved))

    def _read(self, version: Version, file: BundleFile, run: tuple[int, int], timeout_s: float) -> memoryview:
        first, last = run
        begin, end = first * image_format.CHUNK_BYTES, min(file.length, last * image_format.CHUNK_BYTES)
        with tempfile.TemporaryFile(prefix="holdfast-") as scratch:
            scratch.truncate(end - begin)
            view = memoryview(mmap.mmap(scratch.fileno(), end - begin))
        limit = ReadLimit(timeout_s, min(end - begin, MOST_STREAMS * image_format.CHUNK_BYTES), self._storage.where)
        limit.run(lambda: self._storage.bundles.read_chunks_into(version, file, first, view, limit.moved))
        return view.toreadonly()
