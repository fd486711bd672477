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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.tiers.backends.own_descriptor import OwnDescriptor

logger = logging.getLogger(__name__)

_MAX_PART = 1 << 16
_MAX_FDS = 4
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

    Attributes:
        descriptors: those that came with the messages, in their order; whoever takes one closes it.
        lost: this process has closed the socket from elsewhere, as a script does with all descriptors; its number may be
            another file's. From then on nothing is sent or received.
    """

    def __init__(self, link: socket.socket) -> None:
        self.socket = link
        self.lost = False
        self._own = OwnDescriptor.of(link.fileno())
        self.descriptors: list[int] = []
        self._unread = b""
        self._sending = threading.RLock()  # taken again by a signal's handler that interrupts a send

    @property
    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self.socket.fileno()

    def send(self, op: str, number: int = 0, **facts: Any) -> bool:
        """Send an operation with its facts; return whether the other end is still there."""
        return self._send(json.dumps({"op": op, "number": number, **facts}).encode() + b"\n")

    def order(self, order: RunOrder, notes: int = -1) -> bool:
        """Sends an order, with the descriptor `notes` if that is one; whether somebody was there."""
        facts = {"op": "run", **asdict(order), "notes": notes >= 0}
        return self._send(json.dumps(facts).encode() + b"\n", *([notes] if notes >= 0 else []))

    def _send(self, data: bytes, *descriptors: int) -> bool:
        with self._sending:
            if not self.is_whole():
                return False
            try:
                sent = socket.send_fds(self.socket, [data], descriptors) if descriptors else 0
                self.socket.sendall(data[sent:])
            except OSError:
                return False
        return True

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
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
    return AgentChannel(ours), theirs
