"""A pipeline's step as a picture of characters: one line per rank, time to the right.

A digit is a forward of that micro-batch (its last digit), a letter a backward (a is micro-batch 0, capital letters are
weight gradients alone), a dot is idle time and `#` idle time in which a checkpoint is copied. Called by `tools.pipeline`
and by the stories of tests/core/scenarios.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.bubbles import Placement
from holdfast.core.pipeline import Kind, RankTimeline, Timeline

IDLE = "."
COPY = "#"
MAX_WIDTH = 160


def draw(timeline: Timeline, placements: Mapping[int, Placement], *, column_s: float) -> list[str]:
    """One line per rank; a column is `column_s` seconds, shown is what happens in its middle.

    Args:
        timeline: one step of all ranks.
        placements: per rank the chunks in its waits; may lack ranks.
        column_s: seconds of a column.
    """
    ends = max((rank.ends for rank in timeline.ranks), default=0.0)
    count = min(MAX_WIDTH, max(1, round(ends / column_s)))
    digits = len(str(len(timeline.ranks) - 1))
    lines = []
    for number, rank in enumerate(timeline.ranks):
        copied = _copied(rank, placements.get(number))
        row = "".join(_at(rank, copied, (column + 0.5) * column_s) for column in range(count))
        lines.append(f"rank {number:>{digits}}  {row}".rstrip())
    return lines


def _copied(rank: RankTimeline, placement: Placement | None) -> list[tuple[float, float]]:
    """When this rank copies: from the start of each wait that has chunks."""
    seconds = {placed.index: placed.seconds for placed in placement.windows} if placement else {}
    return [(wait.start, wait.start + seconds[wait.index]) for wait in rank.waits if wait.index in seconds]


def _at(rank: RankTimeline, copied: list[tuple[float, float]], time_s: float) -> str:
    for span in rank.spans:
        if span.start <= time_s < span.end:
            return _letter(span.action.kind, span.action.microbatch)
    if any(start <= time_s < end for start, end in copied):
        return COPY
    return IDLE if rank.start <= time_s < rank.ends else " "


def _letter(kind: Kind, microbatch: int) -> str:
    if kind is Kind.FORWARD:
        return str(microbatch % 10)
    letter = chr(ord("a") + microbatch % 26)
    return letter.upper() if kind is Kind.WEIGHT else letter
