"""The keeper's socket: who is let in, and threads that are lent to connections that have something to say or to hear.

A connection that is silent has no thread: the kernel tells which ones are not (epoll), and a thread of the thread pool reads
one message of such a connection and answers it. So thousands of keepers may report to one. The ranks of this node, of
which there are few, keep a thread each, because a save waits for the answer.

Nobody can hold up anybody else: who may wait for something does so aside (`keeper.rpc.thread_pool`), replies and pushes go through a
bounded outbox, and pushes about the same subject replace each other, so a stopped client costs a few kilobytes. Before
its greeting a connection has 5 s and 1 KiB; of those there are at most 64. Strangers (another user) and nonsense are cut
off without harm to the rest. Connections of other nodes come through a second door (`Door`), prove themselves first, and
have 64 places of their own: a flood there costs local clients nothing, and takes the place of its own oldest, so that who
proves itself at once still gets in. What messages mean is the handler's business.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from holdfast.base.errors import AnswerTooLong, HoldfastError, KeeperError
from holdfast.keeper.rpc.listener import Door
from holdfast.keeper.rpc.messages import (
    RANK,
    AnyMessage,
    Hello,
    Message,
    Ping,
    Propose,
    Refusal,
    Report,
    decode,
    decode_hello,
    encode,
    refusal,
)
from holdfast.keeper.rpc.thread_pool import ThreadPool
from holdfast.tiers.wire import frames

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 5.0
# What the last word of a keeper may take for all connections together: on a busy machine threads get their turn late.
FLUSH_TIMEOUT_S = 5.0
REST_S = 0.05
# Connections at once: local ranks, viewers, and the keepers of other nodes, which all report to the coordinator's.
MAX_CONNECTIONS = 8192
MAX_OUTBOX = 1024
# Threads that serve connections at once, without those that wait for something.
MAX_THREADS = 32
# What never waits for anything and comes from everywhere: done by the thread that read it, without stepping aside.
SHORT = (Report, Propose, Ping)


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply with descriptors; the server duplicates them, the handler keeps its own."""

    message: Message
    fds: tuple[int, ...] = ()


