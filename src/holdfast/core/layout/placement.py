"""Describes how one tensor lies on the axes of a mesh, and the arithmetic of cutting a dimension.

Chunks are torch's: every part has ceil(rows / parts) rows, the last one with rows has what is left, and those behind
it are empty and stand at the end of the dimension. Several axes may cut one dimension, from the outermost axis inwards;
a strided shard cuts what an inner axis will have cut (FSDP over tensor parallelism).

Along an axis a part's size is constant but for a few places, the breaks. Whoever adds up sizes looks at one coordinate
between two breaks instead of at all of them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

# Start and length of neighbouring rows.
Run: TypeAlias = tuple[int, int]

_TEXT = re.compile(r"(replicate|own|shard|strided_shard|only)\s*(?:\(([\d\s,]*)\))?\Z")


class Kind(enum.Enum):
    """Names what an axis of the mesh does to a tensor."""

    REPLICATE = "replicate"  # the same bytes at every coordinate
    SHARD = "shard"  # a chunk of one dimension each
    STRIDED = "strided_shard"  # the same, of every one of several parts
    OWN = "own"  # bytes of its own at every coordinate, nobody else's business
    ONLY = "only"  # held at some coordinates (a stage, an owner), where the bytes are the same


@dataclass(frozen=True, slots=True)
class Placement:
    """Says what one axis of the mesh does to one tensor.

    Attributes:
        kind: what it does.
        dim: the tensor dimension that is cut (SHARD, STRIDED).
        parts: into how many parts the dimension is cut first (STRIDED); torch calls it split_factor.
        at: the coordinates that hold it (ONLY), ascending and evenly spaced; several are tied to the same bytes.
    """

    kind: Kind
    dim: int = 0
    parts: int = 1
    at: tuple[int, ...] = ()

    def __str__(self) -> str:
        numbers = {Kind.SHARD: (self.dim,), Kind.STRIDED: (self.dim, self.parts), Kind.ONLY: self.at}.get(self.kind)
        return self.kind.value if numbers is None else f"{self.kind.value}({', '.join(map(str, numbers))})"

    @classmethod
    def parse(cls, text: str) -> Placement | None:
        """The placement that `str` wrote, else None: `replicate`, `shard(0)`, `strided_shard(0, 4)`, `own`, `only(1)`."""
        match = _TEXT.match(text.strip().lower())
        words = [] if match is None or match[2] is None else [word.strip() for word in match[2].split(",")]
        if match is None or not all(word.isdigit() for word in words):
            return None
        numbers = tuple(map(int, words))
        kind = Kind(match[1])
        if kind is Kind.SHARD and len(numbers) == 1:
            return shard(*numbers)
        if kind is Kind.STRIDED and len(numbers) == 2:
            return strided_shard(*numbers)
        if kind is Kind.ONLY and numbers:
            return only(*numbers)
        return cls(kind) if kind in (Kind.REPLICATE, Kind.OWN) and match[2] is None else None


REPLICATE = Placement(Kind.REPLICATE)
OWN = Placement(Kind.OWN)


def shard(dim: int) -> Placement:
    """A chunk of dimension `dim` at every coordinate."""
    return Placement(Kind.SHARD, dim)


def strided_shard(dim: int, parts: int) -> Placement:
    """A chunk of each of `parts` parts of dimension `dim` at every coordinate."""
    return Placement(Kind.STRIDED, dim, parts) if parts > 1 else shard(dim)


def only(*at: int) -> Placement:
    """Held at these coordinates: one stage, or several that are tied."""
    return Placement(Kind.ONLY, at=tuple(sorted(set(at))))


@dataclass(frozen=True, slots=True)
class Step:
    """One axis that cuts a dimension: its number of coordinates, and into how many parts the dimension is cut first."""

    size: int
    parts: int = 1

    def pieces(self, rows: int) -> list[Run]:
        """The parts that are cut before the axis cuts each of them."""
        return [_chunk(rows, self.parts, index) for index in range(self.parts)]

    def taken(self, rows: int, coordinate: int) -> list[Run]:
        """Return which of `rows` rows the coordinate takes."""
        pieces = ((start, _chunk(length, self.size, coordinate)) for start, length in self.pieces(rows))
        return [(start + offset, length) for start, (offset, length) in pieces if length]

    def breaks(self, rows: int) -> set[int]:
        """Coordinates (but 0) at which the sizes of what is taken change."""
        found: set[int] = set()
        for _, length in self.pieces(rows):
            full = length // _chunk_rows(length, self.size)
            found |= {full, full + 1}
        return {place for place in found if 0 < place < self.size}


def _chunk_rows(rows: int, parts: int) -> int:
    return max(1, -(-rows // parts))


def _chunk(rows: int, parts: int, index: int) -> Run:
    """Start and length of chunk `index`; one that is empty starts at the end."""
    size = _chunk_rows(rows, parts)
    start = min(rows, index * size)
    return start, min(rows, start + size) - start


def held(rows: int, steps: Sequence[Step], coordinates: Iterable[int]) -> list[Run]:
    """The rows of a dimension that a rank holds, as runs; a box can tell no more than one."""
    runs = [(0, rows)]
    for step, coordinate in zip(steps, coordinates, strict=True):
        runs = _select(runs, step.taken(sum(length for _, length in runs), coordinate))
    return runs


def _select(runs: Sequence[Run], wanted: Iterable[Run]) -> list[Run]:
    """The rows at positions `wanted` of the rows in `runs` laid end to end; neighbours become one run."""
    found: list[Run] = []
    for first, length in wanted:
        position = 0
        for start, size in runs:
            begin, end = max(first, position), min(first + length, position + size)
            if end > begin:
                here = start + begin - position
                if found and sum(found[-1]) == here:
                    found[-1] = (found[-1][0], found[-1][1] + end - begin)
                else:
                    found.append((here, end - begin))
            position += size
    return found


def breaks(rows: int, steps: Sequence[Step]) -> list[set[int]]:
    """Per step the coordinates at which some size changes; between two of them all coordinates hold equally many rows."""
    found: list[set[int]] = []
    lengths = {rows}
    for step in steps:
        places = set().union(*(step.breaks(length) for length in lengths))
        found.append(places)
        lengths = {sum(run[1] for run in step.taken(length, at)) for length in lengths for at in {0, *places}}
    return found


def intervals(size: int, places: Iterable[int]) -> list[range]:
    """The coordinates of an axis between its breaks."""
    return [range(first, last) for first, last in pairwise(sorted({0, *places, size}))]


def are_neighbours(rows: int, steps: Sequence[Step]) -> bool:
    """Return whether every rank's rows are neighbours.

    Up to the first strided step a rank's rows change evenly between breaks, so the ends of each interval tell it. What
    a step behind it takes may begin in one part and end in the next at any coordinate.
    """
    first = next((index for index, step in enumerate(steps) if step.parts > 1), None)
    if first is None:
        return True
    ends = [
        range(step.size)
        if index > first
        else {at for span in intervals(step.size, places) for at in (span[0], span[-1])}
        for index, (step, places) in enumerate(zip(steps, breaks(rows, steps), strict=True))
    ]
    return all(len(held(rows, steps, corner)) <= 1 for corner in product(*ends))
