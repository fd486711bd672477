"""`ls`, `inspect`, `verify`: what lies under a checkpoint path, what is in a version, and whether its bytes are right.

Only reads. What is damaged is shown with its reason and makes the exit code 1; the commands go on with the rest, so
that one bad version never hides the good ones. Nothing is loaded into tensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.base.errors import (
    CorruptError,
    HoldfastError,
    InUse,
    NotProved,
    StorageError,
    UsageError,
    VersionNotFound,
)
from holdfast.base.events import Events
from holdfast.cli import console
from holdfast.cli.stored import checksums
from holdfast.core.model import Version
from holdfast.tiers.backends.open_url import open_backend
from holdfast.tiers.format import values
from holdfast.tiers.format.image import Entry
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage

MAX_VALUE_CHARS = 100
NOTHING_DURABLE = "no version is durable yet"
# Its bytes may be good: a job that began without a key wrote such versions.
NOT_PROVED = "not proved with the key"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of `ls`: a version, and its manifest or the reason why there is none."""

    version: Version
    state: str
    manifest: Manifest | None = None
    error: HoldfastError | None = None


def list_versions(root: str, *, as_json: bool) -> int:
    """`holdfast ls`; the exit code."""
    storage = open_storage(root, Events())
    job = storage.job_id()
    rows = list(_rows(storage))
    pins, held = storage.marks.pins(), storage.marks.held()
    if as_json:
        shown = [_row_document(row, pinned=row.version in pins, held=row.version in held) for row in rows]
        console.print_json({"root": storage.where, "job_id": job, "versions": shown})
    else:
        console.print_table(
            ("version", "state", "size", "ranks", "bundles", "resumed from"),
            [_row_cells(row, pinned=row.version in pins, held=row.version in held) for row in rows],
        )
        for row in rows:
            if row.error:
                console.say(console.error_text(row.error))
    return console.PROBLEM if any(row.error for row in rows) else console.GOOD


def _rows(storage: Storage) -> Iterator[Row]:
    for version, committed in _looked_into(storage):
        if isinstance(committed, StorageError):
            yield Row(version, _state(committed), error=committed)
            continue
        if not committed:
            yield Row(version, "not committed")
            continue
        try:
            yield Row(version, "durable", storage.manifest(version))
        except VersionNotFound as error:
            if not storage.is_committed(version):
                continue  # retired while we looked
            unread = _listed_and_not_found(error)
            yield Row(version, _state(unread), error=unread)
        except HoldfastError as error:
            yield Row(version, _state(error), error=error)


def _looked_into(storage: Storage) -> Iterator[tuple[Version, bool | StorageError]]:
    """Yield whether each version is committed, or why it cannot be looked into: a directory may refuse alone."""
    for version in storage.named():
        try:
            yield version, storage.is_committed(version)
        except StorageError as error:
            yield version, error


def _state(error: HoldfastError) -> str:
    """Return what an error says of a version. One that could not be read may be good, and must not be taken for
    damaged.
    """
    if isinstance(error, InUse):
        return "another job's"
    if isinstance(error, NotProved):
        return NOT_PROVED
    return "damaged" if error.condemns else "not readable now" if error.retryable else "not readable here"


def _listed_and_not_found(error: VersionNotFound) -> StorageError:
    """Return what is wrong with a version that stands in the listing and is denied when it is read, as a store that lags does."""
    return StorageError("the manifest is listed and cannot be found", where=error.where, remedy="look again later")


def _row_cells(row: Row, *, pinned: bool, held: bool) -> tuple[object, ...]:
    state = ", ".join([row.state, *(["pinned"] if pinned else []), *(["held"] if held else [])])
    if row.manifest is None:
        return (row.version, state, "", "", "", "")
    found = row.manifest
    resumed = found.resumed_from or "a fresh start"
    return (row.version, state, console.size_text(found.num_bytes), found.world_size, len(found.bundles), resumed)


def _row_document(row: Row, *, pinned: bool, held: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "version": str(row.version),
        "incarnation": row.version.incarnation,
        "step": row.version.step,
        "state": row.state,
        "pinned": pinned,
        "held": held,
    }
    if row.manifest is not None:
        found = row.manifest
        document |= {"bytes": found.num_bytes, "world_size": found.world_size, "bundles": len(found.bundles)}
        document |= {"resumed_from": str(found.resumed_from) if found.resumed_from else None}
    if row.error is not None:
        document["error"] = console.error_document(row.error)
    return document


def inspect_version(root: str, version: str | None, *, as_json: bool) -> int:
    """`holdfast inspect`; the exit code."""
    storage = open_storage(root, Events())
    manifest = storage.manifest(choose(storage, version))
    images = [(file, storage.bundles.image(manifest.version, file)) for file in manifest.bundles]
    entries = sorted((e.name, e.offsets, file.ref.bundle_id, e) for file, image in images for e in image.entries)
    stored = {
        file.ref.bundle_id: _values(storage, manifest.version, file, image.values)
        for file, image in images
        if image.values is not None
    }
    if as_json:
        shown = [_entry_document(entry, bundle) for _, _, bundle, entry in entries]
        console.print_json({"version": str(manifest.version), "entries": shown, "values": stored})
    else:
        _print_entries(manifest, [(entry, bundle) for _, _, bundle, entry in entries])
        _print_values(stored)
    return console.GOOD


def _values(storage: Storage, version: Version, file: BundleFile, entry: Entry) -> Any:
    data = storage.bundles.read_entry(version, file, entry)
    return values.decode(data, where=f"{version}/{file.file}")


def _entry_document(entry: Entry, bundle: str) -> dict[str, Any]:
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": entry.global_shape,
        "offsets": entry.offsets,
        "lengths": entry.shape,
        "bundle": bundle,
        "bytes": entry.end - entry.start,
    }


