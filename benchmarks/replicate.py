"""How fast replicas travel, and what that costs a training step: python -m benchmarks.replicate [--quick] [--json]

`socket_throughput_ratio`: bytes per second with which a keeper pulls a replica from another one (asking, sending out of
the slot, receiving into the slot, every digest, the header; Unix sockets), over a plain copy of the same bytes from one
process to another: `sendall` of 1 MiB pieces, `recv_into` a memory that was touched before, nothing checked.
`tls_throughput_ratio`: the same over TCP on loopback under TLS, against a plain copy over one TLS connection of the same
certificates and cipher. The plain receiver runs as nicely as the thread that pulls: on a machine that does nothing else
that makes no difference, and on a busy one it compares two equals. `:normal` is told besides: against one at normal
priority. Both keepers and both ends of the plain copy share the cores of this machine, and so does the training step.
`step_time_ratio`: a training step while replicas travel, over the same step while none do.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from benchmarks import measure
from benchmarks.measure import MIB, Report

from holdfast.base.config import Config
from holdfast.base.events import Events
from holdfast.core.layout.bundles import plan_bundles, rank_layout
from holdfast.core.model import Extent, Level, Shard, Topology, Version
from holdfast.keeper.rpc.client import Assembly, ImageSpan, KeeperClient
from holdfast.keeper.rpc.messages import KEEPER
from holdfast.keeper.rpc.paths import RuntimePaths
from holdfast.keeper.rpc.spawn import ensure_keeper
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.version_store import open_storage
from holdfast.tiers.wire import tcp
from holdfast.tiers.wire.tls import Credentials, read_secret

WAIT_S = 120.0
PIECE_BYTES = MIB
PULLER_NICENESS = 10  # of node.worker, which pulls


class Pair:
    """Two keepers; the first one's rank holds `num_bytes` that live there only, the second one's a page."""

    def __init__(
        self,
        home: Path,
        num_bytes: int,
        network: dict[str, str],
        start: Callable[[str, Config], RuntimePaths] = ensure_keeper,
    ) -> None:
        self.root, topology = str(home / "ck"), Topology(("a", "b"), (0, 1))
        storage = open_storage(self.root, Events())
        job_id, number = storage.claim(), storage.incarnations.register()
        self.number = number
        self.clients: list[KeeperClient] = []
        self._images: list[bytes] = []
        self._spans: list[ImageSpan] = []
        self._steps = iter(range(10_000))
        layouts = []
        for rank, node in enumerate(topology.nodes):
            config = Config(
                runtime_dir=str(home / "rt"), node_label=node, memory_budget=str(8 * num_bytes + 64 * MIB), **network
            )
            place = start(self.root, config)
            self.clients.append(KeeperClient.connect(place.socket, job=place.job, rank=rank))
            rows = max(1, (num_bytes if rank == 0 else 4096) // 4096)
            shard = Shard(f"rank{rank}/w", "F32", (rows, 1024), Extent((0, 0), (rows, 1024)), (rank,))
            (bundle,) = plan_bundles([shard], values_of=[], topology=topology)
            layouts.append(rank_layout([bundle], rank, topology))
            plan = image_format.plan_image(bundle, 0)
            self._images.append(plan.header + os.urandom(4096) * (-(-(plan.length - len(plan.header)) // 4096)))
            self._spans.append(ImageSpan(layouts[-1].bundles[0], 0, plan.length))
        addresses = tuple(client.welcome.address for client in self.clients)
        assembly = Assembly(number, self.root, job_id, topology, addresses)
        for client, layout, span in zip(self.clients, layouts, self._spans, strict=True):
            client.assemble(assembly)
            client.register(layout)
            client.prepare(span.length + 4096, 2)
        for client in self.clients:
            client.resume(number, None)

    def save(self) -> Version:
        """All ranks save the next step, in which every image differs: one that does not is not sent again."""
        version = Version(self.number, next(self._steps))
        for client, image, span in zip(self.clients, self._images, self._spans, strict=True):
            slot = client.begin(version, span.length, durable=False, timeout_s=WAIT_S)
            slot.view[: span.length] = image[: span.length]
            slot.view[span.length - 8 : span.length] = version.step.to_bytes(8, "little")
            client.copied(version, [span])
        return version

    def replicate(self) -> float:
        """Bytes per second of one pull, as the keeper measured it."""
        version = self.save()
        self.clients[0].announced.wait(version, Level.REPLICATED, WAIT_S)
        facts = self.clients[1].status()["replication"]
        return float(facts["last_bytes"] / facts["last_seconds"])

    def close(self) -> None:
        for client in self.clients:
            pid = client.welcome.pid
            client.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


class PlainSend:
    """A process that sends the same bytes whenever it is told to; a plain receiver in this one."""

    def __init__(self, num_bytes: int, credentials: Credentials | None) -> None:
        self._source, self._target = mmap.mmap(-1, num_bytes), mmap.mmap(-1, num_bytes)
        for at in range(0, num_bytes, 4096):
            self._source[at] = self._target[at] = at % 251
        self._credentials = credentials
        here, there = socket.socketpair() if credentials is None else _tcp_pair()
        self._child = os.fork()
        if self._child == 0:
            here.close()
            self._send_for_ever(self._ready(there, server=True))
        there.close()
        self._sock = self._ready(here, server=False)

    def _ready(self, sock: socket.socket, *, server: bool) -> socket.socket:
        if self._credentials is None:
            return sock
        wrapped = self._credentials.take(sock, server=server).sock
        wrapped.do_handshake()
        return wrapped

    def _send_for_ever(self, sock: socket.socket) -> None:
        with memoryview(self._source) as view:
            while sock.recv(1):
                for at in range(0, len(view), PIECE_BYTES):
                    sock.sendall(view[at : at + PIECE_BYTES])
        os._exit(0)

    def copy(self, niceness: int) -> float:
        """Bytes per second of one copy, received by a thread of this niceness."""
        seconds: list[float] = []

        def receive() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
            started = time.perf_counter()
            self._sock.sendall(b"x")
            with memoryview(self._target) as view:
                at = 0
                while at < len(view):
                    at += self._sock.recv_into(view[at : at + PIECE_BYTES])
            seconds.append(time.perf_counter() - started)

        thread = threading.Thread(target=receive)
        thread.start()
        thread.join()
        return len(self._target) / seconds[0]

    def close(self) -> None:
        self._sock.close()
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with tcp.listen("127.0.0.1") as listener:
        listener.setblocking(True)
        here = socket.create_connection(listener.getsockname()[:2])
        there, _ = listener.accept()
        return here, there


@contextlib.contextmanager
def pair_in(
    home: Path,
    num_bytes: int,
    network: dict[str, str],
    start: Callable[[str, Config], RuntimePaths] = ensure_keeper,
) -> Iterator[Pair]:
    home.mkdir(parents=True)
    pair = Pair(home, num_bytes, network, start)
    try:
        yield pair
    finally:
        pair.close()


def throughput(report: Report, name: str, pair: Pair, plain: PlainSend, rounds: int) -> None:
    """Interleaved; the first round is thrown away: the replica's memory is made in it."""
    rows = [(pair.replicate(), plain.copy(PULLER_NICENESS), plain.copy(0)) for _ in range(rounds + 1)]
    ours, nice, normal = zip(*rows[1:], strict=True)
    mib_per_s = {"ours": round(statistics.median(ours) / MIB), "plain": round(statistics.median(nice) / MIB)}
    report.figure(name, measure.ratio(ours, nice), "ratio", ">= 0.7", mib_per_s=mib_per_s)
    report.figure(f"{name}:normal", measure.ratio(ours, normal), "ratio")


