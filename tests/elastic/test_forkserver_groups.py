"""A worker that is killed leaves nothing of its own behind: its loaders' processes would hold its device's memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sample_kit import sampled

# A fork server whose worker starts a process and then ends as it is told; says what became of that process.
FORKSERVER = """
import os, select, signal, socket, sys, time
from holdfast.elastic.processes.forkserver import _ForkServerProcess
ours, theirs = socket.socketpair()
keeper = _ForkServerProcess(theirs, lambda *_: 0)
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.setsid()
    child = os.fork()
    if child == 0:
        os.close(write)
        time.sleep(600)
    os.write(write, str(child).encode())
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(int(sys.argv[1]))
child = os.pidfd_open(int(os.read(read, 20)))
worker = os.pidfd_open(pid)
keeper._pidfds[worker] = pid
select.select([worker], [], [])
keeper._reap(worker)
said = ours.recv(100).decode()
ended = bool(select.select([child], [], [], 20 if sys.argv[2] == "ends" else 0.5)[0])
if not ended:
    signal.pidfd_send_signal(child, signal.SIGKILL)
print("ends" if ended else "lives", '"code"' in said)
"""


@pytest.mark.parametrize(("end", "fate"), [("kill", "ends"), ("3", "ends"), ("0", "lives")])
def test_what_a_worker_that_failed_had_started_ends_with_it(end: str, fate: str) -> None:
    command = [sys.executable, "-c", FORKSERVER, end, fate]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert answer.stdout.split() == [fate, "True"], answer.stderr


# A launcher that is killed before it read what its fork server told it; says whether the worker and its child end.
UNREAD = """
import os, select, signal, socket, sys, time
from holdfast.elastic.processes.forkserver import _ForkServerProcess
read, write = os.pipe()
worker = os.fork()
if worker == 0:
    os.setsid()
    child = os.fork()
    if child:
        os.write(write, str(child).encode())
    time.sleep(600)
child = os.pidfd_open(int(os.read(read, 20)))
ours, theirs = socket.socketpair()
server = os.fork()
if server == 0:
    ours.close()
    keeper = _ForkServerProcess(theirs, lambda *_: 0)
    keeper._pidfds[os.pidfd_open(worker)] = worker
    keeper.greet()
    os.write(write, b"told")
    sys.exit(keeper.serve())
os.read(read, 4)
theirs.close()
ours.close()  # with the greeting in it: the other end is reset
_, status = os.waitpid(server, 0)
ended = bool(select.select([child], [], [], 20)[0])
if not ended:
    signal.pidfd_send_signal(child, signal.SIGKILL)
os.kill(worker, signal.SIGKILL)
os.waitpid(worker, 0)
print(os.waitstatus_to_exitcode(status), ended)
"""


def test_launcher_that_ends_with_words_unread_takes_its_workers_along() -> None:
    command = [sys.executable, "-c", UNREAD]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert answer.stdout.split() == ["0", "True"], answer.stderr
    assert answer.stderr == ""


# A fork server that is stopped, and a worker of it that ends as it is told; says what the launcher makes of that.
STOPPED = """
import os, signal, socket, sys
from holdfast.checkpoint.liveness.heartbeat_page import make_page
from holdfast.elastic.processes import forkserver
forkserver.TOLD_S = 0.3

def work(line, page):
    line.recv(1)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(sys.argv[1])

server = forkserver.ForkServer.start(work)
ours, theirs = socket.socketpair()
child = server.fork(theirs, make_page())
os.kill(server.pid, signal.SIGSTOP)
ours.send(b"x")
code = child.wait(timeout=60)
print(code, child.guessed, server.lost)
os.kill(server.pid, signal.SIGKILL)
server.close()
"""


# A fork server that imports something for seconds when a worker ends; says whether it counts as lost.
BUSY = """
import os, signal, socket, sys, time, types
from holdfast.checkpoint.liveness.heartbeat_page import make_page
from holdfast.elastic.processes import forkserver
forkserver.TOLD_S = forkserver.ASLEEP_S = 0.2
forkserver.IDLE_S, forkserver.WARM = 0.0, ("slow_to_import",)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "slow_to_import":
            began.send(b"x")
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                pass

sys.meta_path.insert(0, Finder())
began, seen = socket.socketpair()
server = forkserver.ForkServer.start(lambda line, page: int(line.recv(1)))
ours, theirs = socket.socketpair()
child = server.fork(theirs, make_page())
seen.recv(1)
ours.send(b"3")
print(child.wait(timeout=60), child.guessed, server.lost)
server.close()
"""
# A fork server that was stopped for so long that it counts as lost, and goes on as it is replaced; says whether the other
# worker lives.
BACK = """
import os, signal, socket, sys, select
from holdfast.checkpoint.liveness.heartbeat_page import make_page
from holdfast.elastic.processes import forkserver
forkserver.TOLD_S = 0.2
server = forkserver.ForkServer.start(lambda line, page: len(line.recv(1)))
lines = [socket.socketpair() for _ in range(2)]
first, other = [server.fork(theirs, make_page()) for _, theirs in lines]
os.kill(server.pid, signal.SIGSTOP)
lines[0][0].send(b"x")
first.wait(timeout=60)
os.kill(server.pid, signal.SIGCONT)
server.close()
print(server.lost, not select.select([other.pidfd], [], [], 1.0)[0])
os.kill(other.pid, signal.SIGKILL)
"""


@pytest.mark.parametrize(("script", "said"), [(BUSY, ["3", "False", "False"]), (BACK, ["True", "True"])])
def test_a_fork_server_that_works_is_not_lost_and_one_that_comes_back_kills_nobody(
    script: str, said: list[str]
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", script]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert answer.stdout.split() == said, answer.stderr


@pytest.mark.parametrize(("end", "code"), sampled([("kill", "-9"), ("3", "3"), ("0", "0")], ("kill", "-9")))
def test_the_end_of_a_worker_is_known_although_its_fork_server_is_stopped(end: str, code: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", STOPPED, end]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert answer.stdout.split() == [code, "False", "True"], answer.stderr
    assert "does not tell that process" in answer.stderr
