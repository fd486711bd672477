"""`holdfast trace`: what ranks and keepers wrote about a run, as a Perfetto trace and as a page that needs nothing else.

Reads the tracks of `base.trace` and the launchers' journals (faults and recoveries); all machines on one axis, by the
wall clock that each of them noted. Writes two files: Chrome trace events as JSON (for ui.perfetto.dev) and one HTML
page with the data inside.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.base import private
from holdfast.base.errors import CorruptError, UsageError
from holdfast.base.replacing import replacing
from holdfast.base.trace import MAX_BYTES, SUFFIX
from holdfast.cli import console
from holdfast.keeper.observe.run_summary import NAME, lines_of
from holdfast.tiers.format.strict_json import parse_loose

PAGE = Path(__file__).with_name("trace.html")
_SLOT = "/*DATA*/null"
# A process that runs its script again begins another track in its file.
MOST_BYTES = 16 * MAX_BYTES
_NUMBERS = re.compile("([0-9]{1,18})")
_ACTION = re.compile(r"\d+[FBIW]\d+\Z")
_KINDS = {
    "wait": "bubble",
    "copy": "copy",
    "copy beside": "copy",
    "copied": "copy",
    "fence": "fence",
    "saved": "save",
    "restored": "recovery",
    "node.preloaded": "recovery",
    "node.sealed": "seal",
    "node.replicated": "replicate",
    "node.refilled": "replicate",
    "node.parity": "replicate",
    "node.persisted": "persist",
    "node.committed": "persist",
    "node.retired": "persist",
    "node.takeover": "fault",
    "memory_level_lost": "fault",
    "memory_level_back": "recovery",
    "step": "step",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that happened; seconds from the beginning of the run."""

    what: str
    kind: str
    start: float
    end: float
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Track:
    """The spans of one process, in the order of their starts."""

    name: str
    pid: int
    spans: tuple[Span, ...]


def trace(directories: Sequence[str], *, html: str | None, perfetto: str | None, as_json: bool) -> int:
    """Writes both files, into the first directory unless told where; returns the exit code.

    Raises:
        UsageError: no tracks there. CorruptError: a line that is no span; names file and line.
    """
    homes = [Path(directory) for directory in directories]
    home = homes[0]
    tracks = read(homes)
    file = Path(html) if html else home / "timeline.html"
    events = Path(perfetto) if perfetto else home / "timeline.json"
    _write(events, json.dumps({"traceEvents": list(_chrome(tracks))}), named=perfetto is not None)
    _write(file, page(tracks, home.name), named=html is not None)
    seconds = max((span.end for track in tracks for span in track.spans), default=0.0)
    count = sum(len(track.spans) for track in tracks)
    kinds = Counter(span.kind for track in tracks for span in track.spans)
    summary = {"tracks": [t.name for t in tracks], "spans": count, "seconds": round(seconds, 3), "kinds": kinds}
    if as_json:
        console.print_json({**summary, "html": str(file), "perfetto": str(events)})
    else:
        console.say(f"{len(tracks)} tracks, {count} spans over {seconds:.1f} s")
        console.say(f"{file}    open it in a browser")
        console.say(f"{events}    open it at ui.perfetto.dev, or in chrome://tracing")
    return 0


