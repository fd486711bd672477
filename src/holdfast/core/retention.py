"""Which durable versions may go, and which must stay (protocol section 8). Pure; called after every commit."""

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
    """Durable versions that retention may remove, oldest first. Call it only after a commit.

    Args:
        durable: versions whose root manifest stands.
        keep_last: how many of the newest stay; never fewer than two.
        keep_every: of so many steps one stays, counted as core.cadence counts them (100: steps 99, 199, ..); 0 for none.
        protected: the one resumed from until a newer is durable, pinned ones, the newest not suspect.
        lineage: with the running incarnation in it. Versions of dead lineage are never recovered from, so the newest
            that are alive stay besides the newest of all: else a roll-back would leave one usable version, or none.
    """
    ordered = sorted(durable)
    live = [version for version in ordered if lineage.is_live(version)]
    count = max(2, keep_last)
    keep = {*ordered[-count:], *live[-count:], *protected}
    if keep_every:
        keep |= {version for version in ordered if (version.step + 1) % keep_every == 0}
    return tuple(version for version in ordered if version not in keep)
