"""Namespaces of the kernel as a machine or a pod: a network, a host name, processes and mounts of its own. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

import psutil

SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
KINDS = ("--net", "--uts", "--mount", "--pid")
# The first process: takes in whoever lost its parent.
INIT = "import os, signal\nwhile True:\n try: os.wait()\n except ChildProcessError: signal.sigtimedwait([signal.SIGCHLD], 1)"


class Space:
    """Namespaces and their first process.

    Args:
        name: the host's.
        setup: commands of a shell that run inside before anything else.

    Attributes:
        pid: of the first process, as it is seen from outside.
    """

    def __init__(self, name: str, *setup: str) -> None:
        lines = ["set -e", f"hostname {name}", "ip link set lo up", *setup, "echo up"]
        shell = ["sh", "-c", "; ".join(lines) + '; exec "$0" -S -c "$1"', sys.executable, INIT]
        command = ["unshare", *KINDS, "--fork", "--kill-child", "--mount-proc", *shell]
        self._holder = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": SEARCHED}
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as said:
            assert said.readline() == "up\n", f"no namespaces for {name}"
        (first,) = psutil.Process(self._holder.pid).children()
        self.pid = first.pid
        self._started: list[subprocess.Popen[bytes]] = []

    def inside(self, *command: str, here: str = "/") -> list[str]:
        """The command that runs another one inside, in a directory."""
        return ["nsenter", f"--target={self.pid}", *KINDS, f"--wd={here}", "--", *command]

    def start(
        self, *command: str, environment: Mapping[str, str], log: str, here: str = "/"
    ) -> subprocess.Popen[bytes]:
        """A container: a process of its own session, whose words go to a file."""
        with open(log, "ab") as words:
            inside = self.inside(*command, here=here)
            started = subprocess.Popen(
                inside, env=dict(environment), stdout=words, stderr=words, start_new_session=True
            )
        self._started.append(started)
        return started

    def processes(self) -> list[psutil.Process]:
        """All that live inside, but the first."""
        return psutil.Process(self.pid).children(recursive=True)

    def lose(self) -> None:
        """All that is inside is killed at once."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._holder.poll() is None:
            self.lose()
        for process in (self._holder, *self._started):
            process.wait(30)
