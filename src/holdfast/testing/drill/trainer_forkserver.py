"""The fork server of a lane: a warm process with PyTorch in it that forks trainers, a few milliseconds each.

Apart from the lane, because a fork of a process with PyTorch costs ten times that of one without. The first one warms
up and then forks those of the other lanes. Reads requests from
a socket, one JSON line each, and answers with process ids; says when a child ended and how. It has no threads: that is
what makes forking safe. Ends when the lane does.

Run by the first lane as `python -m holdfast.testing.drill.trainer_forkserver <descriptors of the sockets> <grounds> <sandbox>`,
both in JSON.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import traceback

import msgspec
import torch
from torch import distributed as dist

from holdfast.keeper.rpc import spawn as keeper_spawn
from holdfast.testing.drill import warmup
from holdfast.testing.drill.crash_points import Journal
from holdfast.testing.drill.shared import Ground, Setup, die_with, multiply
from holdfast.testing.drill.trainer import forked_trainer, trainer

READY = b'{"forked":0}\n'


class DrillForkServer:
    """Forks on request, reaps, reports."""

    def __init__(self, line: socket.socket, ground: Ground) -> None:
        self._line = line
        self._ground = ground
        self._children: dict[int, int] = {}  # pidfd -> pid

    def run(self) -> None:
        """Serves until the lane closes its end."""
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        buffer = b""
        while True:
            for fd, _ in poll.poll():
                if fd in self._children:
                    poll.unregister(fd)
                    self._reap(fd)
                    continue
                data = self._line.recv(1 << 16)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    pidfd = self._fork(msgspec.json.decode(line, type=Setup))
                    poll.register(pidfd, select.POLLIN)

    def _fork(self, setup: Setup) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                die_with(parent)
                code = forked_trainer(setup, self._ground)
            except BaseException:  # noqa: BLE001 - top of the process: its log says why it ended
                traceback.print_exc()
            finally:
                os._exit(code)  # nothing of the parent's may be flushed or cleaned up here
        self._ground.enter_pid(f"t{setup.rank}", pid)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid
        # With a descriptor, for the child may be dead and reaped before the lane can open one.
        socket.send_fds(self._line, [msgspec.json.encode({"forked": pid}) + b"\n"], [pidfd])
        return pidfd

    def _reap(self, pidfd: int) -> None:
        pid, status = os.waitpid(self._children.pop(pidfd), 0)
        os.close(pidfd)
        self._say({"ended": pid, "status": status})

    def _say(self, fact: dict[str, int]) -> None:
        self._line.sendall(msgspec.json.encode(fact) + b"\n")


def live(sandbox: str, line: socket.socket) -> None:
    """The lives of a trainer, in this process; the lane is its keeper. One that is refused has warmed it all the same."""
    spawn, keeper_spawn._spawn = keeper_spawn._spawn, warmup.await_keeper
    with open(os.devnull, "wb") as nowhere, warmup.unseen():
        for setup in warmup.setups(sandbox):
            journal = Journal(nowhere.fileno(), "t0", setup.life)
            line.sendall(READY)
            trainer(setup, journal)
            warmup.await_end(setup)  # or the next life would meet the keeper of this one
    keeper_spawn._spawn = spawn
    store = dist.FileStore(f"{sandbox}/store", 1)  # type: ignore[attr-defined]  # torch does not list it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.all_gather_object([None], None)
    dist.destroy_process_group()


def main() -> int:
    """Warms up, says so, and serves."""
    torch.set_num_threads(1)
    die_with(os.getppid())
    lines = [socket.socket(fileno=fd) for fd in msgspec.json.decode(sys.argv[1])]
    grounds = msgspec.json.decode(sys.argv[2], type=list[Ground])
    live(sys.argv[3], lines[0])
    warmup.settle()
    mine, others = multiply(len(lines))
    for number, line in enumerate(lines):
        if number != mine:
            line.close()
    lines[mine].sendall(READY)
    DrillForkServer(lines[mine], grounds[mine]).run()
    for pid in others:
        os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    os._exit(main())  # taking PyTorch apart takes most of a second, in each fork server
