"""The line between a worker and its agent: JSON lines over a socket pair, nothing else passes between them.

Agent to worker: an `RunOrder` (run the script as this rank), `end` (leave when you are done), `fail` (your error stands).
Worker to agent: `idle`, and of order n: `started`, `reads` (of what can be read only once), `works on`, `restored`, `saved`, `finished` (`departs`: and its process ends), `raised` (its groups broke; it
waits), `failed` (an error of its own; it ends), `left` (the script of a run that is over; it clears up), `unfit` (the script cannot run again in this process; it ends at once;
without a reason others may).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.tiers.backends.own_descriptor import OwnDescriptor

logger = logging.getLogger(__name__)

_MAX_PART = 1 << 16
_MAX_FDS = 4
PATIENCE_S = 1
_INT = struct.Struct("i")


@dataclass(frozen=True, slots=True)
class RunOrder:
    """Run the script.

    Attributes:
        number: counted by the agent; a higher one replaces a lower one at any moment.
        environment: all of it, as the script will see it.
        arguments: `sys.argv` of the script, its path or module first.
        is_module: the first argument is a module's name, as after `python -m`.
        stdout, stderr: files to write to; empty: those of the launcher.
        older: restore the version before the newest: the newest led to the same failure again and again.
        version: restore this one, because the operator named it (`--from-version`); `NO_WISH`, or empty: see `open_checkpointers.Wish`.
        jobs: checkpoint path -> id of the job that it belonged to earlier in this run: an empty path is no beginning then.
        notes: a descriptor of the worker slot's page of notes comes with it (`AgentChannel.descriptors`).
        anew: no script of this job runs again in its process: whoever would ends, and is replaced.
        text: of a script that can be read only once, a character for each byte; empty: it is read where it lies.
    """

    number: int
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    stdout: str = ""
    stderr: str = ""
    older: bool = False
    version: str = ""
    jobs: Mapping[str, str] = field(default_factory=dict)
    notes: bool = False
    anew: bool = False
    text: str = ""


class AgentChannel:
    """One end. `send` may be called by any thread, `receive` by one.

    Args:
        patience_s: how long a send may wait for the other end to read; the rest is kept for `flush`. 0: for ever.

    Attributes:
        descriptors: those that came with the messages, in their order; whoever takes one closes it.
        lost: this process has closed the socket from elsewhere, as a script does with all descriptors; its number may be
            another file's. From then on nothing is sent or received.
    """

    def __init__(self, link: socket.socket, *, patience_s: float = 0.0) -> None:
        self.socket = link
        self._patience_s = patience_s
        # What the other end has not taken yet, in its order: bytes, the descriptors that go with their first, and whether
        # a newer order takes its place while none of it was sent.
        self._unsent: deque[tuple[bytes, tuple[int, ...], bool]] = deque()
        self._pushes = False
        self.lost = False
        self._own = OwnDescriptor.of(link.fileno())
        self.descriptors: list[int] = []
        self._unread = b""
        self._sending = threading.RLock()  # taken again by a signal's handler that interrupts a send

    @property
    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, op: str, number: int = 0, **facts: Any) -> bool:
        """Send an operation with its facts; return whether the other end is still there."""
        return self._send(json.dumps({"op": op, "number": number, **facts}).encode() + b"\n")

    def order(self, order: RunOrder, notes: int = -1) -> bool:
        """Sends an order, with the descriptor `notes` if that is one; whether somebody was there."""
        facts = {"op": "run", **asdict(order), "notes": notes >= 0}
        return self._send(json.dumps(facts).encode() + b"\n", *([notes] if notes >= 0 else []), replaces=True)

    def flush(self) -> None:
        """Send what the other end would not take before, as far as it does now, without waiting."""
        with self._sending:
            if self._unsent and not self._pushes and self.is_whole():
                self._push(time.monotonic())

    def _send(self, data: bytes, *descriptors: int, replaces: bool = False) -> bool:
        """Send all of it, or keep the rest: a message that is cut off would spoil the next one."""
        with self._sending:
            if not self.is_whole():
                return False
            if not self._patience_s:
                return self._send_all(data, descriptors)
            if replaces:  # so the queue holds a begun order, the newest, and a few words
                self._unsent = deque(one for one in self._unsent if not one[2])
            self._unsent.append((data, descriptors, replaces))
            # A handler that interrupts a send leaves it to that.
            return self._pushes or self._push(time.monotonic() + self._patience_s)

    def _send_all(self, data: bytes, descriptors: Sequence[int]) -> bool:
        try:
            sent = socket.send_fds(self.socket, [data], descriptors) if descriptors else 0
            self.socket.sendall(data[sent:])
        except OSError:
            return False
        return True

    def _push(self, until: float) -> bool:
        """Send what is there, under the lock; return whether the other end is still there."""
        self._pushes = True
        try:
            while self._unsent:
                left = until - time.monotonic()
                try:
                    self._push_part(socket.MSG_DONTWAIT if left <= 0 else 0)
                except BlockingIOError:
                    if left <= 0:
                        return True
        except OSError:
            self._unsent.clear()
            return False
        finally:
            self._pushes = False
        return True

    def _push_part(self, flags: int) -> None:
        """Send a part of the first message: the time limit of the socket holds for a call."""
        data, descriptors, replaces = self._unsent.popleft()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        sent = 0
        try:
            sent = self.socket.sendmsg([data[:_MAX_PART]], rights, flags)  # `socket.send_fds` leaves the flags out
        finally:
            if sent == 0:
                self._unsent.appendleft((data, descriptors, replaces))
            elif sent < len(data):
                self._unsent.appendleft((data[sent:], (), False))

    def receive(self, *, wait: bool) -> list[dict[str, Any]] | None:
        """Whole messages that arrived, maybe none; None when the other end is gone.

        Args:
            wait: block until at least a part of one arrives.
        """
        if not self.is_whole():
            return None
        try:
            # Not `socket.recv_fds`: it takes flags and leaves them out.
            flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
            part, came, _, _ = self.socket.recvmsg(_MAX_PART, socket.CMSG_SPACE(_MAX_FDS * _INT.size), flags)
            for level, kind, data in came:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self.descriptors += [number for (number,) in _INT.iter_unpack(data[: len(data) & ~3])]
        except BlockingIOError:
            return []
        except OSError:
            part = b""
            self.is_whole()
        if not part:
            return None
        *lines, self._unread = (self._unread + part).split(b"\n")
        return [json.loads(line) for line in lines]

    def is_whole(self) -> bool:
        """Return whether the socket is still ours; where it is not, that is said once."""
        if self.lost or self.socket.fileno() < 0:
            return False
        if not self._own.is_ours():
            self.lost = True
            self.socket.detach()  # its number is not ours to close
            logger.warning(
                "the line between this worker and its launcher was closed in this process (a library that closes all"
                " descriptors?): it runs on, and is replaced if it would have to run again"
            )
        return not self.lost

    def close(self) -> None:
        """Closes this end."""
        if self.socket.fileno() >= 0 and not self._own.is_ours():
            self.socket.detach()
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def order_of(message: Mapping[str, Any]) -> RunOrder:
    """The order in a message of op `run`."""
    return RunOrder(
        int(message["number"]),
        message["environment"],
        tuple(message["arguments"]),
        is_module=bool(message["is_module"]),
        stdout=message["stdout"],
        stderr=message["stderr"],
        older=bool(message["older"]),
        version=message["version"],
        jobs=message["jobs"],
        notes=bool(message["notes"]),
        anew=bool(message["anew"]),
        text=message["text"],
    )


def pair() -> tuple[AgentChannel, socket.socket]:
    """Our end, and the end that the worker gets. Ours is not inherited."""
    ours, theirs = socket.socketpair()
    # A worker that does not read (stopped, or stuck with the interpreter's lock) must not stop its agent.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE_S, 0))
    return AgentChannel(ours, patience_s=PATIENCE_S), theirs
