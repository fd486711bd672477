"""The bundles of versions in storage: written with proof, read with proof, one file each.

What is missing is so only in a root that is still ours (`in_place`). How a file lies there, plain or encrypted, is
`tiers.storage.bundle_files`; which files a version has, and that it is one, is `tiers.storage.version_store`, which makes this
and hands it out as `Storage.bundles`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from holdfast.base.errors import CorruptError, StorageError, VersionNotFound
from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Seal, Version
from holdfast.tiers.backends.interface import Backend, Linking, PageCached
from holdfast.tiers.backends.parallel_streams import (
    MOST_REQUESTS,
    MOST_STREAMS,
    UNIT_BYTES,
    StreamCount,
    Streams,
    requests_at_once,
)
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import Entry, Image
from holdfast.tiers.storage.bundle_files import BundleFiles
from holdfast.tiers.storage.manifest import ENCRYPTED, ROOT_NAME, BundleFile

logger = logging.getLogger(__name__)

# Smaller files are written again: a second name would cost as much.
MIN_LINKED_BYTES = 1 << 20
# So many files hold the same, in turns: versions that follow each other never share one, so damage of one leaves the version before.
NUM_COPIES = 2
# Before a file gets a name in another version this share of it is read and proved, one stretch after the other: within so many
# versions all of it was. Damage of the one file would else be damage of every version to come.
PROVED_PARTS = 64

_BUNDLE_FILE = re.compile(r"(.+)-[0-9a-f]{32}\.safetensors\Z")


class _InRoot(Protocol):
    """Reads below a root that another job may have taken since."""

    @property
    def require_ours(self) -> Callable[[], None]:
        """Raises unless the root is still ours."""


S = TypeVar("S", bound=_InRoot)
P = ParamSpec("P")
T = TypeVar("T")


def in_place(read: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Proves that what a reader misses or finds damaged is so in a root that is still ours: under an unmounted path all is missing.

    The reader then also raises StorageError, if the root has vanished, and InUse, if it is another job's by now.
    """

    @functools.wraps(read)
    def call(reader: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(reader, *args, **kwargs)
        except (VersionNotFound, CorruptError):
            reader.require_ours()
            raise

    return call


@dataclass(frozen=True, slots=True)
class _Kept:
    """A file of a bundle that was written or linked here, and which of its chunks is proved next."""

    version: Version
    file: BundleFile
    chunk: int

    def is_same(self, version: Version, file: BundleFile) -> bool:
        """Return whether another version's file is this one over again.

        An earlier incarnation's is not: the job may go on from an older version, or because this file was found damaged.
        """
        is_other = self.version != version and self.version.incarnation == version.incarnation
        return is_other and (self.file.file, self.file.seal) == (file.file, file.seal)


class StoredBundles:
    """Reads and writes the bundles of one job.

    What stays the same is written twice and not again, where the backend can give a file two names: each version has all its
    files all the same, none needs another, and neighbours share none. Only files that this object wrote and proved are used so.
    Neighbours are those that are committed: what lies between two of them may never be.

    Args:
        files: how each lies there.
        events: counts `storage_written_bytes`, `storage_linked_bytes` and `storage_read_bytes` (images), `cache_read_bytes` (images, read from the
            page cache alone) and `storage_record_read_bytes` (headers and values).
        require_ours: raises unless the root is still ours.
    """

    def __init__(self, backend: Backend, files: BundleFiles, events: Events, require_ours: Callable[[], None]) -> None:
        self._backend = backend
        self._files = files
        self._events = events
        self.require_ours = require_ours
        local = backend.properties.kind == "local"
        self._kept: dict[str, tuple[_Kept, ...]] = {}  # two files in turns, the one whose turn it is first
        self._readers = StreamCount() if local else StreamCount(most=MOST_REQUESTS)

    def where(self, version: Version, file: BundleFile) -> str:
        """Return where a bundle's file lies, as the operator finds it."""
        return f"{self._backend.properties.where}/{version}/{file.file}"

    def write(
        self,
        version: Version,
        ref: BundleRef,
        seal: Seal,
        view: memoryview,
        *,
        stamp: str,
        progress: Callable[[int], None] = lambda _: None,
    ) -> BundleFile:
        """Makes a sealed image durable. Writing it again, by whomever, changes nothing.

        Args:
            version: whose directory it goes into.
            ref: the bundle.
            seal: its proof, with which every chunk is compared after it was written, beside the write of the next one.
            view: the image, best aligned to a page.
            stamp: from `incarnations.make_stamp`.
            progress: called with the bytes of each part that was written.

        Raises:
            CorruptError: what was written is not what was sealed; there is no new file of the bundle's name.
        """
        view = view.cast("B")
        image_format.check_length(len(view), seal, f"{version}/{ref.bundle_id}")
        file = BundleFile.of(ref, seal, self._files.key_id)
        # If what follows fails, none of them is ever used again.
        kept = tuple(one for one in self._kept.pop(ref.bundle_id, ()) if one.is_same(version, file))
        is_late = any(one.version > version for one in kept)
        if len(kept) == NUM_COPIES and not is_late and not self._is_committed(kept[-1].version):
            kept = kept[
                :-1
            ]  # so the version before may be one that has the first file, and the last may still become one
        if (
            len(kept) == NUM_COPIES
            and not is_late
            and (linked := self._link(version, file, kept[0], stamp)) is not None
        ):
            self._kept[ref.bundle_id] = (*kept[1:], linked)
            progress(len(view))
            return file
        chunks = self._files.chunks(version, file, view)
        with self._events.span("storage.write_bundle", version=str(version), bundle=ref.bundle_id, bytes=len(view)):
            self._backend.put(f"{version}/{file.file}", chunks, stamp=stamp, progress=progress)
        self._events.count("storage_written_bytes", len(view))
        links = isinstance(self._backend, Linking) and not file.key_id  # each version encrypts with keys of its own
        if links and file.length >= MIN_LINKED_BYTES:
            put = _Kept(version, file, random.randrange(len(seal.chunk_digests) or 1))
            self._kept[ref.bundle_id] = kept if is_late else (*kept[1 - NUM_COPIES :], put)
        return file

    def _is_committed(self, version: Version) -> bool:
        """Return whether a version that was written here is known to stand."""
        try:
            return bool(self._backend.read(f"{version}/{ROOT_NAME}", length=1))
        except (VersionNotFound, StorageError):
            return False

    def _link(self, version: Version, file: BundleFile, kept: _Kept, stamp: str) -> _Kept | None:
        """Gives the same file of an earlier version a name in this one; None if it has to be written."""
        backend = self._backend
        if not isinstance(backend, Linking):
            return None
        chunk = kept.chunk
        try:
            for _ in range(-(-len(file.chunk_digests) // PROVED_PARTS)):
                self._prove(kept.version, file, chunk)
                chunk = (chunk + 1) % len(file.chunk_digests)
        except VersionNotFound:
            return None  # retired meanwhile
        except StorageError as error:
            logger.info("%s is written anew for %s: %s", kept.file.file, version, error)
            return None
        except CorruptError as error:
            what = "%s: %s; it is written anew for %s. `holdfast verify` tells which other versions have this file"
            logger.warning(what, error.where or kept.file.file, error.what, version)
            return None
        if not backend.link(f"{version}/{file.file}", f"{kept.version}/{file.file}", stamp=stamp):
            return None
        self._events.count("storage_linked_bytes", file.length)
        self._events.emit("storage.linked_bundle", version=str(version), bundle=file.ref.bundle_id, bytes=file.length)
        return _Kept(version, file, chunk)

    def _prove(self, version: Version, file: BundleFile, index: int) -> None:
        """Proves one chunk of a file that this object wrote."""
        at = index * image_format.CHUNK_BYTES
        chunk = memoryview(bytearray(min(image_format.CHUNK_BYTES, file.length - at)))
        count = self._files.read_into(version, file, chunk, offset=at)
        where = self.where(version, file)
        if count < len(chunk):
            image_format.check_length(at + count, file.seal, where)
        image_format.check_chunk(index, image_format.chunk_digest(chunk), file.seal, where)

    @contextlib.contextmanager
    def _suspicious(self, file: BundleFile) -> Iterator[None]:
        """A file in which damage is found gets no more names."""
        try:
            yield
        except CorruptError:
            self.distrust(file.ref.bundle_id)
            raise

    def distrust(self, bundle_id: str) -> None:
        """Takes note that a file of the bundle is damaged: whatever it is, the next one is written."""
        self._kept.pop(bundle_id, None)

    def opens(self, file: BundleFile) -> bool:
        """Return whether a bundle's file is plain, or its key is here."""
        return file.key_id in ("", self._files.key_id)

    @in_place
    def image(self, version: Version, file: BundleFile) -> Image:
        """Return what a bundle's file holds, from its header alone.

        Raises:
            CorruptError: missing or damaged.
        """
        where = self.where(version, file)
        prefix = counted(self._events, self._files.read(version, file, length=8))
        size = image_format.header_length(prefix, file.length, where)
        data = counted(self._events, self._files.read(version, file, length=size))
        return image_format.read_header(data, file.length, where)

    @in_place
    def read_entry(self, version: Version, file: BundleFile, entry: Entry) -> bytes:
        """The bytes of one entry, proved by the chunks in which they lie.

        Raises:
            CorruptError: missing or damaged.
        """
        where = self.where(version, file)
        first = entry.start // image_format.CHUNK_BYTES
        begin = first * image_format.CHUNK_BYTES
        end = min(file.length, -(-entry.end // image_format.CHUNK_BYTES) * image_format.CHUNK_BYTES)
        data = counted(self._events, self._files.read(version, file, offset=begin, length=end - begin))
        for index, chunk in enumerate(image_format.chunks(data), first):
            image_format.check_chunk(index, image_format.chunk_digest(chunk), file.seal, where)
        return data[entry.start - begin : entry.end - begin]

    @in_place
    def read_into(
        self,
        version: Version,
        file: BundleFile,
        view: memoryview,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Fills `view`, which has the image's length. Proves nothing but the length: `format.verify` does.

        `progress` is called with the bytes of each part that was read.

        Raises:
            CorruptError: the file is missing, too short or too long.
        """
        where = self.where(version, file)
        image_format.check_length(len(view), file.seal, where)
        with self._events.span("storage.read_bundle", version=str(version), bundle=file.ref.bundle_id, bytes=len(view)):
            read = _Read(len(view), progress)
            with self.streams(len(view), read.arrived) as streams:
                for at in range(0, len(view), UNIT_BYTES):
                    part = view[at : at + UNIT_BYTES]
                    streams.put(partial(self._files.read_into, version, file, part, offset=at))
        self._events.count("storage_read_bytes", read.count)
        self._files.check_end(version, file, read.count)

    @in_place
    def read_chunks_into(
        self,
        version: Version,
        file: BundleFile,
        first: int,
        view: memoryview,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Fills `view` with chunks of a bundle's file, beginning with number `first`, and proves each.

        Raises:
            CorruptError: missing, cut short, or damaged; names the bytes.
        """
        with self.streams(len(view), progress) as streams:
            for index, chunk in enumerate(image_format.chunks(view), first):
                streams.put(partial(self._read_and_count, version, file, index, chunk))

    def _read_and_count(self, version: Version, file: BundleFile, index: int, chunk: memoryview) -> int:
        self.read_chunk(version, file, index, chunk)
        return len(chunk)

    @in_place
    def read_chunk(
        self, version: Version, file: BundleFile, index: int, chunk: memoryview, *, cached: bool = False
    ) -> str:
        """Fills `chunk` with chunk `index` and proves it while it is in the processor's cache; returns its digest.
        `cached`: from the page cache of this machine alone, see `has_page_cache`; counted as `cache_read_bytes`.

        Raises:
            CorruptError: missing, cut short, or damaged; names the bytes. NotCachedError: the page cache has not all of it.
        """
        where, at = self.where(version, file), index * image_format.CHUNK_BYTES
        read = self._files.read_into(version, file, chunk, offset=at, cached=cached)
        if cached:
            self._events.count("cache_read_bytes", read)
        else:
            self._events.count("storage_read_bytes", read)
        if read < len(chunk):
            image_format.check_length(at + read, file.seal, where)
        if at + read == file.length:
            self._files.check_end(version, file, file.length)
        digest = image_format.chunk_digest(chunk)
        with self._suspicious(file):
            image_format.check_chunk(index, digest, file.seal, where)
        return digest

    def has_page_cache(self, version: Version, file: str) -> bool:
        """Return whether this machine caches a file of a version and can tell what of it is there. Raises nothing."""
        return isinstance(self._backend, PageCached) and self._backend.has_page_cache(f"{version}/{file}")

    def streams(self, num_bytes: int, done: Callable[[int], None], *, buffered: bool = False) -> Streams:
        """Streams to read so many bytes by; one, in the caller's thread, if they are few. `buffered`: each needs a
        buffer, so that they must not be many where little is read.
        """
        is_in_place = self._backend.properties.kind == "local" and not buffered
        at_once = MOST_STREAMS if is_in_place else requests_at_once(num_bytes)
        return Streams(self._readers, at_once if num_bytes > UNIT_BYTES else 1, done)

    @in_place
    def verify(self, version: Version, file: BundleFile, progress: Callable[[int], None] | None = None) -> None:
        """Reads a bundle's file and proves its content, in the memory of a few chunks. Without the key of an encrypted
        one, that it holds what was written. `progress` is called with the bytes of each chunk that was proved.

        Raises:
            CorruptError: missing or damaged; names the bytes.
        """
        where = self.where(version, file)
        if not self.opens(file):
            self._files.verify_stored(version, file)
            return
        buffer = memoryview(bytearray(min(file.length, image_format.CHUNK_BYTES)))
        digests: list[str] = []
        for at in range(0, file.length, image_format.CHUNK_BYTES):
            chunk = buffer[: file.length - at]
            count = self._files.read_into(version, file, chunk, offset=at)
            self._events.count("storage_read_bytes", count)
            if count < len(chunk):
                image_format.check_length(at + count, file.seal, where)
            digests.append(image_format.chunk_digest(chunk))
            with self._suspicious(file):
                image_format.check_chunk(len(digests) - 1, digests[-1], file.seal, where)
            if progress is not None:
                progress(count)
        self._files.check_end(version, file, file.length)
        image_format.check_digest(tuple(digests), file.seal, where)

    def is_ours(self, version: Version, name: str, size: int) -> bool:
        """Tell whether a file that no manifest lists is proved by itself to be a bundle's: encrypted, or an image of its name."""
        if ENCRYPTED.match(name):
            return self._files.looks_ours(version, name, size)
        match = _BUNDLE_FILE.match(name)
        if match is None:
            return False
        file = BundleFile(BundleRef(match[1], (), 0, 1, 0, ""), name, size, "", ())
        try:
            return self.image(version, file).bundle_id == match[1]
        except (CorruptError, VersionNotFound):
            return False


class _Read:
    """Counts what has arrived of an image from its first byte on, up to where the file ended."""

    def __init__(self, length: int, progress: Callable[[int], None]) -> None:
        self.count = 0
        self._length = length
        self._progress = progress
        self._ended = False

    def arrived(self, num_bytes: int) -> None:
        """Takes the bytes of the next unit."""
        if self._ended:
            return
        self._ended = num_bytes < min(UNIT_BYTES, self._length - self.count)
        self.count += num_bytes
        self._progress(num_bytes)


def counted(events: Events, data: bytes) -> bytes:
    """Returns what was read, counted as read of records."""
    events.count("storage_record_read_bytes", len(data))
    return data
