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

import hmac
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from holdfast.base.config import load
from holdfast.base.errors import (
    CorruptError,
    Fenced,
    ForeignDirectory,
    HoldfastError,
    InUse,
    NotProved,
    StorageBusy,
    StorageError,
    UsageError,
    VersionNotFound,
)
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.backends.interface import Backend, Settling
from holdfast.tiers.backends.open_url import open_backend
from holdfast.tiers.format.strict_json import AUTHENTICATED_FORMAT, MAX_RECORD_BYTES
from holdfast.tiers.storage import manifest as manifests
from holdfast.tiers.storage.bucket_lease import LeaseLock
from holdfast.tiers.storage.bundle_files import BundleFiles, listed, stored_length
from holdfast.tiers.storage.encryption import Key, KeySource, key_of
from holdfast.tiers.storage.incarnations import (
    JOB_FILE,
    KIN_DIGITS,
    NOTHING,
    Incarnations,
    are_kin,
    claim_job,
    make_stamp,
    read_job,
)
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.run_lock import LOCK_FILE, RunLock
from holdfast.tiers.storage.stored_bundles import StoredBundles, counted, in_place
from holdfast.tiers.storage.version_marks import Marks

logger = logging.getLogger(__name__)

NEWER_RUNS = "a newer incarnation runs; this one commits nothing any more"

LATEST = "latest"
# Small files that are read at once, where there are not few of them: a store answers each after tens of milliseconds.
READS_AT_ONCE, FEW_READS = 32, 4

K = TypeVar("K")
T = TypeVar("T")


def open_storage(url: str | Path, events: Events, *, encryption: KeySource | None = None) -> Storage:
    """The storage behind a path, a `file://` URL, or a bucket's URL. Touches nothing yet. `encryption`: where the key
    comes from; None is what the settings of this process say.

    Raises:
        ConfigError: a scheme that this release does not know, obstore is missing, or the key cannot be had.
    """
    source = KeySource.of(load()) if encryption is None else encryption
    return Storage(open_backend(url), events, key=key_of(source), key_required=source.required)


