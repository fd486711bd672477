"""Compiled code that outlives the node it was compiled on: Inductor's, AOT autograd's and Triton's caches, synced to storage.

With `holdfast run --compile-cache URL` the caches of a node lie in one directory, which is filled from URL before the
first worker starts and brought back to URL while the job runs and when it ends: a node that is killed has lost the last
minutes of compiling at most. What is in it is keyed twice: torch's own caches by graph,
code and flags (a changed script misses by itself), and the archive by everything that makes compiled code foreign: the
versions of Python, torch and Triton, the processor, the devices, the flags. Archives are named by their digest; one that
is torn or damaged is passed over. Without the flag torch keeps its caches where it always does.

Compiled code is code: whoever may write to URL can have it run, unless the job has a secret. Then archives are
authenticated with it (HMAC-SHA256) and others are passed over; a node has a directory per secret. That must belong to this
user alone, or nothing is cached. Must never stop a job: every fault is a log line.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch

from holdfast.base import private
from holdfast.base.errors import HoldfastError
from holdfast.base.replacing import replacing
from holdfast.checkpoint.device import accelerator
from holdfast.tiers.backends.interface import Backend
from holdfast.tiers.backends.open_url import open_backend
from holdfast.tiers.format.strict_json import parse_loose
from holdfast.tiers.wire.tls import read_secret

logger = logging.getLogger(__name__)

# Where torch looks; all three below one directory.
DIRECTORIES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
# Flags that change what is compiled.
FLAGS = ("TORCHINDUCTOR_", "TORCH_COMPILE_", "TRITON_", "CXX", "CFLAGS", "CXXFLAGS")
MAX_ARCHIVES = 8
# What is new is brought to storage after so long, and again after twice as long each time.
FIRST_SYNC_S, MOST_SYNC_S = 30.0, 600.0
# A file that changed a moment ago may not be whole.
SETTLED_S = 10.0
JOIN_TIMEOUT_S = 60.0
MAX_BYTES = 4 << 30
# Who may write there may have put any number of files there.
MAX_READ = 256
PIECE_BYTES = 8 << 20
STAMP = "compile-cache"
_SUFFIX = ".cache"


def key(environ: Mapping[str, str]) -> str:
    """The name of everything that compiled code depends on besides the code: a hex digest."""
    flags = {n: v for n, v in environ.items() if n.startswith(FLAGS) and n not in DIRECTORIES}
    parts = [
        sys.version, torch.__version__, platform.machine(), _processor(), accelerator.names(), json.dumps(flags, sort_keys=True),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """The instructions that the compiler may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _of_node(key: str, secret: bytes) -> str:
    """Return the name of a node's directory. Code that runs without the secret fetched is in none of a run with it."""
    if not secret:
        return key
    return hmac.new(secret, f"holdfast compile cache of a node {key}".encode(), hashlib.sha256).hexdigest()[:32]


