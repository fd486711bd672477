"""`make redteam`: cases one after the other until the time is over, one line each."""

from __future__ import annotations

import argparse
import secrets
import sys
import time

import forked
from redteam.case import drawn, shrunk
from redteam.judge import wrongs


def main() -> int:
    parser = argparse.ArgumentParser(prog="redteam", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long new cases are begun")
    parser.add_argument("--seed", type=int, default=None, help="cases follow from it; drawn, and told, by default")
    parser.add_argument("--case", type=int, default=None, help="only the case of this number")
    parser.add_argument("--plant", default="", help="a bug of redteam/planted.py, to see that it is found")
    parser.add_argument("--no-shrink", action="store_true", help="leave what fails as it was drawn")
    given = parser.parse_args()
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    began, number, failed = time.monotonic(), given.case or 0, 0
    while True:
        case = drawn(seed, number)
        started = time.monotonic()
        found = wrongs(case, plant=given.plant)
        print(
            f"{number:4d} {time.monotonic() - started:5.1f} s  {'ok   ' if not found else 'WRONG'} {case}", flush=True
        )
        for line in found:
            print(f"       {line}", flush=True)
        if found:
            failed += 1
            if not given.no_shrink:
                plainest = shrunk(case, lambda plainer: bool(wrongs(plainer, plant=given.plant)))
                print(f"       as plain as it still fails: {plainest}", flush=True)
        number += 1
        if given.case is not None or time.monotonic() - began > given.seconds:
            break
    print(f"{number - (given.case or 0)} cases, {failed} wrong, seed {seed}", flush=True)
    forked.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
