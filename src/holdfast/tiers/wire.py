"""Frames between processes of one job: a length, a body, now and then descriptors or raw bytes behind it.

    frame = u32 big-endian length of the body | body            (body: msgpack of one message, see node/messages.py)
    bulk  = the bytes announced by the frame before it, nothing around them

Transport is a Unix socket in a private directory; the kernel names the peer, and only our own user is served. Other
transports come behind the same functions: nothing outside this file knows an address family.

Rules: every call has a deadline, and a frame that began must end within it (a slow writer is cut off); a length above
the limit is refused before a byte of it is stored; the end of the stream between frames and inside one is KeeperLost;
nonsense is KeeperError. After any error the channel is of no use and must be closed.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.base.errors import ConfigError, KeeperError, KeeperLost

MAX_FRAME_BYTES = 16 << 20
MAX_HELLO_BYTES = 1 << 10
HELLO_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
MAX_DESCRIPTORS = 16
MAX_UNIX_PATH = 107  # sun_path without its closing zero
BULK_BLOCK_BYTES = 1 << 20

_HEAD = struct.Struct(">I")
_FD_SIZE = array.array("i").itemsize


class Channel:
    """One connection, both directions. One thread receives; any thread may send, one frame after the other.

    The socket is non-blocking and every wait is a poll with its own deadline, so that the two directions do not share
    a timeout. The thread that receives is the owner: it calls `close`; everyone else calls `abort`.
    """

    def __init__(self, sock: socket.socket, *, where: str) -> None:
        sock.setblocking(False)
        self.where = where
        self._sock = sock
        self._aborted = False
        self._send_lock = threading.Lock()

    @property
    def aborted(self) -> bool:
        return self._aborted

    def send(self, body: bytes, *, fds: Sequence[int] = (), timeout_s: float) -> None:
        """Sends one frame, with descriptors if given.

        Raises:
            KeeperLost: the peer is gone or did not read within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._send_lock:
            self._send_all(_framed(body), fds, deadline)

    def send_bulk(self, body: bytes, view: memoryview, *, timeout_s: float) -> None:
        """Sends a frame and raw bytes straight from `view` behind it."""
        deadline = time.monotonic() + timeout_s
        with self._send_lock:
            self._send_all(_framed(body), (), deadline)
            self._send_all(view.cast("B"), (), deadline)

    def receive(
        self, *, timeout_s: float | None, frame_timeout_s: float = HELLO_TIMEOUT_S, limit: int = MAX_FRAME_BYTES
    ) -> tuple[bytes, list[int]]:
        """The next frame and the descriptors that came with it (the caller owns them).

        Args:
            timeout_s: how long the peer may be silent before the frame begins; None waits until `abort`.
            frame_timeout_s: how long the frame may take once it began.
            limit: largest body accepted.

        Raises:
            KeeperLost: end of stream. KeeperError: too slow, or too large. TimeoutError: no frame began in time.
        """
        head, fds = self._receive_head(timeout_s)
        try:
            deadline = time.monotonic() + frame_timeout_s
            rest = bytearray(_HEAD.size - len(head))
            self._fill(memoryview(rest), deadline)
            (length,) = _HEAD.unpack(head + rest)
            if length > limit:
                raise KeeperError(f"a frame of {length} bytes is above the limit of {limit}", where=self.where)
            body = bytearray(length)
            self._fill(memoryview(body), deadline)
        except BaseException:
            close_fds(fds)
            raise
        return bytes(body), fds

    def receive_bulk(self, view: memoryview, *, timeout_s: float) -> None:
        """Receives exactly len(view) raw bytes into `view`."""
        self._fill(view.cast("B"), time.monotonic() + timeout_s)

    def abort(self) -> None:
        """Cuts the connection and wakes every thread that waits in it. Any thread, any number of times."""
        self._aborted = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster

    def close(self) -> None:
        """Cuts the connection and gives the descriptor back. Only the owner, when nobody sends any more."""
        self.abort()
        with self._send_lock:
            self._sock.close()

    def _send_all(self, data: memoryview, fds: Sequence[int], deadline: float) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while data:
            try:
                sent = self._sock.sendmsg([data[:BULK_BLOCK_BYTES]], ancillary)
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline - time.monotonic()):
                    raise KeeperLost("the peer does not read", where=self.where) from None
                continue
            except OSError as error:
                raise self._broken(error) from error
            data, ancillary = data[sent:], []

    def _receive_head(self, timeout_s: float | None) -> tuple[bytes, list[int]]:
        if not self._wait(select.POLLIN, timeout_s):
            raise TimeoutError
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(_HEAD.size, socket.CMSG_SPACE(MAX_DESCRIPTORS * _FD_SIZE))
        except BlockingIOError:
            raise TimeoutError from None  # a spurious wake-up
        except OSError as error:
            raise self._broken(error) from error
        fds = _descriptors(ancillary)
        if flags & socket.MSG_CTRUNC:
            close_fds(fds)
            raise KeeperError("more descriptors than allowed", where=self.where)
        if not data:
            raise KeeperLost("the peer closed the connection", where=self.where)
        return data, fds

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view:
            try:
                count = self._sock.recv_into(view, min(len(view), 4 * BULK_BLOCK_BYTES))
            except BlockingIOError:
                if not self._wait(select.POLLIN, deadline - time.monotonic()):
                    raise KeeperError("the peer did not finish its frame in time", where=self.where) from None
                continue
            except OSError as error:
                raise self._broken(error) from error
            if count == 0:
                raise KeeperLost("the peer closed the connection inside a frame", where=self.where)
            view = view[count:]
            if time.monotonic() > deadline:  # a peer that trickles never lets a poll expire
                raise KeeperError("the peer did not finish its frame in time", where=self.where)

    def _wait(self, events: int, timeout_s: float | None) -> bool:
        if timeout_s is not None and timeout_s <= 0:
            return False
        try:
            poll = select.poll()
            poll.register(self._sock, events)
            return bool(poll.poll(None if timeout_s is None else max(1, int(timeout_s * 1000))))
        except (OSError, ValueError) as error:  # closed by the owner
            raise KeeperLost("the connection is closed", where=self.where) from error

    def _broken(self, error: OSError) -> KeeperLost:
        return KeeperLost(f"the connection broke: {error.strerror or error}", where=self.where)


