"""Decides which durable versions may go, and which must stay (protocol section 8). Pure; called after every commit."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.lineage import Lineage
from holdfast.core.model import Version


def to_retire(
    durable: Iterable[Version],
    *,
    keep_last: int,
    keep_every: int,
    protected: Iterable[Version],
    lineage: Lineage = Lineage(),  # noqa: B008  # frozen, and empty
) -> tuple[Version, ...]:
    """Returns the durable versions that retention may remove, oldest first. Call it only after a commit.

    Args:
        durable: versions whose root manifest stands.
        keep_last: how many of the newest stay; never fewer than two.
        keep_every: of so many steps the first version stays, in every line, counted as core.cadence counts them
            (100: steps 0 to 98, 99 to 198, ..); 0 for none.
        protected: the one resumed from until a newer is durable, pinned ones, the newest not suspect.
        lineage: with the running incarnation in it. Versions of dead lineage are never recovered from, so the newest
            that are alive stay besides the newest of all: else a roll-back would leave one usable version, or none.
            A fresh start leaves what was before it alone: of every run that one ended the newest stay, for good.
    """
    ordered = sorted(durable)
    lines = lineage.lines(ordered)
    # Of several lines of one run the last one is the one that went on.
    runs = {line.first: line.versions for line in lines}
    count = max(2, keep_last)
    keep = {*ordered[-count:], *protected}
    for versions in runs.values():
        keep |= {*versions[-count:]}
    if keep_every:
        for line in lines:
            keep |= _firsts(line.versions, keep_every)
    return tuple(version for version in ordered if version not in keep)


def _firsts(versions: Iterable[Version], keep_every: int) -> set[Version]:
    """The first of these ascending versions in each `keep_every` steps: what stays so whatever comes later."""
    found: dict[int, Version] = {}
    for version in versions:
        found.setdefault((version.step + 1) // keep_every, version)
    return set(found.values())