def _write(path: Path, text: str, *, named: bool) -> None:
    """Write a file. The user may name a link or a pipe; where nobody named it, others may have made one in the directory.

    Raises:
        UsageError: it cannot be written.
    """
    data = text.encode("utf-8", errors="replace")
    try:
        if named:
            path.write_bytes(data)
        else:
            with replacing(path) as file:
                file.write(data)
    except OSError as error:
        what = f"the timeline cannot be written: {error.strerror}"
        raise UsageError(what, where=str(path), remedy="name files with --html and --perfetto") from error


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Refuse a file of the directory that cannot be read.

    Raises:
        CorruptError: it is a link or no file, it cannot be read, or it is larger than any that holdfast writes.
    """
    try:
        yield
    except OSError as error:
        raise CorruptError(f"it cannot be read: {error.strerror}", where=str(path), remedy="move it away") from error


def read(homes: Sequence[Path]) -> list[Track]:
    """Every track under these directories, ranks first, on one axis that begins at zero.

    Raises:
        UsageError: none there. CorruptError: a damaged file.
    """
    files = [path for home in homes for path in sorted(home.rglob(f"*{SUFFIX}"))]
    journals = [path for home in homes for path in sorted(home.rglob(NAME))]
    if not files:
        raise UsageError(
            f"no tracks under {', '.join(map(str, homes))}",
            remedy="run with `holdfast run --trace DIR` or Config(trace_dir=...), and give that DIR",
        )
    raw = [_read_file(path) for path in files] + [_read_journal(path) for path in journals]
    begin = min((span.start for track in raw for span in track.spans), default=0.0)
    tracks = [Track(t.name, t.pid, tuple(_earlier(span, begin) for span in t.spans)) for t in raw if t.spans]
    return sorted(tracks, key=lambda track: _natural(track.name))


def _natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    parts = [(int(part), "") if at % 2 else (0, part) for at, part in enumerate(_NUMBERS.split(name))]
    return not name.startswith("rank"), parts


def _earlier(span: Span, by: float) -> Span:
    return Span(span.what, span.kind, span.start - by, span.end - by, span.fields)


def _read_file(path: Path) -> Track:
    with _readable(path):
        lines = private.read(path, MOST_BYTES).decode("utf-8", errors="replace").splitlines()
    spans: list[Span] = []
    name, pid, shift = "", 0, 0.0
    for number, line in enumerate(lines, 1):
        try:
            row = parse_loose(line)
            if isinstance(row, dict) or number == 1:  # a process that runs its script again begins again
                name, pid, shift = str(row["track"]), int(row["pid"]), float(row["wall"]) - float(row["monotonic"])
            else:
                spans.append(_span(row, shift))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            if number == len(lines) > 1:
                break  # a process that was killed while it wrote
            raise CorruptError(f"line {number} is not a span: {error}", where=str(path)) from error
    return Track(name, pid, tuple(sorted(spans, key=lambda span: span.start)))


def _span(row: Any, shift: float) -> Span:
    what, start, end, *more = row
    fields = dict(more[0]) if more else {}
    return Span(str(what), kind_of(str(what)), float(start) + shift, float(end) + shift, fields)


def _read_journal(path: Path) -> Track:
    """The launcher's incidents: from the fault to the end of its recovery."""
    spans: list[Span] = []
    shift = 0.0
    with _readable(path):
        rows = lines_of(path)
    for row in rows:
        if row.get("event") == "run":
            shift = float(row.get("wall", row["t"])) - float(row["t"])
        elif row.get("event") == "incident":
            end = float(row["t"]) + shift
            lasted = sum(float(s) for s in (row.get("seconds") or {}).values())
            found = float(row.get("found_s", 0.0))
            text = str(row.get("first_error", "a fault"))
            spans.append(Span(text, "fault", end - lasted - found, end - lasted, row))
            spans.append(Span(f"recovery from: {text}", "recovery", end - lasted, end, row))
    return Track(f"launcher {path.parent.name}", 0, tuple(sorted(spans, key=lambda span: span.start)))


def kind_of(what: str) -> str:
    """The colour of a span: what sort of thing it is."""
    return "compute" if _ACTION.match(what) else _KINDS.get(what, "other")


def _chrome(tracks: Sequence[Track]) -> Iterable[dict[str, Any]]:
    """Chrome trace events: one process per track, a thread per kind, so that nothing hides another; times in us."""
    for number, track in enumerate(tracks, 1):
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": track.name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        kinds = sorted({_lane(span.kind) for span in track.spans})
        for tid, kind in enumerate(kinds, 1):
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": tid, "args": {"name": kind}}
        for span in track.spans:
            yield {
                "ph": "X",
                "name": span.what,
                "cat": span.kind,
                "pid": number,
                "tid": kinds.index(_lane(span.kind)) + 1,
                "ts": round(span.start * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
                "args": dict(span.fields),
            }


def _lane(kind: str) -> str:
    """Compute and bubbles of a rank never overlap and share a lane."""
    return "work" if kind in ("compute", "bubble") else kind


def page(tracks: Sequence[Track], title: str) -> str:
    """The tracks as one HTML page that needs nothing else; also that of a step that `plan --pipeline` predicts."""
    kinds = sorted({span.kind for track in tracks for span in track.spans})
    data = {
        "title": title,
        "kinds": kinds,
        "tracks": [
            {
                "name": track.name,
                "spans": [
                    [s.what, kinds.index(s.kind), round(s.start, 6), round(s.end, 6), _told(s.fields)]
                    for s in track.spans
                ],
            }
            for track in tracks
        ],
    }
    # "<" never stands in the data as it is: a name from outside cannot end the script.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace(_SLOT, text)


def _told(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in fields.items() if isinstance(value, str | int | float))[:300]
