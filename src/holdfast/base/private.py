"""Directories that belong to this user alone, and files in them: made or proved, never reached through a link.

The runtime directory often lies where every user of the machine may write (`/tmp`), under a name that anybody can guess. So
whoever writes there, or believes what lies there, comes through here first.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from holdfast.base.errors import ConfigError
from holdfast.base.handler_errors import forgive

_LIKE_A_SECRET = re.compile(r"(?:^|[/!\s])(?:0x)?[0-9A-Fa-f]{32,}(?:\s|$)")
# A keeper that ends removes its directory, and the next one makes it anew at the same time.
_ATTEMPTS = 8
# By so much a file may have grown since it was looked at.
_GROWS_BYTES = 1 << 16

REMEDY = "chmod 700 it, or set HOLDFAST_RUNTIME_DIR to a private directory"
NO_DIRECTORY_REMEDY = "set HOLDFAST_RUNTIME_DIR to a private directory; links are not followed"
OTHERS_REMEDY = "another user made it: set HOLDFAST_RUNTIME_DIR to a private directory"


def make(path: Path, *, below: Path | None = None) -> None:
    """Makes a directory that is ours alone (0700), or proves that it is. From `below` on, if given, so must
    be the directories on the way to it.

    Raises:
        ConfigError: one of them is a link, another user's, or open to others. OSError: one cannot be made.
    """
    top = below or path
    way = (*reversed([each for each in path.parents if top in (each, *each.parents)]), path)
    for left in reversed(range(_ATTEMPTS)):
        top.parent.mkdir(parents=True, exist_ok=True)
        try:
            for directory in way:
                _make(directory)
        except FileNotFoundError:  # whoever had one of them has just removed it
            if not left:
                raise
        else:
            return


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        prove(directory)


def prove(path: Path) -> None:
    """Returns if `path` is a directory of ours alone.

    Raises:
        ConfigError: it is not. FileNotFoundError: it is not there.
    """
    _require(path.lstat(), path)


def is_anothers(path: Path) -> bool:
    """Return whether another user made what stands there; a link is what stands there, not where it leads."""
    with forgive(OSError):
        return path.lstat().st_uid != os.geteuid()
    return False


def open_in(directory: Path, name: str, flags: int) -> int:
    """Opens a file of ours in a directory of ours alone; returns the descriptor. A new file has mode 0600.

    Raises:
        ConfigError: the directory is not ours alone, or the file is a link, or not ours. OSError: it cannot be opened.
    """
    at = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require(os.fstat(at), directory)
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=at)
    finally:
        os.close(at)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        os.close(fd)
        raise ConfigError("the file is not ours alone", where=str(directory / name), remedy="remove it")
    return fd


def read(path: Path, most_bytes: int, *, through_links: bool = False) -> bytes:
    """Return the content of a regular file in a directory where others may have put something else.

    Args:
        path: the file.
        most_bytes: a larger file is refused before any of it is read.
        through_links: the content is proved by other means, so it may lie elsewhere.

    Raises:
        OSError: it cannot be read, is no regular file, or has more bytes than that; or it is a link.
    """
    follow = 0 if through_links else os.O_NOFOLLOW
    fd = os.open(path, os.O_RDONLY | follow | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
        return file.read(min(most_bytes, found.st_size + _GROWS_BYTES))  # Python allocates all that it is asked for


def looks_secret(setting: str) -> bool:
    """Return whether a setting that should name a file is a key or secret itself: an easy slip, and not to be repeated."""
    return bool(_LIKE_A_SECRET.search(setting))


def is_secret(found: os.stat_result) -> bool:
    """Returns whether a file may hold a secret: ours, or root's, and open to nobody else.

    Kubernetes mounts secrets as root's, readable for a group of the container (mode 0440 under `fsGroup`); that is accepted.
    """
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in {os.geteuid(), 0}:
        return False
    may_group_read = found.st_uid == 0 != os.geteuid() and found.st_gid in {os.getegid(), *os.getgroups()}
    return not found.st_mode & (0o037 if may_group_read else 0o077)


def is_private(found: os.stat_result) -> bool:
    """Returns whether this is a directory of ours that nobody else may enter."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _require(found: os.stat_result, path: Path) -> None:
    if not is_private(found):
        what, remedy = shortcoming(found)
        raise ConfigError(f"the runtime directory {what}", where=str(path), remedy=remedy)


def shortcoming(found: os.stat_result) -> tuple[str, str]:
    """Returns what is wrong with a directory that is not private, and what to do. Only a directory of ours may need a chmod."""
    if not stat.S_ISDIR(found.st_mode):
        return "is not ours alone (no directory, or a link to one)", NO_DIRECTORY_REMEDY
    return "is not ours alone (owner, or open to others)", REMEDY if found.st_uid == os.geteuid() else OTHERS_REMEDY
