"""`holdfast report`: where the time of a run went, and its incidents, from the journal of its launcher. Without torch.

RUN is a directory with a journal (as `holdfast run` names it), a journal, or a run id under the runtime directory; without
it the newest journal there is taken. An exact name wins over similar ones. A job of several nodes has one journal per node; each tells of its own ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.base.config import load
from holdfast.base.errors import UsageError
from holdfast.cli import status
from holdfast.cli.console import GOOD, PROBLEM, print_json, print_table, say
from holdfast.core.elastic.goodput import ORDER, Goodput
from holdfast.core.elastic.incident import box
from holdfast.keeper.observe.run_summary import NAME, earlier_runs, newest_run


def report(run: str | None, *, as_json: bool) -> int:
    """Prints the sums of the newest run of a journal, and a line for each run before it; returns the exit code."""
    path, found = observed(run)
    if as_json:
        print_json({"journal": str(path), **_document(found), "earlier": list(map(_document, earlier_runs(path)))})
    else:
        _show(path, found)
        for run_before in earlier_runs(path):
            say(f"an earlier run in this journal: {_counts(run_before)}")
    return GOOD if found.finished or not found.incidents else PROBLEM


def observed(run: str | None) -> tuple[Path, Goodput]:
    """The journal of a run, and what its newest life sums to.

    Raises:
        UsageError: there is none, or it tells of no progress.
    """
    path = _journal(run)
    found = newest_run(path)
    if found is None:
        raise UsageError(f"{path} tells of no progress", remedy="look again when the job has made a step")
    return path, found


def _journal(run: str | None) -> Path:
    given = Path(run) if run else None
    if given is not None and given.is_file():
        return given
    if given is not None and (given / NAME).is_file():
        return given / NAME
    root = status.runtime_path(None)
    journals = sorted(root.glob(f"run-*/{NAME}"), key=lambda path: path.stat().st_mtime)
    if run:
        journals = _named(run, journals)
    if not journals:
        raise UsageError(
            f"no journal of {run or 'any run'}",
            where=str(root),
            remedy="`holdfast run` writes one, unless --watchdog=off",
        )
    if run and len(journals) > 1:
        names = ", ".join(path.parent.name for path in reversed(journals))
        say(f"several journals are of {run}, and the newest is taken: {names}", file=sys.stderr)
    return journals[-1]


def _named(run: str, journals: Sequence[Path]) -> list[Path]:
    """The journal of exactly this name or run on this node, else those of the run on others, else the only one that begins so.

    Raises:
        UsageError: several begin so, and none is called so.
    """
    names = {path: path.parent.name for path in journals if path.parent.name.startswith((f"run-{run}-", run))}
    exact = [path for path, name in names.items() if name in (run, f"run-{run}-{load().node}")]
    # A run's id and a node's label may both have a `-`: of other nodes the last part counts as the label.
    exact = exact or [path for path, name in names.items() if name.rpartition("-")[0] == f"run-{run}"]
    if not exact and len(names) > 1:
        what = f"no run is called {run}, and several begin so: {', '.join(names.values())}"
        raise UsageError(what, remedy="name one of these")
    return exact or list(names)


def _document(found: Goodput) -> Mapping[str, Any]:
    return {
        "wall_s": round(found.wall_s, 3),
        "goodput": round(found.share, 4),
        "seconds": {name: round(found.seconds.get(name, 0.0), 3) for name in ORDER},
        "steps": found.steps,
        "steps_made": found.made,
        "steps_made_again": found.again,
        "finished": found.finished,
        "watchdog": found.watchdog,
        "reports": list(found.reports),
        "incidents": [{**asdict(incident), "total_s": incident.total_s} for incident in found.incidents],
    }


def _show(path: Path, found: Goodput) -> None:
    for incident in found.incidents:
        say(box(incident))
    for reason in found.reports:
        say(f"watchdog: {reason}")
    rows = [
        (name, round(seconds, 1), f"{100 * seconds / found.wall_s:.1f} %")
        for name in ORDER
        if (seconds := found.seconds.get(name, 0.0)) > 0
    ]
    print_table(("what", "seconds", "share"), rows)
    say(_counts(found))
    watchdog = f", watchdog {found.watchdog}" if found.watchdog else ""
    say(f"goodput {100 * found.share:.1f} %{watchdog}  ({path})")


def _counts(found: Goodput) -> str:
    """One line: how long a run took, its steps and incidents, and how it ended."""
    state = "ended well" if found.finished else "goes on, or was ended"
    before = f" after {found.steps - found.made} of runs before" if found.steps > found.made else ""
    again = f", {found.again} of them again" if found.again else ""
    return f"{found.wall_s:.1f} s, {found.made} steps{before}{again}, {len(found.incidents)} incidents; {state}"
