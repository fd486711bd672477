"""Frames between processes of one job: a length, a body, now and then descriptors or raw bytes behind it.

    frame = u32 big-endian length of the body | body            (body: msgpack of one message, see keeper/rpc/messages.py)
    bulk  = the bytes announced by the frame before it, nothing around them

Two transports behind the same functions; nothing above this room knows an address family:

    unix:<path>         a socket in a private directory; the kernel names the peer, and only our own user is served
    tcp:<host>:<port>   between nodes, always under mutual TLS of the job's secret (`Security`); no descriptors

A TCP connection carries no frame before both ends are proved; `Channel.principal` then says who the peer is.

Rules: every call has a deadline, and a frame that began must end within it (a slow writer is cut off); a length above
the limit is refused before a byte of it is stored; the end of the stream between frames and inside one is KeeperLost;
nonsense is KeeperError. After any error the channel is of no use and must be closed.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.base.errors import ConfigError, KeeperError, KeeperGone, KeeperLost
from holdfast.base.handler_errors import forgive, pass_on
from holdfast.tiers.wire import tcp

MAX_FRAME_BYTES = 16 << 20
MAX_HELLO_BYTES = 1 << 10
HELLO_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
MAX_DESCRIPTORS = 250  # the kernel takes 253; a rank that comes back may need many slots of its node at once
MAX_UNIX_PATH = 107  # sun_path without its closing zero
BULK_BLOCK_BYTES = 256 << 10
MAX_RECEIVE_BYTES = 4 << 20
UNIX_BUFFER_BYTES = 4 << 20
UNDIVIDED_BYTES = 4 << 10  # so little is sent to a Unix socket as a whole, or not at all
WAIT_S = 1

SHARE = "give every node of the job the same secret file, and an address to listen on"

RAISE_LIMIT = "raise the limit of open files (ulimit -n)"

_HEAD = struct.Struct(">I")
_TIMEVAL = struct.Struct("ll")
_FD_SIZE = array.array("i").itemsize


class Blocked(Exception):
    """A link can go on only after a poll for `events`."""

    def __init__(self, events: int) -> None:
        super().__init__()
        self.events = events


@dataclass(frozen=True, slots=True)
class Principal:
    """Says who proved itself at the other end of a TCP connection."""

    role: str
    job: str
    node: str


class Link(Protocol):
    """Bytes through one non-blocking socket; every method raises Blocked instead of waiting, and OSError."""

    def send(self, data: memoryview, fds: Sequence[int]) -> int:
        """Sends some of `data`, and the descriptors with its first byte."""

    def receive(self, num_bytes: int) -> tuple[bytes, list[int], bool]:
        """At most that many bytes, the descriptors that came along, and whether there were more than allowed."""

    def receive_into(self, view: memoryview) -> int:
        """Fills the beginning of `view`; 0 at the end of the stream."""

    @property
    def has_more(self) -> bool:
        """Return whether bytes wait here of which the kernel does not know any more."""


class Handshake(Link, Protocol):
    """A link that has to be opened first."""

    @property
    def sock(self) -> socket.socket:
        """The socket that it took over."""

    def advance(self) -> Principal:
        """Goes on with the proof; who the peer is when it is done. Raises Blocked, OSError, KeeperError."""


class Security(Protocol):
    """Holds what proves us to other nodes, and them to us (tiers/wire/tls.py)."""

    def take(self, sock: socket.socket, *, server: bool) -> Handshake:
        """A link in place of the plain socket, which is used up."""


class Channel:
    """One connection, both directions. One thread receives; any thread may send, one frame after the other.

    Every wait is short or a poll with its own deadline, so that the two directions do not share a timeout. The thread that receives is the owner: it calls `close`; everyone else calls `abort`.

    Attributes:
        principal: who the peer proved to be; None on a Unix socket, where the kernel vouches for our own user.
    """

    def __init__(self, sock: socket.socket, *, where: str) -> None:
        self.where = where
        self.principal: Principal | None = None
        self._sock = sock
        self._link: Link = _PlainLink(sock)
        self._aborted = False
        self._send_lock = threading.RLock()  # a signal's handler may send between two frames
        self._is_within_frame = False

    @property
    def is_remote(self) -> bool:
        """Return whether it came over the network. The kernel names no process for a peer in another PID namespace
        either.
        """
        return self._sock.family != socket.AF_UNIX

    @property
    def is_cut(self) -> bool:
        """Return whether `abort` was called; its owner may not have noticed yet."""
        return self._aborted

    @property
    def is_left(self) -> bool:
        """Return whether the other end has closed the connection, as the kernel says; bytes of it may still lie here."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError) as error:  # its owner has closed it meanwhile
            pass_on(error)
            return True

    def fileno(self) -> int:
        """The descriptor, to be polled by the owner; -1 once it is closed."""
        return self._sock.fileno()

    @property
    def has_more(self) -> bool:
        """Return whether something was received already that no poll would tell of."""
        return self._link.has_more

    @property
    def is_writable(self) -> bool:
        """Return whether a small frame can be sent without waiting."""
        return self._wait(select.POLLOUT, 1e-6)

    def secure(self, security: Security, *, server: bool, timeout_s: float) -> None:
        """Proves both ends to each other; before this nothing may be sent or received on a TCP connection.

        Raises:
            KeeperLost: the peer left, did not prove itself, or refused our proof. KeeperError: it took too long.
        """
        deadline = time.monotonic() + timeout_s
        try:
            link = security.take(self._sock, server=server)
            self._sock, self._link = link.sock, link
            if self._aborted:  # meanwhile, by another thread, whose shutdown may have met no socket
                raise KeeperLost("the connection is closed", where=self.where)
            while self.principal is None:
                try:
                    self.principal = link.advance()
                except Blocked as blocked:
                    if not self._wait(blocked.events, deadline - time.monotonic()):
                        raise KeeperLost("the peer did not prove itself in time", where=self.where) from None
        except OSError as error:
            pass_on(error)
            raise KeeperLost(
                f"no proof of the job's secret: {error.strerror or error}",
                where=self.where,
                remedy=SHARE,
            ) from error

    def send(self, body: bytes, *, fds: Sequence[int] = (), timeout_s: float) -> None:
        """Sends one frame, with descriptors if given.

        Raises:
            KeeperLost: the peer is gone or did not read within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._send_lock:
            self._send_all(_framed(body), fds, deadline)

    def send_bulk(
        self, body: bytes, view: memoryview, *, timeout_s: float, before: Callable[[int], None] = lambda _: None
    ) -> None:
        """Sends a frame and raw bytes straight from `view` behind it, block by block; each has `timeout_s`.

        `before` is called with the size of each block before it leaves; it may wait (pacing).
        """
        view = view.cast("B")
        with self._send_lock:
            self._send_all(_framed(body), (), time.monotonic() + timeout_s)
            try:
                for at in range(0, len(view), BULK_BLOCK_BYTES):
                    block = view[at : at + BULK_BLOCK_BYTES]
                    before(len(block))
                    self._send_all(block, (), time.monotonic() + timeout_s)
            except BaseException:
                self.abort()  # else the next frame would be read as the rest of these bytes
                raise

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
        with forgive(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # TLS's own would change its link under its users

    def close(self) -> None:
        """Cuts the connection and gives the descriptor back. Only the owner, when nobody sends any more."""
        self.abort()
        with self._send_lock:
            self._sock.close()

    def _send_all(self, data: memoryview, fds: Sequence[int], deadline: float) -> None:
        within = self._is_within_frame
        if within:
            raise KeeperLost("what was sent before this is not whole", where=self.where)
        try:
            self._send_blocks(data, fds, deadline)
        except BaseException:  # of a signal's handler, for one
            if self._is_within_frame:  # and stays so: whoever waits for an answer is told
                self.abort()
            raise

    def _send_blocks(self, data: memoryview, fds: Sequence[int], deadline: float) -> None:
        while data:
            block, within = data[:BULK_BLOCK_BYTES], self._is_within_frame
            # A handler may strike before it is known how much of it was sent.
            self._is_within_frame = within or len(block) > UNDIVIDED_BYTES
            try:
                sent = self._link.send(block, fds)
            except Blocked as blocked:
                self._is_within_frame = within
                if not self._wait(blocked.events, deadline - time.monotonic()):
                    raise KeeperLost("the peer does not read", where=self.where) from None
                continue
            except OSError as error:
                raise self._broken(error) from error
            data, fds = data[sent:], ()
            self._is_within_frame = bool(data)

    def _receive_head(self, timeout_s: float | None) -> tuple[bytes, list[int]]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                data, fds, excess = self._link.receive(_HEAD.size)
                break
            except Blocked as blocked:
                if not self._wait(blocked.events, None if deadline is None else deadline - time.monotonic()):
                    raise TimeoutError from None
            except OSError as error:
                raise self._broken(error) from error
        if excess:
            close_fds(fds)
            raise KeeperError("more descriptors than allowed", where=self.where)
        if not data:
            raise KeeperLost("the peer closed the connection", where=self.where)
        return data, fds

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view:
            try:
                count = self._link.receive_into(view[:MAX_RECEIVE_BYTES])
            except Blocked as blocked:
                if not self._wait(blocked.events, deadline - time.monotonic()):
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
            pass_on(error)
            raise KeeperLost("the connection is closed", where=self.where) from error

    def _broken(self, error: OSError) -> KeeperLost:
        pass_on(error)
        return KeeperLost(f"the connection broke: {error.strerror or error}", where=self.where)


class _PlainLink:
    """The socket as it is.

    Small things never wait. Bulk bytes on a Unix socket wait inside the kernel, for WAIT_S at most: it wakes a sender
    for every page that was read, a poll only when three quarters were, and the two ends would take turns.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waits = sock.family == socket.AF_UNIX
        sock.setblocking(self._waits)
        if self._waits:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)  # as much as this machine allows
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(WAIT_S, 0))

    @property
    def has_more(self) -> bool:
        return False

    def _flags(self, size: int) -> int:
        return 0 if self._waits and size >= BULK_BLOCK_BYTES // 4 else socket.MSG_DONTWAIT

    def send(self, data: memoryview, fds: Sequence[int]) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            return self._sock.sendmsg([data], ancillary, self._flags(len(data)))
        except BlockingIOError as error:
            pass_on(error)
            raise Blocked(select.POLLOUT) from None

    def receive(self, num_bytes: int) -> tuple[bytes, list[int], bool]:
        try:
            room = socket.CMSG_SPACE(MAX_DESCRIPTORS * _FD_SIZE)
            data, ancillary, flags, _ = self._sock.recvmsg(
                num_bytes, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError as error:
            pass_on(error)
            raise Blocked(select.POLLIN) from None
        return data, _descriptors(ancillary), bool(flags & socket.MSG_CTRUNC)

    def receive_into(self, view: memoryview) -> int:
        try:
            flags = self._flags(len(view))
            return self._sock.recv_into(view, 0, flags or socket.MSG_WAITALL)
        except BlockingIOError as error:
            pass_on(error)
            raise Blocked(select.POLLIN) from None


def connect(address: str, *, timeout_s: float, security: Security | None = None) -> Channel:
    """Connects to `unix:<path>` (or a bare path) or `tcp:<host>:<port>`.

    Raises:
        KeeperLost: nobody listens there, it does not prove itself, or this process has no descriptor left for the line.
        ConfigError: not an address.
    """
    if address.startswith("tcp:"):
        return _connect_tcp(address, timeout_s, security)
    path = unix_path(address)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise _unreachable(error, path) from error
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        _require_same_user(sock, path)
        return Channel(sock, where=path)
    except OSError as error:
        sock.close()
        raise _unreachable(error, path) from error
    except BaseException:
        sock.close()
        raise


def _unreachable(error: OSError, where: str) -> KeeperLost:
    pass_on(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return KeeperLost(f"there is no descriptor for a connection: {error.strerror}", where=where, remedy=RAISE_LIMIT)
    kind = KeeperGone if error.errno in (errno.ECONNREFUSED, errno.ENOENT) else KeeperLost
    return kind(f"no keeper listens: {error.strerror or error}", where=where)


def _connect_tcp(address: str, timeout_s: float, security: Security | None) -> Channel:
    if security is None:
        raise KeeperLost("a keeper of another node is reached with the job's secret only", where=address, remedy=SHARE)
    deadline = time.monotonic() + timeout_s
    try:
        sock = tcp.dial(address, timeout_s=timeout_s)
    except OSError as error:
        raise _unreachable(error, address) from error
    channel = Channel(sock, where=address)
    try:
        channel.secure(security, server=False, timeout_s=max(0.1, deadline - time.monotonic()))
    except BaseException:
        channel.close()
        raise
    return channel


def accept_tcp(listener: socket.socket) -> Channel | None:
    """The next connection, not proved yet: the caller secures it before anything else. None if there is none."""
    taken = tcp.take(listener)
    return Channel(taken[0], where=taken[1]) if taken else None


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
    """The process at the other end, as the kernel knows it; 0 if it is on another node, or in a PID namespace that is not ours."""
    if channel.is_remote:
        return 0
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


def close_fds(fds: list[int]) -> None:
    """Closes descriptors that came with a frame nobody wants, and takes them out of the list."""
    while fds:
        os.close(fds.pop())


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