class Connection:
    """One client as the keeper sees it. `send` and `push` never block.

    Args:
        thread pool: lends the thread that writes.

    Attributes:
        number: counted as they were accepted: of two connections of one client the later has the higher.
    """

    def __init__(self, channel: frames.Channel, number: int, thread_pool: ThreadPool) -> None:
        self.channel = channel
        self._thread_pool = thread_pool
        self.number = number
        self.pid = frames.peer_pid(channel)
        self.hello: Hello | None = None
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._pushes: OrderedDict[str, bytes] = OrderedDict()
        self._changed = threading.Condition()
        self._ended = False
        self.is_remote = channel.is_remote
        self.is_polled = False
        self._may_write = False
        self._writing = False  # a thread is lent, or will be
        self._answering = False  # a message was read and its reply is not queued

    @property
    def greeted(self) -> Hello:
        """The greeting; asking before there is one is a bug."""
        if self.hello is None:
            raise KeeperError("the connection has not greeted")
        return self.hello

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queues a message; a client that lets too many pile up is cut off. A reply that fits in no frame becomes a refusal."""
        body = encode(message)
        if message.id and len(body) > frames.MAX_FRAME_BYTES:
            error = AnswerTooLong(
                f"the answer ({type(message).__name__}) has {len(body)} bytes, and a message at most {frames.MAX_FRAME_BYTES}",
                where=f"the keeper, process {os.getpid()}",
            )
            logger.error("%s", error)
            body, fds = encode(refusal(message.id, error)), ()
        self.send_encoded(body, fds)

    def send_encoded(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Does the same with a message that was encoded for several clients."""
        copies = [os.dup(fd) for fd in fds]
        with self._changed:
            if self._ended or len(self._outbox) >= MAX_OUTBOX:
                frames.close_fds(copies)
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
        """Asks for a thread unless there is one; most who only ask whether somebody is there never need one. Under the lock."""
        if not self._writing and self._may_write and (self._outbox or self._pushes):
            self._writing = True
            self._thread_pool.lend(self._write)

    def end(self) -> None:
        """Closes the channel once nobody writes; only who reads it calls this."""
        with self._changed:
            self._ended = True
        self.channel.abort()
        self._await_writer(JOIN_TIMEOUT_S)
        for _, fds in self._outbox:
            frames.close_fds(fds)
        self._outbox.clear()
        self.channel.close()

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Lets a reply that is due and what is queued be sent, and takes nothing more; used when the keeper says its last word."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._answering, timeout_s)
            self._ended = True
        self._await_writer(max(0.0, deadline - time.monotonic()))

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A reply is due: what the message asks for may end the keeper, which then waits a moment for the reply."""
        with self._changed:
            self._answering = True
        try:
            yield
        finally:
            with self._changed:
                self._answering = False
                self._changed.notify_all()

    def _await_writer(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._writing, timeout_s)

    def _write(self) -> None:
        """Sends all that is queued, in a thread of the thread pool."""
        try:
            while (item := self._next()) is not None:
                body, fds = item
                try:
                    if self.channel.is_writable and len(body) <= frames.BULK_BLOCK_BYTES:
                        self.channel.send(body, fds=fds, timeout_s=SEND_TIMEOUT_S)
                    else:
                        with self._thread_pool.aside():
                            self.channel.send(body, fds=fds, timeout_s=SEND_TIMEOUT_S)
                finally:
                    frames.close_fds(fds)
        except HoldfastError as error:
            logger.debug("client %d: %s", self.pid, error.what)
            self._break()
        except Exception:
            logger.exception("writer of client %d failed", self.pid)
            self._break()

    def _break(self) -> None:
        """Nothing is written any more: what was not sent whole cannot be gone on with."""
        self.channel.abort()
        with self._changed:
            self._ended = True
            self._writing = False
            self._changed.notify_all()

    def _next(self) -> tuple[bytes, list[int]] | None:
        with self._changed:
            if self._outbox:  # replies first: somebody waits for them
                return self._outbox.popleft()
            if self._pushes:
                return self._pushes.popitem(last=False)[1], []
            self._writing = False
            self._changed.notify_all()
            return None


class Handler(Protocol):
    """Serves the connections of a keeper. Called from many threads."""

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
        self._listener = frames.listen(path)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._thread_pool = ThreadPool("holdfast client", MAX_THREADS)
        self._poll = select.epoll()
        self._connections: dict[int, Connection] = {}  # by their number, in the order in which they came
        self._parked: dict[int, Connection] = {}  # those without a thread, by descriptor
        self._resting: dict[int, float] = {}  # doors that nobody could come in by, until when
        self._stopping = False
        self._numbers = itertools.count(1)

    def serve(self) -> None:
        """Serves until `stop`; then every connection is flushed and closed and every thread joined."""
        poll = self._poll
        poll.register(self._listener, select.EPOLLIN)
        poll.register(self._wake, select.EPOLLIN)
        doors: dict[int, Callable[[], frames.Channel | None]] = {
            self._listener.fileno(): partial(frames.accept, self._listener)
        }
        if self._door is not None:
            poll.register(self._door.listener, select.EPOLLIN)
            doors[self._door.listener.fileno()] = partial(frames.accept_tcp, self._door.listener)
        due_s = 0.0  # when the handler wants to be called; what comes in by itself is no reason
        while not self._stopping:
            now = time.monotonic()
            if now >= due_s:
                due_s = now + max(0.001, self._handler.tick())
            for fd, _ in poll.poll(min(REST_S if self._resting else 1.0, max(0.0, due_s - time.monotonic()))):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                    due_s = 0.0
                elif fd not in doors:
                    self._unpark(fd)
                elif self._accept(doors[fd]):
                    due_s = 0.0
                else:
                    # Out of descriptors, perhaps: the listener would stay readable and we would spin.
                    poll.modify(fd, 0)
                    self._resting[fd] = time.monotonic() + REST_S
            self._wake_doors()
        self._listener.close()
        if self._door is not None:
            self._door.listener.close()
        self._end_all()
        poll.close()
        os.close(self._wake)

    def _wake_doors(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, until in self._resting.items() if until <= now]:
            self._poll.modify(fd, select.EPOLLIN)
            del self._resting[fd]

    def stop(self) -> None:
        """Ends `serve`; any thread or signal handler."""
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        """Lets `serve` call `tick` now."""
        with suppress(OSError):  # the server has ended
            os.eventfd_write(self._wake, 1)

    def _accept(self, take: Callable[[], frames.Channel | None]) -> bool:
        channel = take()
        if channel is None:
            return False
        connection = Connection(channel, next(self._numbers), self._thread_pool)
        with self._lock:
            known = self._connections.values()
            waiting = [
                c for c in known if c.hello is None and c.is_remote == connection.is_remote and not c.channel.is_cut
            ]
            # Who left before a thread came to it, on a busy machine, takes no place. Of other nodes the oldest gives way anyhow.
            if len(waiting) >= frames.MAX_CONNECTIONS and not connection.is_remote:
                for gone in [c for c in waiting if c.channel.is_left]:
                    gone.channel.abort()
                    waiting.remove(gone)
            crowded = len(waiting) >= frames.MAX_CONNECTIONS
            full = len(self._connections) >= MAX_CONNECTIONS or (crowded and not connection.is_remote)
            if not full:
                self._connections[connection.number] = connection
        if full:
            logger.warning("too many connections; %s is turned away", channel.where)
            channel.close()
            return True
        if crowded:
            waiting[0].channel.abort()
        self._thread_pool.lend(partial(self._welcome, connection))
        return True

    def _welcome(self, connection: Connection) -> None:
        """Lets a connection in; a rank's is served from here on."""

        def work() -> bool:
            with self._thread_pool.aside():
                stays = self._prove(connection) and self._greet(connection)
                while stays and connection.greeted.role == RANK and not self._stopping:
                    self._serve_one(connection, None)
            return stays

        self._attend(connection, work)

    def _hear(self, connection: Connection) -> None:
        """Serves what a connection without a thread of its own has sent."""

        def work() -> bool:
            is_more = True
            while is_more and not self._stopping:
                try:
                    self._serve_one(connection, 0.0)
                except TimeoutError:  # no frame began: a part of a record, or another's descriptor before
                    return True
                is_more = connection.channel.has_more
            return True

        self._attend(connection, work)

    def _attend(self, connection: Connection, work: Callable[[], bool]) -> None:
        """Does `work`, after which the connection waits without a thread if it is True, and is over otherwise."""
        try:
            if work() and not self._stopping:
                self._park(connection)
                return
        except HoldfastError as error:
            logger.debug("client %d: %s", connection.pid, error.what)
        except Exception:
            logger.exception("serving client %d failed", connection.pid)
        self._finish(connection)

    def _park(self, connection: Connection) -> None:
        """Waits for what comes next without a thread. What has come already wakes it at once."""
        fd = connection.channel.fileno()
        with self._lock:
            if not self._stopping:
                self._parked[fd] = connection
                events = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
                if connection.is_polled:
                    self._poll.modify(fd, events)
                else:
                    self._poll.register(fd, events)
                    connection.is_polled = True
                return
        self._finish(connection)

    def _unpark(self, fd: int) -> None:
        with self._lock:
            connection = self._parked.pop(fd, None)
        if connection is not None:  # else it ended meanwhile
            self._thread_pool.lend(partial(self._hear, connection))

    def _finish(self, connection: Connection) -> None:
        """The connection is over; once for each, by who read it last."""
        if connection.hello is not None:
            self._handler.gone(connection)
        if self._stopping:
            connection.flush()  # the last word may still wait: that a version is durable, for one
        connection.end()
        with self._lock:
            self._connections.pop(connection.number, None)
        self.wake()

    def _prove(self, connection: Connection) -> bool:
        """A connection of another node proves itself; one of this machine was vouched for by the kernel."""
        if connection.is_remote and self._door is not None:
            connection.channel.secure(self._door.credentials, server=True, timeout_s=frames.HELLO_TIMEOUT_S)
        return True

    def _greet(self, connection: Connection) -> bool:
        """Reads the greeting and answers it; False if the client is refused."""
        try:
            body, fds = connection.channel.receive(timeout_s=frames.HELLO_TIMEOUT_S, limit=frames.MAX_HELLO_BYTES)
        except TimeoutError:
            return False
        frames.close_fds(fds)
        try:
            hello = decode_hello(body)
            welcome = self._handler.greet(connection, hello)
        except HoldfastError as error:
            connection.channel.send(encode(refusal(0, error)), timeout_s=SEND_TIMEOUT_S)
            return False
        connection.channel.send(encode(welcome), timeout_s=SEND_TIMEOUT_S)
        connection.start()
        return True

    def _serve_one(self, connection: Connection, timeout_s: float | None) -> None:
        """Reads one message, which may take so long to begin, and answers it."""
        body, fds = connection.channel.receive(timeout_s=timeout_s)
        with connection.answering():
            try:
                message = decode(body)
                if isinstance(message, SHORT) or connection.greeted.role == RANK:  # whose thread stands aside for good
                    reply = self._answer(connection, message, fds)
                else:
                    with self._thread_pool.aside():
                        reply = self._answer(connection, message, fds)
            finally:
                frames.close_fds(fds)
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
            connections, parked = list(self._connections.values()), list(self._parked.values())
            self._parked.clear()
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        for connection in connections:
            connection.flush(max(0.0, deadline - time.monotonic()))
            connection.channel.abort()
        for connection in parked:
            self._finish(connection)
        self._thread_pool.stop(JOIN_TIMEOUT_S)


def _refuse(message: AnyMessage, error: HoldfastError) -> Refusal | None:
    """A statement has no reply, so its refusal is only logged."""
    return refusal(message.id, error) if message.id else None
