"""TCP sockets between nodes: addresses, listening, dialling. Bytes only; what they mean and who sent them is above.

A listener's port may be shared with sockets of the same user that hold it and never listen (socket(7), SO_REUSEPORT):
no other user's process, and none that does not ask to share, gets it while one of them is open.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from holdfast.base.errors import ConfigError
from holdfast.base.handler_errors import pass_on

# Incoming connections that the kernel holds while the keeper is busy accepting.
BACKLOG = 256
# Long enough for an answer from an address of this machine.
_KNOCK_S = 1.0
# A node that vanished says nothing: the kernel asks it every few seconds, and gives it up after about half a minute.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
# That the system takes beyond what is on its way. With megabytes in its buffers a slow line would look dead for seconds, then quick.
UNSENT_BYTES = 512 << 10


def listen(host: str, ports: Sequence[int] = (0,)) -> socket.socket:
    """A listening socket on the first of `ports` on which nobody else listens (0: any).

    Raises:
        ConfigError: the address is not one of this machine.
    """
    failure: OSError | None = None
    for port in ports:
        try:
            if port and _is_served(host, port):  # shared with a listener it would get some of its connections
                continue
            sock = _bind(host, port, socket.SO_REUSEPORT, socket.SO_REUSEADDR)
        except OSError as error:
            failure = error
            continue
        try:
            sock.listen(BACKLOG)
            sock.setblocking(False)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise ConfigError(
        f"cannot listen on {host!r}: {failure.strerror if failure else 'no port was given'}",
        where="listen",
        remedy="give an address of this machine",
    ) from failure


def hold(host: str, port: int) -> socket.socket:
    """Keeps the port of a listener for whoever listens there next; it is free again when this is closed.

    Raises:
        OSError: it is not to be had. ConfigError: `host` is no address.
    """
    # Without SO_REUSEADDR, which would let in whoever sets it too as long as nobody listens.
    return _bind(host, port, socket.SO_REUSEPORT)


def _bind(host: str, port: int, *options: int) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        pass_on(error)
        raise ConfigError(f"{host!r} is not an address: {error.strerror or error}", where="listen") from error
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((where[0], port, *where[2:]))
    except BaseException:
        sock.close()
        raise
    return sock


def _is_served(host: str, port: int) -> bool:
    """Return whether somebody listens there; on an address of all interfaces, on loopback too."""
    try:
        socket.create_connection((host, port), timeout=_KNOCK_S).close()
    except OSError as error:
        pass_on(error)
        return False
    return True


def dial(address: str, *, timeout_s: float) -> socket.socket:
    """A connection to `tcp:<host>:<port>`.

    Raises:
        OSError: nobody listens there. ConfigError: not an address.
    """
    sock = socket.create_connection(parse(address), timeout=timeout_s)
    try:
        _tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def take(listener: socket.socket) -> tuple[socket.socket, str] | None:
    """The next connection and its address; None if there is none any more."""
    try:
        sock, peer = listener.accept()
    except OSError:
        return None  # the peer gave up between the wake-up and now, or descriptors ran out
    try:
        _tune(sock)
    except OSError:
        sock.close()
        return None
    return sock, name(peer[0], peer[1])


def parse(address: str) -> tuple[str, int]:
    """Host and port of `tcp:<host>:<port>`; a host with colons stands in brackets.

    Raises:
        ConfigError: not such an address.
    """
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{address!r} is not an address", remedy="write it as tcp:host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def name(host: str, port: int) -> str:
    """The address that `parse` takes apart."""
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
