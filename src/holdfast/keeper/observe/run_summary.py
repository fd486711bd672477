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


def newest_run(path: Path) -> Goodput | None:
    """The sums of the newest run that a journal tells of; None if it tells of no progress.

    Raises:
        OSError: it cannot be read.
    """
    lines = lines_of(path)
    begins = [index for index, line in enumerate(lines) if line.get("event") == "run"]
    if not begins:
        return goodput(lines)
    writer = lines[begins[-1]].get("by")  # another job of the same name may write beside it
    return goodput([line for line in lines[begins[-1] :] if line.get("by") == writer])


class RunFacts:
    """Holds what a keeper says of the run that its node's launcher writes down. Read anew only when there is more of
    it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = -1
        self._facts: dict[str, Any] | None = None

    def __call__(self) -> dict[str, Any] | None:
        """Goodput, seconds by what they went into, and seconds of recoveries by part; None without a launcher's journal."""
        try:
            size = self._path.stat().st_size
            if size != self._size:
                found = newest_run(self._path)
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
