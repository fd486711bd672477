"""From a fault to the first step that all ranks have finished again, over plain torchrun's time for the same.

    python -m benchmarks.recover [--quick] [--json] [--ranks 4] [--mib 64] [--rounds 10] [--part ranks|nodes]

kill -9 of one rank: five jobs run side by side and are hit in turn, so that all meet the same machine: plain torchrun with
`torch.distributed.checkpoint`; `holdfast run` with an unchanged script; the same with `holdfast.resumable`; one
without a spare (`--spares 0`: the replacement is forked after the fault, from a process that has torch imported); and one whose
script leaves a thread behind, so that it does not run again in its process: survivors are forked anew as well. Each tells how
many processes of survivors were kept (`kept`).
torchrun gets `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: without it most of its restarts hang. Where the seconds of ours went
(T1 order, T2 leaving and starting, T3 groups and loading) is told from their journals.

A hang on a lock before a quick watchdog, and SIGSTOP before a careful one: until the rank has been ended (torchrun waits for
the timeout of the groups, half an hour). The loss
of a node: two launchers, one of which dies with its ranks; its replacement is started in the same moment, or waits already
(`spare`). Both with their own defaults: torchrun misses a silent launcher after 15 s, holdfast one that was killed at once.

Ten rounds take about seven minutes on two processors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from benchmarks import watchdog
from benchmarks.measure import Report
from benchmarks.measure import options as parse_options
from torch.distributed import TCPStore

WORKER = str(Path(__file__).with_name("recover_train.py"))
GOALS = {"resumable": "<= 0.15", "rerun": "<= 0.15", "cold": "<= 0.5", "forked": "<= 0.25"}
NODE_LOSS_GOAL = "<= 0.2"
WAIT_S = 120.0
# A job is hit when it has trained for so long: versions exist, spares are there.
CALM_S = 4.0
# A launcher that waits for its turn is there by then.
SETTLED_S = 15.0
# The watchdog's mode per job. A stopped rank is found alike in both; a hang after minutes in careful mode (docs/watchdog.md).
WATCHDOG = {"resumable": "quick", "rerun": "careful", "cold": "careful", "forked": "careful"}
MOST_HANGS, MOST_LOSSES = 5, 3


@dataclass
class Arm:
    """One job."""

    name: str
    home: Path
    ranks: int
    mib: int
    seconds: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    kills: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def events(self) -> Path:
        return self.home / f"{self.name}.events"

    def start(self) -> None:
        stock = self.name == "torchrun"
        module = "torch.distributed.run" if stock else "holdfast.elastic.launch.run_command"
        command = [sys.executable, "-m", module, "--standalone", f"--nproc-per-node={self.ranks}", "--max-restarts=100"]
        if not stock:
            command += [f"--run-id={self.name}", f"--runtime-dir={self.home}/run", f"--watchdog={WATCHDOG[self.name]}"]
            command += ["--spares=0"] if self.name == "cold" else []
        command += [WORKER, "rerun" if self.name == "cold" else self.name]
        command += [str(self.events), str(self.home / f"ck-{self.name}"), str(self.mib)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(self.home / f"{self.name}.log", "wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def rows(self, event: str, count: int) -> list[dict[str, Any]]:
        """What ranks told of this event after so many recoveries."""
        if not self.events.exists():
            return []
        rows = [json.loads(line) for line in self.events.read_text().splitlines() if line.endswith("}")]
        return [row for row in rows if row["event"] == event and row["count"] == count]

    def wait(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + WAIT_S
        while len(rows := self.rows("first_step", count)) < self.ranks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not come back; see {self.home}")
            time.sleep(0.02)
        return rows

    def hit(self) -> float:
        """kill -9 of one rank; seconds until all have finished a step again."""
        before = self.wait(self.kills)
        victim = next(row for row in before if row["rank"] == self.ranks // 2)
        killed_at = time.time()
        os.kill(victim["pid"], signal.SIGKILL)
        self.kills += 1
        after = self.wait(self.kills)
        self.kept.append(len({row["pid"] for row in before} & {row["pid"] for row in after}))
        self.seconds.append(max(row["t"] for row in after) - killed_at)
        return self.seconds[-1]

    def hang(self, signal_: signal.Signals) -> float:
        """One rank stops (SIGSTOP) or hangs on a lock (SIGUSR1); seconds until it was ended. Returns when all go on.

        A rank that is to hang makes its step first: the time counts from where it stands still.
        """
        victim = next(row for row in self.wait(self.kills) if row["rank"] == self.ranks // 2)
        stopped_at = time.time()
        os.kill(victim["pid"], signal_)
        while Path(f"/proc/{victim['pid']}/stat").exists():
            if time.time() - stopped_at > WAIT_S:
                raise TimeoutError(f"{self.name}: nobody missed the rank; see {self.home}")
            time.sleep(0.01)
        ended_at = time.time()
        found = ended_at - max([stopped_at, *(row["t"] for row in self.rows("hangs", self.kills))])
        self.kills += 1
        self.wait(self.kills)
        return found

    def parts(self) -> dict[str, float]:
        """Median seconds of each part of the recoveries, from the journal."""
        rows: dict[str, list[float]] = {}
        for journal in self.home.glob(f"run/run-{self.name}-*/journal.jsonl"):
            for line in journal.read_text().splitlines():
                for part, seconds in json.loads(line).get("seconds", {}).items():
                    rows.setdefault(part, []).append(seconds)
        return {part: round(statistics.median(seconds), 3) for part, seconds in sorted(rows.items())}

    def end(self) -> None:
        if self.process is not None:
            end(self.process)
        for row in self.rows("first_step", self.kills):  # torchrun's workers have sessions of their own
            try:
                os.kill(row["pid"], signal.SIGKILL)
            except ProcessLookupError:
                pass


@dataclass
class Nodes:
    """One job of two launchers, over a store that outlives both."""

    name: str
    home: Path
    ranks: int
    mib: int
    store: TCPStore
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def events(self) -> Path:
        return self.home / f"nodes-{self.name}.events"

    def launch(self, node: int) -> subprocess.Popen[bytes]:
        stock = self.name == "torchrun"
        command = [sys.executable, "-m", "torch.distributed.run" if stock else "holdfast.elastic.launch.run_command"]
        command += ["--nnodes=2", f"--nproc-per-node={self.ranks // 2}", "--max-restarts=100", "--rdzv-backend=c10d"]
        command += [f"--rdzv-id=nodes-{self.name}-{self.home.name}", f"--rdzv-endpoint=127.0.0.1:{self.store.port}"]
        command += ["--rdzv-conf=is_host=0", f"--local-addr=127.0.0.{node + 1}"]
        if not stock:
            command += [f"--node-label=n{node}", f"--runtime-dir={self.home}/run-nodes"]
        command += [WORKER, "torchrun" if stock else "rerun"]
        command += [str(self.events), str(self.home / f"ck-nodes-{self.name}"), str(self.mib)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(self.home / f"nodes-{self.name}-{node}.log", "ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def await_steps(self, since: float) -> float:
        """When all ranks had finished a step after that moment."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            lines = self.events.read_text().splitlines() if self.events.exists() else []
            rows = [row for row in map(json.loads, lines) if row["t"] > since]
            if len({row["rank"] for row in rows}) == self.ranks:
                return max(min(row["t"] for row in rows if row["rank"] == rank) for rank in range(self.ranks))
            time.sleep(0.02)
        raise TimeoutError(f"two nodes of {self.name} did not come back; see {self.home}")

    def run(self, losses: int, *, ahead: bool = False) -> list[float]:
        """Starts, loses a node so many times, ends; seconds of every loss.

        Args:
            losses: how often.
            ahead: a replacement waits already when the node is lost; else it is started in the same moment.
        """
        found = []
        spare = 2 if ahead else 1  # which node takes the place of the one that is lost
        try:
            self.launchers = [self.launch(0), self.launch(1)]
            self.await_steps(0.0)
            self.launchers += [self.launch(spare)] if ahead else []
            for _ in range(losses):
                time.sleep(SETTLED_S if ahead else CALM_S)
                lost_at = time.time()
                kill_family(self.launchers[1].pid)
                self.launchers[1].wait()
                if not ahead:
                    self.launchers[1] = self.launch(1)
                found.append(self.await_steps(lost_at) - lost_at)
                if ahead:
                    spare = 3 - spare
                    self.launchers[1:] = [self.launchers[2], self.launch(spare)]
        finally:
            for launcher in self.launchers:
                kill_family(launcher.pid)
                launcher.wait()
        return found


