"""The keeper's socket: who is let in, one thread that reads each connection, one that writes it.

Nobody can hold up anybody else: a reader only serves its own connection, replies and pushes go through a bounded
outbox with a writer of its own (from its first message on), and pushes about the same subject replace each other, so a
stopped client costs a few kilobytes. Before its greeting a connection has 5 s and 1 KiB; of those there are at most 64. Strangers (another user)
and nonsense are cut off without harm to the rest. Connections of other nodes come through a second door (`Door`), prove
themselves first, and have 64 places of their own: a flood there costs local clients nothing, and takes the place of
its own oldest, so that who proves itself at once still gets in. What messages mean is the handler's business.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from holdfast.base.errors import HoldfastError, KeeperError
from holdfast.node.messages import AnyMessage, Hello, Message, Refusal, decode, decode_hello, encode, refusal
from holdfast.node.network import Door
from holdfast.tiers import wire

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 1.0
REST_MS = 50
# Greeted connections: local ranks, viewers, and the keepers of other nodes.
MAX_GREETED = 1024
MAX_OUTBOX = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply with descriptors; the server duplicates them, the handler keeps its own."""

    message: Message
    fds: tuple[int, ...] = ()


class Connection:
    """One client as the keeper sees it. `send` and `push` never block.

    Attributes:
        number: counted as they were accepted: of two connections of one client the later has the higher.
    """

    def __init__(self, channel: wire.Channel, number: int) -> None:
        self.channel = channel
        self.number = number
        self.pid = wire.peer_pid(channel)
        self.hello: Hello | None = None
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._pushes: OrderedDict[str, bytes] = OrderedDict()
        self._changed = threading.Condition()
        self._ended = False
        self.is_remote = channel.is_remote
        self._may_write = False
        self._writer: threading.Thread | None = None

    @property
    def greeted(self) -> Hello:
        """The greeting; asking before there is one is a bug."""
        if self.hello is None:
            raise KeeperError("the connection has not greeted")
        return self.hello

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queues a message; a client that lets too many pile up is cut off."""
        self.send_encoded(encode(message), fds)

    def send_encoded(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Does the same with a message that was encoded for several clients."""
        copies = [os.dup(fd) for fd in fds]
        with self._changed:
            if self._ended or len(self._outbox) >= MAX_OUTBOX:
                wire.close_fds(copies)
                self.channel.abort()
                return
            self._outbox.append((body, copies))
            self._call_writer()

    def push(self, key: str, message: Message) -> None:
        """Queues a message that replaces an unsent one about the same subject."""
        with self._changed:
            if self._ended:
                return
            self._pushes[key] = encode(message)
            self._pushes.move_to_end(key)
            if len(self._pushes) > MAX_OUTBOX:
                self._pushes.popitem(last=False)
            self._call_writer()

    def start(self) -> None:
        """The client is greeted: what is queued may be written."""
        with self._changed:
            self._may_write = True
            self._call_writer()

    def _call_writer(self) -> None:
        """Wakes the writer; most who only ask whether somebody is there never need one. Under the lock."""
        self._changed.notify()
        if self._writer is None and self._may_write and (self._outbox or self._pushes):
            writer = threading.Thread(target=self._write, name="holdfast writer", daemon=True)
            writer.start()
            self._writer = writer  # not before: a keeper that ends just now would join what was never started

    def end(self) -> None:
        """Stops the writer and closes the channel; only the reader's thread calls it."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self.channel.abort()
        if self._writer is not None:
            self._writer.join(JOIN_TIMEOUT_S)
        for _, fds in self._outbox:
            wire.close_fds(fds)
        self._outbox.clear()
        self.channel.close()

    def flush(self) -> None:
        """Lets the writer send what is queued, then ends it; used when the keeper says its last word."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._writer is not None:
            self._writer.join(FLUSH_TIMEOUT_S)

    def _write(self) -> None:
        try:
            while (item := self._next()) is not None:
                body, fds = item
                try:
                    self.channel.send(body, fds=fds, timeout_s=SEND_TIMEOUT_S)
                finally:
                    wire.close_fds(fds)
        except HoldfastError as error:
            logger.debug("client %d: %s", self.pid, error.what)
            self.channel.abort()
        except Exception:
            logger.exception("writer of client %d failed", self.pid)
            self.channel.abort()

    def _next(self) -> tuple[bytes, list[int]] | None:
        with self._changed:
            while not (self._outbox or self._pushes or self._ended):
                self._changed.wait()
            if self._outbox:  # replies first: somebody waits for them
                return self._outbox.popleft()
            if self._pushes:
                return self._pushes.popitem(last=False)[1], []
            return None


class Handler(Protocol):
    """What the keeper does with connections. Called from many threads."""

    def greet(self, connection: Connection, hello: Hello) -> Message:
        """Sets `connection.hello` and returns the welcome, or raises a HoldfastError that is sent as refusal."""

    def handle(self, connection: Connection, message: AnyMessage, fds: list[int]) -> Message | Answer | None:
        """The reply; None if it comes later or never. Descriptors left in `fds` are closed afterwards."""

    def gone(self, connection: Connection) -> None:
        """The connection ended; called once for each that was greeted."""

    def tick(self) -> float:
        """Does what is due; returns seconds until it wants to be called again."""


