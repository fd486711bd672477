"""Versions in storage: what is written in which order, what counts as there, and what may be removed.

A version exists if its root manifest does; that file is created once and last, and removed first. Everything that is
believed is verified: the job's record, the manifest with all its parts, the images. Nothing is deleted that a manifest
or the file itself does not prove to be ours, and nothing because something could not be reached. Four answers are kept apart: not there (VersionNotFound), damaged
(CorruptError), of a newer holdfast (NewerFormat), unreadable (StorageError).

The order of system calls lives in `local`; decisions (which version, when to retire) live in `core`. Called by the
keeper to write, by everyone to look; imports nothing heavy, because the commands that only look must answer at once.
Layout of the directory: docs/spec/format.md, section 1.
"""

from __future__ import annotations

import functools
import hmac
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from holdfast.base.config import load
from holdfast.base.errors import (
    CorruptError,
    Fenced,
    ForeignDirectory,
    InUse,
    StorageError,
    UsageError,
    VersionNotFound,
)
from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Seal, Version
from holdfast.tiers.backends.interface import Backend, PageCached
from holdfast.tiers.backends.open_url import open_backend
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
from holdfast.tiers.format.strict_json import AUTHENTICATED_FORMAT, MAX_RECORD_BYTES
from holdfast.tiers.storage import incarnations, version_holds
from holdfast.tiers.storage import manifest as manifests
from holdfast.tiers.storage.bucket_lease import LeaseLock
from holdfast.tiers.storage.bundle_files import BundleFiles, listed, stored_length
from holdfast.tiers.storage.encryption import Key, KeySource, load_key
from holdfast.tiers.storage.manifest import ENCRYPTED, BundleFile, Manifest
from holdfast.tiers.storage.run_lock import PREDECESSOR_TIMEOUT_S, RunLock

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

LATEST = "latest"
PINNED = "pinned"
KEPT = "kept"
# Parts of a manifest that are read at once, where there are not few of them: a store answers each after tens of milliseconds.
PARTS_AT_ONCE, FEW_PARTS = 32, 4

_BUNDLE_FILE = re.compile(r"(.+)-[0-9a-f]{32}\.safetensors\Z")


def open_storage(url: str | Path, events: Events, *, encryption: KeySource | None = None) -> Storage:
    """The storage behind a path, a `file://` URL, or a bucket's URL. Touches nothing yet.

    Args:
        url: where.
        events: see Storage.
        encryption: where the key comes from; None is what the settings of this process say.

    Raises:
        ConfigError: a scheme that this release does not know, obstore is missing, or the key cannot be had.
    """
    source = KeySource.of(load()) if encryption is None else encryption
    return Storage(open_backend(url), events, key=load_key(source.setting), key_required=source.required)


