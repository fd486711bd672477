"""Every bundle of a job under one layout, and what follows from it: who holds it, who writes it, what is wrong.

Pure. Made once per layout by the coordinator's board (core.versions.coordinator_board).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core.layout import bundles
from holdfast.core.model import BundleRef, RankLayout, Topology
from holdfast.core.rank_runs import Runs, count_in
from holdfast.core.versions import writer_failover


@dataclass(frozen=True, slots=True)
class Table:
    """Every bundle of the job under one layout.

    Attributes:
        single_node: of those that live in one node only, which one.
        alone_on: the same by node.
        homes: the nodes of the ranks that hold each.
        parts: who writes them.
        flaw: why no version under this layout can be complete; empty if it can.
    """

    refs: tuple[BundleRef, ...]
    ids: frozenset[str]
    single_node: Mapping[str, int]
    homes: Mapping[str, frozenset[int]]
    parts: tuple[writer_failover.Part, ...]
    flaw: str
    alone_on: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def new_table(table: Mapping[str, BundleRef], topology: Topology, flaw: str = "") -> Table:
    """The table of these bundles."""
    refs = tuple(table[bundle_id] for bundle_id in sorted(table))
    of_group: dict[Runs, frozenset[int]] = {}  # groups recur, and may have very many members
    for ref in refs:
        if ref.runs not in of_group:
            of_group[ref.runs] = frozenset(topology.node_of[rank] for rank in ref.ranks)
    homes = {ref.bundle_id: of_group[ref.runs] for ref in refs}
    single_node = {bundle_id: min(nodes) for bundle_id, nodes in homes.items() if len(nodes) == 1}
    alone_on: dict[int, list[str]] = {}
    for bundle_id, node in single_node.items():
        alone_on.setdefault(node, []).append(bundle_id)
    parts, alone = writer_failover.parts(refs, topology), {node: tuple(names) for node, names in alone_on.items()}
    return Table(refs, frozenset(table), single_node, homes, parts, flaw, alone)


def disagreement(table: Mapping[str, BundleRef], layouts: Mapping[int, RankLayout]) -> str:
    """Return what is wrong if a rank lacks a bundle that others share with it, or has it otherwise; else nothing.

    For instance one rank's optimizer has state already and its twin's has not.
    """
    listed: Counter[tuple[str, str]] = Counter()
    for row, num_ranks in bundles.distinct(layouts.values()):
        for ref in row:
            listed[ref.bundle_id, ref.fingerprint] += num_ranks
    for bundle_id, ref in sorted(table.items()):
        if listed[bundle_id, ref.fingerprint] != count_in(ref.runs):
            return (
                f"the {count_in(ref.runs)} ranks of bundle {bundle_id} do not all have it, or not as the same tensors"
            )
    return ""