class Server:
    """Accepts and serves until `stop`. `serve` runs in the thread of its caller."""

    def __init__(self, path: Path, handler: Handler, door: Door | None = None) -> None:
        self._handler = handler
        self._door = door
        self._listener = wire.listen(path)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._readers: dict[threading.Thread, Connection] = {}
        self._stopping = False
        self._numbers = itertools.count(1)

    def serve(self) -> None:
        """Serves until `stop`; then every connection is flushed and closed and every thread joined."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        doors: dict[int, Callable[[], wire.Channel | None]] = {
            self._listener.fileno(): partial(wire.accept, self._listener)
        }
        if self._door is not None:
            poll.register(self._door.listener, select.POLLIN)
            doors[self._door.listener.fileno()] = partial(wire.accept_tcp, self._door.listener)
        while not self._stopping:
            pause_s = self._handler.tick()
            for fd, _ in poll.poll(max(1, int(pause_s * 1000))):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif not self._accept(doors[fd]):
                    # Out of descriptors, perhaps: the listener would stay readable and we would spin.
                    poll.modify(fd, 0)
                    poll.poll(REST_MS)
                    poll.modify(fd, select.POLLIN)
        self._listener.close()
        if self._door is not None:
            self._door.listener.close()
        self._end_all()
        os.close(self._wake)

    def stop(self) -> None:
        """Ends `serve`; any thread or signal handler."""
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        """Lets `serve` call `tick` now."""
        try:
            os.eventfd_write(self._wake, 1)
        except OSError:
            pass  # the server has ended

    def _accept(self, take: Callable[[], wire.Channel | None]) -> bool:
        channel = take()
        if channel is None:
            return False
        connection = Connection(channel, next(self._numbers))
        with self._lock:
            known = self._readers.values()
            waiting = [c for c in known if c.hello is None and c.is_remote == connection.is_remote]
            crowded = len(waiting) >= wire.MAX_CONNECTIONS
            full = len(self._readers) >= MAX_GREETED or (crowded and not connection.is_remote)
            if not full:
                thread = threading.Thread(
                    target=self._read, args=(connection,), name=f"holdfast client {connection.pid}", daemon=True
                )
                self._readers[thread] = connection
        if full:
            logger.warning("too many connections; %s is turned away", channel.where)
            channel.close()
            return True
        if crowded:
            waiting[0].channel.abort()
        thread.start()
        return True

    def _read(self, connection: Connection) -> None:
        try:
            greeted = self._prove(connection) and self._greet(connection)
            while greeted and not self._stopping:
                self._serve_one(connection)
        except HoldfastError as error:
            logger.debug("client %d: %s", connection.pid, error.what)
        except Exception:
            logger.exception("serving client %d failed", connection.pid)
        finally:
            if connection.hello is not None:
                self._handler.gone(connection)
            if self._stopping:
                connection.flush()  # the last word may still wait: that a version is durable, for one
            connection.end()
            with self._lock:
                self._readers.pop(threading.current_thread(), None)
            self.wake()

    def _prove(self, connection: Connection) -> bool:
        """A connection of another node proves itself; one of this machine was vouched for by the kernel."""
        if connection.is_remote and self._door is not None:
            connection.channel.secure(self._door.credentials, server=True, timeout_s=wire.HELLO_TIMEOUT_S)
        return True

    def _greet(self, connection: Connection) -> bool:
        """Reads the greeting and answers it; False if the client is refused."""
        try:
            body, fds = connection.channel.receive(timeout_s=wire.HELLO_TIMEOUT_S, limit=wire.MAX_HELLO_BYTES)
        except TimeoutError:
            return False
        wire.close_fds(fds)
        try:
            hello = decode_hello(body)
            welcome = self._handler.greet(connection, hello)
        except HoldfastError as error:
            connection.channel.send(encode(refusal(0, error)), timeout_s=SEND_TIMEOUT_S)
            return False
        connection.channel.send(encode(welcome), timeout_s=SEND_TIMEOUT_S)
        connection.start()
        return True

    def _serve_one(self, connection: Connection) -> None:
        body, fds = connection.channel.receive(timeout_s=None)
        try:
            message = decode(body)
            reply = self._answer(connection, message, fds)
        finally:
            wire.close_fds(fds)
        if isinstance(reply, Answer):
            connection.send(reply.message, reply.fds)
        elif reply is not None:
            connection.send(reply)

    def _answer(self, connection: Connection, message: AnyMessage, fds: list[int]) -> Message | Answer | None:
        try:
            return self._handler.handle(connection, message, fds)
        except HoldfastError as error:
            logger.debug("%s of client %d refused: %s", type(message).__name__, connection.pid, error)
            return _refuse(message, error)
        except Exception as error:
            logger.exception("%s of client %d failed", type(message).__name__, connection.pid)
            return _refuse(message, KeeperError(f"the keeper failed: {type(error).__name__}: {error}"))

    def _end_all(self) -> None:
        with self._lock:
            readers = dict(self._readers)
        for connection in readers.values():
            connection.flush()
            connection.channel.abort()
        for thread in readers:
            thread.join(JOIN_TIMEOUT_S)


def _refuse(message: AnyMessage, error: HoldfastError) -> Refusal | None:
    """A statement has no reply, so its refusal is only logged."""
    return refusal(message.id, error) if message.id else None