def _print_entries(manifest: Manifest, entries: list[tuple[Entry, str]]) -> None:
    console.say(
        f"{manifest.version}: {len(entries)} entries in {len(manifest.bundles)} bundles, {manifest.world_size} ranks"
    )
    rows = [(e.name, e.dtype, list(e.global_shape), _extent_text(e), bundle, e.end - e.start) for e, bundle in entries]
    console.print_table(("entry", "dtype", "shape", "extent", "bundle", "bytes"), rows)


def _extent_text(entry: Entry) -> str:
    """`[0:4, 8:16]`, or `all` for a whole tensor."""
    if entry.shape == entry.global_shape:
        return "all"
    spans = (f"{start}:{start + length}" for start, length in zip(entry.offsets, entry.shape, strict=True))
    return f"[{', '.join(spans)}]"


def _print_values(stored: dict[str, Any]) -> None:
    for bundle, found in sorted(stored.items()):
        console.say(f"values of {bundle}")
        for name, value in found.items() if isinstance(found, dict) else [("", found)]:
            text = repr(value)
            short = text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}... ({len(text)} characters)"
            console.say(f"  {name} = {short}")


def choose(storage: Storage, text: str | None) -> Version:
    """The durable version that was asked for, or the newest one."""
    storage.job_id()  # says what is wrong with the path, if something is
    if text is not None:
        version = parse(text)
        if not storage.is_committed(version):
            raise not_durable(storage, version)
        return version
    found = storage.versions()
    if not found:
        raise VersionNotFound(NOTHING_DURABLE, where=storage.where)
    return found[-1]


def parse(text: str) -> Version:
    """The version that a text names, there or not."""
    version = Version.parse(text)
    if version is None:
        raise UsageError(f"{text!r} is not a version", remedy="`holdfast ls` shows them: i000001-s0000000120")
    return version


def not_durable(storage: Storage, version: Version) -> VersionNotFound:
    """The error of a version that has no manifest: `ls` shows it where files of it are left."""
    if version in storage.named():
        return VersionNotFound(f"{version} is not committed: its save goes on, or was cut off", where=storage.where)
    return VersionNotFound(f"{version} is not there", where=storage.where)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says what `verify` found of a version.

    Attributes:
        manifest: None if it cannot be read, or the version is gone.
        problems: of the manifest, and of each file the first one.
        retired: retention removed it while it was looked at; nothing is wrong with that.
    """

    version: Version
    manifest: Manifest | None = None
    problems: tuple[HoldfastError, ...] = ()
    retired: bool = False

    @property
    def state(self) -> str:
        """Return the state in a word; damage outweighs what could not be looked at."""
        states = {_state(problem) for problem in self.problems}
        if "damaged" in states:
            return "damaged"
        return min(states, default="retired" if self.retired else "good")


def verify_versions(root: str, version: str | None, *, as_json: bool, sha256: Path | None = None) -> int:
    """`holdfast verify`; the exit code. `sha256`: where the digests of the good versions' files go."""
    storage = open_storage(root, Events())
    storage.job_id()
    if version is None:
        results = [
            Verdict(one, problems=(committed,)) if isinstance(committed, StorageError) else examine(storage, one)
            for one, committed in _looked_into(storage)
            if committed
        ]
        if not results:  # else who asks before an upload or a removal would take nothing for good
            raise VersionNotFound(NOTHING_DURABLE, where=storage.where)
    else:
        results = [examine(storage, choose(storage, version))]
    healthy = not any(result.problems for result in results)
    if sha256 is not None:
        good = [(result.version, result.manifest) for result in results if result.manifest and not result.problems]
        checksums.write(open_backend(root), good, sha256)
    if as_json:
        console.print_json({"root": storage.where, "healthy": healthy, "versions": [_document(r) for r in results]})
    else:
        for result in results:
            _print_verdict(result)
    return console.GOOD if healthy else console.PROBLEM


def examine(storage: Storage, version: Version) -> Verdict:
    """Returns every problem of a version, all of whose bytes are read; of a file the first one, which names its bytes."""
    try:
        manifest = storage.manifest(version)
        return Verdict(version, manifest, tuple(_problems(storage, manifest)))
    except VersionNotFound as error:
        if not storage.is_committed(version):
            return Verdict(version, retired=True)
        return Verdict(version, problems=(_listed_and_not_found(error),))
    except HoldfastError as error:
        return Verdict(version, problems=(error,))


def _problems(storage: Storage, manifest: Manifest) -> Iterator[HoldfastError]:
    """Yield what is wrong with a version's files.

    Raises:
        VersionNotFound: it was retired meanwhile.
    """
    version = manifest.version
    with contextlib.closing(console.Progress(f"verifying {version}", math.ceil(manifest.num_bytes))) as progress:
        for file in manifest.bundles:
            try:
                storage.bundles.verify(version, file, progress.add)
                if storage.bundles.opens(file):
                    storage.bundles.image(version, file)  # whoever wrote it may have sealed nonsense
            except (CorruptError, StorageError) as error:
                yield error


def _print_verdict(result: Verdict) -> None:
    found = result.manifest
    files = "" if found is None else f", {len(found.bundles)} files, {console.size_text(found.num_bytes)}"
    words = {"damaged": "DAMAGED", "retired": "retired while it was verified"}
    console.say(f"{result.version}: {words.get(result.state, result.state)}{files}")
    for problem in result.problems:
        console.say(console.error_text(problem))


def _document(result: Verdict) -> dict[str, Any]:
    found = result.manifest
    return {
        "version": str(result.version),
        "state": result.state,
        "files": 0 if found is None else len(found.bundles),
        "bytes": 0 if found is None else found.num_bytes,
        "problems": [console.error_document(problem) for problem in result.problems],
    }
