"""Tells what the kernel says of a worker: running or stopped, computing, starved, waking, moving bytes. No word of its
own.

Of its main thread, where training runs: state, wakes, hunger, the system call that it waits in. Of all its threads and of
everything that descends from it (data loaders, compilers, what a shell started): processor time, bytes through files,
pipes and TCP connections, memory. Read only when a worker has been silent for a while. No torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import time
from dataclasses import dataclass

from holdfast.core.elastic.worker_facts import PERSON, SLEEP, ProcessStats
from holdfast.elastic.watchdog.worker_interrupt import copies_of_sockets
from holdfast.tiers.memory.proc_stat import stat_fields

_TICKS_HZ = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
FAMILY_EVERY_S = 0.5
# What the kernel says instead of a system call of a thread that is in none.
RUNNING = "running"
# The part of the launcher's time that may go into counting families, and how much of it at once.
SHARE, MOST_S = 0.05, 0.02
# Descriptors are copied to ask for these, so seldom.
SOCKETS_EVERY_S = 2.0
# struct tcp_info of linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received.
_TCP_BYTES, _TCP_BYTES_AT = struct.Struct("=QQ"), 120


@dataclass(frozen=True, slots=True)
class _Calls:
    """Numbers of system calls on one machine.

    Attributes:
        sleeps: nanosleep, clock_nanosleep.
        selects: select, pselect6. Of no descriptors they are sleeps: `time.sleep` of Python 3.10 is one.
        read: alone.
        mute: waits that tell nothing, for locks and drivers: futex, futex_waitv, futex_wait, ioctl.
        outward: those in which a thread waits for somebody outside: read, recvfrom, recvmsg, accept, accept4, connect, wait4,
            waitid, flock, fsync, openat. Threads that serve stand in `poll` and its kind for as long as they live.
    """

    sleeps: tuple[int, ...] = ()
    selects: tuple[int, ...] = ()
    read: int = -1
    mute: tuple[int, ...] = ()
    outward: tuple[int, ...] = ()


_CALLS = {
    "x86_64": _Calls((35, 230), (23, 270), 0, (202, 449, 455, 16), (0, 45, 47, 43, 288, 42, 61, 247, 73, 74, 257)),
    "aarch64": _Calls((101, 115), (72,), 63, (98, 449, 455, 29), (63, 207, 212, 202, 242, 203, 260, 95, 32, 82, 56)),
}
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/davinci", "/dev/accel", "/dev/vfio/")


@dataclass(slots=True)
class _ExpensiveSample:
    """Holds what is too dear for every look: when it was seen last, and what."""

    at_s: float = -math.inf
    members: tuple[int, ...] = ()
    family_s: float = 0.0
    file_bytes: int = 0
    memory_bytes: int = 0
    frozen: bool = False
    sockets_at_s: float = -math.inf
    socket_bytes: int | None = None
    device: bool = False
    thread_call: str = ""


class ProcessSampler:
    """Looks at the workers of one launcher. What is dear is seen so seldom that it takes `SHARE` of the launcher's time."""

    def __init__(self) -> None:
        self._rare: dict[int, _ExpensiveSample] = {}
        self._processes: _Processes = {}
        self._listed_s = -math.inf
        self._cost_s = 0.0  # of what was dear, summed over the workers, and less with every second
        self._cost_at_s = 0.0

    def look(self, pid: int, now_s: float, *, ours: int = 0) -> ProcessStats | None:
        """The worker's vitals; None if it is gone. Bytes of sockets only where the kernel lets us ask (as for our
        children). `ours`: a thread of holdfast in it, which waits for its launcher.
        """
        try:
            state, user, system, _, pages = _stat(pid)
            busy_s, starved_s = main_thread_times(pid)
            status = dict(
                line.split(":\t", 1) for line in _read(f"/proc/{pid}/task/{pid}/status").splitlines() if ":\t" in line
            )
            moved, memory = _moved_bytes(pid, pages), _memory_bytes(pid)
        except (OSError, ValueError, IndexError):
            self._rare.pop(pid, None)
            return None
        rare = self._rare.setdefault(pid, _ExpensiveSample())
        self._look_closer(pid, rare, now_s, ours)
        call, waits_in = _waits_in(pid) if state == "S" else ("", "")
        if call == RUNNING:  # it was woken between the two readings
            state, call = "R", ""
        if state == "S" and not call:  # at a lock, for which a thread of its own may be the one that waits
            call = rare.thread_call
        return ProcessStats(
            state="F" if rare.frozen and state in "SD" else state,
            busy_s=busy_s,
            spent_s=(user + system) / _TICKS_HZ,
            family_s=rare.family_s,
            starved_s=starved_s,
            wakes=int(status.get("voluntary_ctxt_switches", "0")),
            file_bytes=moved + rare.file_bytes,
            socket_bytes=rare.socket_bytes,
            memory_bytes=memory + rare.memory_bytes,
            device=rare.device,
            waits_in=waits_in,
            call=call,
            catches=int(status.get("SigCgt", "0"), 16),
        )

    def forget(self, pid: int) -> None:
        """The worker is not watched any more."""
        self._rare.pop(pid, None)

    def _look_closer(self, pid: int, rare: _ExpensiveSample, now_s: float, ours: int) -> None:
        """Sees the rare things again, if it is time and the launcher has the time."""
        if now_s - rare.at_s < FAMILY_EVERY_S:
            return
        self._cost_s = max(0.0, self._cost_s - SHARE * (now_s - self._cost_at_s))
        self._cost_at_s = now_s
        if self._cost_s > MOST_S:
            return
        began = time.perf_counter()
        if now_s - self._listed_s >= FAMILY_EVERY_S:
            self._processes, self._listed_s = _list_processes(), now_s
        _count(pid, rare, self._processes)
        rare.at_s, rare.frozen = now_s, is_frozen(pid)
        if now_s - rare.sockets_at_s >= SOCKETS_EVERY_S:
            rare.sockets_at_s = now_s
            rare.socket_bytes = _socket_bytes((pid, *rare.members))
            rare.device = _has_device(pid)
            rare.thread_call = _thread_call(pid, ours)
        self._cost_s += time.perf_counter() - began


