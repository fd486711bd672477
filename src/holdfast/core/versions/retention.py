"""Decides which durable versions may go, and which must stay (protocol section 8). Pure; called after every commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from holdfast.core.model import Version
from holdfast.core.versions.lineage import Lineage


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
        keep_every: of so many steps the first version stays, in every line, counted as core.scheduling.cadence counts them
            (100: steps 0 to 98, 99 to 198, ..); 0 for none.
        protected: the one resumed from until a newer is durable, pinned ones, the newest not suspect.
        lineage: with the running incarnation in it. Versions of dead lineage are never recovered from, so the newest
            that are alive stay besides the newest of all: else a roll-back would leave one usable version, or none.
            A fresh start leaves what was before it alone: of every run that one ended the newest stay, for good.
    """
    ordered = sorted(durable)
    keep = {*protected}
    for _, stays in _reasons(ordered, keep_last, keep_every, lineage):
        keep |= stays
    return tuple(version for version in ordered if version not in keep)


def rests_on(
    old: Iterable[Version], durable: Iterable[Version], *, keep_last: int, keep_every: int, lineage: Lineage
) -> set[Version]:
    """Returns the versions without which one of `old` would have to stay; the arguments are those of `to_retire`, and its answer.

    Whoever only remembers that they are durable looks at them before anything goes. They are few, however many are kept.
    """
    gone = set(old)
    found: set[Version] = set()
    for versions, stays in _reasons(sorted(durable), keep_last, keep_every, lineage):
        if not gone.isdisjoint(versions):
            found |= stays
    return found


def _reasons(
    ordered: Sequence[Version], keep_last: int, keep_every: int, lineage: Lineage
) -> Iterator[tuple[Sequence[Version], set[Version]]]:
    """Yields ascending versions of which some stay, and which of them do."""
    lines = lineage.lines(ordered)
    count = max(2, keep_last)
    # Of several lines of one run the last one is the one that went on.
    runs = {line.first: line.versions for line in lines}
    for versions in (ordered, *runs.values()):
        yield versions, {*versions[-count:]}
    for line in lines if keep_every else ():
        for _, bucket in groupby(line.versions, lambda version: (version.step + 1) // keep_every):
            versions = tuple(bucket)
            yield versions, {versions[0]}  # which stays so whatever comes later
