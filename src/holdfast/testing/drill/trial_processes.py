"""The living processes of one trial: forked or started, killed, frozen, reaped, and what they have open.

One `Cast` per trial, owned by the lane that runs it. Keepers are forked here, trainers by the fork server, which tells how
they ended. Every process is watched through a pidfd, so that death is an event and not something to poll for. Nothing
of a cast outlives `end`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.base import program
from holdfast.testing.checks.evidence import slot_links
from holdfast.testing.drill.shared import Ground, Setup, die_with
from holdfast.tiers.memory.proc_stat import stat_fields

WAIT_S = 5.0
# The program that forks trainers.
FORKSERVER = "holdfast.testing.drill.trainer_forkserver"
# States of a process that is dead or about to be; it has no state at all when it is gone.
_DYING = ("Z", "X", "")


@dataclass(slots=True)
class Member:
    """A process of the trial. `status` is its exit status as of waitpid, None while it lives."""

    name: str
    life: int
    pid: int
    pidfd: int
    status: int | None = None


class ForkServerConnection:
    """A lane's end of the line to its fork server.

    Attributes:
        sandbox: where the fork server warms up.
    """

    def __init__(self, line: socket.socket, sandbox: str) -> None:
        self.sandbox = sandbox
        self._line = line
        self._buffer = b""
        self._ended: dict[int, int] = {}
        self._forked: list[int] = []
        self._pidfds: list[int] = []

    def fork(self, setup: Setup) -> tuple[int, int]:
        """Has a trainer forked; returns its process id and a descriptor of it."""
        self._line.sendall(msgspec.json.encode(setup) + b"\n")
        while not (self._forked and self._pidfds):
            self._receive()
        return self._forked.pop(0), self._pidfds.pop(0)

    def await_ready(self) -> None:
        """Waits until it begins a life of its own, or forks."""
        while not self._forked:
            self._receive()
        self._forked.clear()

    def status_of(self, pid: int) -> int:
        """Return how a child that is dead ended."""
        while pid not in self._ended:
            self._receive()
        return self._ended.pop(pid)

    def close(self) -> None:
        """Ends the fork server, once no other process has this end of the line."""
        self._line.close()

    def _receive(self) -> None:
        self._line.settimeout(100.0)  # importing PyTorch takes many seconds on a busy machine
        data, fds, _, _ = socket.recv_fds(self._line, 1 << 16, 4)
        self._pidfds += fds
        if not data:
            raise RuntimeError("the fork server ended")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            fact = msgspec.json.decode(line, type=dict[str, int])
            if "forked" in fact:
                self._forked.append(fact["forked"])
            else:
                self._ended[fact["ended"]] = fact["status"]


def start_forkservers(
    grounds: Sequence[Ground], sandbox: str
) -> tuple[subprocess.Popen[bytes], list[ForkServerConnection]]:
    """One process that warms up and then forks itself, so that there is a fork server for every ground."""
    pairs = [socket.socketpair() for _ in grounds]
    theirs = [pair[1].fileno() for pair in pairs]
    facts = [msgspec.json.encode(fact).decode() for fact in (theirs, grounds)]
    command = program.command(FORKSERVER, *facts, sandbox, flags=_flags())
    inherited = [fd for ground in grounds for fd in ground.inherited]
    process = subprocess.Popen(command, pass_fds=(*theirs, *inherited))
    for _, end in pairs:
        end.close()
    return process, [ForkServerConnection(ours, sandbox) for ours, _ in pairs]


@dataclass(slots=True)
class Cast:
    """Knows who lives.

    Attributes:
        members: the newest process of every name.
    """

    ground: Ground
    forkserver: ForkServerConnection
    members: dict[str, Member] = field(default_factory=dict)
    _former: list[Member] = field(default_factory=list)
    _started: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def fork_trainer(self, setup: Setup) -> Member:
        """A trainer out of the fork server."""
        return self._enlist(f"t{setup.rank}", setup.life, *self.forkserver.fork(setup))

    def start_trainer(self, setup: Setup) -> Member:
        """A trainer in a fresh interpreter."""
        said = msgspec.json.encode(setup).decode()
        command = program.command("holdfast.testing.drill.trainer", said, flags=_flags())
        journal = self.ground.journal_w
        process = subprocess.Popen([*command, str(journal)], pass_fds=(journal,), stdin=subprocess.DEVNULL)
        self._started[process.pid] = process
        return self._enlist(f"t{setup.rank}", setup.life, process.pid, os.pidfd_open(process.pid))

    def fork_keeper(self, setup: Setup, body: Callable[[], int]) -> Member:
        """A child of this process that runs `body` and exits with what it returns."""
        name, parent = f"k{setup.rank}", os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                die_with(parent)
                code = body()
            except BaseException:  # noqa: BLE001 - top of the process: its log says why it ended
                traceback.print_exc()
            finally:
                os._exit(code)  # nothing of the parent's may be flushed or cleaned up here
        self.ground.enter_pid(name, pid)
        return self._enlist(name, setup.life, pid, os.pidfd_open(pid))

    def meet(self, name: str, life: int, pid: int) -> None:
        """Takes a process into the cast that somebody else started."""
        if name not in self.members or self.members[name].pid != pid:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self._enlist(name, life, pid, os.pidfd_open(pid))

    def _enlist(self, name: str, life: int, pid: int, pidfd: int) -> Member:
        member = Member(name, life, pid, pidfd)
        if name in self.members:
            self._former.append(self.members[name])
        self.members[name] = member
        return member

    def alive(self, kind: str = "") -> list[Member]:
        """Living members; of one kind (`t`, `k`) if given."""
        self._reap()
        return [m for m in self.members.values() if m.status is None and m.name.startswith(kind)]

    def is_alive(self, name: str) -> bool:
        return any(member.name == name for member in self.alive())

    def is_dying(self, member: Member) -> bool:
        """Return whether a process that is not dead yet will be: its threads take their time."""
        return _state(member.pid) in _DYING

    def send(self, member: Member, number: int) -> None:
        """A signal, if it is still there to get it."""
        try:
            signal.pidfd_send_signal(member.pidfd, number)
        except ProcessLookupError:
            self._reap()

    def kill(self, names: Sequence[str]) -> None:
        """SIGKILL, and waits until they are dead."""
        members = [self.members[name] for name in dict.fromkeys(names) if self.is_alive(name)]
        for member in members:
            self.send(member, signal.SIGKILL)
        for member in members:
            self.await_end(member, WAIT_S)

    def await_end(self, member: Member, timeout_s: float) -> bool:
        """Return whether the process ended within the time."""
        if member.status is None:
            select.select([member.pidfd], [], [], timeout_s)
        self._reap()
        return member.status is not None

    def _reap(self) -> None:
        for member in (*self._former, *self.members.values()):
            if member.status is not None or not select.select([member.pidfd], [], [], 0)[0]:
                continue
            member.status = self._status_of(member)
            os.close(member.pidfd)
        self._former = [member for member in self._former if member.status is None]

    def _status_of(self, member: Member) -> int:
        if member.pid in self._started:
            code = self._started.pop(member.pid).wait()
            return -code if code < 0 else code << 8
        if member.name.startswith("t"):
            return self.forkserver.status_of(member.pid)
        try:
            return os.waitpid(member.pid, 0)[1]
        except ChildProcessError:
            return 0  # somebody else's child; how it ended is not ours to know

    def freeze(self, kind: str) -> list[Member]:
        """Stops the living members of a kind, so that what they hold can be read; `thaw` lets them go on."""
        members = self.alive(kind)
        for member in members:
            self.send(member, signal.SIGSTOP)
        deadline = time.monotonic() + WAIT_S
        for member in members:
            while _state(member.pid) not in {"T", *_DYING} and time.monotonic() < deadline:
                time.sleep(0.0005)  # the kernel tells nobody but a tracer
            if self.is_dying(member):  # killed before we came
                self.await_end(member, WAIT_S)
        return self.alive(kind)

    def thaw(self, kind: str) -> None:
        """Lets stopped members go on."""
        for member in self.alive(kind):
            self.send(member, signal.SIGCONT)

    def end(self) -> list[str]:
        """Kills who is left and returns their names."""
        left = self.alive()
        self.kill([member.name for member in left])
        return [f"process {member.name} ({member.pid})" for member in left]


def slot_inodes(pid: int) -> set[int]:
    """The memory files that a process has open as slots."""
    found: set[int] = set()
    for path in slot_links(pid):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.stat(path).st_ino)
    return found


def _flags() -> list[str]:
    """Warnings about forks of processes with threads are not for us: there are none, and children die with _exit."""
    return ["-W", "ignore::DeprecationWarning"]


def _state(pid: int) -> str:
    try:
        fields = stat_fields(pid)
    except OSError:
        return ""
    return fields[0].decode() if fields else ""
