"""SHA-256 of a version's files as other tools check them: `holdfast verify ROOT --sha256 FILE`.

One line per file, digest, two spaces, `<version>/<file>`: what `sha256sum --check` of coreutils reads, in the checkpoint
directory or in a copy of it. Of an encrypted file it is the digest of what is stored. No torch.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.base.errors import UsageError, VersionNotFound
from holdfast.base.replacing import replacing
from holdfast.cli import console
from holdfast.core.model import Version
from holdfast.tiers.backends.interface import Backend
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage.manifest import ROOT_NAME, Manifest


def write(backend: Backend, versions: Iterable[tuple[Version, Manifest]], target: Path) -> None:
    """Writes a list of all files of these versions, whole or not at all; without those that are retired meanwhile.

    Raises:
        UsageError: `target` cannot be written. StorageError, VersionNotFound: a file cannot be read.
    """
    lines: list[str] = []
    for version, manifest in versions:
        try:
            lines += list(_lines(backend, version, manifest))
        except VersionNotFound:
            if ROOT_NAME in dict(backend.listing(str(version))):
                raise
    try:
        _put(target, "".join(lines).encode("ascii"))
    except OSError as error:
        remedy = "name a file in a directory that may be written"
        raise UsageError(f"the list cannot be written: {error.strerror}", where=str(target), remedy=remedy) from error


def _put(target: Path, data: bytes) -> None:
    """Write into what is no plain file, such as `/dev/stdout`, and into a link of ours or root's; else replace the file."""
    try:
        there = target.stat()
    except FileNotFoundError:
        there = None
    if there is None or (stat.S_ISREG(there.st_mode) and not _is_trusted_link(target)):
        with replacing(target) as file:
            file.write(data)
    elif _is_standard_output(there):
        sys.stdout.flush()
        sys.stdout.buffer.write(data)  # opened anew it would have a place of its own, and overwrite what is printed
        sys.stdout.flush()
    else:
        target.write_bytes(data)


def _is_trusted_link(target: Path) -> bool:
    """Another user's link may have been made for us to follow."""
    found = target.lstat()
    return stat.S_ISLNK(found.st_mode) and found.st_uid in (0, os.geteuid())


def _is_standard_output(there: os.stat_result) -> bool:
    try:
        return os.path.samestat(there, os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError, AttributeError):  # closed, or a stand-in
        return False


def _lines(backend: Backend, version: Version, manifest: Manifest) -> Iterator[str]:
    names = sorted({ROOT_NAME, *manifest.parts, *(bundle.file for bundle in manifest.bundles)})
    sizes = dict(backend.listing(str(version)))
    progress = console.Progress(f"digesting {version}", sum(sizes.get(name, 0) for name in names))
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for name in names:
        yield f"{_digest(backend, f'{version}/{name}', buffer, progress)}  {version}/{name}\n"
    progress.close()


def _digest(backend: Backend, name: str, buffer: memoryview, progress: console.Progress) -> str:
    digest, at = hashlib.sha256(), 0
    while count := backend.read_into(name, buffer, offset=at):
        digest.update(buffer[:count])
        progress.add(count)
        at += count
    return digest.hexdigest()
