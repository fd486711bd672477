"""Tells who works on a root right now: a lock that ends with its process, beside the record of who owns the root.

The process of rank 0 locks `run.lock` (fcntl(2), F_OFD_SETLK) before it registers an incarnation, so that a second job is
refused before it could fence the first. The kernel drops the lock however its process ends. Safety does not rest on it:
incarnations and create-once files decide. On a file system that knows no locks there is none, and that is logged. A file
server keeps the lock of a machine that died until that machine's lease is over: where the holder says that it is on another
machine, it is waited for so long.

The lock belongs to the open file, so whoever else reads the whole directory in this process (a copy, an upload) opens and
closes the file and drops nothing. A forked child (a data loader's worker) has the open file too, and would keep the lock
when its parent is dead: it closes it first of all. A kernel without such locks (gVisor) has those of a process, F_SETLK, which
such a reader drops.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.base.errors import InUse, StorageError
from holdfast.base.handler_errors import forgive, pass_on
from holdfast.tiers.backends.local import translate
from holdfast.tiers.backends.own_descriptor import OwnDescriptor
from holdfast.tiers.backends.posix_io import is_remote
from holdfast.tiers.format.strict_json import parse_loose

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
# A killed process gives its memory back before its locks; one that was told to end saves first.
PREDECESSOR_TIMEOUT_S = 5.0
# How long a file server believes in a silent client: 90 s by default (Linux: nfsd(7), nfsv4leasetime), and some margin.
REMOTE_LEASE_S = 100.0
# fcntl's own wait knows no deadline.
POLL_S = 0.05

_MAX_BYTES = 1024
_MAX_WORD = 256
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(slots=True)
class _Held:
    """A lock of this process."""

    own: OwnDescriptor
    users: int = 1


# A process has a lock once, however many of its parts work on the root: (device, inode) -> lock.
_held: dict[tuple[int, int], _Held] = {}
_guard = threading.RLock()  # a signal's handler may close another Checkpointer in between
# struct flock of 64-bit Linux: type, whence, start, length (0: to the end), pid (0 for the lock of an open file).
_FLOCK = struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class RunLock:
    """The lock of one root, as one user of it in this process sees it.

    Args:
        root: the checkpoint directory, which exists.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / LOCK_FILE
        self._key: tuple[int, int] | None = None

    def take(self, run_id: str, *, timeout_s: float = PREDECESSOR_TIMEOUT_S) -> None:
        """Takes the lock, or finds that this process has it; waits for a predecessor that is about to end.

        Args:
            run_id: written into the file, with process and host, for whoever is refused.
            timeout_s: how long to wait for a holder on this machine, or where no other machine can reach the root.

        Raises:
            InUse: another process has it; says which. StorageError: the file cannot be opened.
        """
        held = _held.get(self._key) if self._key is not None else None
        if held is not None and self._key == _identity(self._path):
            return
        self.release()  # of a directory that was replaced since
        began = time.monotonic()
        patient = False
        while not self._try(run_id):
            waited_s = time.monotonic() - began
            if waited_s >= timeout_s and not patient and (patient := self._may_be_dead()):
                logger.warning(
                    "%s is locked from another machine (%s); if that is dead, the file server drops the lock within %.0f s",
                    self._path,
                    _describe(self._words()),
                    REMOTE_LEASE_S,
                )
            if waited_s >= (max(timeout_s, REMOTE_LEASE_S) if patient else timeout_s):
                raise InUse(
                    f"another job works on this path: {_describe(self._words())}",
                    where=str(self._path),
                    remedy="stop it, or give this job another path; another run id does not help",
                )
            time.sleep(POLL_S)

    def release(self) -> None:
        """Gives the lock back, if it is ours and nobody else in this process uses it."""
        with _guard:
            key = self._key
            held = _held.get(key) if key is not None else None
            if held is None or key is None:
                return
            if held.users > 1:
                held.users -= 1
                self._key = None  # no call between: a handler finds both or none
                return
            try:
                if held.own.is_ours():  # a script may have closed it, and opened a file of its own under the number
                    with forgive(OSError):
                        os.ftruncate(held.own.number, 0)  # while it is ours: nobody is to be named by mistake
            finally:  # what a signal's handler raises here would keep others out for as long as this process lives
                held.own.close()
                del _held[key]  # behind it: called again this goes on
                self._key = None

    def _try(self, run_id: str) -> bool:
        with _guard:
            key = _identity(self._path)
            held = _held.get(key) if key is not None else None
            if held is not None and held.own.is_ours():
                held.users += 1
                self._key = key
                return True
            return self._lock(run_id, held.users if held is not None else 0)

    def _lock(self, run_id: str, users: int) -> bool:
        """`users`: others of this process, whose descriptor is closed already."""
        try:
            fd = os.open(self._path, _FLAGS, 0o600)
        except OSError as error:
            raise translate(error, str(self._path)) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError("it is not a regular file", where=str(self._path), remedy="move it away")
            _open_to_writers(fd, status, self._path.parent)
            _lock_file(fd)
            key = (status.st_dev, status.st_ino)
            if key != _identity(self._path):  # removed meanwhile: such a lock excludes nobody
                os.close(fd)
                return False
            _name_ourselves(fd, run_id)
            held = _Held(OwnDescriptor.of(fd), users + 1)
        except OSError as error:
            pass_on(error)
            os.close(fd)
            if error.errno not in _NO_LOCKS:
                return False
            logger.warning("%s cannot be locked (%s): a second job is not kept out", self._path, error.strerror)
            return True
        except BaseException:
            os.close(fd)
            raise
        self._key = key
        _held[key] = held
        _let_children_go()
        return True

    def _may_be_dead(self) -> bool:
        """Return whether the kernel of another machine would have to let go of it, on a file system that several reach."""
        try:
            words = parse_loose(self._words())
        except ValueError as error:
            pass_on(error)
            return False
        elsewhere = isinstance(words, dict) and words.get("host") not in (None, socket.gethostname())
        return elsewhere and is_remote(self._path.parent)

    def _words(self) -> bytes:
        """Return what the holder wrote of itself."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return os.read(fd, _MAX_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            pass_on(error)
            return b""


def _open_to_writers(fd: int, status: os.stat_result, root: Path) -> None:
    """Make the file as open as the root is for writing: who could read it alone could lock it, and keep the job out."""
    root_mode = root.stat().st_mode
    mode = 0o600 | sum(both for write, both in ((0o020, 0o060), (0o002, 0o006)) if root_mode & write)
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:
        with forgive(OSError):  # a file system that knows no modes
            os.fchmod(fd, mode)


def _lock_file(fd: int) -> None:
    """Locks the whole open file, without waiting.

    Raises:
        OSError: somebody else has it (EAGAIN, EACCES), or there are no locks here (`_NO_LOCKS`).
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


@functools.cache
def _let_children_go() -> None:
    """Has every forked child close the files: a lock of an open file lasts until its last owner has."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for held in _held.values():
        with forgive(OSError):
            held.own.close()
    _held.clear()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError as error:
        pass_on(error)
        return None
    return status.st_dev, status.st_ino


def _name_ourselves(fd: int, run_id: str) -> None:
    words = {"pid": os.getpid(), "host": socket.gethostname(), "run_id": run_id}
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(words).encode() + b"\n", 0)
    except OSError as error:  # a full disk: the lock holds, only its words are missing
        pass_on(error)
        logger.debug("who holds the lock was not written: %s", error)


def _describe(data: bytes) -> str:
    """The words of a file that may hold anything."""
    try:
        words = parse_loose(data)
    except ValueError as error:
        pass_on(error)
        return "an unknown process"
    fields = [words.get(name) for name in ("pid", "host", "run_id")] if isinstance(words, dict) else [None]
    if not all(isinstance(field, str | int) and str(field)[:_MAX_WORD].isprintable() for field in fields):
        return "an unknown process"
    pid, host, run_id = (str(field)[:_MAX_WORD] for field in fields)
    return f"process {pid} on {host}, run {run_id!r}"
