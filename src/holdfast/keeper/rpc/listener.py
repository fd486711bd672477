"""The keeper's door to other nodes: whether there is one, where it is, and what proves who comes through it.

Without an address there is none, and keepers of one machine meet at their Unix sockets. With one, every connection is
under mutual TLS of the job's secret, on loopback too: any user of the machine could come there. An address of all
interfaces has to be asked for twice. The port is the kernel's choice and told to the ranks, which publish it; a keeper
that takes the place of a killed one tries the same port first, because the other nodes know that one, and the ranks
of the node hold it meanwhile (`checkpoint.job.keeper_link`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address

from holdfast.base.errors import ConfigError
from holdfast.keeper.rpc.messages import KEEPER
from holdfast.keeper.rpc.paths import RuntimePaths
from holdfast.tiers.wire import tcp
from holdfast.tiers.wire.tls import Credentials

SHOW_SECRET = "give --secret-file; make one with `(umask 077; openssl rand -hex 32 > job.secret)`"


@dataclass(frozen=True, slots=True)
class Network:
    """Says how a keeper talks to other nodes.

    Attributes:
        listen: address of this machine to listen on; empty: Unix sockets only.
        unsafe: an address of all interfaces is meant.
        secret: the job's; None: there is none. Never shown.
        bandwidth: bytes per second that replicas may take; 0: no bound.
    """

    listen: str = ""
    unsafe: bool = False
    secret: bytes | None = field(default=None, repr=False)
    bandwidth: int = 0

    def __post_init__(self) -> None:
        if self.listen and self.secret is None:
            raise ConfigError(f"listening on {self.listen} needs the job's secret", where="listen", remedy=SHOW_SECRET)
        if is_everywhere(self.listen) and not self.unsafe:
            raise ConfigError(
                f"{self.listen} would listen on every interface of this machine",
                where="listen",
                remedy="give the address that the other nodes use, or `listen_unsafe = true` in the settings (HOLDFAST_CONFIG)",
            )


@dataclass(frozen=True, slots=True)
class Door:
    """An open door: the listening socket, who may come through it, and the address that other nodes dial."""

    listener: socket.socket
    credentials: Credentials
    address: str


def open_door(network: Network, place: RuntimePaths) -> Door | None:
    """The door to other nodes, if there is to be one.

    Raises:
        ConfigError: the address is not one of this machine.
    """
    if not network.listen or network.secret is None:
        return None
    credentials = Credentials(network.secret, role=KEEPER, job=place.job, node=place.node)
    listener = tcp.listen(network.listen, (*_last_port(place), 0))
    try:
        port = listener.getsockname()[1]
        place.port.write_text(f"{port}\n", encoding="ascii")
    except BaseException:
        listener.close()
        raise
    host = socket.gethostname() if is_everywhere(network.listen) else network.listen
    return Door(listener, credentials, tcp.name(host, port))


def is_everywhere(host: str) -> bool:
    """Return whether it is the address of all interfaces."""
    return _asks(host, lambda address: address.is_unspecified) or host in ("*",)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach it."""
    return host == "localhost" or _asks(host, lambda address: address.is_loopback)


def hidden(text: bytes) -> int:
    """A descriptor that a child inherits to read a secret from, which no argument may hold; memory without a name."""
    fd = os.memfd_create("holdfast-secret", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.write(fd, text)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _asks(host: str, question: Callable[..., bool]) -> bool:
    try:
        return question(ip_address(host))
    except ValueError:
        return False


def _last_port(place: RuntimePaths) -> tuple[int, ...]:
    try:
        return (int(place.port.read_text(encoding="ascii")),)
    except (OSError, ValueError):
        return ()
