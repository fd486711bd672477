"""The crash drill: processes of real jobs are killed at random instants, and what is left is judged.

    python -m holdfast.testing crash [--trials N] [--seed S] [--full-starts N] [--json]

The plan is drawn first (trial_plan.py); lanes (lane.py), warm processes that fork trainers
and keepers, work it off; the table says per phase and victim what was acknowledged and whether anything of it was
lost. That the drill finds bugs is tested by planting some. Exit code 0: nothing violated; 1: otherwise; 2: usage.
How to read the table and repeat a trial: docs/drill.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import msgspec

import holdfast
from holdfast.base import program
from holdfast.base.terminal import say
from holdfast.testing.drill.outcome import Outcome
from holdfast.testing.drill.trial_plan import PHASES, Trial, full_starts, plan

# One more than processors: a lane waits now and then.
NUM_LANES = (os.cpu_count() or 1) + 1
LANE = "holdfast.testing.drill.lane"
PROGRESS_S = 2.0
MIN_MEMORY_BYTES = 256 << 20
# Trials whose violations are listed below the table.
MAX_SHOWN = 10
# Invariants that say that something acknowledged is gone, and those that say that something wrong was accepted.
LOST = {"S1", "S6", "S8", "S11", "S13", "S17"}
TORN = {"S2", "S3", "S4", "S5", "S7", "S10", "S12", "S14", "S16"}


@dataclass(slots=True)
class Cell:
    """One row of the table."""

    trials: int = 0
    struck: int = 0
    acknowledged: int = 0
    refused: int = 0
    lost: int = 0
    torn: int = 0
    other: int = 0
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Counts a trial."""
        kinds = {invariant for invariant, _ in outcome.violations}
        self.trials += 1
        self.struck += outcome.struck
        self.acknowledged += outcome.acknowledged
        self.refused += outcome.refused
        self.lost += bool(kinds & LOST)
        self.torn += bool(kinds & TORN)
        self.other += bool(kinds - LOST - TORN)
        self.seconds += outcome.seconds


@dataclass(slots=True)
class Lanes:
    """Warm processes that work off trials, one behind each channel. Use `open_lanes`."""

    channels: list[Channel]
    warm_up: list[Outcome] = field(default_factory=list)

    def work(self, trials: Iterable[Trial]) -> Iterator[Outcome]:
        """Outcomes in the order in which they come.

        Raises:
            RuntimeError: a lane died.
        """
        waiting = iter(trials)
        with DefaultSelector() as selector:
            for channel in self.channels:
                if channel.give(waiting):
                    selector.register(channel.socket, EVENT_READ, channel)
            while selector.get_map():
                for key, _ in selector.select():
                    yield from msgspec.json.decode(key.data.read(), type=list[Outcome])
                    if not key.data.give(waiting):
                        selector.unregister(key.fileobj)


