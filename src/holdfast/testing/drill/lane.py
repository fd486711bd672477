"""A lane of the crash drill: a warm process that runs trials one after the other and says what it found.

Everything is imported once; a keeper is then a fork away, and a trainer a fork of the nursery. Neither lane nor
nursery has threads, or forking would not be safe.

Run as `python -m holdfast.testing.drill.lane <directory>`: trials come in as JSON lines on standard input, outcomes go
out as JSON lines on standard output.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast.testing import invariants, write_order
from holdfast.testing.drill import warm
from holdfast.testing.drill.cast import Cast, NurseryLine
from holdfast.testing.drill.disk import Disk, make_template
from holdfast.testing.drill.ground import Ground
from holdfast.testing.drill.outcome import Outcome
from holdfast.testing.drill.plan import Trial, dry_runs
from holdfast.testing.drill.record import Measured
from holdfast.testing.drill.stage import Stage

MAX_LOG_LINES = 80
COLLECT_EVERY = 40


class Lane:
    """Runs trials in a directory of its own. Use as a context manager."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._ground = Ground.make()
        self._nursery = NurseryLine(self._ground, tempfile.mkdtemp(prefix="w", dir=directory))
        self._measured = Measured()
        self._trials = 0

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.close()

    def warm_up(self) -> list[Outcome]:
        """Is the keeper while the nursery warms up, and measures the phases by trials without a strike."""
        sandbox = self._nursery.sandbox
        with warm.unseen():
            for setup in warm.setups(sandbox):
                self._nursery.await_ready()
                warm.keep(setup)
        self._nursery.await_ready()
        shutil.rmtree(sandbox, ignore_errors=True)
        warm.settle()
        outcomes = []
        for trial in dry_runs():
            outcomes.append(self.run(trial))
            self._measured.runs[trial.shape] += 1
        return outcomes

    def run(self, trial: Trial) -> Outcome:
        """One trial and the verdict on it."""
        began = time.monotonic()
        sandbox = tempfile.mkdtemp(prefix="", dir=self._directory)
        with self._disk_of(trial, sandbox) as disk:
            stage = Stage(trial, sandbox, Cast(self._ground, self._nursery), self._measured, disk)
            stage.run()
        record = stage.record
        found = invariants.judge(record.course) + write_order.check(f"{sandbox}/c", record.history)
        outcome = Outcome(
            number=trial.number,
            phase=trial.phase,
            victim=trial.victim,
            plant=trial.plant,
            struck=record.struck,
            acknowledged=sum(len(life.acks) for life in record.course.lives),
            refused=record.refused,
            seconds=time.monotonic() - began,
            violations=tuple((violation.invariant, violation.what) for violation in found),
            evidence=(*record.lines, *_logs(sandbox)) if found else (),
            passes=tuple(record.passes),
        )
        shutil.rmtree(sandbox, ignore_errors=True)
        self._trials += 1
        if self._trials % COLLECT_EVERY == 0:  # the collector is off, for the sake of the children
            gc.collect()
        return outcome

    @contextmanager
    def _disk_of(self, trial: Trial, sandbox: str) -> Iterator[Disk | None]:
        """The file system that the checkpoints of the trial get for themselves."""
        if not trial.disk:
            yield None
            return
        template = Path(self._directory, f"{trial.disk}-{os.getpid()}")
        if not template.exists():
            make_template(trial.disk, template)
        disk = Disk(trial.disk, template, Path(sandbox, "disk"), Path(sandbox, "c"))
        try:
            yield disk
        finally:
            disk.close()


def _logs(sandbox: str) -> list[str]:
    lines = []
    for path in sorted(Path(sandbox).glob("*.log")):
        lines += [f"{path.name}: {line}" for line in path.read_text(errors="replace").splitlines()[-MAX_LOG_LINES:]]
    return lines


def main() -> int:
    """Serves trials until standard input ends."""
    # Results leave through a descriptor of their own; whatever prints here must not get between them.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    with Lane(sys.argv[1]) as lane:
        for outcome in lane.warm_up():
            out.write(msgspec.json.encode(outcome) + b"\n")
        out.write(b"ready\n")
        for line in sys.stdin.buffer:
            out.write(msgspec.json.encode(lane.run(msgspec.json.decode(line, type=Trial))) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
