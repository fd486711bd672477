"""Silent corruption on purpose: one flipped byte in the newest version, in memory or in storage.

Both find their victim past holdfast, as testing/checks/evidence.py reads it, and name the version that they spoiled. Used by
the crash drill and by tests that need a checkpoint which is there and wrong.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from holdfast.core.model import Version
from holdfast.testing.checks.evidence import slot_descriptors, slot_header

_PREFIX = struct.Struct("<8sQQ")


def damage_memory(pids: Iterable[int]) -> Version | None:
    """Flips one byte in every sealed copy of the newest version that these processes hold; None if there is none."""
    found: list[tuple[Version, int, int]] = []
    fds: list[int] = []
    seen: set[int] = set()
    for pid in pids:
        for fd in slot_descriptors(pid, seen, flags=os.O_RDWR):
            fds.append(fd)
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
                header, _ = slot_header(memory)
                if header is None:
                    continue
                version = Version(header["version"]["incarnation"], header["version"]["step"])
                base = _PREFIX.unpack_from(memory)[1]
                found += [
                    (version, fd, base + image["offset"] + image["seal"]["length"] // 2) for image in header["images"]
                ]
    newest = max((version for version, _, _ in found), default=None)
    for version, fd, at in found:
        if version == newest:
            _flip(fd, at)
    for fd in fds:
        os.close(fd)
    return newest


def damage_storage(root: Path) -> Version | None:
    """Flips one byte in the middle of every bundle of the newest committed version; None if there is none."""
    committed = [Version.parse(path.parent.name) for path in root.glob("*/manifest.json")]
    newest = max((version for version in committed if version is not None), default=None)
    if newest is not None:
        for path in sorted((root / str(newest)).glob("*.safetensors")):
            fd = os.open(path, os.O_RDWR)
            _flip(fd, os.fstat(fd).st_size // 2)
            os.close(fd)
    return newest


def _flip(fd: int, at: int) -> None:
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0x10]), at)