class _Digest(Protocol):
    """Is a hash or a keyed one."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


class CompileCache:
    """The caches of one node.

    Args:
        url: where archives are kept between runs and nodes.
        directory: of this node; made when needed, within `below`.
        environ: is read for the key and, by `fetch`, told the directories; what the user set stays.
        below: this directory and all from it on must be this user's alone; by default `directory` itself.
        secret: authenticates archives; empty: they are told apart from damaged ones only.
    """

    def __init__(
        self,
        url: str,
        directory: Path,
        environ: MutableMapping[str, str],
        *,
        below: Path | None = None,
        secret: bytes = b"",
    ) -> None:
        self._url = url
        self._environ = environ
        self._below = below or directory
        self._secret = secret
        self._is_fit = False
        self.key = key(environ)
        self.directory = directory / _of_node(self.key, secret)
        self._known: set[str] = set()
        self._archives: set[str] = set()  # whose files are all here
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def fetch(self) -> int:
        """Fills the directory and points torch at it; returns how many files came. Before the first worker starts."""
        try:
            private.make(self.directory, below=self._below)
        except (HoldfastError, OSError) as error:
            logger.warning("nothing that is compiled is kept or fetched: %s", error)
            return 0
        self._is_fit = True
        for variable, name in DIRECTORIES.items():
            self._environ.setdefault(variable, str(self.directory / name))
        try:
            backend = open_backend(self._url)
            return sum(self._fetched(backend, name, size) for name, size in self._bounded(backend))
        except (HoldfastError, OSError, MemoryError) as error:
            if isinstance(error.__cause__, FileNotFoundError):  # before the first job that kept something there
                logger.info("nothing is kept at %s yet", self._url)
                return 0
            logger.warning("the compile cache could not be fetched: %s", str(error) or type(error).__name__)
            return 0

    def _bounded(self, backend: Backend) -> list[tuple[str, int]]:
        """Return name and size of the archives that are looked at: the smallest, MAX_READ of them, MAX_BYTES in all."""
        listed = [(name, size) for name, size in backend.listing(self.key) if name.endswith(_SUFFIX)]
        chosen: list[tuple[str, int]] = []
        total = 0
        for name, size in sorted(listed, key=lambda row: (row[1], row[0])):
            total += size
            if total > MAX_BYTES or len(chosen) == MAX_READ:
                what = f"{len(listed) - len(chosen)} of {len(listed)} archives of the compile cache"
                logger.warning("%s are passed over: more than %d bytes, or too many", what, MAX_BYTES)
                break
            chosen.append((name, size))
        return chosen

    def _fetched(self, backend: Backend, name: str, size: int) -> int:
        """Return how many files of one archive came. It is held in memory only after it is proved in pieces."""
        proof, buffer, path = self._proof(), memoryview(bytearray(min(size, PIECE_BYTES))), f"{self.key}/{name}"
        for at in range(0, size, PIECE_BYTES):
            piece = buffer[: size - at]
            proof.update(piece[: backend.read_into(path, piece, offset=at)])
        if not self._is_proved(name, proof):
            return 0
        return self._unpack(name, backend.read(path, length=size))

    def start(self, *, first_s: float = FIRST_SYNC_S) -> None:
        """Brings what is new to storage from now on, in a thread of its own."""
        if not self._is_fit:
            return
        self._thread = threading.Thread(target=self._sync, args=(first_s,), name="holdfast compile cache", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The last worker has ended: everything is brought to storage."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)
        if self._is_fit:
            self.keep()

    def _sync(self, pause_s: float) -> None:
        while not self._ended.wait(pause_s):
            self.keep(settled_s=SETTLED_S)
            pause_s = min(2 * pause_s, MOST_SYNC_S)

    def _unpack(self, name: str, archive: bytes) -> int:
        """Writes the files of one archive; none if it is damaged."""
        proof = self._proof()
        proof.update(archive)
        if not self._is_proved(name, proof):
            return 0
        count = 0
        self._archives.add(name)
        for path, content, executable in unpack(archive):
            target = self.directory / path
            self._known.add(path)
            if not target.exists():
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with replacing(target) as file:
                    os.fchmod(file.fileno(), 0o700 if executable else 0o600)
                    file.write(content)
                count += 1
        return count

    def keep(self, *, settled_s: float = 0.0) -> int:
        """Brings what is new to storage; returns how many files that are. One thread at a time.

        Args:
            settled_s: files that changed in the last so many seconds are left for later.
        """
        try:
            latest = time.time() - settled_s
            found = {path: file for path, file in self._files() if not settled_s or file.stat().st_mtime < latest}
            files = {path: file for path, file in found.items() if path not in self._known}
            if not files:
                return 0
            backend = open_backend(self._url)
            backend.prepare()
            # A heap of archives costs every start: now and then one takes the place of all whose files are here.
            replaced = sorted(self._archives) if len(self._archives) >= MAX_ARCHIVES else []
            archive = pack(found if replaced else files)
            name = self._name(archive)
            backend.put(f"{self.key}/{name}", [memoryview(archive)], stamp=STAMP)
            if replaced:
                backend.delete(*(f"{self.key}/{old}" for old in replaced if old != name))
            self._known |= set(files)
            self._archives = self._archives - set(replaced) | {name}
            return len(files)
        except (HoldfastError, OSError, MemoryError) as error:
            logger.warning("the compile cache could not be kept: %s", str(error) or type(error).__name__)
            return 0

    def _name(self, archive: bytes) -> str:
        """Return the name of an archive: its digest, with the job's secret if there is one."""
        proof = self._proof()
        proof.update(archive)
        return _named(proof)

    def _proof(self) -> _Digest:
        """Return what an archive is digested with."""
        if not self._secret:
            return hashlib.sha256()
        return hmac.new(self._secret, f"holdfast compile cache {self.key} ".encode(), hashlib.sha256)

    def _is_proved(self, name: str, proof: _Digest) -> bool:
        if hmac.compare_digest(_named(proof).encode(), os.fsencode(name)):
            return True
        what = "damaged, or not of a process with this job's secret," if self._secret else "damaged"
        logger.warning("the compile cache %s is %s and passed over", name, what)
        return False

    def _files(self) -> Iterator[tuple[str, Path]]:
        total = 0
        for file in sorted(self.directory.rglob("*")):
            lasting = not file.name.endswith((".lock", ".tmp", ".new")) and "locks" not in file.parts
            if file.is_file() and not file.is_symlink() and lasting:
                total += file.stat().st_size
                if total > MAX_BYTES:
                    logger.warning("the compile cache is larger than %d bytes; the rest is left out", MAX_BYTES)
                    return
                yield str(file.relative_to(self.directory)), file


def _named(proof: _Digest) -> str:
    return f"{proof.hexdigest()[:32]}{_SUFFIX}"


def pack(files: Mapping[str, Path]) -> bytes:
    """One archive: the length of a JSON list of (name, bytes, executable), the list, the contents."""
    contents = {name: file.read_bytes() for name, file in files.items()}
    rows = [[name, len(contents[name]), os.access(file, os.X_OK)] for name, file in files.items()]
    head = json.dumps(rows).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(contents.values())


def unpack(archive: bytes) -> list[tuple[str, bytes, bool]]:
    """(name, content, executable) of each file; nothing if the archive is not one, no name that leads elsewhere."""
    try:
        begin = 8 + int.from_bytes(archive[:8], "little")
        rows = parse_loose(archive[8:begin])
        found = []
        for name, size, executable in rows:
            os.fsencode(name)  # a name that no file can have is refused here
            parts = PurePosixPath(name).parts
            if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\0" in name or size < 0:
                return []
            found.append((name, archive[begin : begin + size], bool(executable)))
            begin += size
    except (ValueError, TypeError):
        return []
    return found if begin == len(archive) else []


def make_cache(
    given: str | None,
    directory: Path,
    environ: MutableMapping[str, str],
    *,
    below: Path | None = None,
    secret_file: str = "",
) -> CompileCache | None:
    """Returns the cache that the flag asks for; None without it or with `off`.

    Raises:
        ConfigError: the secret's file is unfit.
    """
    if not given or given == "off":
        return None
    secret = read_secret(secret_file) if secret_file else b""
    return CompileCache(given, directory, environ, below=below, secret=secret)
