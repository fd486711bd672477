"""Groups of ranks as runs: 16,384 ranks of a mesh's dimension are three numbers.

Pure. Messages and manifests carry runs; what decides wants single ranks. A group recurs in every bundle that is cut from
it, so its ranks are spread out once and shared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

MAX_RANKS = 1 << 20
# Groups whose ranks are kept spread out; those of one rank are not, for they cost nothing.
MAX_KEPT = 1024

Run: TypeAlias = tuple[int, int, int]
Runs: TypeAlias = tuple[Run, ...]


def runs_of(ranks: Sequence[int]) -> Runs:
    """Return ascending ranks as (first, last, step) runs, taken greedily from the beginning."""
    found: list[Run] = []
    at = 0
    while at < len(ranks):
        end = at + 1
        step = ranks[end] - ranks[at] if end < len(ranks) else 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        found.append((ranks[at], ranks[end - 1], step))
        at = end
    return tuple(found)


def count_in(runs: Runs) -> int:
    """Return how many ranks there are in runs, which bounds what `spread` allocates.

    Raises:
        ValueError: the numbers are no ranks.
    """
    if not all(0 <= first <= last < MAX_RANKS and step > 0 for first, last, step in runs):
        raise ValueError("impossible ranks")
    return sum((last - first) // step + 1 for first, last, step in runs)


def spread(runs: Runs) -> tuple[int, ...]:
    """Return the single ranks of runs, ascending; the same object for the same group.

    Raises:
        ValueError: these are no runs that `runs_of` makes.
    """
    if len(runs) == 1 and runs[0][0] == runs[0][1] and runs[0][2] == 1 and 0 <= runs[0][0] < MAX_RANKS:
        return (runs[0][0],)
    return _spread(runs)


@functools.lru_cache(MAX_KEPT)
def _spread(runs: Runs) -> tuple[int, ...]:
    if count_in(runs) > MAX_RANKS:
        raise ValueError(f"more than {MAX_RANKS} ranks")
    ranks = tuple(rank for first, last, step in runs for rank in range(first, last + 1, step))
    if runs_of(ranks) != runs:
        raise ValueError("ranks are not in canonical form")
    if not all(a < b for a, b in pairwise(ranks)):
        raise ValueError("ranks are not ascending")
    return ranks


def is_in(rank: int, runs: Runs) -> bool:
    """Return whether a rank is one of them."""
    return any(first <= rank <= last and (rank - first) % step == 0 for first, last, step in runs)