class Channel:
    """The command's end of the line to a lane."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._lines = end.makefile("rb")

    def give(self, waiting: Iterator[Trial]) -> bool:
        """Hands the next trial out, if there is one; its outcome is read before the next."""
        trial = next(waiting, None)
        if trial is None:
            return False
        self.socket.sendall(msgspec.json.encode(trial) + b"\n")
        return True

    def read(self) -> bytes:
        """A line from the lane.

        Raises:
            RuntimeError: it ended.
        """
        line = self._lines.readline()
        if not line:
            raise RuntimeError("a lane ended")
        return line

    def close(self) -> None:
        """Lets the lane end."""
        self._lines.close()
        self.socket.close()


@contextmanager
def open_lanes(count: int, lane: str = LANE) -> Iterator[Lanes]:
    """Starts the lanes, waits until they are warm, and ends them; `lane` is the module that they run."""
    with _directory() as directory, _lanes_in(directory, count, lane) as lanes:
        yield lanes


@contextmanager
def _lanes_in(directory: str, count: int, lane: str) -> Iterator[Lanes]:
    pairs = [socket.socketpair() for _ in range(count)]
    process = _start(lane, directory, [theirs.fileno() for _, theirs in pairs])
    lanes = Lanes([Channel(ours) for ours, _ in pairs])
    for _, theirs in pairs:
        theirs.close()
    try:
        for channel in lanes.channels:
            while (line := channel.read()) != b"ready\n":
                lanes.warm_up += msgspec.json.decode(line, type=list[Outcome])
        yield lanes
    finally:
        for channel in lanes.channels:
            channel.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(lane: str, directory: str, ends: Sequence[int]) -> subprocess.Popen[bytes]:
    """The first lane; it forks the others."""
    source = str(Path(holdfast.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    # One thread per library: a process with threads cannot be forked safely.
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = program.command(lane, directory, *map(str, ends), flags=("-W", "ignore::DeprecationWarning"))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=ends, env=environment)


# --- the two ways to run it ---------------------------------------------------------------------------------------


def drill(trials: Sequence[Trial], *, num_lanes: int, progress: Progress) -> list[Outcome]:
    """Runs the trials; a lane's own trials without a strike are among the outcomes if they violated anything."""
    with open_lanes(max(1, min(num_lanes, len(trials)))) as lanes:
        return [*(outcome for outcome in lanes.warm_up if outcome.violations), *run(lanes, trials, progress)]


def run(lanes: Lanes, trials: Iterable[Trial], progress: Progress) -> list[Outcome]:
    """Runs the trials in lanes that are open."""
    outcomes: list[Outcome] = []
    for outcome in lanes.work(trials):
        outcomes.append(outcome)
        progress.show(len(outcomes), outcomes)
    return outcomes


class DrillError(RuntimeError):
    """The drill cannot judge: a trial without any fault was not clean."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("a trial in which nobody is killed is not clean; mend that first")
        self.outcome = outcome


@contextmanager
def _directory() -> Iterator[str]:
    """A short path in memory if there is one: SIGKILL does not reach the page cache, so a disk proves nothing more."""
    memory = Path("/dev/shm")
    place = (
        memory if memory.is_dir() and shutil.disk_usage(memory).free > MIN_MEMORY_BYTES else Path(tempfile.gettempdir())
    )
    directory = tempfile.mkdtemp(prefix="hfd-", dir=place)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# --- what is shown ------------------------------------------------------------------------------------------------


class Progress:
    """A line on standard error every two seconds."""

    def __init__(self, total: int, what: str, *, quiet: bool = False) -> None:
        self._total, self._what, self._quiet = total, what, quiet
        self._began = self._last = time.monotonic()

    def show(self, done: int, outcomes: Sequence[Outcome]) -> None:
        """Says how far it is, if enough time has passed."""
        now = time.monotonic()
        if self._quiet or now - self._last < PROGRESS_S:
            return
        self._last = now
        rate = done / (now - self._began)
        left = f"{(self._total - done) / rate:.0f} s left" if rate else "time left unknown"
        bad = sum(bool(outcome.violations) for outcome in outcomes if not outcome.plant)
        sys.stderr.write(f"{done} of {self._total} {self._what}, {rate:.1f}/s, {left}, {bad} with violations\n")
        sys.stderr.flush()


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The result of a drill: phase x victim."""
    cells: dict[tuple[str, str], Cell] = defaultdict(Cell)
    total = Cell()
    for outcome in outcomes:
        cells[outcome.phase, outcome.victim].add(outcome)
        total.add(outcome)
    order = {phase: index for index, phase in enumerate(PHASES)}
    rows: list[tuple[str, ...]] = [
        ("phase", "victim", "trials", "struck", "acknowledged", "lost", "torn", "other", "refused", "seconds")
    ]
    for phase, victim in sorted(cells, key=lambda key: (order.get(key[0], len(order)), key)):
        rows.append(_row(phase, victim, cells[phase, victim]))
    rows.append(_row("all", "", total))
    return _aligned(rows, num_left=2)


