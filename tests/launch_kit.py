"""Launchers and workers of one test, on one node or on several: start them, wait for what they do, lose them all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from torch.distributed import TCPStore

import forked

WORKER = str(Path(__file__).parent / "elastic" / "elastic_worker.py")
# A launcher without warnings of Python; flags and the script follow.
LAUNCH = (sys.executable, "-W", "ignore", "-m", "holdfast.elastic.launch.run_command")
RECOVERY_S = 60.0
GUARD_S = 3
# Of each launcher: a broken connection of torch alone tells three thousand, and tests look for what came before it.
MAX_LOG_CHARS = 30_000

Launcher = subprocess.Popen[str] | forked.Popen


@dataclass
class Job:
    """Launchers and workers of one test; everything dies with it.

    A launcher is forked from a warm process, with PyTorch in it, unless the test asks for a fresh one: a real start.
    """

    directory: Path
    script: str = WORKER
    program: tuple[str, ...] = ("-m", "holdfast.elastic.launch.run_command")
    launchers: list[Launcher] = field(default_factory=list)

    def launch(self, *flags: str, worker: tuple[str, ...] = (), fresh: bool = False) -> Launcher:
        command = [sys.executable, *self.program, *flags, self.script, str(self.directory), *worker]
        log = (self.directory / f"launcher{len(self.launchers)}.log").open("w")
        with log:
            start = subprocess.Popen if fresh else forked.Popen
            launcher = start(command, stdout=log, stderr=log, text=True)
        self.launchers.append(launcher)
        return launcher

    def ranks(self, world_size: int) -> list[tuple[int, int, int]] | None:
        """(process id, restart count, step) of every rank, or None if one has not reported."""
        try:
            rows = [(self.directory / f"rank{rank}").read_text().split() for rank in range(world_size)]
        except FileNotFoundError:
            return None
        return [(int(pid), int(restarts), int(step)) for pid, restarts, step in rows]

    def running(self, world_size: int, *, since: set[int] = frozenset()) -> list[tuple[int, int, int]]:  # type: ignore[assignment]
        """Waits until all ranks have made steps in processes that are not in `since`."""

        def progressed() -> list[tuple[int, int, int]] | None:
            rows = self.ranks(world_size)
            good = rows is not None and all(pid not in since and step >= 3 for pid, _, step in rows)
            return rows if good else None

        return wait_for(progressed, f"steps of {world_size} ranks", self.logs)

    def recovered(self, world_size: int, restarts: int, *, steps: int = 10) -> list[tuple[int, int, int]]:
        """Waits until all ranks have made steps after so many recoveries, for long enough to count as progress."""

        def there() -> list[tuple[int, int, int]] | None:
            rows = self.ranks(world_size)
            good = rows is not None and all(count >= restarts and step >= steps for _, count, step in rows)
            return rows if good else None

        return wait_for(there, f"recovery {restarts} of {world_size} ranks", self.logs)

    def stop(self) -> None:
        (self.directory / "stop").touch()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-MAX_LOG_CHARS:] for path in sorted(self.directory.glob("launcher*.log")))

    def end(self) -> None:
        for launcher in self.launchers:
            kill_tree(launcher)


def wait_for(condition: Callable[[], object], what: str, logs: Callable[[], str]) -> object:
    deadline = time.monotonic() + RECOVERY_S
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {RECOVERY_S} s for {what}\n{logs()}")


def kill_tree(launcher: Launcher) -> None:
    """SIGKILL to a launcher and all its workers: what the loss of a node looks like."""
    try:
        victims = [launcher, *psutil.Process(launcher.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        victims = [launcher]
    for victim in victims:
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # ended by itself
    launcher.wait()


class Nodes:
    """Launchers of one rank each.

    Args:
        endpoint: of the rendezvous; the first launcher hosts it if `hosted`.
        size: MIN:MAX.
        worker: what each is told.
    """

    def __init__(
        self,
        job: Job,
        endpoint: str,
        size: str = "2",
        *,
        hosted: bool = True,
        restarts: int = 20,
        worker: tuple[str, ...] = (),
    ) -> None:
        self.job, self.endpoint, self.size, self.hosted, self.restarts = job, endpoint, size, hosted, restarts
        self.worker = worker

    def start(self, node: int, *flags: str) -> Launcher:
        conf = f"is_host={int(self.hosted and node == 0)},keep_alive_interval=1,keep_alive_max_attempt=3"
        return self.job.launch(
            f"--nnodes={self.size}",
            "--nproc-per-node=1",
            f"--max-restarts={self.restarts}",
            "--rdzv-backend=c10d",
            "--rdzv-id=lost",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-conf={conf},last_call_timeout=1",
            f"--local-addr=127.0.0.{node + 1}",
            f"--node-label=node{node}",
            f"--guard-time={GUARD_S}",
            *flags,
            worker=self.worker,
        )


def free_port() -> int:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


def family(launcher: Launcher) -> list[psutil.Process]:
    return [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
