"""Serves metrics on a port of loopback, when it is asked for.

The port answers `GET /metrics` and nothing else, one client at a time, within two seconds and four kilobytes. It checks
the Host header, because a web page that rebinds its name to 127.0.0.1 must not read it, and it listens on loopback only.
It never has a say in anything: what goes wrong here is logged and costs a page.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from holdfast.base.errors import HoldfastError

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 2.0
# Clients at a time; one more takes the place of the oldest, so that who asks at once is answered.
MAX_CLIENTS = 8
MAX_REQUEST_BYTES = 4096
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?\Z", re.IGNORECASE)
_POLL_S = 0.5


class MetricsPort:
    """Serves one page on loopback, from a thread of its own.

    Args:
        port: on 127.0.0.1; 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, page: Callable[[], str]) -> None:
        self._page = page
        self._listener = socket.create_server(("127.0.0.1", port), backlog=8)
        self._listener.settimeout(_POLL_S)
        self._stopping = threading.Event()
        self._clients: deque[socket.socket] = deque()
        self._thread = threading.Thread(target=self._serve, name="holdfast metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Return where it listens."""
        return int(self._listener.getsockname()[1])

    def stop(self) -> None:
        """Ends it."""
        self._stopping.set()
        self._thread.join()
        self._listener.close()
        for client in list(self._clients):  # each takes itself out when it has ended
            _cut(client)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                logger.warning("the metrics port is lost: %s", error)
                return
            self._clients.append(client)
            if len(self._clients) > MAX_CLIENTS:
                _cut(self._clients.popleft())
            threading.Thread(target=self._answer, args=(client,), name="holdfast metrics client", daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client:
            try:
                request = _request(client, time.monotonic() + REQUEST_TIMEOUT_S)
                client.settimeout(REQUEST_TIMEOUT_S)  # of the whole answer
                client.sendall(_reply(request, self._page))
            except (OSError, HoldfastError) as error:
                logger.debug("a client of the metrics port: %s", error)
        with contextlib.suppress(ValueError):  # it was cut off
            self._clients.remove(client)


def _cut(client: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        client.shutdown(socket.SHUT_RDWR)


def _request(client: socket.socket, deadline: float) -> bytes:
    """The head of a request; cut where it is too long.

    Raises:
        TimeoutError: it did not come by the deadline, however many parts came.
    """
    data = b""
    while b"\r\n\r\n" not in data and len(data) < MAX_REQUEST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not end")
        client.settimeout(left)
        part = client.recv(MAX_REQUEST_BYTES - len(data))
        if not part:
            break
        data += part
    return data


def _reply(request: bytes, page: Callable[[], str]) -> bytes:
    head, end, _ = request.decode("latin-1").partition("\r\n\r\n")
    line, *rows = head.split("\r\n")
    fields = [row.partition(":") for row in rows]
    hosts = [value.strip() for name, _, value in fields if name.strip().lower() == "host"]
    if not end:
        return _answer(
            "431 Request Header Fields Too Large" if len(request) >= MAX_REQUEST_BYTES else "400 Bad Request"
        )
    if len(hosts) != 1 or not _HOSTS.match(hosts[0]):
        return _answer("403 Forbidden")  # a page of another name must not read this through its visitor's browser
    words = line.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return _answer("400 Bad Request")
    if words[0] != "GET":
        return _answer("405 Method Not Allowed")
    if words[1] != "/metrics":
        return _answer("404 Not Found")
    return _answer("200 OK", page())


def _answer(status: str, body: str = "") -> bytes:
    data = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(data)}\r\n"
        "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data
