"""Writes the page of what the default tests run of the package: lines and branches, by folder, and the files with the least.

python -m website.covered build/coverage/report.json website/covered.json      sums up what `make coverage` measured
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from website.pages import joined, page, table

PACKAGE = "src/holdfast/"
# Files with a smaller share are listed one by one, if they have at least so many lines.
LEAST, LINES = 0.8, 20
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def summary(report: dict[str, Any]) -> dict[str, list[int]]:
    """Returns what a report of coverage.py counts for each file of the package.

    Args:
        report: what `coverage json` writes.

    Returns:
        Path below the package -> lines, lines that ran, branches, branches that were taken.
    """
    counted = {path: [file["summary"][name] for name in COUNTS] for path, file in report["files"].items()}
    return {path.partition(PACKAGE)[2]: row for path, row in sorted(counted.items()) if row[0]}


def covered(files: dict[str, list[int]]) -> str:
    """Returns the page.

    Args:
        files: as `summary` returns them; empty where nothing was measured yet.
    """
    what = (
        "Lines and branches of the package that the default tests run, also in processes that they start or fork. "
        "What a process ran that was killed is not counted, and tests kill many. Made by `make coverage`."
    )
    if not files:
        return page("Coverage", what, "Not measured yet.")
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path, row in files.items():
        for folder in {"/".join(path.split("/")[:2]) if path.count("/") > 1 else path.split("/")[0], "all"}:
            folders[folder] = [total + count for total, count in zip(folders[folder], row, strict=True)]
    head = ("folder", "lines", "run", "branches", "taken")
    least = {path: row for path, row in files.items() if row[0] >= LINES and _share(row) < LEAST}
    rows = sorted(least.items(), key=lambda item: _share(item[1]))
    parts = {
        "By folder": table(head, [_cells(folder, row) for folder, row in sorted(folders.items())]),
        f"Files below {LEAST:.0%}": table(("file", *head[1:]), [_cells(path, row) for path, row in rows]),
    }
    return page("Coverage", what, joined(parts))


def _share(row: list[int]) -> float:
    """Lines that ran and branches that were taken, of all of both."""
    return (row[1] + row[3]) / max(1, row[0] + row[2])


def _cells(name: str, row: list[int]) -> tuple[str, ...]:
    lines, ran, branches, taken = row
    return (
        f"`{name}`",
        str(lines),
        f"{ran / max(1, lines):.0%}",
        str(branches),
        f"{taken / branches:.0%}" if branches else "",
    )


def main(report: str, to: str) -> None:
    """Sums up a report, one file a line, so that a change of it can be read."""
    files = summary(json.loads(Path(report).read_text()))
    lines = ",\n".join(f"{json.dumps(path)}: {json.dumps(row)}" for path, row in files.items())
    Path(to).write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
