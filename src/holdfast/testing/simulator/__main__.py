"""`holdfast drill sim`: many seeds of the simulated cluster, on all processors; or one seed with its whole story.

Exit code 0: no violation; 1: otherwise; 2: usage. Every finding names its seed, and
`--only SEED` tells it again, event by event.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from holdfast.base.terminal import say
from holdfast.testing.simulator.run import Result, run


def simulate(seeds: Sequence[int], *, processes: int = 1) -> list[Result]:
    """The results of these seeds, in order."""
    if processes <= 1 or len(seeds) < 8:
        return [run(seed) for seed in seeds]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(run, seeds, chunksize=4)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _options(arguments)
    if options.only is not None:
        return _tell(run(options.only, verbose=True))
    began = time.monotonic()
    seeds = range(options.seed, options.seed + options.seeds)
    results = simulate(seeds, processes=options.processes)
    broken = [result for result in results if result.violation is not None]
    faults = sum((result.faults for result in results), Counter[str]())
    if options.json:
        say(
            json.dumps(
                {
                    "seeds": len(results), "faults": faults, "recoveries": sum(r.recoveries for r in results),
                    "live_fills": sum(r.fills for r in results),
                    "answers": sum((r.answers for r in results), Counter[str]()),
                    "events": sum(r.num_events for r in results), "seconds": round(time.monotonic() - began, 1),
                    "violations": [{"seed": r.seed, "what": str(r.violation)} for r in broken],
                }
            )
        )  # fmt: skip
        return int(bool(broken))
    for name, count in sorted(faults.items(), key=lambda item: -item[1]):
        say(f"{count:8} {name}")
    say(*(f"seed {result.seed}: {result.violation}" for result in broken))
    answers = sum((result.answers for result in results), Counter[str]())
    say("answers of the escalation policy: " + ", ".join(f"{count} {name}" for name, count in answers.most_common()))
    fills = sum(r.fills for r in results)
    totals = f"{sum(r.num_events for r in results)} events, {sum(r.recoveries for r in results)} recoveries"
    totals += f" ({fills} from live state)"
    verdict = f"{len(broken)} violations" if broken else "no violation"
    say(f"{len(results)} seeds, {totals}, {time.monotonic() - began:.1f} s: {verdict}")
    return int(bool(broken))


def _tell(result: Result) -> int:
    say(*result.story)
    say(f"seed {result.seed}: {result.violation or 'no violation'}; transcript {result.digest}")
    return int(result.violation is not None)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="holdfast drill sim", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=300, metavar="N", help="how many seeds (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="the first one (default 0)")
    parser.add_argument("--only", type=int, metavar="SEED", help="one seed, with its whole transcript")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: all processors")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.processes < 1:
        parser.error("there is at least one seed and one process")
    return options


if __name__ == "__main__":
    sys.exit(main())
