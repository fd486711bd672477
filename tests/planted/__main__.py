"""`make planted`: plants every bug of a drill, or one, and says how it was found; exit code 1 if one is missed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

from holdfast.testing.checks.power_cut_disk import KINDS, why_not
from holdfast.testing.drill.crash_drill import NUM_LANES, Progress
from holdfast.testing.power import power
from planted import crash, faults, hunt, simulator

SEED = 1
Rows = Iterator[tuple[bool, str]]


def _crash(names: list[str]) -> Rows:
    with hunt.open_lanes(NUM_LANES) as lanes:
        quarries = hunt.hunt(lanes, names, SEED, Progress(len(names), "planted bugs found"))
    yield from ((quarry.found_by is not None, str(quarry)) for quarry in quarries)


def _power(names: list[str]) -> Rows:
    reasons = {kind: why_not(kind) for kind in KINDS}
    kinds = [kind for kind, reason in reasons.items() if not reason]
    if not kinds:
        sys.exit(f"the power drill cannot run: {reasons[KINDS[0]]}")
    with hunt.open_lanes(NUM_LANES) as lanes:
        trials = power.plan({(kind, False): power.boundaries(lanes, kind, False, SEED) for kind in kinds}, SEED)
        quarries = hunt.hunt_by_cuts(lanes, names, trials, Progress(len(names), "planted bugs found"))
    yield from ((quarry.found_by is not None, str(quarry)) for quarry in quarries)


def _faults(names: list[str]) -> Rows:
    for name in names:
        cell, found = faults.hunt(name)
        invariant, what = found or ("MISSED", faults.BUGS[name].what)
        yield found is not None, f"{name:<28} {invariant:<6} {cell:<18} {what[:90]}"


def _simulator(names: list[str]) -> Rows:
    for name in names:
        result = simulator.hunt(name, 0)
        yield result is not None, f"{name:<28} " + (f"seed {result.seed}: {result.violation}" if result else "MISSED")


HUNTS: dict[str, tuple[Callable[[list[str]], Rows], list[str]]] = {
    "crash": (_crash, list(crash.BUGS)),
    "faults": (_faults, list(faults.BUGS)),
    "power": (_power, list(hunt.CUT_IN)),
    "sim": (_simulator, list(simulator.BUGS)),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="planted", description=__doc__)
    parser.add_argument("drill", choices=HUNTS)
    parser.add_argument("bugs", nargs="*", metavar="BUG", help="these; all by default")
    given = parser.parse_args()
    run, known = HUNTS[given.drill]
    if unknown := set(given.bugs) - set(known):
        parser.error(f"no such bug: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    missed = 0
    for found, row in run(given.bugs or known):
        missed += not found
        print(row, flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
