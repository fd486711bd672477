"""A worker that is killed leaves nothing of its own behind: its loaders' processes would hold its device's memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(("end", "code"), [("kill", "-9"), ("3", "3"), ("0", "0")])
def test_the_end_of_a_worker_is_known_although_its_fork_server_is_stopped(end: str, code: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", STOPPED, end]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert answer.stdout.split() == [code, "False", "True"], answer.stderr
    assert "does not tell that process" in answer.stderr
