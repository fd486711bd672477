"""A node that froze, was replaced, and wakes up: the job does not notice, and nothing of it joins or is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

WORKER = str(Path(__file__).with_name("zombie_worker.py"))
GUARD_S = 8.0
WAIT_S = 60.0


class Cluster:
    """Two nodes of one rank: launchers, keepers, a store that outlives them; all of it dies with the test."""

    def __init__(self, out: Path, runtime: Path) -> None:
        self.out, self.runtime = out, runtime
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.started: list[subprocess.Popen[str]] = []

    def launch(self, node: int, place: str) -> subprocess.Popen[str]:
        """A launcher for a node, on a machine of its own: `place` is its directory of keepers."""
        runtime = self.runtime / place
        runtime.mkdir(mode=0o700, exist_ok=True)
        flags = [
            "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=zombies", f"--guard-time={GUARD_S}",
            f"--rdzv-endpoint=127.0.0.1:{self.store.port}", f"--local-addr=127.0.0.{node + 1}", f"--node-label=node{node}",
            "--rdzv-conf=is_host=0,keep_alive_interval=1,keep_alive_max_attempt=2", f"--runtime-dir={runtime}",
        ]  # fmt: skip
        command = [sys.executable, "-m", "holdfast.train.elastic", *flags, WORKER, str(self.out)]
        with (self.out / f"launcher{len(self.started)}.log").open("w") as log:
            self.started.append(subprocess.Popen(command, stdout=log, stderr=log, text=True))
        return self.started[-1]

    def keepers(self, place: str) -> list[psutil.Process]:
        """The keepers of one machine."""
        found = [p for p in psutil.process_iter() if "holdfast.node" in " ".join(_command(p))]
        return [p for p in found if str(self.runtime / place) in " ".join(_command(p)) or place in _runtime(p)]

    def rows(self, rank: int) -> dict[int, dict[int, str]]:
        """Process id -> step -> digest, of everything that a rank ever trained."""
        return {
            int(path.name.split("-")[1]): {int(a): b for a, b, _ in map(str.split, path.read_text().splitlines())}
            for path in self.out.glob(f"rank{rank}-*")
        }

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            logs = "\n".join(path.read_text()[-2500:] for path in sorted(self.out.glob("launcher*.log")))
            assert time.monotonic() < deadline, f"waited for {what}\n{logs}"
            time.sleep(0.05)

    def end(self) -> None:
        for launcher in self.started:
            for process in [*family(launcher), psutil.Process()][:-1]:
                process.kill()
            launcher.wait()
        for process in [p for place in ("first", "second", "third") for p in self.keepers(place)]:
            process.kill()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _runtime(process: psutil.Process) -> str:
    try:
        return process.environ().get("HOLDFAST_RUNTIME_DIR", "").rpartition("/")[2]
    except psutil.Error:
        return ""


def family(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """A launcher with all that it started, children first; empty when it ended."""
    try:
        process = psutil.Process(launcher.pid)
        return [*reversed(process.children(recursive=True)), process]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def cluster(tmp_path: Path, runtime_dir: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, runtime_dir)
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_node_that_wakes_up_after_it_was_replaced_neither_joins_nor_saves(cluster: Cluster) -> None:
    nodes = [cluster.launch(0, "first"), cluster.launch(1, "second")]
    cluster.wait(lambda: any(len(rows) > 3 for rows in cluster.rows(1).values()), "the first steps")
    (zombie,) = cluster.rows(1)
    frozen = [*family(nodes[1]), *cluster.keepers("second")]
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    replacement = cluster.launch(1, "third")
    cluster.wait(
        lambda: any(len(rows) > 3 for pid, rows in cluster.rows(1).items() if pid != zombie), "the replacement"
    )
    assert time.monotonic() - began > GUARD_S, "the name was given away before the guard time was over"
    for process in frozen:  # all but the launcher first, so that the worker has time to do harm
        if process.pid != nodes[1].pid:
            process.send_signal(signal.SIGCONT)
    cluster.wait((cluster.out / f"tried-{zombie}").exists, "what the zombie tries")
    assert (cluster.out / f"tried-{zombie}").read_text().startswith("refused")
    os.kill(nodes[1].pid, signal.SIGCONT)
    assert nodes[1].wait(30) == 1
    assert "another launcher took the place of this one" in (cluster.out / "launcher1.log").read_text()
    now = max(max(rows) for pid, rows in cluster.rows(1).items() if pid != zombie and rows)
    cluster.wait(lambda: max(max(rows) for rows in cluster.rows(1).values() if rows) > now + 5, "more steps")
    (cluster.out / "stop").touch()
    assert [nodes[0].wait(60), replacement.wait(60)] == [0, 0]
    digests: dict[int, set[str]] = {}
    for rank in range(2):
        for rows in cluster.rows(rank).values():
            for step, digest in rows.items():
                digests.setdefault(step, set()).add(digest)
    assert all(len(found) == 1 for found in digests.values()), "a step came out differently"
    assert sorted(digests) == list(range(max(digests) + 1))
