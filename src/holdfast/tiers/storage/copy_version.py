"""A durable version at a second place: every file proved while it is read, the manifest last.

The other place is a job of its own with the same bytes and the same lineage: it can be restored from, listed and verified
like any. Doing it twice is doing it once. What another job has there is left alone, and what a job has that went on there. Memory: one
bundle. The caller holds the version at the source meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from holdfast.base.errors import InUse, UsageError
from holdfast.core.model import Version
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage import manifest as manifests
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.version_store import Storage

# What this process copied, or began to: (job, place, incarnation). So the incarnation that is registered there is its own.
_begun: set[tuple[str, str, int]] = set()


def duplicate(source: Storage, target: Storage, version: Version, progress: Callable[[int, int], None]) -> None:
    """Makes `version` of `source` durable at `target`.

    Args:
        source: where it is durable, and held.
        target: the other place; an empty one becomes a job's.
        version: which.
        progress: called with (bytes done, bytes to do) while a file is read and when one is written, which is half of the
            work each. What it raises ends the copy.

    Raises:
        CorruptError: a file of the source is damaged. VersionNotFound: the source has it no more.
        UsageError: the target is the source. InUse: the target is another job's, or has another version of this name.
        StorageError, Fenced: the target refuses.
    """
    manifest, stamp = source.manifest(version), make_stamp(version.incarnation)
    job_id, done, total = target.claim(kin=manifest.job_id), 0, sum(file.length for file in manifest.bundles)
    # One part is enough here: one writer, one line.
    files = [BundleFile.of(file.ref, file.seal, target.key_id) for file in manifest.bundles]
    name, part = manifests.part_name(0), manifests.part_entry(manifests.encode_part(files))
    copied = dataclasses.replace(manifest, job_id=job_id, parts={name: part}, bundles=())
    _require_ours(target, manifest, copied)
    begun = manifest.job_id, job_id, version.incarnation
    if begun not in _begun:
        _begun.add(begun)  # before the question: another spelling of the place may be copied to meanwhile
        try:
            _require_one_line(source, target, manifest)
        except BaseException:
            _begun.discard(begun)
            raise

    def moved(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done // 2, total)

    moved(0)
    for file in manifest.bundles:
        view = memoryview(bytearray(file.length))
        source.bundles.read_into(version, file, view, moved)
        image_format.verify(view, file.seal, source.bundles.where(version, file))
        target.bundles.write(version, file.ref, file.seal, view, stamp=stamp)
        moved(file.length)
    target.write_part(version, 0, files, stamp=stamp)
    # Incarnations of which no version was copied are links of the chain all the same.
    target.commit(copied, stamp=stamp, lineage=source.incarnations.lineage())


def _require_ours(target: Storage, manifest: Manifest, copied: Manifest) -> None:
    """Proves, before anything is written, that nothing at the target is replaced by what it is not.

    Raises:
        UsageError, InUse: as `duplicate` does.
    """
    version = manifest.version
    if copied.job_id == manifest.job_id and version in target.marks.held():  # by who copies it
        raise UsageError("it is the job's own place", where=target.where, remedy="name another place")
    if target.is_of_another_job(manifest.job_id):
        raise InUse(
            "another job works there, or copies its versions there", where=target.where, remedy="name an empty place"
        )
    if target.is_committed(version) and target.root(version).parts != copied.parts:
        raise InUse(f"another {version} stands there", where=target.where, remedy="name an empty place")


def _require_one_line(source: Storage, target: Storage, manifest: Manifest) -> None:
    """Proves that no job went on at the target by itself: of what two made from one version, a restart there would take the newest.

    Raises:
        InUse: one did.
    """
    number = manifest.version.incarnation
    ours = {number: manifest.resumed_from, **source.incarnations.lineage()}
    theirs = target.incarnations.lineage()
    if target.incarnations.highest() == number or any(theirs[one] != ours.get(one, theirs[one]) for one in theirs):
        raise InUse(
            "another job went on there from a copy, apart from this one",
            where=target.where,
            remedy="name an empty place",
        )