def connect(address: str, *, timeout_s: float) -> Channel:
    """Connects to `unix:<path>` (or a bare path).

    Raises:
        KeeperLost: nobody listens there. ConfigError: not an address.
    """
    path = unix_path(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        _require_same_user(sock, path)
    except (OSError, KeeperError) as error:
        sock.close()
        if isinstance(error, KeeperError):
            raise
        raise KeeperLost(f"no keeper listens: {error.strerror or error}", where=path) from error
    return Channel(sock, where=path)


def listen(path: Path) -> socket.socket:
    """A listening Unix socket at `path`, mode 0600. The path must be free; its directory decides who may reach it."""
    unix_path(str(path))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(str(path))
        os.chmod(path, 0o600)
        sock.listen(MAX_CONNECTIONS)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def accept(listener: socket.socket) -> Channel | None:
    """The next connection of our own user; None if there is none any more or it was a stranger's."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None  # the peer gave up between the wake-up and now, or descriptors ran out
    try:
        _require_same_user(sock, "incoming connection")
    except (OSError, KeeperError):
        sock.close()
        return None
    return Channel(sock, where="incoming connection")


def peer_pid(channel: Channel) -> int:
    """The process at the other end, as the kernel knows it."""
    return _credentials(channel._sock)[0]


def unix_path(address: str) -> str:
    """The file system path of a Unix address.

    Raises:
        ConfigError: another kind of address, or a path that the kernel cannot take.
    """
    path = address.removeprefix("unix:")
    if not path.startswith("/"):
        raise ConfigError(f"{address!r} is not an address", remedy="write it as unix:/absolute/path")
    if len(os.fsencode(path)) > MAX_UNIX_PATH:
        raise ConfigError(
            f"the socket path has {len(os.fsencode(path))} bytes, the kernel takes {MAX_UNIX_PATH}",
            where=path,
            remedy="set a shorter HOLDFAST_RUNTIME_DIR or node label",
        )
    return path


def close_fds(fds: Sequence[int]) -> None:
    """Closes descriptors that came with a frame nobody wants."""
    for fd in fds:
        os.close(fd)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


def _require_same_user(sock: socket.socket, where: str) -> None:
    uid = _credentials(sock)[1]
    if uid != os.geteuid():
        raise KeeperError(f"the peer belongs to user {uid}, not to {os.geteuid()}", where=where)


def _framed(body: bytes) -> memoryview:
    if len(body) > MAX_FRAME_BYTES:
        raise KeeperError(f"a message of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return memoryview(_HEAD.pack(len(body)) + body)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_SIZE])
    return list(fds)