class Storage:
    """The versions of one job under one root.

    Args:
        events: counts `storage_record_read_bytes` (manifests), and what StoredBundles does.
        key: what bundle files are encrypted with, and manifests are authenticated.
        key_required: with a key, whether a version that is not authenticated with it counts as damaged.

    Attributes:
        bundles: reads and writes the files of bundles.
        incarnations: those that were registered here, and what they resumed from.
        marks: pins, and all else that keeps a version from being retired.
        run_lock: keeps a second job out, once the root is claimed.
    """

    def __init__(self, backend: Backend, events: Events, *, key: Key | None = None, key_required: bool = True) -> None:
        self._key = key
        self._key_required = key_required
        self._backend = backend
        self._events = events
        self.incarnations = Incarnations(backend)
        self.marks = Marks(backend)
        self.bundles = StoredBundles(backend, BundleFiles(backend, key, self.job_id), events, self.require_ours)
        self._job_id = ""
        local = backend.properties.kind == "local"
        self.run_lock = RunLock(Path(backend.properties.where)) if local else LeaseLock(backend)

    @property
    def where(self) -> str:
        """The root, as the operator names it."""
        return self._backend.properties.where

    # The job.

    def job_id(self) -> str:
        """The id of the job that owns the root; see `incarnations.read_job`."""
        self._job_id = self._job_id or read_job(self._backend)
        return self._job_id

    @property
    def key_id(self) -> str:
        """Return the id of the key that new files are encrypted with; empty if there is none."""
        return self._key.id if self._key else ""

    def claim(self, *, kin: str = "") -> str:
        """Makes an empty root ours, or finds that it is; returns the job's id. See `incarnations.claim_job`.

        Raises:
            InUse, StorageError: it was ours before, and is another job's or has vanished; see `require_job`.
        """
        if self._job_id:
            self.require_job(self._job_id)
        self._job_id = claim_job(self._backend, kin=kin)
        return self._job_id

    def is_of_another_job(self, job_id: str) -> bool:
        """Return whether a claimed root, to which that job copies, has nothing to do with it.

        An older holdfast gave a place an id of its own. Nothing tells whose it is then, unless a job itself worked there.
        """
        here = self.job_id()
        is_copy = len(here) > KIN_DIGITS
        return not are_kin(here, job_id) and (is_copy or LOCK_FILE in {name.rstrip("/") for name in self._names()})

    def require_job(self, job_id: str) -> None:
        """Proves that the root is still what `claim` found: somebody may have removed or replaced it since. Empty: any job's.

        Raises:
            StorageError: it has vanished. InUse: it belongs to another job by now.
        """
        try:
            found = read_job(self._backend)
        except (VersionNotFound, ForeignDirectory) as error:
            raise self._vanished() from error
        if job_id not in ("", found):
            raise InUse(
                f"the path belongs to job {found} by now; this one is {job_id}",
                where=self.where,
                remedy="one of the two needs another path",
            )
        self._job_id = job_id

    def require_ours(self) -> None:
        """Proves, where the job is known, that the root is still its; raises as `require_job`."""
        self.require_job(self._job_id)

    def _vanished(self) -> StorageError:
        return StorageError(
            "the checkpoint directory has vanished, or its holdfast.json has",
            where=self.where,
            remedy="bring it back, or mount it; to begin anew in an empty directory, stop the job and start it again",
        )

    # Writing a version.

    def write_part(
        self, version: Version, node: int, files: Iterable[BundleFile], *, stamp: str
    ) -> tuple[str, int, str]:
        """Makes a node's part of the manifest durable; returns (name, length, digest) for the root."""
        data = manifests.encode_part(files)
        name = manifests.part_name(node)
        self._backend.put(f"{version}/{name}", [memoryview(data)], stamp=stamp)
        return (name, *manifests.part_entry(data))

    def commit(self, manifest: Manifest, *, stamp: str, lineage: Mapping[int, Version | None] = NOTHING) -> None:
        """Makes a version durable, as far as anyone is concerned, by creating its root manifest. Repeating is fine.

        Args:
            manifest: its root, with all parts.
            stamp: from `incarnations.make_stamp`.
            lineage: what earlier incarnations resumed from; a record of it that is missing here is made up for.

        Raises:
            Fenced: a higher incarnation is registered, or the version was committed with other content.
            StorageError: a listed file is not there.
        """
        version = manifest.version
        # An incarnation that came back from memory while nothing could be written is registered now, before anything of
        # it counts.
        self._require_newest(version, self.incarnations.enlist(version.incarnation, manifest.resumed_from, lineage))
        try:
            parts = self._parts(manifest)
            whole = manifests.assemble(manifest, parts, f"{self.where}/{version}")
        except VersionNotFound as error:
            raise _incomplete("a part of the manifest is missing", f"{self.where}/{version}") from error
        if wrong := self._missing(whole):
            what = f"{len(wrong)} of {len(whole.bundles)} files are missing or cut short, the first is {wrong[0]}"
            raise _incomplete(what, f"{self.where}/{version}")
        self._require_newest(version, self.incarnations.highest())  # once more, for all this may have taken long
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
            raise Fenced(NEWER_RUNS, where=str(version))

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
        """Returns the committed versions, ascending. Committed is not verified: see `manifest` and `StoredBundles.verify`.

        What bears a version's name and is no directory (a link to where somebody moved it) counts as committed: it cannot be
        read, and whoever tries is told so, instead of taking an older one.

        Raises:
            StorageError: the path refuses, or what was a job's directory is one no more.
        """
        names = self._names()
        named = _named(names)
        committed = _at_once({one: partial(self.is_committed, one) for one in named if f"{one}/" in names})
        return [one for one in named if committed.get(one, True)]

    def look(self, known: Collection[Version] = ()) -> tuple[list[Version], list[Version]]:
        """Returns the committed versions, and those of which files exist but no commit, ascending, in one look.

        For who removes: what is no directory is neither. It cannot be removed, and nothing may go because it stands there.

        Args:
            known: versions that were committed when the caller looked last: as long as anything of one is there, it is not
                looked into. A request for every version that is kept would be made of a bucket each time.

        Raises:
            StorageError: as `versions`.
        """
        named = _named(name for name in self._names() if name.endswith("/"))
        looked = _at_once({one: partial(self.is_committed, one) for one in named if one not in known})
        unfinished = [one for one, is_committed in looked.items() if not is_committed]
        return sorted({*named} - {*unfinished}), unfinished

    def named(self) -> list[Version]:
        """Returns all versions of which anything is there, ascending, without a look into any: one may be unreadable.

        Raises:
            StorageError: as `versions`.
        """
        return _named(self._names())

    def is_committed(self, version: Version, *, by_name: bool = False) -> bool:
        """Returns whether the root manifest of a version stands. It is looked for by its name: the list of a large version is long.

        With `by_name` the list, which may show it earlier, is not asked of what its name does not find. For who asks again.

        Raises:
            StorageError: the path refuses.
        """
        try:
            self._backend.read(f"{version}/{manifests.ROOT_NAME}", length=1)
        except VersionNotFound:
            if by_name:
                return False
        except StorageBusy:
            raise
        except StorageError:
            pass  # it may be a link, or denied: then it is listed, and whoever reads it is told so
        else:
            return True
        return any(name == manifests.ROOT_NAME for name, _ in self._backend.listing(str(version)))

    def is_durable(self, version: Version, *, by_name: bool = False) -> bool:
        """Returns whether a version is committed and survives a power cut: whoever committed it may have been killed before that.

        `by_name` is as of `is_committed`.

        Raises:
            StorageError: the path refuses, or its names cannot be made durable.
        """
        is_committed = self.is_committed(version, by_name=by_name)
        if is_committed and isinstance(self._backend, Settling):
            self._backend.settle(str(version))
        return is_committed

    def unfinished(self) -> list[Version]:
        """Versions of which files exist, but no commit: being written, abandoned, or left by a crash."""
        return self.look()[1]

    @in_place
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

    @in_place
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

    # Removing.

    def pin(self, version: Version) -> None:
        """Keeps a version from ever being retired; it may be committed later. Says so where it seems to be gone."""
        self.marks.pin(version)
        there = self.named()
        if version not in there and any(one > version for one in there):
            logger.warning(
                "%s is pinned, and nothing of it is in %s, though newer versions are: retention removed it before, or it is still in memory",
                version,
                self.where,
            )

    def retire(self, version: Version, *, permit: Callable[[], None] = lambda: None) -> None:
        """Removes a committed version: first the commit, durably, then the files that it lists. `permit` is asked when
        all is known, right before the commit goes; what it raises keeps the version.

        Raises:
            UsageError: it is pinned. InUse: it is held.
            CorruptError: its manifest is damaged, so nothing proves which files are ours.
        """
        manifest = self.manifest(version)
        name = f"{version}/{manifests.ROOT_NAME}"
        data = self._read_record(name)
        self._require_unmarked(version)
        permit()
        self._backend.delete(name)
        try:
            self._require_unmarked(version)  # somebody may have marked it between our question and the removal
        except HoldfastError:  # no answer is not "it is not marked"
            self.require_job(self.job_id())  # what took the place of the root gets nothing
            self._backend.create(
                name, data, stamp=make_stamp(0)
            )  # it is no writer of that incarnation, whose files are swept
            self._take_back_if_retired(manifest, name)
            raise
        self._remove(version, [bundle.file for bundle in manifest.bundles], manifest.parts)

    def _committed(self, version: Version) -> UsageError:
        return UsageError(f"{version} is committed", where=self.where, remedy="retire it instead")

    def _require_unmarked(self, version: Version) -> None:
        """Prove that nobody keeps a version; raises as `retire`."""
        if version in self.marks.pins():
            raise UsageError(f"{version} is pinned", where=self.where, remedy="unpin it first")
        if mark := self.marks.held().get(version):
            raise InUse(
                f"{version} is held by a process that reads it, to copy it elsewhere",
                where=self.where,
                remedy=f"wait until it has ended; if it died on another machine, remove {mark}",
            )

    def discard(self, version: Version, *, permit: Callable[[], None] = lambda: None) -> None:
        """Removes what is left of a version that was never committed, or whose retirement was interrupted.

        Files go that an intact part lists, intact parts, and images that name the bundle that their file is named
        after. Everything else stays, and with it the directory. The caller knows that nobody is still writing the
        version. `permit` is asked as by `retire`.

        Raises:
            UsageError: it is committed, or pinned. InUse: it is held.
        """
        parts: list[str] = []
        files: list[str] = []
        found = self._backend.listing(str(version))  # one look: that there is no commit is said of these very files
        if manifests.ROOT_NAME in dict(found):
            raise self._committed(version)
        if not found:  # or another file system stands here for a moment
            self._backend.delete(f"{version}/")
            return
        for name, size in found:
            if name.startswith("manifest-") and self._is_part(version, name):
                parts.append(name)
            elif self.bundles.is_ours(version, name, size):
                files.append(name)
        permit()
        # That was a long look. Who retires it meanwhile brings its commit back if it finds a mark, so marks come first here.
        self._require_unmarked(version)
        if self.is_committed(version, by_name=True):
            raise self._committed(version)
        # Whoever began to retire it may have died before the removal of the commit was durable; now it is.
        self._backend.delete(f"{version}/{manifests.ROOT_NAME}")
        self._remove(version, files, parts)

    # Inside.

    def _names(self) -> set[str]:
        names = {name for name, _ in self._backend.listing("")}
        if self._job_id and JOB_FILE not in names:
            raise self._vanished()  # an empty mount point is no job without versions
        return names

    def _parts(self, root: Manifest) -> dict[str, bytes]:
        """The bytes of every part that a root lists; decode_root bounded their lengths."""
        read = {
            name: partial(self._read_listed, root.version, name, length=length + 1)
            for name, (length, _) in root.parts.items()
        }
        return _at_once(read)

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
            raise NotProved(f"{what}, and a key is required", where=where)

    def _remove(self, version: Version, files: Iterable[str], parts: Iterable[str]) -> None:
        """Removes the files, and what a paused committer may have created since the commit was removed: it looked for them
        afterwards, or this finds it. Parts go last: while they stand, an interrupted removal can prove what goes on with it.
        """
        for names in (sorted(files), [manifests.ROOT_NAME], sorted(parts), [""]):
            self._backend.delete(*(f"{version}/{name}" for name in names))

    def _is_part(self, version: Version, name: str) -> bool:
        try:
            manifests.decode_part(self._read_record(f"{version}/{name}"), name)
        except (CorruptError, VersionNotFound):
            return False
        return True

    def _read_record(self, name: str) -> bytes:
        return counted(self._events, self._backend.read(name, length=MAX_RECORD_BYTES + 1))

    def _read_listed(self, version: Version, name: str, *, length: int) -> bytes:
        read = partial(self._backend.read, f"{version}/{name}", length=length)
        return counted(self._events, listed(self._backend, version, read))


def _at_once(reads: Mapping[K, Callable[[], T]]) -> dict[K, T]:
    """Return the answers of these reads, several under way where they are not few; the first error ends it, not the last of thousands."""
    if len(reads) < FEW_READS:
        return {key: call() for key, call in reads.items()}
    with ThreadPoolExecutor(min(READS_AT_ONCE, len(reads)), "holdfast reads") as pool:
        reading = {key: pool.submit(call) for key, call in reads.items()}
        try:
            return {key: future.result() for key, future in reading.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _named(names: Iterable[str]) -> list[Version]:
    """Return the versions that names in a root are of, ascending."""
    found = (Version.parse(name.rstrip("/")) for name in names)
    return sorted(version for version in found if version is not None)


def _incomplete(what: str, where: str) -> StorageError:
    return StorageError(what, where=where, remedy="write the version again")
