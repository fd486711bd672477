"""A directory as a backend: local disks and mounted network file systems.

The order of a write is the reason that a version survives a power cut, and no step may move: bytes into a temporary
file, fsync of it, close, rename or link to the final name, fsync of the directory, fsync of the root. After any error
the temporary file is abandoned and never touched again except to remove it.

Every name is opened beneath a descriptor of the root, segment by segment, following no links. The root is opened for
each call, so that a root that was replaced or unmounted is noticed.

A root that we make is ours alone (0700), because weights are worth stealing; what is beneath it is as open as the root is.
To share a job's checkpoints, open its root (`chmod g+rx`), or make it beforehand: the next files follow.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.base.errors import Fenced, HoldfastError, StorageError, StorageFull, VersionNotFound
from holdfast.base.handler_errors import forgive, pass_on
from holdfast.tiers.backends import posix_io
from holdfast.tiers.backends.interface import TEMPORARY, NotCachedError, Properties, check_segment, split_name
from holdfast.tiers.backends.parallel_streams import StreamCount

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC  # it may be a link, and so may what leads to it
_DIRECTORY = _ROOT | os.O_NOFOLLOW
# O_NONBLOCK: a pipe that someone put there must not hold us.
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

# Files that were put are remembered up to so many, to be given other names; the oldest are forgotten first.
MAX_NOTED = 1 << 16

_REMEDIES = {
    errno.EACCES: "give this user the right to read and write there",
    errno.EPERM: "give this user the right to read and write there",
    errno.EROFS: "mount the file system writable",
    errno.ENOENT: "the directory has vanished; mount it or choose another path",
    errno.ENOTDIR: "something that is not a directory stands in the way; move it away or choose another path",
    errno.EISDIR: "a directory stands where a file belongs; move it away",
    errno.ELOOP: "a link stands where a file of holdfast belongs; links are not followed, move it away",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or use a file system that allows larger ones",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EIO: "check the device and the kernel's log",
    errno.ESTALE: "the network file system lost the directory; mount it again",
}


@dataclass(frozen=True, slots=True)
class _Noted:
    """Says which file was put, as it was once its bytes were durable; and how open the root was."""

    device: int
    number: int
    length: int
    written_ns: int
    mode: int

    @classmethod
    def of(cls, status: os.stat_result, mode: int) -> _Noted:
        """Return it for a file; only regular ones are put."""
        number = status.st_ino if stat.S_ISREG(status.st_mode) else -1
        return cls(status.st_dev, number, status.st_size, status.st_mtime_ns, mode)


class LocalBackend:
    """The directory `root`. Its only state is how many streams it is worth, and what it put; any thread may call it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lags = posix_io.is_remote(root)
        self._streams = StreamCount()
        self._noting = threading.Lock()
        self._noted: dict[str, _Noted] = {}

    @property
    def properties(self) -> Properties:
        return Properties(kind="local", where=str(self._root), has_temporaries=True, lags=self._lags)

    def prepare(self) -> None:
        """Makes the root and its parents, each durable in its own parent."""
        with self._translated(""):
            missing = [path for path in (self._root, *self._root.parents) if not path.exists()]
            for path in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700 if path == self._root else 0o777)
                with posix_io.closing(os.open(path.parent, _ROOT)) as parent:
                    posix_io.sync(parent)
            with self._open_root() as root:
                _make_directory(root, TEMPORARY)
                posix_io.sync(root)

    def put(
        self,
        name: str,
        chunks: Iterable[memoryview],
        *,
        stamp: str,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Writes a file, whole or not at all; see Backend."""
        directory, leaf = split_name(name)
        self._note(name, None)
        with self._translated(name), self._open_root() as root:
            made = self._temporary(root, chunks, stamp, progress)
            with made as (place, temporary), _beneath(root, directory) as target:
                # Of the temporary file, whose name nobody else knows: another writer may replace the final one.
                noted = _Noted.of(os.stat(temporary, dir_fd=place, follow_symlinks=False), _mode(root))
                os.rename(temporary, leaf, src_dir_fd=place, dst_dir_fd=target)
                posix_io.sync(target, root)
        self._note(name, noted)

    def link(self, name: str, source: str, *, stamp: str) -> bool:
        """Gives a file that was put here another name; see Linking.

        It gets a temporary name first and is compared under that, because under `source` it may be replaced at any moment.
        """
        (directory, leaf), (old_directory, old) = split_name(name), split_name(source)
        with self._noting:
            noted = self._noted.get(source)
        if noted is None:
            return False
        check_segment(stamp)
        with self._translated(name), self._open_root() as root, contextlib.ExitStack() as opened:
            try:
                there = opened.enter_context(_beneath(root, old_directory, make=False))
            except FileNotFoundError:
                return False
            place, temporary = opened.enter_context(_beneath(root, TEMPORARY)), f"{stamp}.{secrets.token_hex(6)}"
            try:
                status = posix_io.link_again(there, old, place, temporary)
                if status is None or _Noted.of(status, _mode(root)) != noted:
                    return False
                target = opened.enter_context(_beneath(root, directory))
                os.rename(temporary, leaf, src_dir_fd=place, dst_dir_fd=target)
                posix_io.sync(target, root)
            finally:
                # Gone, unless `name` was a name of this very file: then the rename did nothing.
                with forgive(OSError):
                    os.unlink(temporary, dir_fd=place)
        self._note(name, noted)
        return True

    def _note(self, name: str, noted: _Noted | None) -> None:
        with self._noting:
            self._noted.pop(name, None)
            if noted is not None:
                self._noted[name] = noted
            while len(self._noted) > MAX_NOTED:
                del self._noted[next(iter(self._noted))]

    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        """Writes a file if none is there; see Backend."""
        directory, leaf = split_name(name)
        with self._translated(name), self._open_root() as root:
            with self._temporary(root, [memoryview(data)], stamp) as (place, temporary):
                with _beneath(root, directory) as target:
                    created = posix_io.link(place, temporary, target, leaf, where=self._where(name))
                    if not created:
                        try:
                            found = self.read(name, length=len(data) + 1)
                        except VersionNotFound as error:
                            raise StorageError(f"{name} was removed meanwhile", where=self._where(name)) from error
                        if found != data:
                            raise Fenced(f"{name} exists with other content", where=self._where(name))
                        # Whoever made it may have failed before its directory was durable. Our own copy of the same
                        # bytes in its place makes this call's promise true without trusting a file we did not sync.
                        os.rename(temporary, leaf, src_dir_fd=place, dst_dir_fd=target)
                    posix_io.sync(target, root)
        return created

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """At most `length` bytes from `offset` on; see Backend."""
        with self._translated(name), self._open_old(name) as (descriptor, size):
            wanted = max(0, size - offset)
            buffer = bytearray(wanted if length is None else min(length, wanted))
            return bytes(buffer[: posix_io.fill(descriptor, memoryview(buffer), offset)])

    def read_into(self, name: str, view: memoryview, *, offset: int = 0) -> int:
        with self._translated(name), self._open_old(name) as (descriptor, _):
            return posix_io.fill(descriptor, view, offset)

    def has_page_cache(self, name: str) -> bool:
        """Return whether the file system of this file can tell what is cached; see PageCached."""
        try:
            with self._open_old(name) as (descriptor, _):
                posix_io.fill(descriptor, memoryview(bytearray(1)), 0, os.RWF_NOWAIT)
        except OSError as error:
            pass_on(error)
            return error.errno == errno.EAGAIN
        except HoldfastError:
            return False
        return True

    def read_cached(self, name: str, view: memoryview, *, offset: int) -> int:
        """Fills `view` from the page cache; see PageCached."""
        with self._translated(name), self._open_old(name) as (descriptor, _):
            try:
                return posix_io.fill(descriptor, view, offset, os.RWF_NOWAIT)
            except BlockingIOError as error:
                raise NotCachedError from error

    def listing(self, directory: str) -> list[tuple[str, int]]:
        """(name, bytes) of what stands directly in `directory`; see Backend."""
        if directory and directory != TEMPORARY:
            check_segment(directory)
        with self._translated(directory), contextlib.ExitStack() as opened:
            try:
                root = opened.enter_context(self._open_root())
            except FileNotFoundError:
                if directory:
                    raise  # what lies beneath a root that has vanished is not known
                return []
            try:
                return sorted(_scan(opened.enter_context(_beneath(root, directory, make=False))))
            except FileNotFoundError:
                return []

    def settle(self, directory: str) -> None:
        """Makes the names in `directory` durable; see Settling."""
        check_segment(directory)
        with self._translated(directory), self._open_root() as root, contextlib.suppress(FileNotFoundError):
            with _beneath(root, directory, make=False) as target:
                posix_io.sync(target, root)

    def delete(self, *names: str) -> None:
        """Removes files in this order, durably; see Backend."""
        for name in names:
            with self._translated(name), self._open_root() as root, contextlib.suppress(FileNotFoundError):
                _remove(root, name)
        # Also where nothing was left to remove: the one who removed it may have failed just before this.
        for directory in sorted({_parent(name) for name in names}, reverse=True):
            with self._translated(directory), self._open_root() as root, contextlib.suppress(FileNotFoundError):
                with _beneath(root, directory, make=False) as target:
                    posix_io.sync(target)

    def _where(self, name: str) -> str:
        return str(self._root / name) if name else str(self._root)

    @contextlib.contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """The one border where the operating system's errors become ours."""
        try:
            yield
        except OSError as error:
            raise translate(error, self._where(name)) from error

    @contextlib.contextmanager
    def _open_root(self) -> Iterator[int]:
        # The way to the root may contain links: that is the operator's choice. Beneath it there are none.
        descriptor = os.open(self._root, _ROOT)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _open_old(self, name: str) -> Iterator[tuple[int, int]]:
        """(descriptor, size) of a regular file that exists."""
        directory, leaf = split_name(name)
        with contextlib.ExitStack() as opened:
            try:
                root = opened.enter_context(self._open_root())
            except FileNotFoundError as error:
                if directory:
                    raise  # what lies beneath a root that has vanished is not known
                raise VersionNotFound(f"there is no {name}", where=self._where(name)) from error
            try:
                target = opened.enter_context(_beneath(root, directory, make=False))
                descriptor = os.open(leaf, _OLD_FILE, dir_fd=target)
            except FileNotFoundError as error:
                raise VersionNotFound(f"there is no {name}", where=self._where(name)) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(f"{name} is not a regular file", where=self._where(name), remedy="move it away")
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _temporary(
        self, root: int, chunks: Iterable[memoryview], stamp: str, progress: Callable[[int], None] = lambda _: None
    ) -> Iterator[tuple[int, str]]:
        """(directory, name) of a durable file with these bytes. Gone afterwards, unless it got its final name."""
        check_segment(stamp)
        with _beneath(root, TEMPORARY) as place:
            name = f"{stamp}.{secrets.token_hex(6)}"
            try:
                posix_io.write(place, name, chunks, progress, mode=_mode(root) & 0o666, count=self._streams)
                yield place, name
            finally:
                # After an error the file is worth nothing; after a rename there is none; after a link it is spare.
                with forgive(OSError):
                    os.unlink(name, dir_fd=place)


@contextlib.contextmanager
def _beneath(root: int, directory: str, *, make: bool = True) -> Iterator[int]:
    """A descriptor of a directory directly beneath the root (`""` is the root)."""
    if not directory:
        yield root
        return
    if make:
        _make_directory(root, directory)
    descriptor = os.open(directory, _DIRECTORY, dir_fd=root)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _make_directory(root: int, directory: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, _mode(root), dir_fd=root)


def _mode(root: int) -> int:
    """Return who may look at the root, and so at what is made beneath it; never less than we need ourselves.

    Where all write and each removes only what is theirs (the sticky bit), the same holds beneath.
    """
    return stat.S_IMODE(os.fstat(root).st_mode) & 0o1777 | 0o700


def _parent(name: str) -> str:
    return "" if name.endswith("/") else name.rpartition("/")[0]


def _remove(root: int, name: str) -> None:
    """Removes a file, or a directory if it is empty (`x/`)."""
    if name.endswith("/"):
        check_segment(name[:-1])
        try:
            os.rmdir(name[:-1], dir_fd=root)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return
    directory, _, leaf = name.rpartition("/")
    split_name(leaf if directory == TEMPORARY else name)
    with _beneath(root, directory, make=False) as target:
        os.unlink(leaf, dir_fd=target)


def _scan(directory: int) -> Iterator[tuple[str, int]]:
    with os.scandir(directory) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # removed while we look
                if entry.is_dir(follow_symlinks=False):
                    yield f"{entry.name}/", 0
                else:
                    yield entry.name, entry.stat(follow_symlinks=False).st_size


def translate(error: OSError, where: str) -> StorageError:
    """Return what the operating system said about `where`, as an error of ours with a remedy. What a signal's handler raised is raised."""
    pass_on(error)
    code = error.errno or 0
    if code in (errno.ENOSPC, errno.EDQUOT):
        what = "no space is left" if code == errno.ENOSPC else "the quota is used up"
        return StorageFull(what, where=where, remedy="free space or raise the quota; it is written again from memory")
    remedy = _REMEDIES.get(code, "check the path, its mount and the kernel's log")
    return StorageError(f"the path refuses: {error.strerror or error}", where=where, remedy=remedy)