def kill_family(pid: int) -> None:
    """kill -9 of a process and all its descendants."""
    try:
        victims = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    parser = parse_options("recover", __doc__ or "")
    parser.set_defaults(mib=64)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, help="default 10; 2 with --quick")
    parser.add_argument(
        "--part", choices=("ranks", "nodes"), help="only faults of single ranks, or only losses of nodes"
    )
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 10)
    report = Report(f"recover-{options.part}" if options.part else "recover", options.quick, options.json)
    home = Path(tempfile.mkdtemp(prefix="hfr-"))
    if options.part != "nodes":
        lost_ranks(report, home, options, rounds)
    if options.part != "ranks":
        lost_nodes(report, home, options, min(rounds, MOST_LOSSES))
    report.save()
    shutil.rmtree(home, ignore_errors=True)


def lost_ranks(report: Report, home: Path, options: argparse.Namespace, rounds: int) -> None:
    """Jobs of one node side by side: kills, and ranks that hang or stand."""
    arms = [Arm(name, home, options.ranks, options.mib) for name in ("torchrun", *GOALS)]
    try:
        for arm in arms:
            arm.start()
        for arm in arms:
            arm.wait(0)
        for _ in range(rounds):
            for arm in arms:
                time.sleep(CALM_S)
                arm.hit()
        parts = {arm.name: arm.parts() for arm in arms}
        stops, hangs = [], []
        for _ in range(min(rounds, MOST_HANGS)):
            time.sleep(CALM_S)
            hangs.append(arms[1].hang(signal.SIGUSR1))
            stops.append(arms[2].hang(signal.SIGSTOP))
    finally:
        for arm in arms:
            arm.end()
    stock = arms[0].seconds
    report.figure("torchrun_recovery_seconds", statistics.median(stock), "s", ranks=options.ranks, runs=rounded(stock))
    for arm in arms[1:]:
        ratios = [ours / theirs for ours, theirs in zip(arm.seconds, stock, strict=True)]
        more = {
            "seconds": round(statistics.median(arm.seconds), 3),
            "runs": rounded(arm.seconds),
            "ranks": options.ranks,
            "kept": arm.kept,
            "parts": parts[arm.name],
        }
        report.figure(f"{arm.name}_recovery_ratio", statistics.median(ratios), "", GOALS[arm.name], **more)
    for name, arm, runs in (("hang", arms[1], hangs), ("stop", arms[2], stops)):
        more = {"ranks": options.ranks, "runs": rounded(runs), "watchdog": WATCHDOG[arm.name]}
        report.figure(f"{name}_found_seconds", statistics.median(runs), "s", "<= 3", **more)
    report.figure(
        "watchdog_overhead_percent", watchdog.measure(options.quick)["watchdog_overhead_percent"], "%", "<= 0.1"
    )


def lost_nodes(report: Report, home: Path, options: argparse.Namespace, losses: int) -> None:
    """Two nodes, one of which is lost; one job after the other, for they need the processors to start."""
    (home / "ahead").mkdir()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stock, ours = (
        Nodes(name, home, options.ranks, options.mib, store).run(losses) for name in ("torchrun", "holdfast")
    )
    report.figure("torchrun_node_loss_seconds", statistics.median(stock), "s", runs=rounded(stock))
    ratio = statistics.median(ours) / statistics.median(stock)
    report.figure(
        "node_loss_recovery_ratio",
        ratio,
        "",
        NODE_LOSS_GOAL,
        seconds=round(statistics.median(ours), 3),
        runs=rounded(ours),
    )
    stock, ours = (
        Nodes(name, home / "ahead", options.ranks, options.mib, store).run(losses, ahead=True)
        for name in ("torchrun", "holdfast")
    )
    ratio = statistics.median(ours) / statistics.median(stock)
    more = {"seconds": round(statistics.median(ours), 3), "runs": rounded(ours), "torchrun": rounded(stock)}
    report.figure("node_loss_spare_recovery_ratio", ratio, "", NODE_LOSS_GOAL, **more)


def rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


if __name__ == "__main__":
    main()
