"""A keeper that holds two versions of one bundle, and a proxy before it that damages, holds up or cuts what it sends."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.model import Level, Seal, Version
from holdfast.keeper.replication.image_transfer import PeerReader
from holdfast.keeper.rpc import messages
from holdfast.tiers.backends.parallel_streams import StreamCount
from holdfast.tiers.wire import frames
from keeper.rig import Rig, reached

PAGE = 4096


@dataclass
class Proxy:
    """Between a keeper and whoever pulls from it: passes everything on, and damages bulk bytes when told to."""

    target: Path
    path: Path
    damage: Callable[[bytearray], bool] | None = None  # True: end the connection behind what is left
    damaged: int = 0
    opened: int = 0
    _threads: set[threading.Thread] = field(default_factory=set)
    _socks: set[socket.socket] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Return whether no connection is open."""
        return not self._socks

    def __enter__(self) -> Proxy:
        self._listener = frames.listen(self.path)
        self._listener.setblocking(True)
        self._run(self._serve)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in tuple(self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in tuple(self._threads):
            thread.join(30)

    def _run(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.opened += 1
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self.target))
                self._run(self._pass_on, client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        """One connection from its beginning to its end; nothing of it stays."""
        self._socks |= {client, server}
        there = threading.Thread(target=self._there, args=(client, server), daemon=True)
        there.start()
        self._back(server, client)
        for sock in (client, server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        there.join(30)
        self._socks -= {client, server}
        client.close()
        server.close()
        self._threads.discard(threading.current_thread())

    def _there(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := client.recv(1 << 16):
                server.sendall(part)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = _exactly(server, 4)
                body = _exactly(server, struct.unpack(">I", head)[0])
                client.sendall(head + body)
                said = messages.decode(bytes(body))
                if isinstance(said, messages.Bulk):
                    bulk = _exactly(server, said.length)
                    if self.damage is not None:
                        self.damaged += 1
                        if self.damage(bulk):
                            client.sendall(bulk)
                            break
                    client.sendall(bulk)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


def content(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


class Source:
    """A keeper that holds two versions of one bundle of random bytes."""

    def __init__(self, rig: Rig) -> None:
        (self.trainer,) = rig.start()
        self.rig = rig
        self.own = max(self.trainer.mine, key=lambda bundle: bundle.num_bytes)
        self.images: dict[Version, bytes] = {}
        for step in (1, 2):
            slot = self.trainer.begin(step)
            spans = self.trainer.write(slot, step)
            for span in spans:
                if span.ref.bundle_id == self.own.bundle_id:
                    begin = span.offset + 4 * PAGE  # behind the header
                    slot.view[begin : span.offset + span.length] = content(span.length - 4 * PAGE, step)
                    image = bytes(slot.view[span.offset : span.offset + span.length])
            version = self.trainer.version(step)
            self.trainer.client.copied(version, spans)
            reached([self.trainer], version, Level.CAPTURED)
            self.images[version] = image
        self.version = version

    def reader(self, address: str, count: StreamCount | None = None) -> PeerReader:
        rig = self.rig
        hello = messages.Hello(
            job=rig.keeper(0).job, role=messages.KEEPER, node=1, incarnation=rig.incarnation, job_id=rig.job_id
        )
        return PeerReader(address, hello, lambda: False, count=count)

    def seal(self, reader: PeerReader) -> Seal:
        return reader.seals(self.version, (self.own.bundle_id,))[self.own.bundle_id]

    def pull(
        self, address: str, count: StreamCount | None = None, progress: Callable[[int], None] = lambda _: None
    ) -> bytes:
        reader = self.reader(address, count)
        try:
            seal = self.seal(reader)
            target = bytearray(seal.length)
            reader.read_into(self.version, seal, memoryview(target), progress)
            return bytes(target)
        finally:
            reader.close()
