"""A signal ends the launcher within its grace, whatever its main thread waits for.

A launcher that is told to end gives its workers time to save, ends them and leaves (`elastic.launch.base_agent`). All of that is done by
its main thread, which may stand in a call that no signal ends: a store whose host is frozen, a log whose reader has
stopped, storage that hangs, a process that the kernel does not let die. Python runs the handler of a signal only when
such a call returns. The kernel writes the number of each signal into a socket of ours at once; a thread reads it there.

    2 s after the signal      workers that have not been told yet are told by this thread
    grace                     who lives is killed, unless the main thread has done it
    30 s later                the launcher ends here, and says so

A second SIGINT or SIGQUIT shortens the grace to 2 s: somebody is in a hurry. Another SIGTERM says nothing new, for schedulers
send it again and again (Slurm at the end of a grace time, with half a minute left until SIGKILL). Workers that have all ended shorten what is left to 30 s.

Must never: wait for anything without a limit, ask a store, or take a lock that the main thread may hold.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

# How long the main thread may take to begin, and to leave when the workers are gone: it may bring compiled code to storage.
BEGIN_S = 2.0
LEAVE_S = 30.0
POLL_S = 0.5
# Of a message: what a pipe that can be written takes without a wait.
MAX_TEXT = 2048
# After the first signal: what a person sends who will not wait. Schedulers, service managers and terminals repeat the others.
HURRY = frozenset({signal.SIGINT, signal.SIGQUIT})


class WorkerOwner(Protocol):
    """Has workers; `elastic.launch.base_agent.BaseAgent`. Called in the guard's thread."""

    def is_ending(self) -> bool:
        """Return whether the workers have been told to end."""

    def any_lives(self) -> bool:
        """Return whether a worker lives, as the kernel says."""

    def tell(self, number: int) -> None:
        """Sends a signal to every worker that lives and was sent none yet."""

    def kill(self) -> None:
        """Kills the workers and all that they started."""

    def ended_well(self) -> bool:
        """Return whether all workers have ended, with code 0."""

    def safe(self) -> str:
        """Says what was saved."""


class ExitGuard:
    """Guards the end of one launcher; made and closed in one thread. Outside of the main thread it hears nothing.

    Args:
        workers: who is told and killed.
        numbers: the signals that tell the launcher to end.
        grace_s: how long workers may take to save and end.
        also_ends: returns the processes that are killed with the launcher if it ends here.

    Attributes:
        code: the exit code of a launcher that is cut short; None: 0 if all workers ended well, else 128 + signal.
    """

    def __init__(
        self, workers: WorkerOwner, numbers: Iterable[int], *, grace_s: float, also_ends: Callable[[], Iterable[int]]
    ) -> None:
        self._workers, self._numbers, self._grace_s = workers, frozenset(numbers), grace_s
        self._also_ends = also_ends
        self.code: int | None = None
        self._heard, signalled = socket.socketpair()
        signalled.setblocking(False)
        self._signalled = signalled
        self._is_main = threading.current_thread() is threading.main_thread()  # no other hears of signals
        self._before = signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False) if self._is_main else -1
        threading.Thread(target=self._run, name="holdfast-exit", daemon=True).start()

    def close(self) -> None:
        """The launcher ends by itself from here on."""
        if self._is_main:
            signal.set_wakeup_fd(self._before)
        self._signalled.close()

    def _run(self) -> None:
        came: list[int] = []
        while not came:
            heard = self._hear(None)
            if heard is None:
                return
            came = heard
        first = came[0]
        began, told, killed = time.monotonic(), False, False
        grace_s = (
            min(self._grace_s, BEGIN_S) if HURRY.intersection(came[1:]) else self._grace_s
        )  # a second may have come with it
        kill_at, leave_at = began + grace_s, began + grace_s + LEAVE_S
        while (heard := self._hear(POLL_S)) is not None:
            now = time.monotonic()
            if HURRY.intersection(heard):
                kill_at, leave_at = min(kill_at, now + BEGIN_S), min(leave_at, now + BEGIN_S + LEAVE_S)
            if not told and now - began > BEGIN_S:
                told = True
                if not self._workers.is_ending():
                    self._workers.tell(first)
            if not killed and now > kill_at:
                killed = True
                self._workers.kill()
            if not self._workers.any_lives():
                leave_at = min(leave_at, now + LEAVE_S)
            if now > leave_at:
                self._leave(first, now - began)

    def _hear(self, timeout_s: float | None) -> list[int] | None:
        """Signals that came, maybe none; None: the guard is closed."""
        poll = select.poll()
        poll.register(self._heard, select.POLLIN)
        if not poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)):
            return []
        heard = self._heard.recv(256)
        if not heard:
            self._heard.close()
            return None
        return [number for number in heard if number in self._numbers]

    def _leave(self, number: int, after_s: float) -> None:
        code = self.code if self.code is not None else 0 if self._workers.ended_well() else 128 + number
        self._workers.kill()
        for pid in self._also_ends():
            with contextlib.suppress(ProcessLookupError):  # it ended
                os.kill(pid, signal.SIGKILL)
        name = signal.Signals(number).name
        _say(
            f"holdfast run: {name} came {after_s:.0f} s ago, and the launcher waits for something that does not end: it is"
            f" ended here; {self._workers.safe()}\n"
        )
        os._exit(code)


def _say(text: str) -> None:
    """Writes to the standard error, unless that would wait: whoever reads it may be what is stuck."""
    poll = select.poll()
    try:
        poll.register(2, select.POLLOUT)
        if poll.poll(1000):
            os.write(2, text.encode()[:MAX_TEXT])
    except OSError:
        pass  # it is closed