def step_time(report: Report, pair: Pair, rounds: int) -> None:
    """A step of a small GPT while a replica travels, over one while none does."""
    model, optimizer = measure.gpt_of(24 * MIB)
    step = measure.training(model, optimizer)
    for _ in range(5):
        step()
    busy, idle = [], []
    for _ in range(rounds):
        idle.append(statistics.median(measure.timed(step) for _ in range(8)))
        version = pair.save()
        during = steps_until(
            step, lambda version=version: pair.clients[0].announced.level(version)[0] >= Level.REPLICATED
        )
        busy.append(statistics.mean(during))
    milliseconds = {"idle": round(statistics.median(idle) * 1e3, 2), "busy": round(statistics.median(busy) * 1e3, 2)}
    report.figure("step_time_ratio", measure.ratio(busy, idle), "ratio", milliseconds=milliseconds)


def steps_until(step: Callable[[], None], done: Callable[[], bool]) -> list[float]:
    found: list[float] = []
    deadline = time.monotonic() + WAIT_S
    while not found or (not done() and time.monotonic() < deadline):
        found.append(measure.timed(step))
    return found


def main() -> None:
    options = measure.options("replicate", "How fast replicas travel.").parse_args()
    torch.set_num_threads(1)
    num_bytes = (options.mib // 4 if options.quick else options.mib) * MIB
    rounds = 5 if options.quick else 15
    home = Path(tempfile.mkdtemp(prefix="hf-bench-", dir=options.dir))
    report = Report("replicate", options.quick, options.json)
    secret = home / "secret"
    secret.touch(0o600)
    secret.write_text(os.urandom(32).hex())
    credentials = Credentials(read_secret(str(secret)), role=KEEPER, job="0", node="plain")
    try:
        plain, under_tls = PlainSend(num_bytes, None), PlainSend(num_bytes, credentials)
        with contextlib.closing(plain), contextlib.closing(under_tls):
            with pair_in(home / "unix", num_bytes, {}) as pair:
                throughput(report, "socket_throughput_ratio", pair, plain, rounds)
                step_time(report, pair, rounds)
            with pair_in(home / "tls", num_bytes, {"listen": "127.0.0.1", "secret_file": str(secret)}) as pair:
                throughput(report, "tls_throughput_ratio", pair, under_tls, rounds)
        report.save()
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
