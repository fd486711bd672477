"""The process that workers are forked from: torch is imported in it, and nothing else has happened there.

The launcher has imported torch anyway. Before it makes its first thread it forks the fork server, and every worker is a
fork of that: 10 ms instead of the 3 s of an import, at the start and at every replacement. The fork server has one thread,
no group, no device, no state of the job. When it is idle it imports what most scripts import next (`WARM`).

The launcher asks over a socket (`ForkServer`, at its side); the fork server forks, waits for its children and tells how they
ended. When the launcher is gone, however it ended, the fork server kills what it forked: no worker outlives its launcher.

Must never: import the user's code, start a thread, initialise CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from holdfast.base.process_label import label_process
from holdfast.elastic.worker.kill_descendants import kill_group
from holdfast.tiers.memory.proc_stat import stat_fields

logger = logging.getLogger(__name__)

# Imported one by one while nobody asks; together they cost 2 to 3 s of processor time, once for each launcher.
WARM = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.data",
        "torch.distributed.checkpoint", "safetensors.torch", "holdfast.checkpoint.checkpointer.checkpointer")  # fmt: skip
IDLE_S = 2.0
ANSWER_TIMEOUT_S = 60.0
CLOSE_S = 10.0
# How long the end of a worker may stay untold before its fork server counts as lost: if it is stopped, and if it sleeps. One
# that computes, waits for a processor or for a disk imports something, and that takes as long as it takes.
TOLD_S, ASLEEP_S = 10.0, 60.0
_MAX_MESSAGE = 1 << 16
_FORK, _FORK_WITHOUT_PAGE = b"f", b"w"

# The launcher handles these in any case, so the programs that it starts have the default.
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
# Signals that end a process by default and mean nothing to this one: a scheduler may send any of them to all processes.
ENDING = (
    *HANDLED, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO,
    signal.SIGPWR, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)  # fmt: skip

# What a forked worker does; returns its exit code, or -SIGINT.
Work = Callable[[socket.socket, int], int]


class NotForked(Exception):
    """No worker could be forked now: there is no process, descriptor or memory for it. Later there may be."""


class ForkServerLost(NotForked):
    """The fork server is gone: no worker can be forked, and nobody tells how those that live will end."""


class Child:
    """One forked worker, with what `subprocess.Popen` offers and torch's agent calls."""

    def __init__(self, forkserver: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.guessed = False  # nobody was left who knew how it ended
        self._forkserver = forkserver
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it ended already; the fork server tells how
            self.pidfd = -1

    def poll(self) -> int | None:
        """The exit code (negative: the signal), or None while it lives."""
        if self.returncode is None:
            self.returncode = self._forkserver.exit_code(self.pid, self.pidfd)
            self.guessed = self.returncode is not None and self._forkserver.guessed(self.pid)
            if self.returncode is not None and self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1
        return self.returncode

    def is_untold(self) -> bool:
        """Return whether it has ended, as the kernel says, and the fork server, which may import something, has not told how."""
        return self.poll() is None and self.pidfd >= 0 and bool(readable([self.pidfd], 0.0))

    def wait(self, timeout: float | None = None) -> int:
        """Blocks until it ended.

        Raises:
            subprocess.TimeoutExpired: it lives after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._forkserver.await_news(min(left, 1.0))
        return code

    def send_signal(self, number: int) -> None:
        """A signal to this process and no other, even if its number was given away meanwhile."""
        if self.poll() is None and self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # ended this moment, or is another user's
                signal.pidfd_send_signal(self.pidfd, number)


class ForkServer:
    """The launcher's side. One thread uses it."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self._link = link
        self.pid = pid
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._forked: list[int] = []
        self._exits: dict[int, int] = {}
        # Who ended, as the kernel says, and since when the fork server does nothing although it could have told it.
        self._untold: dict[int, tuple[float, object]] = {}
        self._refused: list[str] = []
        self._guessed: set[int] = set()
        self._ready = True
        self.lost = False

    @classmethod
    def start(cls, work: Work) -> ForkServer:
        """Forks it. In the launcher this returns; in workers, much later, it raises SystemExit with their exit code.

        Call it from the main thread, before any other thread exists, outside of any `try`.
        """
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # what is shared stays shared: the collector of a child need not touch it
        pid = os.fork()
        if pid == 0:
            ours.close()
            label_process("hf-forkserver")
            raise SystemExit(_ForkServerProcess(theirs, work).serve())
        theirs.close()
        return cls(ours, pid)

    @classmethod
    def start_program(cls, program: Sequence[str]) -> ForkServer:
        """Start another one in place of a lost one: as a program, for this process has threads by now. Returns at once.

        Args:
            program: a command that calls `serve` with the descriptor that is appended to it.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen([*program, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
        made = cls(ours, process.pid)
        made._ready, made._process = False, process
        return made

    @property
    def fileno(self) -> int:
        """Readable when there is news."""
        return self._link.fileno()

    @property
    def ready(self) -> bool:
        """Return whether it has imported what it needs."""
        if not self._ready:
            self.await_news(0.0)
        return self._ready or self.lost

    def fork(self, control: socket.socket, page: int) -> Child:
        """A new worker with `control` as its line to us and `page` for its beats; -1: it has none.

        Raises:
            ForkServerLost: it is gone, or does not answer.
            NotForked: it says why it could not.
        """
        if not self.ready:
            raise NotForked("the process that workers are forked from is starting")
        try:
            given = [control.fileno(), *([page] if page >= 0 else [])]
            socket.send_fds(self._link, [_FORK if page >= 0 else _FORK_WITHOUT_PAGE], given)
        except OSError as error:
            self.lost = True
            raise ForkServerLost(f"the process that workers are forked from is gone: {error}") from error
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not self._forked and not self._refused:
            if self.lost or time.monotonic() > deadline:
                self.lost = True
                raise ForkServerLost("the process that workers are forked from does not answer")
            self.await_news(1.0)
        if self._refused:
            raise NotForked(self._refused.pop())
        return Child(self, self._forked.pop(0))

    def guessed(self, pid: int) -> bool:
        """Return whether `exit_code` does not know how the child ended, only that it did."""
        return pid in self._guessed

    def exit_code(self, pid: int, pidfd: int = -1) -> int | None:
        """Return how the child ended, if it did.

        Args:
            pid: of a child of the fork server.
            pidfd: the same, as long as it is open: so its end is seen although a fork server that is stopped tells nothing.
        """
        if pid not in self._exits:
            self.await_news(0.0)
        if pid not in self._exits and not self.lost and pidfd >= 0 and readable([pidfd], 0.0):
            self._miss(pid)
        if self.lost and pid not in self._exits and not _lives(pid):
            code = _code_of_zombie(pid)
            self._exits[pid] = -signal.SIGKILL if code is None else code  # nobody is left who knows better
            if code is None:
                self._guessed.add(pid)
        return self._exits.get(pid)

    def _miss(self, pid: int) -> None:
        """A child has ended. If the fork server does not tell it and does nothing else either, it is lost."""
        now, (is_stopped, work) = time.monotonic(), _work_of(self.pid)
        since, before = self._untold.setdefault(pid, (now, work))
        if work != before:
            self._untold[pid] = now, work
        elif now - since > (TOLD_S if is_stopped else ASLEEP_S) and _code_of_zombie(pid) is not None:
            self.lost = True
            logger.error(
                "the process that workers are forked from (%d) does not tell that process %d ended, for %.0f s: it counts as "
                "lost; those that live go on", self.pid, pid, now - since,
            )  # fmt: skip

    def await_news(self, timeout_s: float) -> None:
        """Waits for one message of the fork server, or until time is over."""
        if self.lost:
            time.sleep(min(timeout_s, 0.05))
            return
        if not readable([self._link.fileno()], timeout_s):
            return
        try:
            part = self._link.recv(_MAX_MESSAGE)
        except OSError:
            part = b""
        if not part:
            self.lost = True
            logger.error("the process that workers are forked from is gone; those that live go on")
        *lines, self._unread = (self._unread + part).split(b"\n")
        for line in lines:
            told: dict[str, Any] = json.loads(line)
            if "ready" in told:
                self._ready = True
            elif "no" in told:
                self._refused.append(told["no"])
            elif "code" in told:
                self._exits[told["pid"]] = told["code"]
            else:
                self._forked.append(told["pid"])

    def close(self) -> None:
        """The fork server ends, and kills the workers that are left; one that is lost leaves them alone."""
        if self.lost:  # it may come back to itself, find the line closed, and kill those that live
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._link.close()
        killed, deadline = False, time.monotonic() + CLOSE_S
        try:
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if killed and time.monotonic() > deadline:
                    logger.error(
                        "process %d, from which workers were forked, does not die: it is left behind", self.pid
                    )
                    break
                if time.monotonic() > deadline:  # it is stopped, or has no processor
                    os.kill(self.pid, signal.SIGKILL)
                    killed, deadline = True, time.monotonic() + CLOSE_S
                time.sleep(0.01)
        except ChildProcessError:
            pass  # somebody else asked
        if self._process is not None:
            self._process.returncode = 0  # it was waited for here


def serve(link: int, work: Work) -> int:
    """Be the fork server that `ForkServer.start_program` started; returns as that does which is forked.

    Args:
        link: descriptor of the line to the launcher.
        work: what workers do.
    """
    label_process("hf-forkserver")
    keeper = _ForkServerProcess(socket.socket(fileno=link), work)
    keeper.greet()
    return keeper.serve()


def readable(descriptors: Sequence[int], timeout_s: float | None) -> list[int]:
    """Return those of the descriptors that have something to read, or whose other end is gone; any number may be given.

    Args:
        descriptors: of files, sockets or processes.
        timeout_s: how long to wait for the first; None: for ever.
    """
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))]


class _ForkServerProcess:
    """The fork server itself: forks on request, reaps, tells."""

    def __init__(self, link: socket.socket, work: Work) -> None:
        self._link = link
        self._work = work
        self._pidfds: dict[int, int] = {}  # pidfd -> pid
        self._to_warm = list(WARM)
        self._asked = False
        self._before: dict[int, Any] = {}  # how signals were handled in the launcher when it forked

    def greet(self) -> None:
        """Tell the launcher that requests are answered from now on."""
        self._tell({"ready": 1})

    def serve(self) -> int:
        """Until the launcher is gone. Returns the exit code in the fork server, and that of the work in each child."""
        for number in ENDING:
            self._before[number] = signal.signal(number, signal.SIG_IGN)  # the launcher decides; its end is ours
        while True:
            waiting = IDLE_S if self._asked and self._to_warm else None
            link = self._link.fileno()
            ready = readable([link, *self._pidfds], waiting)
            for pidfd in ready:
                if pidfd != link:
                    self._reap(pidfd)
            if link in ready:
                given, num_given = self._receive()
                if len(given) != num_given:
                    for fd in given:
                        os.close(fd)
                    self._tell({"no": "too few descriptors (ulimit -n) where workers are forked"})
                    continue
                control, page = [*given, -1][:2]
                try:
                    pid = os.fork()
                except OSError as error:
                    self._refuse(control, page, error)
                    continue
                if pid == 0:
                    return self._become_worker(control, page)
                self._born(pid, control, page)
            elif not ready:
                _import_quietly(self._to_warm.pop(0))

    def _receive(self) -> tuple[list[int], int]:
        """Receive for each worker that is wanted its line, and its page if it is to have one; and how many that are."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._link, _MAX_MESSAGE, 16)
        except OSError:  # it was killed before it had read all that we told it
            self._end()
        if not data:
            self._end()
        self._asked = True
        return list(descriptors), 1 if data == _FORK_WITHOUT_PAGE else 2

    def _born(self, pid: int, control: int, page: int) -> None:
        try:
            self._pidfds[os.pidfd_open(pid)] = pid
        except OSError as error:  # nobody would hear of its end
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._refuse(control, page, error)
            return
        close_all(control, page)
        self._tell({"pid": pid})

    def _refuse(self, control: int, page: int, error: OSError) -> None:
        close_all(control, page)
        self._tell({"no": f"no process could be forked: {error.strerror}"})

    def _become_worker(self, control: int, page: int) -> int:
        os.setsid()  # a group of its own: what it starts can be ended with it
        self._link.close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        for number, before in self._before.items():
            keeps = before == signal.SIG_IGN and number not in HANDLED
            signal.signal(number, signal.SIG_IGN if keeps else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = self._work(socket.socket(fileno=control), page)
        if code == -signal.SIGINT:  # Python runs exit handlers first, and ends by the signal then
            sys.excepthook = lambda *_: None  # the worker has told it
            raise KeyboardInterrupt
        return code

    def _reap(self, pidfd: int) -> None:
        pid = self._pidfds.pop(pidfd)
        os.close(pidfd)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_code != os.CLD_EXITED or ended.si_status:
            # Loaders of a worker that was killed would hold its device for some seconds more. Its number is not given away yet.
            kill_group(pid)
        _, status = os.waitpid(pid, 0)
        self._tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: Mapping[str, Any]) -> None:
        try:
            self._link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._end()

    def _end(self) -> NoReturn:
        for pid in self._pidfds.values():
            kill_group(pid)
        os._exit(0)


def close_all(*descriptors: int) -> None:
    """Closes descriptors; a number below zero is none."""
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)


def _import_quietly(name: str) -> None:
    """Import modules; what is missing or fails costs the next worker a moment, nothing else."""
    try:
        pkgutil.resolve_name(name)
    except Exception as error:  # noqa: BLE001 - whatever an import may raise, the script will meet it by itself
        logger.info("%s was not imported in advance: %s", name, error)


def _code_of_zombie(pid: int) -> int | None:
    """Return how a process ended that nobody has awaited yet; None if it is none, or the kernel does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # one open file: the fields and the owner are of one process
            fields = file.read().rsplit(b")", 1)[1].split()
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # proc_pid_stat(5): field 52, in the form of waitpid(2); zero for who may not know it.
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == b"Z" and is_ours else None


def _work_of(pid: int) -> tuple[bool, object]:
    """Return whether a process is stopped, and what differs from look to look while it works, or would."""
    fields = stat_fields(pid)
    if not fields:
        return False, None
    # Fields 14 and 15: ticks of its threads in user and kernel mode.
    return fields[0] in (b"T", b"t"), object() if fields[0] in (b"R", b"D") else (fields[11], fields[12])


def _lives(pid: int) -> bool:
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")
