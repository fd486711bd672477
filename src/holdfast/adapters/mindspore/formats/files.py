"""Tells how files of MindSpore are opened and replaced: bounded reads, private and atomic writes.

Errors of the file system pass as they come (OSError), as from any function that is given a path.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from holdfast.base.errors import CorruptError

PathLike: TypeAlias = str | os.PathLike[str]
Buffer: TypeAlias = bytes | bytearray | memoryview

# MindSpore's own modes: what the front end writes is for the owner, what is a checkpoint is then only read.
PRIVATE = 0o600
READ_ONLY = 0o400
_DIRECTORY = 0o700


def read_file(path: PathLike, *, what: str, limit: int | None = None) -> bytes:
    """All bytes of a regular file.

    Args:
        path: of the file.
        what: what the file should be, for the error.
        limit: longest file that is read at all, in bytes.

    Raises:
        ValueError: no regular file there, or an empty one (as MindSpore).
        CorruptError: longer than `limit`.
    """
    if not os.path.isfile(path):
        raise ValueError(f"no such {what}: {os.fspath(path)}")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise CorruptError(f"{size} bytes are too many for a {what}, {limit} at most", where=os.fspath(path))
        data = file.read() if limit is None else file.read(limit)
    if not data:
        raise ValueError(f"the {what} is empty: {os.fspath(path)}")
    return data


def replace_file(path: PathLike, chunks: Iterable[Buffer], *, mode: int = PRIVATE) -> None:
    """Writes a file whole or not at all, with exactly this mode; makes its directory if there is none."""
    target = Path(path)
    os.makedirs(target.parent, mode=_DIRECTORY, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
