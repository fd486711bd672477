"""A real HTTP S3 server on loopback, and a small proxy before it that loses, delays, cuts and refuses on demand."""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from holdfast.tiers.backends.object_store import ObjectStoreBackend, open_bucket

BUCKET = "holdfast-test"
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass(frozen=True)
class Request:
    """What a plan decides on: the n-th request since the plan was set, and what it is."""

    number: int
    method: str
    path: str
    conditional: bool

    @property
    def name(self) -> str:
        return self.path.partition("?")[0].rpartition("/")[2]


# What a plan may answer: "" lets it pass; a number is that status at once; the rest is in Proxy.
Plan = Callable[[Request], str]


@dataclass
class Server:
    """Moto behind a proxy. `plan` is asked for every request; `seen` are those since the plan was set."""

    port: int
    upstream: int
    plan: Plan = lambda _: ""
    seen: list[Request] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.port}",
        }

    @contextlib.contextmanager
    def planned(self, plan: Plan) -> Iterator[list[Request]]:
        self.seen.clear()
        self.released.clear()
        self.plan = plan
        try:
            yield self.seen
        finally:
            self.plan = lambda _: ""
            self.released.set()


def times(count: int, action: str, *, where: Callable[[Request], bool] = lambda _: True) -> Plan:
    """The first `count` requests of those meet the fault."""
    left = [count]

    def plan(request: Request) -> str:
        if left[0] and where(request):
            left[0] -= 1
            return action
        return ""

    return plan


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: Server

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        state = self.server_state
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(len(state.seen), self.command, self.path, "If-None-Match" in self.headers)
        state.seen.append(request)
        action = state.plan(request)
        if action.isdigit():
            return self._answer(int(action), {}, b"<Error><Code>Planned</Code></Error>")
        if action == "stall":  # until the test lets go; the client has given up by then
            state.released.wait(60)
            return self._hang_up()
        if action == "reset":
            return self._hang_up()
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        if action == "unconditional":
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        connection = http.client.HTTPConnection("127.0.0.1", state.upstream, timeout=30)
        try:
            connection.request(self.command, self.path, body=body, headers=headers)
            reply = connection.getresponse()
            data = reply.read()
            found = {name: value for name, value in reply.getheaders() if name.lower() not in _HOP}
            length = int(reply.getheader("Content-Length") or len(data))
        finally:
            connection.close()
        if action == "lost":
            return self._hang_up()
        if action == "flip" and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        if action == "short":  # a smaller body that claims to be whole
            return self._answer(reply.status, found, data[: len(data) // 2])
        if action == "cut":
            self._answer(reply.status, found, data[: len(data) // 2], claim=max(length, 1))
            return self._hang_up()
        return self._answer(reply.status, found, data, claim=length)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _answer(self, status: int, headers: dict[str, str], data: bytes, claim: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if claim is None else claim))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):
                self.wfile.write(data)

    def _hang_up(self) -> None:
        self.close_connection = True


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that hung up is what the tests are about


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """A server with an empty bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        upstream = moto.get_host_and_port()[1]
        handler = type("Handler", (_Handler,), {})
        proxy = _Proxy(("127.0.0.1", 0), handler)
        state = handler.server_state = Server(proxy.server_address[1], upstream)
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=30)
            connection.request("PUT", f"/{BUCKET}")
            assert connection.getresponse().status == 200
            connection.close()
            yield state
        finally:
            state.released.set()
            proxy.shutdown()
            proxy.server_close()
            thread.join(30)
    finally:
        moto.stop()


def bucket(prefix: str, *, timeout_s: float = 10.0) -> ObjectStoreBackend:
    """A backend on the server whose environment is set."""
    return open_bucket(f"s3://{BUCKET}/{prefix}", timeout_s=timeout_s)
