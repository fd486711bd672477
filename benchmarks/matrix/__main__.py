"""`make matrix`: runs the suite on other releases, one environment at a time, and keeps the results with their dates.

python -m benchmarks.matrix [ROW ...] [--tests "tests/checkpoint tests/elastic"] [--options="--slow"] [--list] [--pages]

Rows are named by `--list`; all by default. `--pages` runs nothing: it makes the tables and the ranges from the results again.
The exit code is 1 if a test failed or a row could not be run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.matrix import environment, pages
from benchmarks.matrix.rows import rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "versions.jsonl"
PAGE = ROOT / "docs" / "versions.md"
RANGES = ROOT / "src" / "holdfast" / "cli" / "tested.json"


def main() -> int:
    every = rows(ROOT)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="these; all by default")
    parser.add_argument("--tests", default="", help="paths of tests, instead of those of the row")
    parser.add_argument("--options", default="", help="more arguments of pytest")
    parser.add_argument("--list", action="store_true", help="names the rows")
    parser.add_argument("--pages", action="store_true", help="runs nothing; makes tables and ranges from the results")
    given = parser.parse_args()
    if unknown := sorted(set(given.rows) - every.keys()):
        parser.error(f"there is no row {', '.join(unknown)}; there are {', '.join(every)}")
    if given.list:
        print("\n".join(f"{row.name:<20} {' '.join(row.packages)}" for row in every.values()))
        return 0
    failed = False
    for name in [] if given.pages else given.rows or list(every):
        result = environment.run(every[name], given.tests.split(), given.options.split())
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
        failed |= bool(result["ended"] or result["failed"])
    write_pages()
    return int(failed)


def write_pages() -> None:
    """Makes what is made from the results."""
    found = results()
    PAGE.write_text(pages.with_tables(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    RANGES.write_text(json.dumps(pages.ranges(found), indent=2) + "\n", encoding="utf-8")


def results() -> list[dict[str, Any]]:
    """Returns every result that was kept, oldest first."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    raise SystemExit(main())
