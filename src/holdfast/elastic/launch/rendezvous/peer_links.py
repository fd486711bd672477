"""Connections between launchers that carry nothing: the kernel ends them when the process at the other end dies.

The leader has one to every other launcher, the others have one to the leader; they lead to the stores that launchers
keep ready (`elastic.launch.rendezvous.standby_store`). A connection that ends proves little by itself, as firewalls and routers end some too. So
the address is knocked at again: who refuses is gone, who accepts lives, and who says nothing is left to its beats.

Nothing here waits but for the name of a machine, once. One thread uses it. What it means that a launcher is gone says
`core.elastic.lost_node`.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

# A knock that nobody answered is repeated after so long.
AGAIN_S = 1.0


@dataclass(slots=True)
class _Link:
    """A connection to one launcher.

    Attributes:
        place: its family and address as the kernel takes them; None: its name was not found.
        stands: it was connected at the last look.
        stood: it was connected before, so whoever refuses now has gone.
        again_at: when the next knock is due, monotonic seconds; only without a socket.
    """

    place: tuple[int, Any] | None
    socket: socket.socket | None = None
    stands: bool = False
    stood: bool = False
    gone: str = ""
    again_at: float = 0.0


class PeerLinks:
    """Those of one launcher, by group rank of the other end."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}

    def lead_to(self, addresses: Mapping[int, str]) -> None:
        """Begin anew, with connections to these launchers: HOST:PORT by group rank."""
        self.close()
        self._links = {rank: _Link(_place(address)) for rank, address in addresses.items()}
        for link in self._links.values():
            _knock(link, time.monotonic())

    def filenos(self) -> list[int]:
        """Return the descriptors that become readable when a launcher dies."""
        return [link.socket.fileno() for link in self._links.values() if link.socket is not None and link.stands]

    def gone(self) -> dict[int, str]:
        """Return group rank -> proof, as a phrase, of the launchers whose processes have ended."""
        now = time.monotonic()
        for link in self._links.values():
            if not link.gone:
                _look(link, now)
        return {rank: link.gone for rank, link in self._links.items() if link.gone}

    def close(self) -> None:
        """End all connections."""
        for link in self._links.values():
            _drop(link)
        self._links = {}


def _place(address: str) -> tuple[int, Any] | None:
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        logger.info("no connection to the launcher at %s: %s", address, error)
        return None
    return family, place


def _look(link: _Link, now: float) -> None:
    if link.socket is None:
        if link.stood and now >= link.again_at:  # one that never came to be is not tried again: it proves nothing
            _knock(link, now)
    elif not link.stands:
        _judge(link, link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), now)
    elif _ended(link.socket):
        _drop(link)
        _knock(link, now)


def _knock(link: _Link, now: float) -> None:
    """Begin to connect. On one machine the answer is there at once, else at a later look."""
    if link.place is None:
        return
    family, place = link.place
    link.socket = socket.socket(family, socket.SOCK_STREAM)
    link.socket.setblocking(False)
    _judge(link, link.socket.connect_ex(place), now)


def _judge(link: _Link, error: int, now: float) -> None:
    assert link.socket is not None
    if error == errno.EINPROGRESS:
        return
    if error:
        _drop(link)
        link.again_at = now + AGAIN_S
        if error == errno.ECONNREFUSED and link.stood:
            link.gone = "the connection to its launcher ended and nobody listens there any more"
        return
    try:
        link.socket.getpeername()
    except OSError:
        return  # under way
    link.stands = link.stood = True


def _ended(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _drop(link: _Link) -> None:
    if link.socket is not None:
        link.socket.close()
    link.socket, link.stands = None, False
