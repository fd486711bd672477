"""`holdfast drill faults`: cells of the matrix of faults x phases on real processes, as a table.

Exit code 0: no cell broke a promise (with --plant: every planted bug was found); 1: otherwise; 2: usage.
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
from dataclasses import replace
from pathlib import Path

import msgspec

from holdfast.testing.faults import cells, planted
from holdfast.testing.faults.cells import CELLS, Cell
from holdfast.testing.faults.job import Outcome, run

# Cells mostly wait: for leases, and for what must not happen.
JOBS = 3
# How often each cell of a planted bug is tried: some need two things to meet, which a busy machine keeps apart.
TRIES = 3


@contextmanager
def ground() -> Iterator[Path]:
    """A short directory: a socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="hff-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_cell(cell: Cell, plant: str = "") -> Outcome:
    """One cell in a directory of its own, with a bug planted if one is named."""
    with ground() as base, planted.in_ranks(plant):
        return replace(run(cell, base, plant=planted.in_keepers(plant)), plant=plant)


def hunt(name: str) -> tuple[str, str, tuple[str, str] | None]:
    """The bug, the first cell that finds it, and the violation; no cell and None if it is missed in all of its TRIES."""
    bug = planted.BUGS[name]
    for cell in bug.cells * TRIES:
        for violation in run_cell(CELLS[cell], name).violations:
            if violation[0] in bug.invariants:
                return name, cell, violation
    return name, "", None


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = _options(arguments)
    chosen = cells.chosen(tuple(options.cells), phase=options.phase, fault=options.fault, group=options.group)
    if options.list:
        _say(*(f"{cell!s:<26} {cell.phase:<10} {cell.group}" for cell in chosen))
        return 0
    if options.plant:
        return _hunt(
            list(planted.BUGS) if options.plant == "all" else [options.plant], options.jobs, as_json=options.json
        )
    if not chosen:
        sys.stderr.write("no cell matches; `holdfast drill faults --list` names them all\n")
        return 2
    began, bad, count = time.monotonic(), 0, 0
    if not options.json:
        _say(f"{'cell':<26} {'phase':<10} {'group':<10} {'named':>5} {'back':>7} {'seconds':>7}  violations")
    for outcome in _each(chosen, options.jobs):
        count, bad = count + 1, bad + bool(outcome.violations)
        _say(msgspec.json.encode(outcome).decode() if options.json else _row(outcome))
    if not options.json:
        _say("", f"{count} cells in {time.monotonic() - began:.0f} s: {bad} with violations")
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


def _hunt(names: Sequence[str], jobs: int, *, as_json: bool) -> int:
    """Looks for every bug; those of the ranks one after the other, for all cells of this process have them."""
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(hunt, [name for name in names if planted.in_keepers(name)]))
    found += [hunt(name) for name in names if not planted.in_keepers(name)]
    for name, cell, evidence in found:
        bug = planted.BUGS[name]
        if as_json:
            row = {"name": name, "kind": bug.kind, "cell": cell, "found_by": evidence}
            _say(msgspec.json.encode(row).decode())
        else:
            invariant, what = evidence or ("MISSED", bug.what)
            _say(f"{name:<30} {bug.kind:<12} {cell:<18} {invariant:<6} {what[:100]}")
    missed = sum(evidence is None for _, _, evidence in found)
    if not as_json:
        _say("", f"{len(names) - missed} of {len(names)} planted bugs found")
    return int(bool(missed))


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="holdfast drill faults", description="Hurts real jobs in every phase and judges what is left."
    )
    parser.add_argument("--cells", nargs="+", default=[], metavar="NAME", help="these, with * and ?: 'kill@*-1'")
    parser.add_argument("--phase", default="", choices=cells.PHASES, help="only cells that strike in this phase")
    parser.add_argument("--fault", default="", metavar="WHAT", help="only this fault: kill, stop, EIO, ..")
    parser.add_argument("--group", default="", choices=cells.GROUPS, help="only cells of this group of faults")
    parser.add_argument("--plant", choices=["all", *planted.BUGS], metavar="NAME|all", help="plant a bug and find it")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"cells at a time (default {JOBS})")
    parser.add_argument("--list", action="store_true", help="name the cells and run none")
    parser.add_argument("--json", action="store_true", help="one JSON object per cell instead of the table")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("at least one cell at a time")
    return options
