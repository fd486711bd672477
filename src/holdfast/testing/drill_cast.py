"""The living processes of one trial: forked or started, killed, frozen, reaped, and what they have open.

One `Cast` per trial, owned by the lane that runs it. Process ids are shared with the children through an anonymous
mapping, so that a process that strikes another one knows it, however late that one was forked. Nothing of a cast
outlives `end`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

# More names than a trial has.
_PLACES = 16
_NUMBER = struct.Struct("<i")
FREEZE_S = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Member:
    """A process of the trial. `status` is its exit status as of waitpid, None while it lives."""

    name: str
    life: int
    pid: int
    pidfd: int
    status: int | None = None
    ours: bool = True


@dataclass(slots=True)
class Cast:
    """Who lives.

    Attributes:
        members: the newest process of every name.
        former: earlier ones, all dead.
    """

    members: dict[str, Member] = field(default_factory=dict)
    former: list[Member] = field(default_factory=list)
    _table: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _PLACES * _NUMBER.size))
    _places: dict[str, int] = field(
        default_factory=lambda: {f"{kind}{n}": 2 * n + (kind == "k") for n in range(4) for kind in "tk"}
    )

    def fork(self, name: str, life: int, body: Callable[[], int]) -> Member:
        """A child that runs `body` and exits with what it returns; it dies with this process."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                _die_with(parent)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                code = body()
            except BaseException:  # top of the process: its log says why it ended
                traceback.print_exc()
            finally:
                os._exit(code)  # nothing of the parent's may be flushed or cleaned up here
        return self.enlist(name, life, pid)

    def enlist(self, name: str, life: int, pid: int, *, ours: bool = True) -> Member:
        """Takes a process into the cast; one that is not our child is watched all the same."""
        if name in self.members:
            self.former.append(self.members[name])
        member = Member(name, life, pid, os.pidfd_open(pid), ours=ours)
        self.members[name] = member
        _NUMBER.pack_into(self._table, self._places[name] * _NUMBER.size, pid)
        return member

    def pid_of(self, name: str) -> int:
        """The process id behind a name, in any process of the cast."""
        return int(_NUMBER.unpack_from(self._table, self._places[name] * _NUMBER.size)[0])

    def alive(self, kind: str = "") -> list[Member]:
        """Living members; of one kind (`t`, `k`) if given."""
        self.reap()
        return [m for m in self.members.values() if m.status is None and m.name.startswith(kind)]

    def is_alive(self, name: str) -> bool:
        return any(member.name == name for member in self.alive())

    def kill(self, *names: str) -> None:
        """SIGKILL, and waits until they are dead."""
        members = [self.members[name] for name in names if self.is_alive(name)]
        for member in members:
            os.kill(member.pid, signal.SIGKILL)
        for member in members:
            self.await_end(member, FREEZE_S)

    def await_end(self, member: Member, timeout_s: float) -> bool:
        """Whether the process ended within the time."""
        poll = select.poll()
        poll.register(member.pidfd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        self.reap()
        return member.status is not None

    def reap(self) -> None:
        """Notices who has died."""
        for member in self.members.values():
            if member.status is not None:
                continue
            if member.ours:
                pid, status = os.waitpid(member.pid, os.WNOHANG)
                if pid:
                    self._dead(member, status)
            elif not os.path.exists(f"/proc/{member.pid}"):
                self._dead(member, 0)

    def _dead(self, member: Member, status: int) -> None:
        member.status = status
        os.close(member.pidfd)

    def freeze(self, kind: str) -> list[Member]:
        """Stops the living members of a kind, so that what they hold can be read; `thaw` lets them go on."""
        members = self.alive(kind)
        for member in members:
            os.kill(member.pid, signal.SIGSTOP)
        deadline = time.monotonic() + FREEZE_S
        for member in members:
            while _state(member.pid) not in {"T", "Z", ""} and time.monotonic() < deadline:
                time.sleep(0.0005)  # the kernel tells nobody but a tracer
        return members

    def thaw(self, kind: str) -> None:
        """Lets stopped members go on."""
        for member in self.alive(kind):
            os.kill(member.pid, signal.SIGCONT)

    def end(self) -> list[str]:
        """Kills who is left and returns their names."""
        left = [f"process {member.name} ({member.pid})" for member in self.alive()]
        self.kill(*[member.name for member in self.alive()])
        self._table.close()
        return left


def _die_with(parent: int) -> None:
    """The kernel kills this process when the lane ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(70)


def slot_inodes(pid: int) -> set[int]:
    """The memory files that a process has open as slots."""
    found: set[int] = set()
    try:
        links = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for link in links:
        path = f"/proc/{pid}/fd/{link}"
        try:
            if os.readlink(path).startswith("/memfd:holdfast"):
                found.add(os.stat(path).st_ino)
        except OSError:
            continue  # closed meanwhile
    return found


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
