"""A pipeline's predicted step: as tracks for the page of `holdfast trace`, and as a picture of characters.

The picture has one line per rank, time to the right. Where every action is as wide as a column, a digit is a forward of
that micro-batch (its last digit), a letter a backward (a is micro-batch 0, capital letters are weight gradients alone).
Where actions are narrower, a column tells what fills it: its shade says what the rank computes, and marks say how much
of the column it waits. In both a dot is idle time, `#` idle time in which a checkpoint is copied, `~` the reduction of
gradients and `=` the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from holdfast.cli.timeline import Span, Track
from holdfast.core.pipeline.bubble_placement import Placement
from holdfast.core.pipeline.event_model import RankTimeline, Timeline

IDLE, COPY, SYNC, OPTIMIZER = ".", "#", "~", "="
MAX_WIDTH = 160
LETTERS = "digit: forward of that micro-batch, letter: backward (capital: of the weights alone)"
# Forwards, backwards, both, weight gradients alone.
BLOCKS, PLAIN = "░▓▒█", "fbxw"
# A column whose rank waits for more than this is not all work; for more than the rest of it, all wait.
_SOME = 0.25
# What computes so much of the work in a column gives it its shade.
_MOST = 0.75
_ACTION = re.compile(r"\d+([FBIW])(\d+)\Z")
_MARKS = {"wait": IDLE, "copy": COPY, "gradient sync": SYNC, "optimizer": OPTIMIZER}


@dataclass(frozen=True, slots=True)
class Picture:
    """Says what is drawn: from one time to another, a column for so many seconds; `shades` are four, as BLOCKS are."""

    column_s: float
    start: float = 0.0
    end: float = inf
    shades: str = BLOCKS


def tracks(
    step: Timeline, placements: Mapping[int, Placement], endings: Sequence[Mapping[str, float]] = ()
) -> tuple[Track, ...]:
    """Return what every rank does in a step, and when.

    Args:
        step: one step of all ranks.
        placements: per rank the chunks in its waits; may lack ranks.
        endings: per rank what follows its last action, in order, and for how long; empty: nothing.
    """
    found = []
    for number, rank in enumerate(step.ranks):
        spans = [
            Span(str(s.action), "compute", s.start, s.end, {}) for s in rank.spans
        ] + _waits(rank, placements.get(number))  # fmt: skip
        at = rank.ends
        for what, seconds in (endings[number] if endings else {}).items():
            if seconds:
                spans.append(Span(what, "sync" if what == "gradient sync" else what, at, at + seconds, {}))
            at += seconds
        found.append(Track(f"rank {number}", 0, tuple(sorted(spans, key=lambda span: span.start))))
    return tuple(found)


def _waits(rank: RankTimeline, placement: Placement | None) -> list[Span]:
    """Waits, copies from the start of those that have chunks, and beside the work the copies that fit into none."""
    placed = {one.index: one for one in placement.windows} if placement else {}
    left = placement.left_seconds if placement else 0.0
    spans = []
    for wait in rank.waits:
        before = {"before": str(rank.spans[wait.index].action)}
        spans.append(Span("wait", "bubble", wait.start, wait.end, before))
        if wait.index in placed:
            one = placed[wait.index]
            spans.append(Span("copy", "copy", wait.start, wait.start + one.seconds, {"chunks": one.end - one.first}))
    for start, end in _work(rank):
        if left <= 0:
            break
        spans.append(Span("copy beside", "copy", start, min(end, start + left), {"why": "no wait has room for it"}))
        left -= end - start
    return spans


def _work(rank: RankTimeline) -> list[tuple[float, float]]:
    """Return when the rank computes, from wait to wait."""
    starts = [rank.start, *(wait.end for wait in rank.waits)]
    ends = [*(wait.start for wait in rank.waits), rank.ends]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if end > start]


def is_fine(shown: Sequence[Track], picture: Picture) -> bool:
    """Return whether every action of the picture is as wide as a column, so that it can be told by its letter."""
    actions = [
        span.end - span.start
        for track in shown
        for span in track.spans
        if span.kind == "compute" and span.end > span.start and span.start < picture.end and span.end > picture.start
    ]
    # A hair less than a column is what floats make of a column.
    return min(actions, default=inf) >= picture.column_s * (1 - 1e-9)


def draw(shown: Sequence[Track], picture: Picture) -> list[str]:
    """One line per track."""
    end = min(picture.end, max((span.end for track in shown for span in track.spans), default=0.0))
    count = min(MAX_WIDTH, max(1, round((end - picture.start) / picture.column_s)))
    digits = max((len(track.name) for track in shown), default=0) - len("rank ")
    row = _letters if is_fine(shown, picture) else _shades
    return [
        f"rank {track.name.removeprefix('rank '):>{digits}}  {row(track, picture, count)}".rstrip() for track in shown
    ]


def _letters(track: Track, picture: Picture, count: int) -> str:
    """Return what happens in the middle of each column."""
    cells = [" "] * count
    # A copy lies in a wait, and hides it.
    for span in sorted(track.spans, key=lambda span: span.what == "copy"):
        letter = _letter(span.what)
        first, last = (ceil((at - picture.start) / picture.column_s - 0.5) for at in (span.start, span.end))
        for column in range(max(first, 0), min(last, count) if letter else 0):
            cells[column] = letter
    return "".join(cells)


def _letter(what: str) -> str:
    """Return the letter of a span; empty for one that is not drawn."""
    action = _ACTION.match(what)
    if action is None:
        return _MARKS.get(what, "")
    kind, microbatch = action[1], int(action[2])
    if kind == "F":
        return str(microbatch % 10)
    letter = chr(ord("a") + microbatch % 26)
    return letter.upper() if kind == "W" else letter


def _shades(track: Track, picture: Picture, count: int) -> str:
    """Return what fills each column."""
    filled: list[dict[str, float]] = [{} for _ in range(count)]
    for span in track.spans:
        action = _ACTION.match(span.what)
        what = action[1].replace("I", "B") if action else _MARKS.get(span.what, "")
        first, last = (int((at - picture.start) / picture.column_s) for at in (span.start, span.end))
        for column in range(max(first, 0), min(last + 1, count) if what else 0):
            start = picture.start + column * picture.column_s
            inside = min(span.end, start + picture.column_s) - max(span.start, start)
            if inside > 0:
                filled[column][what] = filled[column].get(what, 0.0) + inside
    return "".join(_shade(column, picture.shades) for column in filled)


def _shade(filled: Mapping[str, float], shades: str) -> str:
    """Return the shade of one column, by the seconds of what is in it."""
    waited, copied = filled.get(IDLE, 0.0), filled.get(COPY, 0.0)
    work = {what: seconds for what, seconds in filled.items() if what not in (IDLE, COPY)}
    worked = sum(work.values())
    if not waited + worked:
        return " "
    share = waited / (waited + worked)
    if share > _SOME:
        copies = 2 * copied >= waited
        return (COPY if copies else IDLE) if share > 1 - _SOME else ("+" if copies else "-")
    most = max(work, key=lambda what: work[what])
    if most in (SYNC, OPTIMIZER):
        return most
    if work[most] < _MOST * sum(work.get(kind, 0.0) for kind in "FBW"):
        return shades[2]
    return shades["FB?W".index(most)]


def legend(shown: Sequence[Track], picture: Picture) -> str:
    """Return what the characters mean; only those of endings that are there."""
    kinds = {span.what for track in shown for span in track.spans}
    endings = (("gradient sync", SYNC), ("optimizer", OPTIMIZER))
    end = "".join(f"; {mark} {what}" for what, mark in endings if what in kinds)
    if is_fine(shown, picture):
        return f"{LETTERS}; {IDLE} idle, {COPY} idle and the checkpoint is copied{end}"
    forward, backward, both, weights = tuple(picture.shades)
    alone = f", {weights}: weight gradients" if any("W" in what for what in kinds) else ""
    return (
        f"a column is more than an action: {forward} forwards, {backward} backwards, {both} both{alone}; {IDLE} idle, "
        f"{COPY} idle and the checkpoint is copied; - work and idle, + work and idle with copies{end}"
    )
