"""The demo's two simulated nodes: launchers, workers and keepers as real processes, killed for real and cleaned up.

A node is a label, a runtime directory of its own and everything that was started with its mark in the environment;
the mark is how a whole node, keeper and detached children included, is found in /proc and killed at once. Nothing
else on the machine carries it, so nothing else is ever killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.base import program

MARK = "HF_DEMO_NODE"
KEEPER_MODULE = "holdfast.keeper"
RANKS_PER_NODE = 2


class DemoFailure(Exception):
    """Something in the demo did not happen as promised; the message says what."""


@dataclass(slots=True)
class Cluster:
    """Processes and directories of one demo. `close` ends and removes all of it, whatever state it is in."""

    steps: int
    durable_every: int
    keep: Path | None = None
    home: Path = field(init=False)
    runtime: Path = field(init=False)
    _token: str = field(init=False, default_factory=lambda: secrets.token_hex(8))
    _launchers: dict[str, subprocess.Popen[bytes]] = field(init=False, default_factory=dict)
    _port: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        # Sockets lie in a directory of their own: a socket's path may have 107 bytes, `--keep` may be longer.
        self.runtime = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
        self.home = self.keep or self.runtime
        for name in ("reference", "facts", "logs"):
            (self.home / name).mkdir(parents=True, exist_ok=True)

    @property
    def checkpoints(self) -> Path:
        return self.home / "checkpoints"

    def start_reference(self) -> None:
        """The yardstick: the same four ranks under plain torchrun, without holdfast; one restart is allowed."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        command += ["--max-restarts", "1"]
        self._spawn("reference", [*command, "-m", "holdfast.testing.demo.train", "--plain", *self._arguments()])

    def new_rendezvous(self) -> None:
        """Chooses a free port on loopback for the launchers that are started next."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def start_node(self, node: str, *, place: int) -> None:
        """One launcher with two ranks; the first node that is started hosts the rendezvous.

        Args:
            node: its label, never used twice.
            place: which address of loopback it has. Agents are ranked by address, so a replacement at the same place
                takes the same ranks.
        """
        command = program.command("holdfast.cli.cli", "run", "--nnodes", "2")
        command += ["--nproc-per-node", str(RANKS_PER_NODE), "--max-restarts", "4", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "demo"]
        command += ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=4", "--local-addr", f"127.0.0.{place}"]
        command += ["--trace", str(self.home / "trace")]
        arguments = [*self._arguments(), "--checkpoints", str(self.checkpoints)]
        self._spawn(node, [*command, "-m", "holdfast.testing.demo.train", *arguments])

    def wait_port(self, timeout_s: float = 30.0) -> None:
        """Until the rendezvous answers, so that the node started first is its host."""
        wait_until(lambda: _answers(self._port), timeout_s, "the rendezvous opens its port", self.check)

    def check(self) -> None:
        """Raises DemoFailure when a launcher ended with an error of its own."""
        for node, launcher in self._launchers.items():
            if launcher.poll() not in (None, 0):
                raise DemoFailure(f"{node} ended with exit code {launcher.returncode}\n{self.tail(node)}")

    def ended(self) -> bool:
        """Return whether every launcher has ended well."""
        self.check()
        return all(launcher.poll() == 0 for launcher in self._launchers.values())

    def keepers(self, node: str) -> list[int]:
        """Process ids of the keepers of a node."""
        return [pid for pid in self._marked(node) if KEEPER_MODULE in _strings(pid, "cmdline")]

    def living(self) -> list[int]:
        """Process ids of everything that was started and has not ended."""
        return self._marked("")

    def kill_node(self, node: str) -> int:
        """SIGKILL to launcher, workers and keeper of one node (of all if empty); returns how many processes that were."""
        killed: set[int] = set()
        deadline = time.monotonic() + 20
        # A launcher could start a worker between the look and the kill, hence again until none is left.
        while victims := self._marked(node):
            for pid in victims:
                _kill(pid)
            killed.update(victims)
            if time.monotonic() > deadline:
                raise DemoFailure(f"processes of {node or 'the demo'} survive SIGKILL: {victims}")
            time.sleep(0.01)
        for name in [name for name in self._launchers if node in ("", name)]:
            self._launchers.pop(name).wait(timeout=20)
        return len(killed)

    def log(self, node: str) -> Path:
        return self.home / "logs" / f"{node}.log"

    def tail(self, node: str, num_lines: int = 30) -> str:
        """The last lines that a node's launcher and workers printed."""
        return "\n".join(self.log(node).read_text(errors="replace").splitlines()[-num_lines:])

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs one `holdfast` command to its end."""
        argv = program.command("holdfast.cli.cli", *arguments)
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=60, check=False, env=self._environment("commands")
        )

    def timeline(self) -> dict[str, Any]:
        """Draws what every rank, keeper and launcher did into `timeline.html`; what is in it, by kind.

        Raises:
            DemoFailure: `holdfast trace` failed.
        """
        where = [str(self.home / "trace"), str(self.runtime / "run")]
        files = ["--html", str(self.home / "timeline.html"), "--perfetto", str(self.home / "timeline.json")]
        result = self.command("trace", *where, *files, "--json")
        if result.returncode:
            raise DemoFailure(f"no timeline: {result.stdout}{result.stderr}")
        return dict(json.loads(result.stdout))

    def close(self) -> None:
        """Kills what is left and removes the directories, except with `--keep`."""
        self.kill_node("")
        shutil.rmtree(self.runtime, ignore_errors=True)

    def _arguments(self) -> list[str]:
        return ["--steps", str(self.steps)]

    def _spawn(self, node: str, command: list[str]) -> None:
        facts = "reference" if node == "reference" else "facts"
        with self.log(node).open("ab") as log:
            self._launchers[node] = subprocess.Popen(
                [*command, "--facts", str(self.home / facts)],
                env=self._environment(node),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, node: str) -> dict[str, str]:
        runtime = self.runtime / "run" / node
        runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        return {
            **kept,
            MARK: f"{self._token}:{node}:",
            "HOLDFAST_NODE_LABEL": node,
            "HOLDFAST_RUNTIME_DIR": str(runtime),
            "HOLDFAST_RUN_ID": "demo",
            "HOLDFAST_EVERY": "1",
            "HOLDFAST_DURABLE_EVERY": str(self.durable_every),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # most restarts of plain torchrun hang without it
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def _marked(self, node: str) -> list[int]:
        """Ids of the living processes with the mark of `node`; of all nodes if it is empty."""
        mark = f"{MARK}={self._token}:{node}:" if node else f"{MARK}={self._token}:"
        return [pid for pid in _processes() if any(v.startswith(mark) for v in _strings(pid, "environ"))]


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str, check: Callable[[], None] | None = None
) -> None:
    """Polls until `condition` holds; `check` may raise in between.

    Raises:
        DemoFailure: not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if check is not None:
            check()
        if time.monotonic() > deadline:
            raise DemoFailure(f"waited {timeout_s:.0f} s in vain until {what}")
        time.sleep(0.02)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _processes() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def _strings(pid: int, file: str) -> list[str]:
    """The zero-separated strings of a file in /proc; none for a process that is gone, a zombie or somebody else's."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # ended by itself meanwhile
        os.kill(pid, signal.SIGKILL)
