"""A lane of the crash drill: a warm process that runs trials one after the other and says what it found.

Everything is imported once; a keeper is then a fork away, and a trainer a fork of the fork server. Neither lane nor
fork server has threads, or forking would not be safe. The first lane and its fork server warm up and measure; then both fork
those of the other lanes.

Run as `python -m holdfast.testing.drill.lane <directory> <descriptor>...`, with a socket for each lane: trials come in
as JSON lines, outcomes go out as JSON lines.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from holdfast.testing.checks import invariants, write_order
from holdfast.testing.checks.power_cut_disk import Disk, make_template
from holdfast.testing.drill import warmup
from holdfast.testing.drill.outcome import Outcome
from holdfast.testing.drill.record import Measured
from holdfast.testing.drill.shared import Ground, multiply
from holdfast.testing.drill.trial import Stage
from holdfast.testing.drill.trial_plan import Trial, dry_runs
from holdfast.testing.drill.trial_processes import Cast, ForkServerConnection, start_forkservers

MAX_LOG_LINES = 80
COLLECT_EVERY = 40


class Lane:
    """Runs trials in a directory of its own."""

    def __init__(self, directory: str, ground: Ground, forkserver: ForkServerConnection, measured: Measured) -> None:
        self._directory = directory
        self._ground = ground
        self._forkserver = forkserver
        self._measured = measured
        self._trials = 0

    def warm_up(self) -> list[Outcome]:
        """Is the keeper while the fork server warms up, and measures the phases by trials without a strike."""
        sandbox = self._forkserver.sandbox
        with warmup.unseen():
            for setup in warmup.setups(sandbox):
                self._forkserver.await_ready()
                warmup.keep(setup)
        self._forkserver.await_ready()
        shutil.rmtree(sandbox, ignore_errors=True)
        warmup.settle()
        outcomes = []
        for trial in dry_runs():
            outcomes += self.run(trial)
            self._measured.runs[trial.shape] += 1
        return outcomes

    def run(self, trial: Trial) -> list[Outcome]:
        """One job and the verdicts on its trials; the one in which something was violated is the last."""
        sandbox = tempfile.mkdtemp(prefix="", dir=self._directory)
        with self._disk_of(trial, sandbox) as disk:
            stage = Stage(trial, sandbox, Cast(self._ground, self._forkserver), self._measured, disk)
            stage.run()
        record = stage.record
        found = invariants.judge(record.course) + write_order.check(f"{sandbox}/c", record.history)
        ends = [*(tally.began for tally in record.tallies[1:]), time.monotonic()]
        outcomes = [
            Outcome(
                number=trial.number + index,
                phase=phase,
                victim=victim,
                plant=trial.plant,
                struck=tally.struck,
                acknowledged=tally.acknowledged,
                refused=tally.refused,
                seconds=end - tally.began,
            )
            for index, (tally, (phase, victim), end) in enumerate(zip(record.tallies, trial.cells, ends, strict=False))
        ]
        outcomes[-1] = replace(
            outcomes[-1],
            violations=tuple((violation.invariant, violation.what) for violation in found),
            evidence=(*record.lines, *_logs(sandbox)) if found else (),
            passes=tuple(record.passes),
        )
        shutil.rmtree(sandbox, ignore_errors=True)
        self._trials += 1
        if self._trials % COLLECT_EVERY == 0:  # the collector is off, for the sake of the children
            gc.collect()
        return outcomes

    @contextmanager
    def _disk_of(self, trial: Trial, sandbox: str) -> Iterator[Disk | None]:
        """The file system that the checkpoints of the trial get for themselves."""
        if not trial.disk:
            yield None
            return
        template = Path(self._directory, f"{trial.disk}-{os.getpid()}")
        if not template.exists():
            make_template(trial.disk, template)
        with closing(Disk(trial.disk, template, Path(sandbox, "disk"), Path(sandbox, "c"))) as disk:
            yield disk


def _logs(sandbox: str) -> list[str]:
    lines = []
    for path in sorted(Path(sandbox).glob("*.log")):
        lines += [f"{path.name}: {line}" for line in path.read_text(errors="replace").splitlines()[-MAX_LOG_LINES:]]
    return lines


def main() -> int:
    """Serves trials on every socket until it is closed at the other end."""
    os.dup2(2, 1)  # results leave through the sockets; what prints here is for people
    directory, channels = sys.argv[1], [socket.socket(fileno=int(fd)) for fd in sys.argv[2:]]
    grounds = [Ground.make() for _ in channels]
    process, forkservers = start_forkservers(grounds, tempfile.mkdtemp(prefix="w", dir=directory))
    measured = Measured()
    channels[0].sendall(msgspec.json.encode(Lane(directory, grounds[0], forkservers[0], measured).warm_up()) + b"\n")
    mine, others = multiply(len(channels))
    for number, (channel, forkserver) in enumerate(zip(channels, forkservers, strict=True)):
        if number != mine:  # who is alone with an end notices when the other one is closed
            channel.close()
            forkserver.close()
    if mine:
        forkservers[mine].await_ready()
    serve(Lane(directory, grounds[mine], forkservers[mine], measured), channels[mine])
    forkservers[mine].close()
    for pid in others:
        os.waitpid(pid, 0)
    if not mine:
        process.wait()
    return 0


def serve(lane: Lane, channel: socket.socket) -> None:
    """Works off trials until there are no more."""
    channel.sendall(b"ready\n")
    with channel, channel.makefile("rb") as lines:
        for line in lines:
            channel.sendall(msgspec.json.encode(lane.run(msgspec.json.decode(line, type=Trial))) + b"\n")


if __name__ == "__main__":
    os._exit(main())  # nothing is left to clean up
