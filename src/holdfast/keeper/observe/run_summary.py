"""Reading the journal of this node's launcher (`elastic.watchdog.run_journal`): lines, the newest run in it, and what it sums to.

Read by `holdfast report`, and by the keeper for its status and metrics. A journal that is not there, or not readable, says
nothing. Pure sums: `core.elastic.goodput`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.base import private
from holdfast.core.elastic.goodput import ORDER, Goodput, goodput
from holdfast.core.elastic.incident import PARTS
from holdfast.tiers.format.strict_json import parse_loose

NAME = "journal.jsonl"
MAX_BYTES = 64 << 20
# No time in seconds, and no step, is so large; beyond it sums lose their meaning.
_MOST = 1e15


def newest_run(path: Path, root: str = "") -> Goodput | None:
    """The sums of the newest run that a journal tells of; None if it tells of no progress. Only jobs count that
    saved to the checkpoint path `root`, or told none; all, if it is empty.

    Raises:
        OSError: it cannot be read.
    """
    runs = _runs(lines_of(path))
    paths = [{str(line.get("root")) for line in run if line.get("event") == "works on"} for run in runs]
    known = [run for run, its in zip(runs, paths, strict=True) if root in its]
    unknown = [run for run, its in zip(runs, paths, strict=True) if not root or not its]
    return goodput((known or unknown or [[]])[-1])


def earlier_runs(path: Path) -> list[Goodput]:
    """Returns the sums of each run of a journal before the one that `newest_run` tells of, oldest first; none without progress.

    Raises:
        OSError: it cannot be read.
    """
    return [found for run in _runs(lines_of(path))[:-1] if (found := goodput(run)) is not None]


def _runs(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the lines of each run, in the order of their beginnings: jobs of one name may write beside each other."""
    runs: list[list[dict[str, Any]]] = []
    latest: dict[str, list[dict[str, Any]]] = {}  # writer -> its newest run
    for line in lines:
        writer = str(line.get("by"))
        if line.get("event") == "run" or writer not in latest:
            latest[writer] = []
            runs.append(latest[writer])
        latest[writer].append(line)
    return runs


class RunFacts:
    """Holds what a keeper says of the run that its node's launcher writes down. Read anew only when there is more of
    it.
    """

    def __init__(self, path: Path, root: str = "") -> None:
        self._path, self._root = path, root
        self._size = -1
        self._facts: dict[str, Any] | None = None

    def __call__(self) -> dict[str, Any] | None:
        """Goodput, seconds by what they went into, and seconds of recoveries by part; None without a launcher's journal."""
        try:
            size = self._path.stat().st_size
            if size != self._size:
                found = newest_run(self._path, self._root)
                self._size, self._facts = size, _facts(found) if found is not None else None
        except OSError:
            self._facts = None
        return self._facts


def _facts(found: Goodput) -> dict[str, Any]:
    parts = {name: sum(incident.seconds.get(name, 0.0) for incident in found.incidents) for name, _ in PARTS}
    return {
        "goodput": found.share,
        "wall_s": found.wall_s,
        "seconds": {name: found.seconds.get(name, 0.0) for name in ORDER},
        "incidents": len(found.incidents),
        "detection_s": sum(incident.found_s for incident in found.incidents),
        "recovery_s": parts,
        "watchdog": found.watchdog,
        "reports": list(found.reports),
    }


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Returns the lines that can be read; one that was cut off by a crash, or is none of ours, is passed over.

    Raises:
        OSError: it cannot be read.
    """
    text = private.read(path, MAX_BYTES).decode(errors="replace")
    found = []
    for line in text.splitlines():
        try:
            entry = parse_loose(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and _is_fit(entry):
            found.append(entry)
    return found


def _is_fit(entry: dict[str, Any]) -> bool:
    """Returns whether a line has a time, and numbers where sums are made of them."""
    numbers = (entry.get("t"), entry.get("wall", 0), entry.get("found_s", 0), entry.get("step", 0))
    tables = [table for name in ("spent", "seconds") if (table := entry.get(name))]
    known = all(isinstance(table, dict) for table in tables)
    return known and all(map(_is_number, (*numbers, *(number for table in tables for number in table.values()))))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _MOST