def _in_place(read: Callable[Concatenate[Storage, P], T]) -> Callable[Concatenate[Storage, P], T]:
    """Return what a reader misses or finds damaged is so in a root that is still ours: under an unmounted path all is
    missing.

    The reader then also raises StorageError, if the root has vanished, and InUse, if it is another job's by now.
    """

    @functools.wraps(read)
    def call(storage: Storage, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(storage, *args, **kwargs)
        except (VersionNotFound, CorruptError):
            storage.require_job(storage._job_id)
            raise

    return call


class Storage:
    """The versions of one job under one root.

    Args:
        backend: where the bytes go.
        events: counts `storage_written_bytes` and `storage_read_bytes` (images), `cache_read_bytes` (images, read from the
            page cache alone) and `storage_record_read_bytes` (everything else that is read).
        key: what bundle files are encrypted with, and manifests are authenticated.
        key_required: with a key, whether a version that is not authenticated with it counts as damaged.
    """

    def __init__(self, backend: Backend, events: Events, *, key: Key | None = None, key_required: bool = True) -> None:
        self._key = key
        self._key_required = key_required
        self._backend = backend
        self._events = events
        self._files = BundleFiles(backend, key, self.job_id)
        self._job_id = ""
        local = backend.properties.kind == "local"
        self._readers = StreamCount() if local else StreamCount(most=MOST_REQUESTS)
        self._run_lock = RunLock(Path(backend.properties.where)) if local else LeaseLock(backend)

    @property
    def where(self) -> str:
        """The root, as the operator names it."""
        return self._backend.properties.where

    # The job and its incarnations.

    def job_id(self) -> str:
        """The id of the job that owns the root; see `registry.read_job`."""
        self._job_id = self._job_id or incarnations.read_job(self._backend)
        return self._job_id

    def claim(self) -> str:
        """Makes an empty root ours, or finds that it is; returns the job's id. See `registry.claim_job`.

        Raises:
            InUse, StorageError: it was ours before, and is another job's or has vanished; see `require_job`.
        """
        if self._job_id:
            self.require_job(self._job_id)
        self._job_id = incarnations.claim_job(self._backend)
        return self._job_id

    def require_job(self, job_id: str) -> None:
        """Proves that the root is still what `claim` found: somebody may have removed or replaced it since. Empty: any job's.

        Raises:
            StorageError: it has vanished. InUse: it belongs to another job by now.
        """
        try:
            found = incarnations.read_job(self._backend)
        except (VersionNotFound, ForeignDirectory) as error:
            raise self._vanished() from error
        if job_id not in ("", found):
            raise InUse(
                f"the path belongs to job {found} by now; this one is {job_id}",
                where=self.where,
                remedy="one of the two needs another path",
            )
        self._job_id = job_id

    def _vanished(self) -> StorageError:
        return StorageError(
            "the checkpoint directory has vanished, or its holdfast.json has",
            where=self.where,
            remedy="bring it back, or mount it; to begin anew in an empty directory, stop the job and start it again",
        )

    def occupy(self, run_id: str, *, timeout_s: float = PREDECESSOR_TIMEOUT_S) -> None:
        """Keeps a second job out until `leave`, or until this process ends; see `tiers.storage.run_lock`. After `claim`.

        Raises:
            InUse: another living process works on the root; says which.
        """
        self._run_lock.take(run_id, timeout_s=timeout_s)

    def leave(self) -> None:
        """Lets another job in. Doing it twice, or without `occupy`, is fine."""
        self._run_lock.release()

    def register_incarnation(self, *, above: int = 0) -> int:
        """Takes the next free incarnation, higher than `above`. From then on everything of a lower one is dead."""
        return incarnations.register(self._backend, above=above)

    def highest_incarnation(self) -> int:
        """The highest incarnation that was ever registered; 0 if none was."""
        return incarnations.highest(self._backend)

    def record_resumed(
        self, incarnation: int, version: Version | None, lineage: Mapping[int, Version | None] = incarnations.NOTHING
    ) -> None:
        """Records what an incarnation started from, once; Fenced if something else is recorded. `lineage`: as for `commit`."""
        incarnations.record_resumed(self._backend, incarnation, version, lineage)

    def lineage(self) -> dict[int, Version | None]:
        """Incarnation -> what it resumed from, for those that got so far as to record it."""
        return incarnations.lineage(self._backend)

    def record_wished(self, incarnation: int, version: Version | None) -> None:
        """Records the operator's wish that an incarnation fulfils, before `record_resumed`; see `incarnations.record_wished`."""
        incarnations.record_wished(self._backend, incarnation, version)

    def fulfilled(self) -> tuple[int, Version] | None:
        """Returns the incarnation that fulfilled the operator's last wish, and that wish; see `incarnations.fulfilled`."""
        return incarnations.fulfilled(self._backend)

    def sweep(self, incarnation: int) -> list[str]:
        """Removes temporary files of dead writers, given the incarnation that runs; returns their names."""
        if not self._backend.properties.has_temporaries:
            return []
        return incarnations.sweep(self._backend, incarnation)

    # Writing a version.

    def write_bundle(
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
            stamp: from `registry.make_stamp`.
            progress: called with the bytes of each part that was written.

        Raises:
            CorruptError: what was written is not what was sealed; there is no new file of the bundle's name.
        """
        view = view.cast("B")
        image_format.check_length(len(view), seal, f"{version}/{ref.bundle_id}")
        file = BundleFile.of(ref, seal, self._files.key_id)
        chunks = self._files.chunks(version, file, view)
        with self._events.span("storage.write_bundle", version=str(version), bundle=ref.bundle_id, bytes=len(view)):
            self._backend.put(f"{version}/{file.file}", chunks, stamp=stamp, progress=progress)
        self._events.count("storage_written_bytes", len(view))
        return file

    def write_part(
        self, version: Version, node: int, files: Iterable[BundleFile], *, stamp: str
    ) -> tuple[str, int, str]:
        """Makes a node's part of the manifest durable; returns (name, length, digest) for the root."""
        data = manifests.encode_part(files)
        name = manifests.part_name(node)
        self._backend.put(f"{version}/{name}", [memoryview(data)], stamp=stamp)
        return (name, *manifests.part_entry(data))

    def commit(
        self, manifest: Manifest, *, stamp: str, lineage: Mapping[int, Version | None] = incarnations.NOTHING
    ) -> None:
        """Makes a version durable, as far as anyone is concerned, by creating its root manifest. Repeating is fine.

        Args:
            manifest: its root, with all parts.
            stamp: from `registry.make_stamp`.
            lineage: what earlier incarnations resumed from; a record of it that is missing here is made up for.

        Raises:
            Fenced: a higher incarnation is registered, or the version was committed with other content.
            StorageError: a listed file is not there.
        """
        version = manifest.version
        # An incarnation that came back from memory while nothing could be written is registered now, before anything of
        # it counts.
        self._require_newest(
            version, incarnations.enlist(self._backend, version.incarnation, manifest.resumed_from, lineage)
        )
        try:
            parts = self._parts(manifest)
            whole = manifests.assemble(manifest, parts, f"{self.where}/{version}")
        except VersionNotFound as error:
            raise _incomplete("a part of the manifest is missing", f"{self.where}/{version}") from error
        if wrong := self._missing(whole):
            what = f"{len(wrong)} of {len(whole.bundles)} files are missing or cut short, the first is {wrong[0]}"
            raise _incomplete(what, f"{self.where}/{version}")
        self._require_newest(version, self.highest_incarnation())  # once more, for all this may have taken long
        name = f"{version}/{manifests.ROOT_NAME}"
        root = replace(manifest, mac=self._mac(manifest, parts), proved_format=AUTHENTICATED_FORMAT)
        self._backend.create(name, manifests.encode_root(root), stamp=stamp)  # THE commit
        self._take_back_if_retired(whole, name)
        try:
            self._backend.put(LATEST, [memoryview(f"{version}\n".encode())], stamp=stamp)
        except StorageError as error:  # a hint for people, nothing reads it
            logger.warning("the hint %s was not written: %s", LATEST, error)

    def _require_newest(self, version: Version, highest: int) -> None:
        if highest > version.incarnation:
            raise Fenced("a newer incarnation runs; this one commits nothing any more", where=str(version))

    def _take_back_if_retired(self, manifest: Manifest, name: str) -> None:
        """We may have been paused before the commit, while another committed the version and later retired it.

        Asked also where the commit was there before: it may be ours of an attempt whose reply was lost. A path that cannot
        be read proves nothing: then the commit stays, and is tried again.
        """
        if self._missing(manifest):
            self._backend.delete(name)
            raise Fenced("the version was committed and retired while we were paused", where=name)

    def _missing(self, manifest: Manifest) -> list[str]:
        """Returns the files that the manifest lists and that are not there with their length."""
        sizes = dict(self._backend.listing(str(manifest.version)))
        return [bundle.file for bundle in manifest.bundles if sizes.get(bundle.file) != stored_length(bundle)]

    # Looking.

    def versions(self) -> list[Version]:
        """Returns the committed versions, ascending. Committed is not verified: see `manifest` and `verify_bundle`.

        Raises:
            StorageError: the path refuses, or what was a job's directory is one no more.
        """
        return self.look()[0]

    def look(self, known: Collection[Version] = ()) -> tuple[list[Version], list[Version]]:
        """Returns the committed versions, and those of which files exist but no commit, ascending, in one look.

        Args:
            known: versions that were committed when the caller looked last: as long as anything of one is there, it is not
                looked into. A request for every version that is kept would be made of a bucket each time.

        Raises:
            StorageError: as `versions`.
        """
        committed: list[Version] = []
        unfinished: list[Version] = []
        for version in self._directories():
            (committed if version in known or self.is_committed(version) else unfinished).append(version)
        return committed, unfinished

    def named(self) -> list[Version]:
        """Returns all versions of which anything is there, ascending, without a look into any: one may be unreadable.

        Raises:
            StorageError: as `versions`.
        """
        found = (Version.parse(name.rstrip("/")) for name in self._names())
        return sorted(version for version in found if version is not None)

    def is_committed(self, version: Version) -> bool:
        """Returns whether the root manifest of a version is listed."""
        return any(name == manifests.ROOT_NAME for name, _ in self._backend.listing(str(version)))

    def unfinished(self) -> list[Version]:
        """Versions of which files exist, but no commit: being written, abandoned, or left by a crash."""
        return self.look()[1]

    @_in_place
    def manifest(self, version: Version) -> Manifest:
        """The verified manifest of a version, with all its bundles.

        Raises:
            VersionNotFound: it was never committed, or is retired, perhaps while it was read.
            CorruptError: it is damaged, or a part of it is missing, or nobody who has our key made it.
            InUse: it is of another job.
            NewerFormat: it is of a newer holdfast.
            StorageError: the path refuses, or has vanished.
        """
        where, root = f"{self.where}/{version}", self.root(version)
        parts = self._parts(root)
        whole = manifests.assemble(root, parts, where)
        self._require_proof(whole, parts, where)
        return whole

    @_in_place
    def root(self, version: Version) -> Manifest:
        """The root of a version's manifest, without its bundles: one small file, which names all parts with their digests.

        Raises:
            VersionNotFound, CorruptError, InUse, NewerFormat, StorageError: as `manifest` does.
        """
        where = f"{self.where}/{version}"
        data = self._read_record(f"{version}/{manifests.ROOT_NAME}")
        root = manifests.decode_root(data, f"{where}/{manifests.ROOT_NAME}")
        if root.version != version:
            raise CorruptError(f"the manifest is of version {root.version}", where=where)
        if root.job_id != self.job_id():
            raise InUse(f"the version belongs to job {root.job_id}", where=where, remedy="choose another path")
        return root

    def opens(self, file: BundleFile) -> bool:
        """Return whether a bundle's file is plain, or its key is here."""
        return file.key_id in ("", self._files.key_id)

    @_in_place
    def image(self, version: Version, file: BundleFile) -> Image:
        """Return what a bundle's file holds, from its header alone.

        Raises:
            CorruptError: missing or damaged.
        """
        where = f"{self.where}/{version}/{file.file}"
        prefix = self._counted(self._files.read(version, file, length=8))
        size = image_format.header_length(prefix, file.length, where)
        data = self._counted(self._files.read(version, file, length=size))
        return image_format.read_header(data, file.length, where)

    @_in_place
    def read_entry(self, version: Version, file: BundleFile, entry: Entry) -> bytes:
        """The bytes of one entry, proved by the chunks in which they lie.

        Raises:
            CorruptError: missing or damaged.
        """
        where = f"{self.where}/{version}/{file.file}"
        first = entry.start // image_format.CHUNK_BYTES
        begin = first * image_format.CHUNK_BYTES
        end = min(file.length, -(-entry.end // image_format.CHUNK_BYTES) * image_format.CHUNK_BYTES)
        data = self._counted(self._files.read(version, file, offset=begin, length=end - begin))
        for index, chunk in enumerate(image_format.chunks(data), first):
            image_format.check_chunk(index, image_format.chunk_digest(chunk), file.seal, where)
        return data[entry.start - begin : entry.end - begin]

    @_in_place
    def read_bundle_into(
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
        where = f"{self.where}/{version}/{file.file}"
        image_format.check_length(len(view), file.seal, where)
        with self._events.span("storage.read_bundle", version=str(version), bundle=file.ref.bundle_id, bytes=len(view)):
            read = _Read(len(view), progress)
            with self.streams(len(view), read.arrived) as streams:
                for at in range(0, len(view), UNIT_BYTES):
                    part = view[at : at + UNIT_BYTES]
                    streams.put(partial(self._files.read_into, version, file, part, offset=at))
        self._events.count("storage_read_bytes", read.count)
        self._files.check_end(version, file, read.count)

    @_in_place
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

    @_in_place
    def read_chunk(
        self, version: Version, file: BundleFile, index: int, chunk: memoryview, *, cached: bool = False
    ) -> str:
        """Fills `chunk` with chunk `index` and proves it while it is in the processor's cache; returns its digest.

        Args:
            version: whose file it is.
            file: what the manifest says of it.
            index: number of the chunk.
            chunk: what is filled.
            cached: from the page cache of this machine alone, see `has_page_cache`; counted as `cache_read_bytes`.

        Raises:
            CorruptError: missing, cut short, or damaged; names the bytes. NotCachedError: the page cache has not all of it.
        """
        where, at = f"{self.where}/{version}/{file.file}", index * image_format.CHUNK_BYTES
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
        image_format.check_chunk(index, digest, file.seal, where)
        return digest

    def has_page_cache(self, version: Version, file: str) -> bool:
        """Return whether this machine caches a file of a version and can tell what of it is there. Raises nothing."""
        return isinstance(self._backend, PageCached) and self._backend.has_page_cache(f"{version}/{file}")

    def streams(self, num_bytes: int, done: Callable[[int], None], *, buffered: bool = False) -> Streams:
        """Streams to read so many bytes by; one, in the caller's thread, if they are few.

        Args:
            num_bytes: of all that is read.
            done: as for `Streams`.
            buffered: each needs a buffer, so that they must not be many where little is read.
        """
        is_in_place = self._backend.properties.kind == "local" and not buffered
        at_once = MOST_STREAMS if is_in_place else requests_at_once(num_bytes)
        return Streams(self._readers, at_once if num_bytes > UNIT_BYTES else 1, done)

    @_in_place
    def verify_bundle(self, version: Version, file: BundleFile, progress: Callable[[int], None] | None = None) -> None:
        """Reads a bundle's file and proves its content, in the memory of a few chunks. Without the key of an encrypted
        one, that it holds what was written.

        Args:
            version: whose file it is.
            file: what the manifest says of it.
            progress: called with the bytes of each chunk that was proved.

        Raises:
            CorruptError: missing or damaged; names the bytes.
        """
        where = f"{self.where}/{version}/{file.file}"
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
            image_format.check_chunk(len(digests) - 1, digests[-1], file.seal, where)
            if progress is not None:
                progress(count)
        self._files.check_end(version, file, file.length)
        image_format.check_digest(tuple(digests), file.seal, where)

    # Removing.

    def retire(self, version: Version, *, permit: Callable[[], None] = lambda: None) -> None:
        """Removes a committed version: first the commit, durably, then the files that it lists.

        Args:
            version: which.
            permit: asked when all is known, right before the commit goes; what it raises keeps the version.

        Raises:
            UsageError: it is pinned. InUse: it is held.
            CorruptError: its manifest is damaged, so nothing proves which files are ours.
        """
        manifest = self.manifest(version)
        if version in self.pins():
            raise UsageError(f"{version} is pinned", where=self.where, remedy="unpin it first")
        if mark := self.held().get(version):
            raise InUse(
                f"{version} is held by a process that reads it, to copy it elsewhere",
                where=self.where,
                remedy=f"wait until it has ended; if it died on another machine, remove {mark}",
            )
        permit()
        self._backend.delete(f"{version}/{manifests.ROOT_NAME}")
        self._remove(version, [bundle.file for bundle in manifest.bundles], manifest.parts)

    def discard(self, version: Version, *, permit: Callable[[], None] = lambda: None) -> None:
        """Removes what is left of a version that was never committed, or whose retirement was interrupted.

        Files go that an intact part lists, intact parts, and images that name the bundle that their file is named after.
        Everything else stays, and with it the directory. The caller knows that nobody is still writing the version.

        Args:
            version: which.
            permit: as for `retire`.

        Raises:
            UsageError: it is committed.
        """
        parts: list[str] = []
        files: list[str] = []
        found = self._backend.listing(str(version))  # one look: that there is no commit is said of these very files
        if manifests.ROOT_NAME in dict(found):
            raise UsageError(f"{version} is committed", where=self.where, remedy="retire it instead")
        if not found:  # or another file system stands here for a moment
            self._backend.delete(f"{version}/")
            return
        for name, size in found:
            if name.startswith("manifest-") and self._is_part(version, name):
                parts.append(name)
            elif ENCRYPTED.match(name):
                files += [name] if self._files.looks_ours(version, name, size) else []
            elif (match := _BUNDLE_FILE.match(name)) and self._is_image(version, name, (match[1], size)):
                files.append(name)
        permit()
        # Whoever began to retire it may have died before the removal of the commit was durable; now it is.
        self._backend.delete(f"{version}/{manifests.ROOT_NAME}")
        self._remove(version, files, parts)

    def pin(self, version: Version) -> None:
        """Keeps a version from ever being retired."""
        self._backend.create(f"{PINNED}/{version}", b"", stamp=incarnations.make_stamp(0))

    def unpin(self, version: Version) -> None:
        """Takes a pin away."""
        self._backend.delete(f"{PINNED}/{version}")

    def keep(self, version: Version) -> None:
        """Marks a version as the one to be kept of its minutes; unlike a pin, retention itself set it."""
        self._backend.create(f"{KEPT}/{version}", b"", stamp=incarnations.make_stamp(version.incarnation))

    def kept(self) -> set[Version]:
        """The versions that are kept for their time."""
        return self._marked(KEPT)

    def pins(self) -> set[Version]:
        """The pinned versions."""
        return self._marked(PINNED)

    def hold(self, version: Version, stamp: str) -> None:
        """Keeps a version from being retired until `release` with the same stamp, or until the stamp's process is gone."""
        version_holds.hold(self._backend, version, stamp)

    def release(self, version: Version, stamp: str) -> None:
        """Ends a hold. Without one it does nothing."""
        version_holds.release(self._backend, version, stamp)

    def held(self) -> dict[Version, str]:
        """Returns the versions that are held, each with the name of a mark; see `break_holds` for those of the dead."""
        return version_holds.held(self._backend)

    def break_holds(self, incarnation: int) -> list[str]:
        """Ends the holds of processes that are gone, given the incarnation that runs; returns the names of the marks."""
        return version_holds.break_dead(self._backend, incarnation)

    def _marked(self, directory: str) -> set[Version]:
        found = (Version.parse(name) for name, _ in self._backend.listing(directory))
        return {version for version in found if version is not None}

    # Inside.

    def _directories(self) -> list[Version]:
        found = (Version.parse(name[:-1]) for name in self._names() if name.endswith("/"))
        return sorted(version for version in found if version is not None)

    def _names(self) -> set[str]:
        names = {name for name, _ in self._backend.listing("")}
        if self._job_id and incarnations.JOB_FILE not in names:
            raise self._vanished()  # an empty mount point is no job without versions
        return names

    def _parts(self, root: Manifest) -> dict[str, bytes]:
        """The bytes of every part that a root lists; decode_root bounded their lengths."""
        read = {
            name: partial(self._read_listed, root.version, name, length=length + 1)
            for name, (length, _) in root.parts.items()
        }
        if len(read) < FEW_PARTS:
            return {name: call() for name, call in read.items()}
        with ThreadPoolExecutor(min(PARTS_AT_ONCE, len(read)), "holdfast parts") as pool:
            reading = {name: pool.submit(call) for name, call in read.items()}
            try:
                return {name: future.result() for name, future in reading.items()}
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # the first error ends it, not the last of thousands
                raise

    def _mac(self, root: Manifest, parts: Mapping[str, bytes]) -> str:
        return self._key.authenticate(manifests.proved_texts(root, parts)) if self._key else ""

    def _require_proof(self, whole: Manifest, parts: Mapping[str, bytes], where: str) -> None:
        """Require, with a key, that somebody who has it made this version.

        A version of which every file is of other keys can prove nothing, and nothing of it opens: who reads is told which key.
        """
        ids = {bundle.key_id for bundle in whole.bundles}
        if self._key is None or (ids and not ids & {"", self._key.id}):
            return
        if whole.mac:
            if not hmac.compare_digest(whole.mac, self._mac(whole, parts)):
                raise CorruptError("the version was changed by somebody who does not have the key", where=where)
        elif self._key_required:
            what = (
                "the version is plain, or was made by an older holdfast"
                if "" in ids or not ids
                else "the version is not authenticated"
            )
            raise CorruptError(
                f"{what}, and a key is required",
                where=where,
                remedy="if the job began without a key: `encryption_required = false` in the settings, until a new version is there",
            )

    def _remove(self, version: Version, files: Iterable[str], parts: Iterable[str]) -> None:
        """Removes the files, and what a paused committer may have created since the commit was removed: it looked for them
        afterwards, or this finds it. Parts go last: while they stand, an interrupted removal can prove what goes on with it.
        """
        names = [*sorted(files), manifests.ROOT_NAME, *sorted(parts)]
        self._backend.delete(*(f"{version}/{name}" for name in names))
        self._backend.delete(f"{version}/")

    def _is_part(self, version: Version, name: str) -> bool:
        try:
            manifests.decode_part(self._read_record(f"{version}/{name}"), name)
        except (CorruptError, VersionNotFound):
            return False
        return True

    def _is_image(self, version: Version, name: str, claim: tuple[str, int]) -> bool:
        bundle_id, size = claim
        file = BundleFile(BundleRef(bundle_id, (), 0, 1, 0, ""), name, size, "", ())
        try:
            return self.image(version, file).bundle_id == bundle_id
        except (CorruptError, VersionNotFound):
            return False

    def _read_record(self, name: str) -> bytes:
        return self._counted(self._backend.read(name, length=MAX_RECORD_BYTES + 1))

    def _read_listed(self, version: Version, name: str, *, length: int) -> bytes:
        read = partial(self._backend.read, f"{version}/{name}", length=length)
        return self._counted(listed(self._backend, version, read))

    def _counted(self, data: bytes) -> bytes:
        self._events.count("storage_record_read_bytes", len(data))
        return data


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


def _incomplete(what: str, where: str) -> StorageError:
    return StorageError(what, where=where, remedy="write the version again")
