"""The system calls of a durable write, in the order that a power cut forgives.

Large files are written with O_DIRECT straight from the caller's pages, which costs a sixth of the CPU of the page
cache; where the file system or the memory does not allow that, through the page cache. No fsync is ever repeated on the
same file: after an error the kernel forgets the dirty pages and the next call "succeeds"
(https://wiki.postgresql.org/wiki/Fsync_Errors). Every function raises OSError as it comes; `local`, the only caller,
translates it and removes what is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from holdfast.base.errors import StorageUnfit
from holdfast.base.handler_errors import forgive, pass_on
from holdfast.tiers.backends.interface import held_at_once, total_bytes
from holdfast.tiers.backends.parallel_streams import UNIT_BYTES, StreamCount, Streams

PAGE = 4096
# Kinds of file systems that other machines write to as well.
REMOTE_KINDS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse", "glusterfs", "9p")
# Below this a direct write only adds latency.
MIN_DIRECT_BYTES = 256 << 10

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_NOREPLACE = 1
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
# Of a file that is there: another device or project, no more names allowed, or it went meanwhile.
_NO_MORE_LINKS = _NO_LINKS | {errno.EXDEV, errno.EACCES, errno.ENOENT}


class _DirectRefusedError(Exception):
    """O_DIRECT is not possible for this file. Nothing is wrong with the storage."""


def write(
    place: int,
    name: str,
    chunks: Iterable[memoryview],
    progress: Callable[[int], None] = lambda _: None,
    *,
    mode: int = 0o600,
    count: StreamCount | None = None,
) -> None:
    """Writes a new file and makes its bytes durable (its name is not yet); by several streams, if there is a count of them."""
    total = total_bytes(chunks)
    if total is None or total >= MIN_DIRECT_BYTES:
        try:
            _write_direct(place, name, chunks, progress, mode, count)
            return
        except _DirectRefusedError:
            # A file that returned an error is never used again, so the bytes go into a new one. Some file systems
            # refuse the flag before they make the file, some after.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=place)
    with closing(os.open(name, _NEW_FILE, mode, dir_fd=place)) as descriptor:
        at = 0
        for chunk in chunks:
            for begin in range(0, len(chunk), UNIT_BYTES):
                progress(_write_all(descriptor, chunk[begin : begin + UNIT_BYTES], at + begin))
            at += len(chunk)
        os.fsync(descriptor)


def _write_direct(
    place: int,
    name: str,
    chunks: Iterable[memoryview],
    progress: Callable[[int], None],
    mode: int,
    count: StreamCount | None,
) -> None:
    """Writes whole pages from where they lie and the rest from a padded page, and cuts the padding off.

    Every stream has ended before the file is made durable, and before its descriptor is closed.
    """
    total = total_bytes(chunks)
    at_once = held_at_once(chunks) if count is not None and total is not None and total > UNIT_BYTES else 1
    with _refusal(), closing(os.open(name, _NEW_FILE | os.O_DIRECT, mode, dir_fd=place)) as descriptor:
        at = 0
        with Streams(count or StreamCount(), at_once, progress) as streams:
            for chunk in chunks:
                if at % PAGE:  # only the last chunk may end within a page
                    raise _DirectRefusedError
                whole = len(chunk) - len(chunk) % PAGE
                for begin in range(0, whole, UNIT_BYTES):
                    unit = chunk[begin : min(begin + UNIT_BYTES, whole)]
                    streams.put(partial(_write_all, descriptor, unit, at + begin))
                if whole < len(chunk):
                    page = memoryview(mmap.mmap(-1, PAGE))  # memory that is aligned and zero
                    page[: len(chunk) - whole] = chunk[whole:]
                    streams.put(partial(_write_all, descriptor, page, at + whole))
                at += len(chunk)
                if at == total:  # who makes the chunks is asked once more when all are written
                    streams.drain()
        os.ftruncate(descriptor, at)
        os.fsync(descriptor)


@contextlib.contextmanager
def _refusal() -> Iterator[None]:
    """EINVAL is how the file system, or memory that is not aligned, refuses O_DIRECT."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise _DirectRefusedError from error
        raise


def _write_all(descriptor: int, unit: memoryview, at: int) -> int:
    """Writes all of `unit` at `at`, however little a call takes; returns the bytes."""
    done = 0
    while done < len(unit):
        written = os.pwrite(descriptor, unit[done:], at + done)
        if written <= 0:
            raise OSError(errno.EIO, "the file system wrote nothing and gave no reason")
        done += written
    return done


def fill(descriptor: int, view: memoryview, offset: int, flags: int = 0) -> int:
    """Reads into `view` from `offset` until it is full or the file ends; returns the bytes read.

    Raises:
        OSError: with `RWF_NOWAIT`: EAGAIN where not all of it is cached; EOPNOTSUPP where the file system cannot tell.
    """
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + UNIT_BYTES]], offset + done, flags)
        if count == 0:
            break
        done += count
    return done


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Closes the descriptor; an error of close counts, for it may be the first word of a lost write (NFS)."""
    try:
        yield descriptor
    except BaseException:
        with forgive(OSError):
            os.close(descriptor)
        raise
    os.close(descriptor)


def link(place: int, temporary: str, target: int, leaf: str, *, where: str) -> bool:
    """Gives a temporary file its final name if that is free; False if it is taken."""
    try:
        os.link(temporary, leaf, src_dir_fd=place, dst_dir_fd=target, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _rename_new(place, temporary, target, leaf, where=where)
    return True


def link_again(source: int, old: str, place: int, temporary: str) -> os.stat_result | None:
    """Gives a file a temporary name as well; what it is, or None if it is not there or no name can be added."""
    try:
        os.link(old, temporary, src_dir_fd=source, dst_dir_fd=place, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_MORE_LINKS:
            raise
        return None
    return os.stat(temporary, dir_fd=place, follow_symlinks=False)


def _rename_new(place: int, temporary: str, target: int, leaf: str, *, where: str) -> bool:
    """The same where the file system has no links: renameat2 with RENAME_NOREPLACE."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(place, os.fsencode(temporary), target, os.fsencode(leaf), _RENAME_NOREPLACE) == 0:
            return True
        code = ctypes.get_errno()
        if code == errno.EEXIST:
            return False
        if code not in _NO_LINKS:
            raise OSError(code, os.strerror(code))
    remedy = "choose a path on a file system with hard links or with RENAME_NOREPLACE"
    raise StorageUnfit("a file cannot be created exactly once here", where=where, remedy=remedy)


def sync(*directories: int) -> None:
    """Makes names durable. A file system that cannot do that is refused."""
    try:
        for directory in directories:
            os.fsync(directory)
    except OSError as error:
        pass_on(error)
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            remedy = "choose a path on a file system whose directories can be synchronised"
            raise StorageUnfit("names cannot be made durable here (fsync of a directory)", remedy=remedy) from error
        raise


def is_remote(path: Path) -> bool:
    """Returns whether other machines may write below `path` too: unless the kernel's table of mounts denies it."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
        real = os.path.realpath(path)  # goes on at a loop of links, which whoever opens it is told of
    except OSError as error:
        pass_on(error)
        return True
    kind, longest = "", -1
    for line in lines:
        mount, words = line.split()[4], line.partition(" - ")[2].split()
        if words and len(mount) > longest and (real == mount or real.startswith(f"{mount.rstrip('/')}/")):
            kind, longest = words[0], len(mount)
    return kind.startswith(REMOTE_KINDS)
