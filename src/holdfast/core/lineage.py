"""Which versions belong to the living run: the chain of incarnations and where each resumed from.

After a roll-back the same step is made again with other content. The versions that the dead incarnation saved beyond
the point of resumption are dead lineage: never chosen, never protected (invariant S4).
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """Whether the newest incarnation descends from `version` (or made it)."""
        if not self.resumed:
            return True
        newest = max(self.resumed)
        if version.incarnation >= newest:
            return True
        bound = self.resumed[newest]
        while bound is not None:
            if version.incarnation == bound.incarnation:
                return version.step <= bound.step
            if version.incarnation > bound.incarnation or bound.incarnation not in self.resumed:
                return False
            bound = self.resumed[bound.incarnation]
        return False
