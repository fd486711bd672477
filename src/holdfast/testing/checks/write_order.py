"""Works out what a power cut would leave, from the file operations alone: the order of writes that SIGKILL cannot test.

A killed process leaves its page cache to the kernel, so no number of kills finds a missing fsync. This checker follows
every file operation of the keepers and holds at each moment what is not yet safe: bytes written since the last fsync
of the file, names made or removed since the last fsync of their directory. Whenever the protocol relies on something
(a final name appears, a manifest is committed, "durable" is named, files are removed) everything it stands on must be
safe. Rules: docs/spec/protocol.md, sections 6 and 8.
"""

from __future__ import annotations

import os.path
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.core.model import Version
from holdfast.testing.checks.invariants import Violation

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class FileOp:
    """One call of the operating system that changes files; paths are absolute.

    Attributes:
        call: open (with the intent to write), pwrite, ftruncate, fsync, rename, link, unlink, rmdir or mkdir.
        source: the other name of rename and link.
        failed: the call reported an error.
        absent: the error was that there is no such name.
        replaces: the rename replaced a file.
    """

    call: str
    path: str
    source: str = ""
    failed: bool = False
    absent: bool = False
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class NamedDurable:
    """The moment when a rank was told that a version is durable."""

    version: Version


@dataclass(slots=True)
class _Disk:
    """Holds what is not safe yet."""

    root: str
    dirty: set[str] = field(default_factory=set)
    spoiled: set[str] = field(default_factory=set)
    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    removed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    standing: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    found: list[Violation] = field(default_factory=list)

    def blame(self, invariant: str, what: str) -> None:
        violation = Violation(invariant, what)
        if violation not in self.found:
            self.found.append(violation)

    def short(self, path: str) -> str:
        return os.path.relpath(path, self.root)

    def is_final(self, path: str) -> bool:
        """Return whether the name promises that the file is whole: a file of a version, or a record beside them."""
        return not self.short(path).startswith((".tmp", ".."))


def check(root: str, history: Iterable[FileOp | NamedDurable]) -> list[Violation]:
    """Every moment at which the job relied on something that a power cut would have taken.

    Args:
        root: the checkpoint directory.
        history: operations of all processes on files beneath it and what was acknowledged, in causal order.
    """
    disk = _Disk(os.path.abspath(root))
    for event in history:
        if isinstance(event, NamedDurable):
            _named_durable(disk, event.version)
        elif event.path.startswith(disk.root):
            _apply(disk, event)
    return disk.found


def _apply(disk: _Disk, op: FileOp) -> None:
    directory = os.path.dirname(op.path)
    if op.failed:
        if op.call in {"pwrite", "ftruncate", "fsync"}:
            disk.spoiled.add(op.path)
        if op.call == "unlink" and op.absent:
            _found_gone(disk, op.path, directory)
        return
    if op.call in {"open", "mkdir"}:
        if op.path not in disk.standing[directory]:
            disk.names[directory].add(op.path)
    elif op.call in {"pwrite", "ftruncate"}:
        disk.dirty.add(op.path)
    elif op.call == "fsync":
        _sync(disk, op.path)
    elif op.call in {"rename", "link"}:
        _appear(disk, op, directory)
    elif op.call == "unlink":
        _remove(disk, op.path, directory)


def _sync(disk: _Disk, path: str) -> None:
    if path in disk.spoiled:
        disk.blame("S14", f"fsync of {disk.short(path)} was tried again after an error")
    disk.dirty.discard(path)
    disk.standing[path] |= disk.names.pop(path, set())
    disk.removed.pop(path, None)


def _appear(disk: _Disk, op: FileOp, directory: str) -> None:
    for state in (disk.dirty, disk.spoiled):
        if op.source in state:
            state.add(op.path)
            if op.call == "rename":
                state.discard(op.source)
    if not disk.is_final(op.path):
        return
    name = disk.short(op.path)
    if op.path in disk.spoiled:
        disk.blame("S14", f"{name} got its final name after an error on the file")
    if op.path in disk.dirty:
        disk.blame("S2", f"{name} got its final name before fsync")
    if os.path.basename(op.path) == MANIFEST:
        _commit(disk, directory)
        if op.call == "rename" and not op.replaces:
            disk.blame("S7", f"{name} was made by rename, which would replace another writer's")
    # A file that takes the place of a durable one: after a power cut one of the two is there, and both are whole.
    if op.path not in disk.standing[directory]:
        disk.names[directory].add(op.path)
    disk.removed[directory].discard(op.path)


def _commit(disk: _Disk, directory: str) -> None:
    version = disk.short(directory)
    for path in sorted(disk.names[directory]):
        if os.path.basename(path) != MANIFEST:
            disk.blame("S2", f"{version} was committed before fsync of the directory with {os.path.basename(path)}")
    for path in sorted(disk.dirty):
        if os.path.dirname(path) == directory:
            disk.blame("S2", f"{version} was committed before fsync of {os.path.basename(path)}")


def _remove(disk: _Disk, path: str, directory: str) -> None:
    disk.standing[directory].discard(path)
    disk.names[directory].discard(path)
    disk.dirty.discard(path)
    disk.removed[directory].add(path)
    version = Version.parse(os.path.basename(directory))
    if version is None:
        return
    manifest = os.path.join(directory, MANIFEST)
    if path == manifest:
        if not any(other > version for other in _committed(disk)):
            disk.blame("S11", f"{version} was removed before a newer version was committed")
    elif manifest in disk.standing[directory] | disk.names[directory] | disk.removed[directory]:
        disk.blame("S11", f"a file of {version} was removed before its manifest was durably gone")


def _found_gone(disk: _Disk, path: str, directory: str) -> None:
    """Somebody removed it and was killed before that was on record: it is gone, and not yet durably."""
    for names in (disk.standing[directory], disk.names[directory]):
        if path in names:
            names.discard(path)
            disk.removed[directory].add(path)


def _committed(disk: _Disk) -> list[Version]:
    """Versions whose manifest would survive a power cut."""
    versions = (Version.parse(os.path.basename(d)) for d, names in disk.standing.items() if f"{d}/{MANIFEST}" in names)
    return [version for version in versions if version is not None]


def _named_durable(disk: _Disk, version: Version) -> None:
    directory = os.path.join(disk.root, str(version))
    manifest = os.path.join(directory, MANIFEST)
    if manifest in disk.names[directory]:
        disk.blame("S13", f"{version} was called durable before fsync of the directory with its manifest")
    if directory in disk.names[disk.root]:
        disk.blame("S13", f"{version} was called durable before fsync of the root with its directory")
