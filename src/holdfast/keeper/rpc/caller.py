"""Calls over one channel, the caller's side: requests with replies, statements without, pushes to a callback.

One reader thread owns the channel. A reply goes to the call that waits for its id; everything else is a push. When
the connection ends every waiting call raises KeeperLost at once, and so does every later one.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from holdfast.base.errors import HoldfastError, KeeperError, KeeperLost
from holdfast.base.handler_errors import pass_on
from holdfast.keeper.rpc.messages import (
    KEEPER,
    AnyMessage,
    Hello,
    Message,
    Refusal,
    Welcome,
    decode,
    encode,
    raise_refusal,
)
from holdfast.tiers.wire import frames
from holdfast.tiers.wire.latch import Latch

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5.0
# A keeper of this node that has left so much unread is frozen: a step does not wait for it.
TELL_TIMEOUT_S = 1.0
JOIN_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Waiting:
    done: Latch = field(default_factory=Latch)
    reply: AnyMessage | None = None
    fds: list[int] = field(default_factory=list)
    is_left: bool = False

    def answer(self, message: AnyMessage, fds: list[int]) -> None:
        """Hands the reply to who waits; if they have just left, nobody takes its descriptors."""
        self.fds = fds  # before the reply, which may be taken at once
        self.reply = message
        self.done.set()
        if self.is_left:
            self._close_fds()

    def leave(self) -> None:
        """Nobody waits any more."""
        self.is_left = True
        self._close_fds()

    def _close_fds(self) -> None:
        """Closes each once, though two threads may be at it."""
        with suppress(IndexError):
            while True:
                frames.close_fds([self.fds.pop()])


class Caller:
    """A connection to a keeper, greeted and ready.

    Args:
        on_push: called in the reader thread with every message that is not a reply; must be quick.
        on_lost: called once in the reader thread when the connection ended without `close`.
    """

    def __init__(
        self,
        channel: frames.Channel,
        welcome: Welcome,
        *,
        on_push: Callable[[AnyMessage], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.welcome = welcome
        self._channel = channel
        self._on_push = on_push
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        # Without a lock: a signal's handler that calls in between would keep it, and the reader could deliver nothing.
        self._waiting: dict[int, _Waiting] = {}
        self._lost = ""
        self._closing = False
        self._thread = threading.Thread(target=self._read, name=f"holdfast reader {channel.where}", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # of a signal's handler: it may run already
            self._closing = True
            channel.abort()
            raise

    @property
    def alive(self) -> bool:
        return not self._lost and not self._closing

    def call(self, request: Message, *, timeout_s: float, fds: Sequence[int] = ()) -> tuple[AnyMessage, list[int]]:
        """The reply to `request` and its descriptors (the caller owns them).

        Raises:
            KeeperLost: the other side is gone, or did not answer in time.
            HoldfastError: the class that the other side named in its refusal.
        """
        number, until = next(self._numbers), time.monotonic() + timeout_s
        waiting = _Waiting()
        self._waiting[number] = waiting
        try:
            try:
                self._require_alive()  # behind it, for the end wakes only what it finds
                body = encode(msgspec.structs.replace(request, id=number))
                self._channel.send(body, fds=fds, timeout_s=min(timeout_s, SEND_TIMEOUT_S))
                answered = waiting.done.wait(until - time.monotonic())
            finally:
                self._waiting.pop(number, None)
            if waiting.reply is None:
                why = f"did not answer within {timeout_s:g} s" if not answered else self._lost
                raise KeeperLost(f"the keeper {why}" if not answered else why, where=self._channel.where)
            if isinstance(waiting.reply, Refusal):
                raise_refusal(waiting.reply)
        except BaseException:  # of a signal's handler, for one: the answer may be there, or come now
            waiting.leave()
            raise
        return waiting.reply, waiting.fds

    def tell(self, statement: Message) -> None:
        """Sends a message that has no reply.

        Raises:
            KeeperLost: the other side is gone or does not read.
        """
        self._require_alive()
        timeout_s = SEND_TIMEOUT_S if self._channel.is_remote else TELL_TIMEOUT_S
        self._channel.send(encode(statement), timeout_s=timeout_s)

    def close(self) -> None:
        """Ends the connection and the reader thread; `on_lost` is not called."""
        self._closing = True
        self._channel.abort()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _require_alive(self) -> None:
        if self._lost or self._closing:
            raise KeeperLost(self._lost or "the connection is closed", where=self._channel.where)

    def _read(self) -> None:
        reason = "the reader ended"
        try:
            while True:
                body, fds = self._channel.receive(timeout_s=None)
                self._deliver(decode(body), fds)
        except HoldfastError as error:
            reason = error.what
        except Exception as error:  # top of the thread: the fault is recorded and ends the connection
            logger.exception("reader of %s failed", self._channel.where)
            reason = f"the reader failed: {error}"
        finally:
            self._end(reason)

    def _deliver(self, message: AnyMessage, fds: list[int]) -> None:
        waiting = self._waiting.pop(message.id, None) if message.id else None
        if waiting is not None:
            waiting.answer(message, fds)
            return
        frames.close_fds(fds)  # nobody asked for these, or nobody waits for them any more
        if not message.id:
            self._on_push(message)

    def _end(self, reason: str) -> None:
        was_left = self._closing  # whoever sees that it is lost may close it at once
        self._lost = reason
        self._channel.close()
        for call in list(self._waiting.values()):
            call.done.set()
        if not was_left:
            self._on_lost(reason)


def dial(
    address: str,
    hello: Hello,
    *,
    timeout_s: float,
    on_push: Callable[[AnyMessage], None],
    on_lost: Callable[[str], None],
    security: frames.Security | None = None,
) -> Caller:
    """Connects, greets and waits for the welcome.

    Raises:
        KeeperLost: nobody answers. HoldfastError: refused (InUse, Fenced, KeeperError).
    """
    channel, welcome = _greet(address, hello, timeout_s=timeout_s, security=security)
    return Caller(channel, welcome, on_push=on_push, on_lost=on_lost)


def ring(address: str, hello: Hello, *, timeout_s: float) -> None:
    """Finds out whether somebody is there, and leaves at once.

    Raises:
        KeeperLost, HoldfastError: as `dial`.
    """
    _greet(address, hello, timeout_s=timeout_s)[0].close()


def _greet(
    address: str, hello: Hello, *, timeout_s: float, security: frames.Security | None = None
) -> tuple[frames.Channel, Welcome]:
    channel = frames.connect(address, timeout_s=timeout_s, security=security)
    try:
        if channel.principal is not None and channel.principal.role != KEEPER:
            raise KeeperError(f"who answers is no keeper, but a {channel.principal.role}", where=address)
        channel.send(encode(hello), timeout_s=timeout_s)
        body, fds = channel.receive(timeout_s=timeout_s)
        frames.close_fds(fds)
        reply = decode(body)
        if isinstance(reply, Refusal):
            raise_refusal(reply)
        if not isinstance(reply, Welcome):
            raise KeeperError("the keeper did not welcome us", where=address)
    except TimeoutError as error:
        channel.close()
        pass_on(error)
        raise KeeperLost(f"the keeper did not answer within {timeout_s:g} s", where=address) from error
    except BaseException:
        channel.close()
        raise
    return channel, reply
