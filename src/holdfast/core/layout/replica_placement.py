"""Decides who keeps the replica of what lives in one node only: equal loads by bytes, another rack, the fewest possible
pairs.

Everybody works this out from the table of all bundles and the topology, so nobody has to be told. Where every node has
about as much of its own as the others (nearly every job) the next node round keeps it, whatever the number of nodes.
Where loads would differ by more than a tenth (stages or nodes of different sizes), or racks stand in the way, bytes are
dealt: always a pair of the two places that are hardest to serve, as much as leaves the rest solvable. That needs about
as many pairs as there are nodes, and ends equal wherever equal is possible; a node or rack that holds more than all
others together is served by all the others. Explicit pairs are taken as they are and count as load.

Pure.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.layout import parity_groups
from holdfast.core.model import BundleRef, Topology

# Loads that differ from their mean by no more than this are equal.
TOLERANCE = 0.1

# Of one node's bytes: so many for that node, in this order.
Shares = tuple[tuple[int, int], ...]


def place(refs: Iterable[BundleRef], topology: Topology) -> dict[str, int]:
    """The backup node of every bundle that lives in one node only, by bundle id; empty in a job that keeps no replicas."""
    if not parity_groups.keeps_replicas(topology):
        return {}
    homes = ((ref, only_home(ref, topology)) for ref in refs)
    return _dealt(((ref, home) for ref, home in homes if home is not None), topology)


def place_again(refs: Sequence[BundleRef], holders: Mapping[str, int], topology: Topology) -> dict[str, int]:
    """Return who makes the second copy of every bundle that one node alone still holds, by bundle id.

    Where `place` would have it, so that the next version finds it there; elsewhere if that is who holds it, and for
    bundles that had twins on several nodes: then dealt as evenly as by `place`, racks and named pairs kept.

    Args:
        refs: all bundles of the job.
        holders: by bundle id, the only node that has a copy.
        topology: who runs where.
    """
    if not parity_groups.keeps_replicas(topology):
        return {}
    placed = place(refs, topology)
    found = {name: placed[name] for name, holder in holders.items() if placed.get(name, holder) != holder}
    left = [(ref, holders[ref.bundle_id]) for ref in refs if ref.bundle_id in holders and ref.bundle_id not in found]
    return found | _dealt(left, topology)


def _dealt(homes: Iterable[tuple[BundleRef, int]], topology: Topology) -> dict[str, int]:
    """The backup node of each bundle, given where it is."""
    single_node: dict[int, list[BundleRef]] = defaultdict(list)
    for ref, home in homes:
        single_node[home].append(ref)
    totals = [sum(ref.num_bytes for ref in single_node.get(node, ())) for node in range(len(topology.nodes))]
    shared = shares(totals, topology)
    return {
        ref.bundle_id: node
        for home, mine in single_node.items()
        for ref, node in deal(sorted(mine, key=lambda r: (r.ranks, r.index)), shared[home])
    }


def deal(refs: Sequence[BundleRef], shares: Shares) -> list[tuple[BundleRef, int]]:
    """One node's bundles dealt over its shares, in order; each goes where its middle falls."""
    found: list[tuple[BundleRef, int]] = []
    at, begin = 0, 0
    end = shares[0][1]
    for ref in refs:
        while at + 1 < len(shares) and 2 * begin + ref.num_bytes > 2 * end:
            at += 1
            end += shares[at][1]
        found.append((ref, shares[at][0]))
        begin += ref.num_bytes
    return found


def only_home(ref: BundleRef, topology: Topology) -> int | None:
    """The node that all members of the bundle's group live on; None if they live on several."""
    home = topology.node_of[ref.ranks[0]]
    return home if all(topology.node_of[rank] == home for rank in ref.ranks) else None


def next_node(home: int, topology: Topology) -> int:
    """The node that was named for `home`, else the next one round that stands in another rack, else the next one."""
    if topology.backups and topology.backups[home] >= 0:
        return topology.backups[home]
    count = len(topology.nodes)
    color = colors(topology)
    # One after the other, not all at once: the first one nearly always is it, and every node asks.
    places = ((home + step) % count for step in range(1, count))
    return next((node for node in places if color[node] != color[home]), (home + 1) % count)


def colors(topology: Topology) -> Sequence[str | int]:
    """Return what a copy and its original may not share: the rack, where there are several and all are known; else the
    node.
    """
    if len(set(topology.racks)) > 1 and all(topology.racks):
        return topology.racks
    return range(len(topology.nodes))


