"""What the kernel says of a worker: running or stopped, computing, starved, waking, reading. No word of the worker's own.

Everything is of its main thread, where training runs, plus the processor time and bytes of its direct children (data
loaders, compilers); `spent_s` is of all its threads. Read only when a worker has been silent for a while: about 50
microseconds a look. No torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Vitals:
    """See core.faults.Sight. `catches`: the signals that the process handles, as the kernel's mask."""

    state: str = "S"
    busy_s: float = 0.0
    spent_s: float = 0.0
    starved_s: float = 0.0
    wakes: int = 0
    read_bytes: int = 0
    catches: int = 0


def vitals(pid: int) -> Vitals | None:
    """The worker's; None if it is gone."""
    try:
        state, *spent = _stat(pid)
        run_ns, wait_ns, _ = _read(f"/proc/{pid}/task/{pid}/schedstat").split()
        status = dict(
            line.split(":\t", 1) for line in _read(f"/proc/{pid}/task/{pid}/status").splitlines() if ":\t" in line
        )
        children = [int(child) for child in _read(f"/proc/{pid}/task/{pid}/children").split()]
        busy, moved = int(run_ns) / 1e9, _moved_bytes(pid)
    except (OSError, ValueError, IndexError):
        return None
    for child in children:
        try:
            _, user, system = _stat(child)
            busy += (user + system) / _TICKS_HZ
            moved += _moved_bytes(child)
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return Vitals(
        state=state,
        busy_s=busy,
        spent_s=sum(spent) / _TICKS_HZ,
        starved_s=int(wait_ns) / 1e9,
        wakes=int(status.get("voluntary_ctxt_switches", "0")),
        read_bytes=moved,
        catches=int(status.get("SigCgt", "0"), 16),
    )


def state(pid: int) -> str:
    """The letter of its main thread's state alone (proc_pid_stat(5)); empty if it is gone."""
    try:
        return _stat(pid)[0]
    except (OSError, ValueError, IndexError):
        return ""


def oom_kills() -> int:
    """How often the kernel killed somebody of this cgroup for want of memory; 0 where that is not told."""
    try:
        path = next(line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::"))
        events = _read(f"/sys/fs/cgroup{path}/memory.events")
        return next(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def _stat(pid: int) -> tuple[str, int, int]:
    """State, user and system ticks of the whole process."""
    text = _read(f"/proc/{pid}/stat")
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[11]), int(fields[12])


def _moved_bytes(pid: int) -> int:
    """Read and written, through files and pipes; sockets are not counted by the kernel."""
    try:
        lines = _read(f"/proc/{pid}/io").splitlines()
    except OSError:
        return 0
    return sum(int(line.split(": ")[1]) for line in lines if line.startswith(("rchar", "wchar", "read_bytes")))


def _read(path: str) -> str:
    return Path(path).read_text(encoding="ascii", errors="replace")
