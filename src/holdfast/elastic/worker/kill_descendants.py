"""Kills all that a worker started, but for what cleans up behind it.

The resource tracker of `multiprocessing` and the shared-memory manager of torch wait for the end of those they serve, remove
what these left in /dev/shm, and end. Killed with them they would leave it there for good, and a replacement that makes
shared memory under the same name could not start. So they are given a moment first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from holdfast.tiers.memory.proc_stat import stat_fields

# How long those that clean up may take, and how often their end is looked for.
CLEAN_S, POLL_S = 2.0, 0.01
# A process may fork while its group is looked through.
_PASSES = 5
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def kill_group(group: int) -> None:
    """Kill every process of a group; those that clean up end by themselves, or after `CLEAN_S` seconds.

    Args:
        group: the process id of its leader, which may be the caller: it is killed last.
    """
    me = os.getpid()
    cleaners = {pid for pid in _members(group) if _cleans(pid)} - {me}
    for _ in range(_PASSES if cleaners else 0):
        others = [pid for pid in _members(group) if pid not in cleaners and pid != me]
        if not others:
            break
        for pid in others:
            _kill(pid, group)
    if cleaners and os.getpgrp() == group:
        _kill(me, group)  # they wait for this end too; the fork server sees to what is left
    deadline = time.monotonic() + CLEAN_S
    while cleaners & set(_members(group)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    # All have ended, or those that are left are another user's, as of `sudo`.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def was_given_away(pid: int, code: int | None) -> bool:
    """Return whether another process has the number of one that ended with `code`, and was reaped.

    The kernel gives no number away that a group still has: nothing is left of its group then.
    """
    return code is not None and _group_of(pid) != -1


def _members(group: int) -> list[int]:
    """Return the processes of the group that live."""
    try:
        numbers = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    except OSError:
        return []  # no descriptor is left for the look: those that clean up are killed with the others
    return [number for number in numbers if _group_of(number) == group]


def _group_of(pid: int) -> int:
    """Return the group of a process that lives; -1 if it does not."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return -1
    return -1 if not fields or fields[0] in (b"Z", b"X") else int(fields[2])


def _cleans(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return any(word in command for word in _CLEANERS)


def _kill(pid: int, group: int) -> None:
    """Kill a process of the group and no other one, even if its number was given away meanwhile."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return  # it ended
    try:
        if _group_of(pid) == group:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it ended, or is another user's
    finally:
        os.close(handle)
