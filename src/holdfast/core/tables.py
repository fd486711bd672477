"""Every bundle of a job under one layout, and what follows from it: who holds it, who writes it, what is wrong.

Pure. Made once per layout by the coordinator's board (core.commit).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core import bundles, takeover
from holdfast.core.model import BundleRef, RankLayout, Topology


@dataclass(frozen=True, slots=True)
class Table:
    """Every bundle of the job under one layout.

    Attributes:
        lonely: of those that live in one node only, which one.
        ranks: who holds each.
        parts: who writes them.
        flaw: why no version under this layout can be complete; empty if it can.
    """

    refs: tuple[BundleRef, ...]
    ids: frozenset[str]
    lonely: Mapping[str, int]
    ranks: Mapping[str, tuple[int, ...]]
    parts: tuple[takeover.Part, ...]
    flaw: str


def new_table(table: Mapping[str, BundleRef], topology: Topology, flaw: str = "") -> Table:
    """The table of these bundles."""
    refs = tuple(table[bundle_id] for bundle_id in sorted(table))
    homes = {ref.bundle_id: bundles.only_home(ref, topology) for ref in refs}
    lonely = {bundle_id: home for bundle_id, home in homes.items() if home is not None}
    ranks = {ref.bundle_id: ref.ranks for ref in refs}
    return Table(refs, frozenset(table), lonely, ranks, takeover.parts(refs, topology), flaw)


def disagreement(table: Mapping[str, BundleRef], layouts: Mapping[int, RankLayout]) -> str:
    """What is wrong if a rank lacks a bundle that others share with it, or has it otherwise; else nothing.

    For instance one rank's optimizer has state already and its twin's has not.
    """
    listed = Counter((ref.bundle_id, ref.fingerprint) for layout in layouts.values() for ref in layout.bundles)
    for bundle_id, ref in sorted(table.items()):
        if listed[bundle_id, ref.fingerprint] != len(ref.ranks):
            return f"the {len(ref.ranks)} ranks of bundle {bundle_id} do not all have it, or not as the same tensors"
    return ""