def shares(totals: Sequence[int], topology: Topology) -> list[Shares]:
    """Return for every node what the others keep of its `totals` bytes. Every node has a share, if only of nothing."""
    nodes = range(len(totals))
    ring = [next_node(node, topology) for node in nodes]
    simple: list[Shares] = [((backup, total),) for backup, total in zip(ring, totals, strict=True)]
    loads = [0] * len(totals)
    for backup, total in zip(ring, totals, strict=True):
        loads[backup] += total
    mean = sum(totals) / len(totals)
    if max(loads) <= (1 + TOLERANCE / 2) * mean and min(loads) >= (1 - TOLERANCE / 2) * mean:
        return simple
    named = [bool(topology.backups) and topology.backups[node] >= 0 for node in nodes]
    fixed = [0] * len(totals)
    for node in nodes:
        if named[node]:
            fixed[ring[node]] += totals[node]
    free = [0 if named[node] else totals[node] for node in nodes]
    dealt = _deal_bytes(free, fixed, colors(topology))
    return [simple[n] if named[n] or not dealt[n] else tuple(dealt[n]) for n in nodes]


@dataclass(slots=True)
class _Color:
    """A rack, or a node where there are none: bytes that it gives away, and room that it has for others'."""

    gives: list[list[int]]  # [node, bytes]
    takes: list[list[int]]
    give: int = 0
    take: int = 0


def _deal_bytes(free: Sequence[int], fixed: Sequence[int], color: Sequence[str | int]) -> list[list[tuple[int, int]]]:
    """Pairs of giver and taker of different colours; every taker ends with about the same load."""
    room = _room(free, fixed, color)
    places: dict[str | int, _Color] = {}
    for node, name in enumerate(color):
        place = places.setdefault(name, _Color([], []))
        place.gives.append([node, free[node]])
        place.takes.append([node, room[node]])
        place.give += free[node]
        place.take += room[node]
    found: list[list[tuple[int, int]]] = [[] for _ in free]
    order = {name: index for index, name in enumerate(places)}
    heap = [(-place.give - place.take, order[name], place) for name, place in places.items()]
    heapq.heapify(heap)
    left = sum(free)
    while left > 0 and len(heap) > 1:
        giver, taker, aside = _pick(heap)
        third = max((entry[2].give + entry[2].take for entry in (*aside, *heap[:1])), default=0)
        amount = min(giver[2].give, taker[2].take, max(1, left - third))
        _move(giver[2], taker[2], amount, found)
        left -= amount
        for _, index, place in (giver, taker, *aside):
            if place.give or place.take:
                heapq.heappush(heap, (-place.give - place.take, index, place))
    return found


_Entry = tuple[int, int, _Color]


def _pick(heap: list[_Entry]) -> tuple[_Entry, _Entry, list[_Entry]]:
    """The colour that is hardest to serve and the hardest one that it can be paired with; and those passed over.

    What is left can be dealt out as long as no colour gives and takes more than all that is left, so it is the hardest
    that must not be kept waiting.
    """
    one, aside = heapq.heappop(heap), list[_Entry]()
    while True:
        two = heapq.heappop(heap)
        if one[2].give and two[2].take:
            return one, two, aside
        if one[2].take and two[2].give:
            return two, one, aside
        aside.append(two)


def _move(giver: _Color, taker: _Color, amount: int, found: list[list[tuple[int, int]]]) -> None:
    giver.give -= amount
    taker.take -= amount
    while amount:
        source, target = giver.gives[-1], taker.takes[-1]
        part = min(amount, source[1], target[1])
        if part:
            shares = found[source[0]]
            if shares and shares[-1][0] == target[0]:
                shares[-1] = (target[0], shares[-1][1] + part)
            else:
                shares.append((target[0], part))
        source[1] -= part
        target[1] -= part
        amount -= part
        if not source[1]:
            giver.gives.pop()
        if not target[1]:
            taker.takes.pop()


def _room(free: Sequence[int], fixed: Sequence[int], color: Sequence[str | int]) -> list[int]:
    """Return what every node is to take: equal loads, but no colour more than the others have to give it."""
    to_give, of_color = sum(free), _sums(free, color)
    room = _level(to_give, fixed, range(len(free)))
    for name, gives in of_color.items():
        members = [node for node, other in enumerate(color) if other == name]
        most = to_give - gives
        if sum(room[node] for node in members) > most:  # one colour at most: it gives more than the rest has room for
            others = [node for node in range(len(free)) if color[node] != name]
            inside, outside = _level(most, fixed, members), _level(to_give - most, fixed, others)
            return [inside[node] if color[node] == name else outside[node] for node in range(len(free))]
    return room


def _sums(values: Sequence[int], color: Sequence[str | int]) -> Mapping[str | int, int]:
    sums: dict[str | int, int] = defaultdict(int)
    for value, name in zip(values, color, strict=True):
        sums[name] += value
    return sums


def _level(amount: int, fixed: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """`amount` poured over `nodes`, on top of what each has, so that all stand as high as possible alike."""
    room = [0] * len(fixed)
    rising = sorted(nodes, key=lambda node: (fixed[node], node))
    count, height, below = 0, 0, 0
    poured = amount
    for index, node in enumerate(rising):
        below += fixed[node]
        count, height = index + 1, (amount + below) // (index + 1)
        if index + 1 == len(rising) or height <= fixed[rising[index + 1]]:
            break
    for node in rising[:count]:
        room[node] = max(0, height - fixed[node])
        poured -= room[node]
    for node in rising[: max(0, poured)]:  # what rounding left
        room[node] += 1
    return room
