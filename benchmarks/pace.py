"""Storage of a limited rate: one line that all processes of a benchmark share, as the ranks of a job share a file server.

    holdfast    its keepers run as ever, their backend wrapped:   python -m benchmarks.pace LINE [arguments of a keeper]
    others      their own readers, each file opened as a PacedFile

Whoever takes bytes waits until those before it have gone through. The files themselves lie in the page cache, so the
line is all that is slow, and it is the same for all. Needs no torch, for a keeper has none.

Other stores bound each stream and not all together: `limit_streams` makes every call of this process that writes or reads a
file take its time, and a keeper is started so if a rate stands in the line's place. Networks often bound each connection:
`limit_connections`, and a keeper for which `connections:RATE:MOST` stands there, which opens at most MOST to one peer.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from holdfast.base.config import Config
from holdfast.keeper.replication import image_transfer
from holdfast.keeper.rpc.listener import hidden
from holdfast.keeper.rpc.paths import RuntimePaths, place_of
from holdfast.keeper.service import keeper_main
from holdfast.tiers.backends.interface import Backend
from holdfast.tiers.storage import version_store
from holdfast.tiers.wire import tcp

STEP_BYTES = 1 << 20
_SO_MAX_PACING_RATE = 47  # of asm-generic/socket.h, in bytes per second
_STATE = struct.Struct("=dd")  # when the line is free again (CLOCK_MONOTONIC), bytes per second (0: no bound)


class Line:
    """A bound in bytes per second for all processes that open the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def path(self) -> Path:
        return self._path

    def bound(self, bytes_per_s: float) -> None:
        """The rate from now on; 0: none."""
        with self._locked():
            os.pwrite(self._fd, _STATE.pack(time.monotonic(), bytes_per_s), 0)

    def take(self, num_bytes: int) -> None:
        """Returns when so many bytes have gone through."""
        with self._locked():
            free_s, rate = _STATE.unpack(os.pread(self._fd, _STATE.size, 0))
            if not rate:
                return
            free_s = max(time.monotonic(), free_s) + num_bytes / rate
            os.pwrite(self._fd, _STATE.pack(free_s, rate), 0)
        time.sleep(max(0.0, free_s - time.monotonic()))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)  # threads of one process exclude each other as well
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


class Paced:
    """A backend behind the line: a wrapper with the same verbs."""

    def __init__(self, backend: Backend, line: Line) -> None:
        self._backend = backend
        self._line = line

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._backend, verb)

    def put(
        self, name: str, chunks: Iterable[memoryview], *, stamp: str, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        def moved(num_bytes: int) -> None:
            self._line.take(num_bytes)
            progress(num_bytes)

        self._backend.put(name, chunks, stamp=stamp, progress=moved)

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        data = self._backend.read(name, offset=offset, length=length)
        self._line.take(len(data))
        return data

    def read_into(self, name: str, view: memoryview, *, offset: int = 0) -> int:
        done = 0
        while done < len(view):
            step = view[done : done + STEP_BYTES]
            count = self._backend.read_into(name, step, offset=offset + done)
            self._line.take(count)
            done += count
            if count < len(step):
                break
        return done


class PacedFile(io.FileIO):
    """A file behind the line, open for reading; nothing is read ahead."""

    def __init__(self, path: str | os.PathLike[str], line: Line) -> None:
        super().__init__(path, "r")
        self._line = line

    def readinto(self, buffer: Any) -> int:
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view):
            count = super().readinto(view[done : done + STEP_BYTES]) or 0
            if not count:
                break
            self._line.take(count)
            done += count
        return done

    def read(self, size: int | None = -1) -> bytes:
        left = os.fstat(self.fileno()).st_size - self.tell()
        data = bytearray(left if size is None or size < 0 else min(size, left))
        return bytes(data[: self.readinto(data)])


def limit_streams(bytes_per_s: float) -> Callable[[], None]:
    """From now on a thread of this process writes and reads files at this rate, however many others do; returns the end of it."""
    real = os.pwrite, os.preadv

    def wait(began_s: float, num_bytes: int) -> int:
        time.sleep(max(0.0, began_s + num_bytes / bytes_per_s - time.monotonic()))
        return num_bytes

    def end() -> None:
        os.pwrite, os.preadv = real

    os.pwrite = lambda *args: wait(time.monotonic(), real[0](*args))  # type: ignore[assignment]
    os.preadv = lambda *args: wait(time.monotonic(), real[1](*args))  # type: ignore[assignment]
    return end


def limit_connections(bytes_per_s: int) -> None:
    """From now on each TCP connection of this process sends at this rate, however many others do."""
    real = tcp._tune

    def tune(sock: socket.socket) -> None:
        real(sock)
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)

    tcp._tune = tune


class SlowWriter(io.FileIO):
    """A file that is written at a rate of its own, as a stream of `limit_streams` is."""

    def __init__(self, path: str | os.PathLike[str], bytes_per_s: float) -> None:
        super().__init__(path, "w")
        self._rate = bytes_per_s

    def write(self, data: Any) -> int:
        began_s, view, done = time.monotonic(), memoryview(data).cast("B"), 0
        while done < len(view):
            done += super().write(view[done:]) or 0
        time.sleep(max(0.0, began_s + done / self._rate - time.monotonic()))
        return done


def start_keeper(root: str, config: Config, line: Line | float | str) -> RuntimePaths:
    """A keeper of the node whose storage lies behind the line, or whose streams have that rate, or its connections
    (`connections:RATE:MOST`), once it listens. It is a child of this process.
    """
    place = place_of(root, config)
    place.make()
    ready, theirs = os.pipe()
    command = [
        sys.executable, "-m", "benchmarks.pace", str(line.path if isinstance(line, Line) else line),
        "--root", root, "--run-id", config.run_id, "--node", place.node, "--runtime-dir", str(place.runtime),
        "--memory-budget", config.memory_budget, "--linger-s", str(config.linger_s), "--ready-fd", str(theirs),
    ]  # fmt: skip
    passed = [theirs]
    if config.listen:
        passed.append(hidden(Path(config.secret_file).read_bytes()))
        command += ["--listen", config.listen, "--secret-fd", str(passed[1])]
    subprocess.Popen(command, pass_fds=passed, start_new_session=True)
    for fd in passed:
        os.close(fd)
    with os.fdopen(ready) as said:
        answer = json.loads(said.read() or "{}")
    if not answer.get("pid"):
        raise RuntimeError(f"no paced keeper: {answer}; see {place.log}")
    return place


def main() -> int:
    """A keeper behind the line, or of limited streams, or of limited connections."""
    limit = sys.argv[1]
    if limit.startswith("connections:"):
        rate, most = map(int, limit.split(":")[1:])
        limit_connections(rate)
        image_transfer.MOST_LINES = most
    elif "/" in limit:
        line, opened = Line(Path(limit)), version_store.open_backend
        version_store.open_backend = lambda url: Paced(opened(url), line)
    else:
        limit_streams(float(limit))
    return keeper_main.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
