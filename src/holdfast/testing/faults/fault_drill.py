"""`holdfast drill faults`: cells of the matrix of faults x phases on real processes, as a table.

Exit code 0: no cell broke a promise; 1: otherwise; 2: usage.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast.base.terminal import say
from holdfast.testing.faults import cells
from holdfast.testing.faults.cells import Cell
from holdfast.testing.faults.faulted_job import Outcome, run

# Cells mostly wait: for leases, and for what must not happen.
JOBS = 3


@contextmanager
def ground() -> Iterator[Path]:
    """A short directory: a socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="hff-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_cell(cell: Cell) -> Outcome:
    """One cell in a directory of its own."""
    with ground() as base:
        return run(cell, base)


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = _options(arguments)
    chosen = cells.chosen(tuple(options.cells), phase=options.phase, fault=options.fault, group=options.group)
    if options.list:
        say(*(f"{cell!s:<26} {cell.phase:<10} {cell.group}" for cell in chosen))
        return 0
    if not chosen:
        sys.stderr.write("no cell matches; `holdfast drill faults --list` names them all\n")
        return 2
    began, bad, count = time.monotonic(), 0, 0
    if not options.json:
        say(f"{'cell':<26} {'phase':<10} {'group':<10} {'named':>5} {'back':>7} {'seconds':>7}  violations")
    for outcome in _each(chosen, options.jobs):
        count, bad = count + 1, bad + bool(outcome.violations)
        say(msgspec.json.encode(outcome).decode() if options.json else _row(outcome))
    if not options.json:
        say("", f"{count} cells in {time.monotonic() - began:.0f} s: {bad} with violations")
    return int(bool(bad))


def _each(chosen: Iterable[Cell], jobs: int) -> Iterator[Outcome]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(run_cell, chosen)


def _row(outcome: Outcome) -> str:
    told = "; ".join(f"{invariant}: {what}" for invariant, what in outcome.violations) or "none"
    return (
        f"{outcome.cell:<26} {outcome.phase:<10} {outcome.group:<10} {outcome.acknowledged:>5} {outcome.back:>7} "
        f"{outcome.seconds:>7.1f}  {told}"
    )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="holdfast drill faults", description="Hurts real jobs in every phase and judges what is left."
    )
    parser.add_argument("--cells", nargs="+", default=[], metavar="NAME", help="these, with * and ?: 'kill@*-1'")
    parser.add_argument("--phase", default="", choices=cells.PHASES, help="only cells that strike in this phase")
    parser.add_argument("--fault", default="", metavar="WHAT", help="only this fault: kill, stop, EIO, ..")
    parser.add_argument("--group", default="", choices=cells.GROUPS, help="only cells of this group of faults")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"cells at a time (default {JOBS})")
    parser.add_argument("--list", action="store_true", help="name the cells and run none")
    parser.add_argument("--json", action="store_true", help="one JSON object per cell instead of the table")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("at least one cell at a time")
    return options
