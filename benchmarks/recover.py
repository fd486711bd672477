"""kill -9 of one rank to the first step that all ranks have finished again, over plain torchrun's time for the same.

    python -m benchmarks.recover [--quick] [--json] [--ranks 4] [--mib 64]

Four jobs run side by side and are hit in turn, so that all meet the same machine: plain torchrun with
`torch.distributed.checkpoint`; `holdfast run` with an unchanged script; the same with `holdfast.resumable`; and one
without a spare (`--spares 0`: the replacement is forked after the fault, from a process that has torch imported).
torchrun gets `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: without it most of its restarts hang.
"""

from __future__ import annotations

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

from benchmarks.measure import Report
from benchmarks.measure import options as parse_options

WORKER = str(Path(__file__).with_name("recover_train.py"))
GOALS = {"resumable": "<= 0.15", "rerun": "<= 0.4", "cold": "<= 0.5"}
WAIT_S = 120.0
# A job is hit when it has trained for so long: versions exist, spares are there.
CALM_S = 4.0


@dataclass
class Arm:
    """One job."""

    name: str
    home: Path
    ranks: int
    mib: int
    seconds: list[float] = field(default_factory=list)
    kills: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def events(self) -> Path:
        return self.home / f"{self.name}.events"

    def start(self) -> None:
        stock = self.name == "torchrun"
        module = "torch.distributed.run" if stock else "holdfast.train.elastic"
        command = [sys.executable, "-m", module, "--standalone", f"--nproc-per-node={self.ranks}", "--max-restarts=100"]
        if not stock:
            command += [f"--run-id={self.name}", f"--runtime-dir={self.home}/run", "--watchdog=on"]
            command += ["--spares=0"] if self.name == "cold" else []
        command += [WORKER, "rerun" if self.name == "cold" else self.name]
        command += [str(self.events), str(self.home / f"ck-{self.name}"), str(self.mib)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(self.home / f"{self.name}.log", "wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def first_steps(self, count: int) -> list[dict[str, Any]]:
        """Of every rank, after so many recoveries."""
        if not self.events.exists():
            return []
        rows = [json.loads(line) for line in self.events.read_text().splitlines() if line.endswith("}")]
        return [row for row in rows if row["count"] == count]

    def wait(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + WAIT_S
        while len(rows := self.first_steps(count)) < self.ranks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not come back; see {self.home}")
            time.sleep(0.02)
        return rows

    def hit(self) -> float:
        """kill -9 of one rank; seconds until all have finished a step again."""
        victim = next(row for row in self.wait(self.kills) if row["rank"] == self.ranks // 2)
        killed_at = time.time()
        os.kill(victim["pid"], signal.SIGKILL)
        self.kills += 1
        self.seconds.append(max(row["t"] for row in self.wait(self.kills)) - killed_at)
        return self.seconds[-1]

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for row in self.first_steps(self.kills):  # torchrun's workers have sessions of their own
            try:
                os.kill(row["pid"], signal.SIGKILL)
            except ProcessLookupError:
                pass


def main() -> None:
    parser = parse_options("recover", __doc__ or "")
    parser.set_defaults(mib=64)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    report = Report("recover", options.quick, options.json)
    home = Path(tempfile.mkdtemp(prefix="hfr-"))
    arms = [Arm(name, home, options.ranks, options.mib) for name in ("torchrun", "resumable", "rerun", "cold")]
    try:
        for arm in arms:
            arm.start()
        for arm in arms:
            arm.wait(0)
        for _ in range(3 if options.quick else 10):
            for arm in arms:
                time.sleep(CALM_S)
                arm.hit()
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
        }
        report.figure(f"{arm.name}_recovery_ratio", statistics.median(ratios), "", GOALS[arm.name], **more)
    report.save()
    shutil.rmtree(home, ignore_errors=True)


def rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


if __name__ == "__main__":
    main()