def _row(phase: str, victim: str, cell: Cell) -> tuple[str, ...]:
    numbers = (cell.trials, cell.struck, cell.acknowledged, cell.lost, cell.torn, cell.other, cell.refused)
    return (phase, victim, *map(str, numbers), f"{cell.seconds:.1f}")


def _aligned(rows: Sequence[tuple[str, ...]], *, num_left: int) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def report(outcomes: Sequence[Outcome], *, as_json: bool, verbose: bool) -> int:
    """Prints the table, or a line of JSON per trial; returns the exit code."""
    bad = [outcome for outcome in outcomes if outcome.violations]
    if as_json:
        say(*(msgspec.json.encode(outcome).decode() for outcome in outcomes))
        return int(bool(bad))
    say(*table(outcomes))
    for outcome in bad[: len(bad) if verbose else MAX_SHOWN]:
        _say_violations(outcome, verbose=verbose)
    return int(bool(bad))


def _say_violations(outcome: Outcome, *, verbose: bool) -> None:
    say("", f"trial {outcome.number} ({outcome.phase}, {outcome.victim}):")
    say(*(f"  {invariant}: {what}" for invariant, what in outcome.violations))
    say(*(f"    {line}" for line in (outcome.evidence if verbose else ())))


def _write_evidence(path: Path, outcomes: Sequence[Outcome]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for outcome in outcomes:
            if outcome.violations:
                file.write(f"=== trial {outcome.number} ({outcome.phase}, {outcome.victim}) {outcome.plant}\n")
                file.writelines(f"{invariant}: {what}\n" for invariant, what in outcome.violations)
                file.writelines(f"    {line}\n" for line in outcome.evidence)


# --- the command --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _options(arguments)
    began = time.monotonic()
    jobs = plan(options.trials, options.seed) if options.only is None else plan(options.only + 1, options.seed)[-1:]
    jobs += full_starts(options.full_starts, options.seed)
    progress = Progress(sum(len(job.cells) for job in jobs), "trials", quiet=options.json)
    outcomes = drill(jobs, num_lanes=options.lanes, progress=progress)
    code = report(outcomes, as_json=options.json, verbose=options.only is not None)
    if options.evidence:
        _write_evidence(options.evidence, outcomes)
    if not options.json:
        verdict = "violations found" if code else "no violation"
        say("", f"{len(outcomes)} trials of seed {options.seed} in {time.monotonic() - began:.1f} s: {verdict}")
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="holdfast drill",
        description="Kills processes of real jobs and judges what is left. Other drills, each with its own --help: "
        "faults, power, soak, sim.",
    )
    parser.add_argument("drill", choices=["crash"], help="which drill")
    parser.add_argument("--trials", type=int, default=1000, help="how many trials (default 1000)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same plan (default 1)")
    parser.add_argument(
        "--only",
        type=int,
        metavar="N",
        help="only the job of trial N of the seed, up to that trial, with its journal and logs",
    )
    parser.add_argument("--full-starts", type=int, default=0, metavar="N", help="also N trials of fresh interpreters")
    parser.add_argument("--lanes", type=int, default=NUM_LANES, help="trials at a time (default: processors + 1)")
    parser.add_argument("--evidence", type=Path, metavar="FILE", help="write journal and logs of violations there")
    parser.add_argument("--json", action="store_true", help="one JSON object per trial instead of the table")
    options = parser.parse_args(arguments)
    if options.trials < 0 or options.full_starts < 0 or options.lanes < 1:
        parser.error("numbers must not be negative, and there is at least one lane")
    if (options.only is None and options.trials + options.full_starts < 1) or (options.only or 0) < 0:
        parser.error("there is at least one trial: no trial shows no violation, whatever is broken")
    return options


if __name__ == "__main__":
    sys.exit(main())
