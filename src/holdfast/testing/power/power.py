"""The power drill: the power goes after every system call of persist, commit and retention, and what is left is judged.

    holdfast drill power [--trials N] [--seed S] [--filesystem ext4|xfs] [--only N] [--json]

A trial is one of the crash drill (lane.py), whose checkpoints lie on a file system of its own (checks/power_cut_disk.py). In its first
life the file system is shut down exactly before or after one call, trainer and keeper die at that instant, the file
system is mounted again as after a start of the machine, and the job comes back from what it holds. The boundaries are
not drawn: a life without a cut is measured first, and the plan has every boundary of one job, each with the journal
lost and with the journal written. Exit code 0: nothing violated; 1: otherwise; 2: usage, or power cannot
be cut here.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence

from holdfast.base.terminal import say
from holdfast.testing.checks.power_cut_disk import JOURNAL_LOST, JOURNAL_WRITTEN, KINDS, why_not
from holdfast.testing.drill.crash_drill import (
    NUM_LANES,
    DrillError,
    Lanes,
    Progress,
    open_lanes,
    report,
    run,
)
from holdfast.testing.drill.crash_points import MEASURE
from holdfast.testing.drill.trial_plan import LAST_LIFE, NO_STRIKE, SOLO, Aim, LifePlan, Trial, script

# The third commit is the first after which something is retired. The last save sees to it that this is over before the
# life ends; nothing is cut in it.
SAVES = script("D1 D1 D1 D1")
# Whether the state is large.
SIZES = (False, True)
PHASES = ("persist", "commit", "retention")
_HOW = {JOURNAL_LOST: "journal lost", JOURNAL_WRITTEN: "journal written"}
Boundary = tuple[str, int, int]


def boundaries(lanes: Lanes, kind: str, large: bool, seed: int) -> list[Boundary]:
    """(phase, pass, number of the point) of every boundary of one job's first three versions.

    Args:
        lanes: open lanes.
        kind: of file system.
        large: large files are written past the page cache, with other calls.
        seed: of the plan.

    Raises:
        DrillError: the job without a cut was not clean.
    """
    calm = Trial(0, seed, SOLO, NO_STRIKE, (LifePlan(SAVES), LAST_LIFE), mode=MEASURE, disk=kind, large=large)
    (outcome,) = lanes.work([calm])
    if outcome.violations:
        raise DrillError(outcome)
    found = []
    for phase, number, points in outcome.passes:
        if phase not in PHASES:
            continue
        total = sum(name == phase for name, _, _ in outcome.passes)
        last = 1 if phase == "retention" else total * (len(SAVES) - 1) // len(SAVES)
        # A point lies before and after each call; before the next is the same as after the last, but for the first.
        found += [(phase, number, point) for point in range(points) if number <= last and (point == 0 or point % 2)]
    return found


def draw(kind: str, how: int, boundary: Boundary, *, number: int, seed: int, large: bool) -> Trial:
    """The trial in which the power goes at a boundary."""
    phase, occurrence, point = boundary
    aim = Aim(phase, "k0", "n0", 0.0, True, 0.0, exact=(occurrence, point), cut=how)
    cells = ((phase, f"{kind}, {_HOW[how]}"),)
    return Trial(number, seed, SOLO, cells, (LifePlan(SAVES, aim), LAST_LIFE), disk=kind, large=large)


def plan(places: Mapping[tuple[str, bool], Sequence[Boundary]], seed: int) -> list[Trial]:
    """Every boundary with both kinds of cut, in an order that the seed shuffles: the first half has every boundary
    once, the second half has it with the other kind of cut. A place is a file system, and whether the state is
    large.
    """
    first, second = [], []
    for place, found in places.items():
        for index, boundary in enumerate(found):
            hows = (JOURNAL_LOST, JOURNAL_WRITTEN) if index % 2 else (JOURNAL_WRITTEN, JOURNAL_LOST)
            first.append((place, hows[0], boundary))
            second.append((place, hows[1], boundary))
    for half in (first, second):
        random.Random(seed).shuffle(half)
    return [
        draw(kind, how, cut, number=number, seed=seed, large=large)
        for number, ((kind, large), how, cut) in enumerate([*first, *second])
    ]


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = _options(arguments)
    began = time.monotonic()
    kinds = (options.filesystem,) if options.filesystem else KINDS
    reasons = [reason for reason in map(why_not, kinds) if reason]
    if reasons:
        sys.stderr.write(f"the power drill cannot run: {reasons[0]}\n")
        return 2
    try:
        with open_lanes(options.lanes) as lanes:
            trials = plan(
                {(kind, large): boundaries(lanes, kind, large, options.seed) for kind in kinds for large in SIZES},
                options.seed,
            )
            total = len(trials)
            trials = _chosen(trials, options)
            outcomes = run(lanes, trials, Progress(len(trials), "trials", quiet=options.json))
    except DrillError as error:
        sys.stderr.write(f"{error}: {error.outcome.violations}\n")
        return 1
    code = report(outcomes, as_json=options.json, verbose=options.only is not None)
    if not options.json:
        verdict = "violations found" if code else "no violation"
        seconds = time.monotonic() - began
        say("", f"{len(trials)} of {total} cuts of seed {options.seed} in {seconds:.1f} s: {verdict}")
    return code


def _chosen(trials: list[Trial], options: argparse.Namespace) -> list[Trial]:
    if options.only is None:
        return trials[: options.trials]
    return [trial for trial in trials if trial.number == options.only]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="holdfast drill power", description="Cuts the power of real file systems and judges what is left."
    )
    parser.add_argument("--trials", type=int, default=200, help="how many cuts of the plan; 0 for all (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same plan (default 1)")
    parser.add_argument("--filesystem", choices=KINDS, help="only this one (default: each)")
    parser.add_argument("--only", type=int, metavar="N", help="only trial N of the seed, with its journal and logs")
    parser.add_argument("--lanes", type=int, default=NUM_LANES, help="trials at a time (default: processors + 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object per trial instead of the table")
    options = parser.parse_args(arguments)
    if options.trials < 0 or options.lanes < 1:
        parser.error("numbers must not be negative, and there is at least one lane")
    options.trials = options.trials or None
    return options
