"""Decides which versions belong to the living run: the chain of incarnations and where each resumed from.

After a roll-back the same step is made again with other content. The versions that the dead incarnation saved beyond
the point of resumption are dead lineage: never chosen, never protected (invariant S4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.core.model import Version


@dataclass(frozen=True, slots=True)
class Lineage:
    """Incarnation -> the version it resumed from; None where it started afresh.

    Only incarnations that went on to train are recorded; one that died during recovery made nothing and cuts nothing.
    """

    resumed: Mapping[int, Version | None] = field(default_factory=dict)

    def with_(self, incarnation: int, resumed_from: Version | None) -> Lineage:
        """The lineage with one more record; an existing one is kept, for it was written once."""
        return self if incarnation in self.resumed else Lineage({**self.resumed, incarnation: resumed_from})

    def is_live(self, version: Version) -> bool:
        """Return whether the newest incarnation descends from `version` (or made it)."""
        if not self.resumed:
            return True
        newest = max(self.resumed)
        return version.incarnation >= newest or version.step <= self._path(newest).get(version.incarnation, -1)

    def lines(self, versions: Iterable[Version]) -> list[Line]:
        """Returns what incarnations made or descend from, of these versions; the line of the newest is the last one.

        Lines are those of every incarnation that made one of them, and of the last one that goes back to each beginning.
        """
        ordered = sorted(versions)
        newest = max(self.resumed, default=0)
        firsts: dict[int, int] = {}
        for number, bound in sorted(self.resumed.items()):
            firsts[number] = number if bound is None else firsts.get(bound.incarnation, bound.incarnation)
        last = {first: number for number, first in firsts.items()}
        heads = {newest, *last.values(), *(version.incarnation for version in ordered if version.incarnation < newest)}
        found = []
        for head in sorted(heads):
            path = {**self._path(head), head: math.inf}
            chain = (v for v in ordered if v.step <= path.get(v.incarnation, -1) or head == newest < v.incarnation)
            found.append(Line(firsts.get(head, head), tuple(chain)))
        return found

    @property
    def cut(self) -> int | None:
        """The incarnation that the newest one descends from and of which nothing is recorded; None if there is none such.

        What came before it cannot be told from what a fresh start ended.
        """
        newest = max(self.resumed, default=0)
        earliest = min(self._path(newest), default=newest)
        return None if earliest in self.resumed or not newest else earliest

    def _path(self, incarnation: int) -> dict[int, int]:
        """The incarnations that this one descends from, each with the step up to which it does."""
        path: dict[int, int] = {}
        while (bound := self.resumed.get(incarnation)) is not None and bound.incarnation < incarnation:
            incarnation = bound.incarnation
            path[incarnation] = bound.step
        return path


@dataclass(frozen=True, slots=True)
class Line:
    """A chain of versions, ascending. Lines with one `first`, the incarnation that began afresh, are of one run."""

    first: int
    versions: tuple[Version, ...]
