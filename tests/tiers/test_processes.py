"""Which processes have ended, where that can be known; where it cannot, none of them has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.tiers.memory.processes import has_ended, machine_id, start_time

# In a world without /proc: nothing is told of any process, nor of the machine.
HIDDEN = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"']


def run(code: str, *arguments: object, hidden: bool = False) -> str:
    """What a program prints."""
    command = [*(HIDDEN if hidden else []), sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if hidden and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"/proc cannot be hidden here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ended_processes_and_reused_numbers_are_known() -> None:
    child = subprocess.Popen(["sleep", "60"])
    started = start_time(child.pid)
    assert not has_ended(child.pid, started)
    assert not has_ended(child.pid), "whichever process has the number"
    assert started is not None
    assert has_ended(child.pid, started + 1), "another process has the number now"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(child.pid, started), "it only waits to be reaped"
    child.wait()
    assert has_ended(child.pid, started)
    assert has_ended(1 << 33)
    assert not has_ended(0), "the number is of another namespace"
    assert not has_ended(1), "another user's"


ALIVE = """
import subprocess
from holdfast.tiers.memory.processes import has_ended, start_time
child = subprocess.Popen(["sleep", "60"])
assert start_time(child.pid) is None, "/proc is not hidden"
print(has_ended(child.pid, 12345), has_ended(child.pid))
child.kill(); child.wait()
print(has_ended(child.pid, 12345), has_ended(child.pid))
"""


def test_a_hidden_process_has_not_ended() -> None:
    assert run(ALIVE, hidden=True).split() == ["False", "False", "True", "True"]


OUT_OF_DESCRIPTORS = """
import os, resource
from holdfast.tiers.memory.processes import has_ended, machine_id, start_time
me, started, machine = os.getpid(), start_time(os.getpid()), machine_id()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(start_time(me), has_ended(me, started))
"""


def test_without_descriptors_nobody_is_taken_for_dead() -> None:
    assert run(OUT_OF_DESCRIPTORS).split() == ["None", "False"]


def test_machines_that_cannot_be_told_apart_are_different() -> None:
    name = "from holdfast.tiers.memory.processes import machine_id; print(machine_id(), machine_id())"
    first, second = (run(name, hidden=True).split() for _ in range(2))
    assert first[0] == first[1] != second[0]
    assert run(name).split() == [machine_id()] * 2


# A living process holds a lock in a bucket (a directory stands for it), or writes a file; another one looks.
TOGETHER = """
import os, sys, threading
from pathlib import Path
from holdfast.base.errors import InUse
from holdfast.tiers.storage.incarnations import Incarnations, make_stamp
from holdfast.tiers.storage.bucket_lease import LeaseLock
from holdfast.tiers.backends.local import LocalBackend

backend = LocalBackend(Path(sys.argv[1]))
backend.prepare()
ready, theirs = os.pipe()
end, ours = os.pipe()
if os.fork() == 0:
    if sys.argv[2] == "lock":
        LeaseLock(backend).take("holder", timeout_s=1.0)
    else:
        (Path(sys.argv[1]) / ".tmp" / (make_stamp(1) + ".0a")).write_bytes(b"half")
    os.write(theirs, b"!")
    os.read(end, 1)
    os._exit(0)
os.read(ready, 1)
try:
    if sys.argv[2] == "lock":
        LeaseLock(backend, lease_s=60.0).take("other", timeout_s=0.1)
        print("taken over")
    else:
        print("removed", Incarnations(backend).sweep(1))
except InUse:
    print("refused")
finally:
    os.write(ours, b"!")
    os.wait()
"""


@pytest.mark.parametrize(("what", "kept"), [("lock", "refused\n"), ("file", "removed []\n")])
def test_what_a_hidden_process_holds_is_left_to_it(tmp_path: Path, what: str, kept: str) -> None:
    """Parent and child share what they call their machine, so that only the child's number tells that it lives."""
    assert run(TOGETHER, tmp_path / "root", what, hidden=True) == kept
    assert run(TOGETHER, tmp_path / "seen", what) == kept


@pytest.mark.parametrize("look", [start_time, has_ended])
def test_odd_names_of_processes_are_no_obstacle(look: Callable[[int], object], tmp_path: Path) -> None:
    """The second field of /proc/PID/stat is whatever the program calls itself."""
    program = tmp_path / ") Z 0 ("
    program.write_bytes(Path("/bin/sleep").resolve().read_bytes())
    program.chmod(0o700)
    child = subprocess.Popen([program, "60"])
    try:
        assert look(child.pid) not in (None, True)
    finally:
        child.kill()
        child.wait()
