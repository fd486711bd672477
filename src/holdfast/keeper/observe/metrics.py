"""Tells what keepers say about themselves as Prometheus text, and a port on loopback that serves it when it is asked
for.

The names are a promise (docs/storage.md lists them). The port answers `GET /metrics` and nothing else, one client at a
time, within two seconds and four kilobytes. It checks the Host header, because a web page that rebinds its name to
127.0.0.1 must not read it, and it listens on loopback only. It never has a say in anything: what goes wrong here is
logged and costs a page.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from holdfast.base.errors import HoldfastError
from holdfast.core.model import Version

logger = logging.getLogger(__name__)

Facts = Mapping[str, Any]
Sample = tuple[dict[str, object], float]

REQUEST_TIMEOUT_S = 2.0
# Clients at a time; one more takes the place of the oldest, so that who asks at once is answered.
MAX_CLIENTS = 8
MAX_REQUEST_BYTES = 4096
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?\Z", re.IGNORECASE)
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_POLL_S = 0.5


def render(keepers: Iterable[Facts]) -> str:
    """The statuses of keepers as one exposition: each metric once, with a sample per keeper."""
    families: dict[str, tuple[str, str, list[Sample]]] = {}
    for facts in keepers:
        whose = {"node": facts["node"], "job": facts["job"]}
        for name, kind, text, samples in _families(facts):
            family = families.setdefault(name, (kind, text, []))
            family[2].extend((whose | labels, value) for labels, value in samples)
    lines: list[str] = []
    for name, (kind, text, samples) in sorted(families.items()):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n" if lines else ""


def _families(facts: Facts) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """(name, kind, help, samples) of one keeper."""
    memory = facts["memory"]
    alone: tuple[tuple[str, str, float], ...] = (
        ("uptime_seconds", "Since the keeper started.", facts["uptime_s"]),
        ("resident_bytes", "Memory of the keeper's process at its peak.", facts["resident_bytes"]),
        ("memory_used_bytes", "Snapshot memory of all keepers that share the budget.", memory["used_bytes"]),
        ("memory_allowed_bytes", "The budget.", memory["allowed_bytes"]),
        ("incarnation", "How often the job has started or come back.", facts["incarnation"]),
        ("nodes", "Nodes of the job.", len(facts["nodes"])),
        ("alarms", "What somebody should look at.", len(facts["alarms"])),
        ("suspect_versions", "Versions whose twins sealed different bytes.", len(facts["suspects"])),
    )
    for name, text, value in alone:
        yield f"holdfast_{name}", "gauge", text, [({}, value)]
    yield from _levels(facts)
    yield from _run(facts["run"])
    ranks = facts["ranks"].items()
    yield (
        "holdfast_rank_up", "gauge", "Whether the rank's process is connected.",
        [({"rank": rank}, 1 if found["pid"] else 0) for rank, found in ranks],
    )  # fmt: skip
    slots = [({"rank": rank, "replica": "no"}, slot) for rank, found in ranks for slot in found["slots"]]
    slots += [({"rank": slot["rank"], "replica": "yes"}, slot) for slot in facts["replicas"]]
    yield (
        "holdfast_slot_sealed_bytes", "gauge", "Images in a slot; replica: of another node's rank.",
        [(labels | {"slot": slot["slot"]}, slot["sealed_bytes"]) for labels, slot in slots],
    )  # fmt: skip
    for name, value in sorted(facts["counters"].items()):
        clean = _NOT_IN_NAMES.sub("_", name)
        yield f"holdfast_{clean}_total", "counter", f"Sum of {clean} of this keeper's life.", [({}, value)]


def _run(run: Facts | None) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """Yield the samples of the run that this node's launcher writes down."""
    if run is None:
        return
    yield (
        "holdfast_goodput_ratio",
        "gauge",
        "Part of the run's time that went into steps that count.",
        [({}, run["goodput"])],
    )
    spent: list[Sample] = [({"what": name}, seconds) for name, seconds in run["seconds"].items()]
    yield "holdfast_run_seconds", "gauge", "Where the seconds of the run went; stalls are saves.", spent
    yield "holdfast_incidents", "gauge", "Failures of the run that were mended.", [({}, run["incidents"])]
    yield (
        "holdfast_detection_seconds",
        "gauge",
        "From the last progress to the verdict, summed.",
        [({}, run["detection_s"])],
    )
    parts: list[Sample] = [({"part": name}, seconds) for name, seconds in run["recovery_s"].items()]
    yield "holdfast_recovery_seconds", "gauge", "Recoveries by part, T0 to T4, summed.", parts


def _levels(facts: Facts) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """The newest version per level, and how far it lies behind what is captured."""
    newest = {level: Version.parse(name) if name else None for level, name in facts["newest"].items()}
    steps = [({"level": level}, found.step) for level, found in newest.items() if found]
    yield "holdfast_version_step", "gauge", "Step of the newest version that reached the level.", list(steps)
    captured = newest.pop("captured")
    lags: list[Sample] = [
        ({"level": level}, captured.step - found.step)
        for level, found in newest.items()
        if captured and found and captured.incarnation == found.incarnation
    ]
    yield "holdfast_lag_steps", "gauge", "Steps between the newest captured version and the level's newest.", lags


def _labels(labels: Mapping[str, object]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


class MetricsPort:
    """Serves one page on loopback, from a thread of its own.

    Args:
        port: on 127.0.0.1; 0 takes a free one.
        page: makes the page.

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