def vitals(pid: int) -> ProcessStats | None:
    """One look by itself; None if the process is gone."""
    return ProcessSampler().look(pid, time.monotonic())


def state(pid: int) -> str:
    """The letter of its main thread's state alone (proc_pid_stat(5)); empty if it is gone."""
    try:
        return _stat(pid)[0]
    except (OSError, ValueError, IndexError):
        return ""


def main_thread_times(pid: int) -> tuple[float, float]:
    """Return for how many seconds its main thread has run, and waited for a processor.

    Raises:
        OSError, ValueError: the kernel does not tell.
    """
    ran_ns, waited_ns, _ = _read(f"/proc/{pid}/task/{pid}/schedstat").split()
    return int(ran_ns) / 1e9, int(waited_ns) / 1e9


def oom_kills() -> int:
    """Return how often the kernel killed somebody of this cgroup for want of memory; 0 where that is not told."""
    try:
        path = next(line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::"))
        events = _read(f"/sys/fs/cgroup{path}/memory.events")
        return next(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def is_frozen(pid: int, root: str = "/sys/fs/cgroup") -> bool:
    """Return whether its control group, or one above it, is frozen: a container that was paused, a job that was
    suspended.
    """
    try:
        lines = [line.split(":", 2) for line in _read(f"/proc/{pid}/cgroup").splitlines()]
    except OSError:
        return False
    for _, controllers, path in lines:
        try:
            if not controllers:  # version 2
                frozen = "frozen 1" in _read(f"{root}{path}/cgroup.events")
            else:
                freezes = "freezer" in controllers.split(",") and path != "/"
                frozen = freezes and not _read(f"{root}/freezer{path}/freezer.state").startswith("THAWED")
        except OSError:
            continue  # the root has no such file
        if frozen:
            return True
    return False


_Processes = dict[int, tuple[int, int]]  # pid -> its parent and its session


def _list_processes() -> _Processes:
    found: _Processes = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = stat_fields(int(entry))
                found[int(entry)] = (int(fields[1]), int(fields[3]))
            except (OSError, ValueError, IndexError):
                continue  # it ended meanwhile
    return found


def _members(pid: int, processes: _Processes) -> tuple[int, ...]:
    """All that descend from a process, by parent or by session: what a shell left behind has another parent."""
    members = {child for child, (_, session) in processes.items() if session == pid and child != pid}
    grows = True
    while grows:
        more = {child for child, (parent, _) in processes.items() if parent == pid or parent in members}
        grows = not more <= members
        members |= more
    return tuple(sorted(members - {pid}))


def _count(pid: int, rare: _ExpensiveSample, processes: _Processes) -> None:
    """Adds up what the worker's descendants did."""
    busy, moved, memory = 0, 0, 0
    rare.members = _members(pid, processes)
    for member in rare.members:
        try:
            _, user, system, waited, pages = _stat(member)
            busy += user + system + waited
            moved += _moved_bytes(member, pages)
            memory += _memory_bytes(member)
        except (OSError, ValueError, IndexError):
            continue
    with contextlib.suppress(OSError, ValueError, IndexError):  # it ended; the next look says so
        busy += _stat(pid)[3]  # of children that ended
    rare.family_s, rare.file_bytes, rare.memory_bytes = busy / _TICKS_HZ, moved, memory


def _socket_bytes(pids: tuple[int, ...]) -> int | None:
    """Bytes that went through their open TCP connections; None if the kernel forbids to ask."""
    total, asked = 0, False
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # it ended
        try:
            for copy in copies_of_sockets(pid, pidfd):
                asked = True
                with socket.socket(fileno=copy) as link:
                    total += _tcp_bytes(link)
        except OSError:
            return None
        finally:
            os.close(pidfd)
    return total if asked else 0


def _tcp_bytes(link: socket.socket) -> int:
    try:
        told = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return sum(_TCP_BYTES.unpack_from(told, _TCP_BYTES_AT))
    except (OSError, struct.error):
        return 0  # of another kind, or closed


def _has_device(pid: int) -> bool:
    try:
        return any(_leads_to_device(f"/proc/{pid}/fd/{entry}") for entry in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _leads_to_device(link: str) -> bool:
    try:
        return os.readlink(link).startswith(_DEVICES)
    except OSError:
        return False  # closed meanwhile


def _waits_in(pid: int) -> tuple[str, str]:
    """Return the system call that its main thread waits in, and what that shows of its own will; empty where it shows nothing.

    A sleep ends by itself, a terminal is a person's. A call of which the kernel does not tell may be any. `RUNNING`: it is
    in none.
    """
    calls = _CALLS.get(os.uname().machine, _Calls())
    try:
        told = _read(f"/proc/{pid}/task/{pid}/syscall").split()
    except OSError:
        return "a system call that the kernel does not tell", ""
    if told[:1] == [RUNNING]:
        return RUNNING, ""
    if int(told[0]) in calls.mute:
        return "", ""
    number = int(told[0])
    is_sleep = number in calls.sleeps or (number in calls.selects and int(told[1], 16) == 0)
    waits_in = SLEEP if is_sleep else ""
    if number == calls.read and _is_terminal(pid, int(told[1], 16)):
        waits_in = PERSON
    return f"a system call (no. {number} of {os.uname().machine})", waits_in


def _thread_call(pid: int, ours: int) -> str:
    """Return the call in which one of its threads waits for somebody outside; empty if none does. Ours talk by Unix sockets."""
    calls = _CALLS.get(os.uname().machine, _Calls())
    try:
        threads = [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return ""
    for thread in threads:
        try:
            told = _read(f"/proc/{pid}/task/{thread}/syscall").split()
        except OSError:
            continue  # it ended, or the kernel does not tell
        if thread in (pid, ours) or told[0] == RUNNING or int(told[0]) not in calls.outward:
            continue
        if not _is_unix_socket(pid, int(told[1], 16)):
            return f"a system call of its own thread {thread} (no. {told[0]} of {os.uname().machine})"
    return ""


def _is_unix_socket(pid: int, fd: int) -> bool:
    try:
        link = os.readlink(f"/proc/{pid}/fd/{fd}")
        if not link.startswith("socket:["):
            return False
        with open(f"/proc/{pid}/net/unix", encoding="ascii", errors="replace") as rows:
            return any(link[len("socket:[") : -1] in row.split() for row in rows)
    except OSError:
        return False


def _is_terminal(pid: int, fd: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False  # closed meanwhile


def _stat(pid: int) -> tuple[str, int, int, int, int]:
    """State; user and system ticks of the whole process, those of children that ended; pages read from disks."""
    fields = stat_fields(pid)
    return fields[0].decode(), int(fields[11]), int(fields[12]), int(fields[13]) + int(fields[14]), int(fields[9])


def _moved_bytes(pid: int, pages: int) -> int:
    """Read and written, through files and pipes, and as pages; what `recv` and `send` move is not counted here."""
    pages *= _PAGE_BYTES
    try:
        lines = _read(f"/proc/{pid}/io").splitlines()
    except OSError:
        return pages
    return pages + sum(int(line.split(": ")[1]) for line in lines if line.startswith(("rchar", "wchar", "read_bytes")))


def _memory_bytes(pid: int) -> int:
    return int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES


def _read(path: str) -> str:
    """A file of /proc: short, and read for every silent worker several times a second."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16).decode("ascii", "replace")
    finally:
        os.close(fd)
