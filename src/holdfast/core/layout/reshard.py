"""Leads from one layout into any other: which parts of the saved pieces make up what a rank wants, and who reads them.

Pure algebra of boxes. A saved tensor lies in pieces (boxes of the whole), with repetitions where twins or several
groups hold the same. A wanted box is covered by disjoint parts of pieces, so every element comes from exactly one
place. A part is turned into the runs of checksum chunks in which its bytes lie: what is read is what is needed, rounded
to chunks, because only whole chunks can be proved. Of the chunks that must come from storage each is read by one rank,
among those of the nodes that need it, so that all nodes read about the same; the others get it from there.

Nothing here knows a mesh: any placement, number of ranks or stage is a set of boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from holdfast.core.layout.bundles import cut, fingerprint, group_shards, kind_of, kinds
from holdfast.core.model import Bundle, BundleRef, Extent, Shard

# Runs (first, end) of chunks, ascending and apart.
Runs: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box that comes from piece number `piece`."""

    piece: int
    box: Extent


def is_layout(refs: Iterable[BundleRef], shards: Iterable[Shard], still: Container[str] = ()) -> bool:
    """Return whether a rank that holds `shards` would save exactly these bundles, cut as they were: then each is wanted
    whole.

    Args:
        refs: the saved bundles whose group contains the rank.
        shards: all that the rank holds now.
        still: names of those that may lie apart; see `bundles.kinds`.
    """
    groups = group_shards(shards)
    saved: dict[tuple[int, ...], dict[str, dict[int, BundleRef]]] = defaultdict(lambda: defaultdict(dict))
    for one in refs:
        saved[one.ranks][kind_of(one.bundle_id)][one.index] = one
    if not groups.keys() <= saved.keys():
        return False
    return all(_is_cut_so(ranks, groups.get(ranks, ()), found, still) for ranks, found in saved.items())


def _is_cut_so(
    ranks: tuple[int, ...],
    members: Sequence[Shard],
    saved: Mapping[str, Mapping[int, BundleRef]],
    still: Container[str],
) -> bool:
    """Return whether the shards of one group give the saved bundles, by kind and index; older releases knew one kind."""
    alike = kinds(members, still if saved.keys() - {""} else ())
    if not saved.keys() <= alike.keys() or any(found for kind, found in alike.items() if kind not in saved):
        return False
    for kind, shares in saved.items():
        count = next(iter(shares.values())).count
        for index, pieces in enumerate(cut(alike[kind], count)):
            ref = shares.get(index)
            if ref is None and not pieces:
                continue  # a share that would be empty
            if ref is None or fingerprint(Bundle(ref.bundle_id, ranks, index, count, pieces, False)) != ref.fingerprint:
                return False
    return True


def overlap(one: Extent, other: Extent) -> Extent | None:
    """The box that both have in common, None if there is no element in it."""
    if one == other:  # in the layout that was saved all are
        return None if 0 in one.lengths else one
    offsets, lengths = [], []
    for a, la, b, lb in zip(one.offsets, one.lengths, other.offsets, other.lengths, strict=True):
        first, last = max(a, b), min(a + la, b + lb)
        if last <= first:
            return None
        offsets.append(first)
        lengths.append(last - first)
    return Extent(tuple(offsets), tuple(lengths))


def without(whole: Extent, hole: Extent) -> Iterator[Extent]:
    """`whole` without `hole`, which lies inside it, as disjoint boxes."""
    offsets, lengths = list(whole.offsets), list(whole.lengths)
    for dim, (first, length) in enumerate(zip(hole.offsets, hole.lengths, strict=True)):
        start, end = offsets[dim], offsets[dim] + lengths[dim]
        for at, until in ((start, first), (first + length, end)):
            if until > at:
                offsets[dim], lengths[dim] = at, until - at
                yield Extent(tuple(offsets), tuple(lengths))
        offsets[dim], lengths[dim] = first, length


def cover(wanted: Extent, pieces: Sequence[Extent]) -> tuple[Part, ...] | None:
    """Disjoint parts of `pieces` that make up `wanted`, earlier pieces preferred; None if something is missing."""
    if not wanted.num_elements:
        return ()
    parts: list[Part] = []
    missing = [wanted]
    for number, piece in enumerate(pieces):
        left: list[Extent] = []
        for box in missing:
            common = overlap(box, piece)
            if common is None:
                left.append(box)
                continue
            parts.append(Part(number, common))
            left += without(box, common)
        missing = left
        if not missing:
            return tuple(parts)
    return None


def layers(shape: Sequence[int], pieces: Sequence[Extent]) -> list[list[int]]:
    """Pieces of a tensor (their numbers) apart by how often they make up the whole of it; one list if they do so once.

    Where several groups saved the same under one name without knowing of each other, each layer is what one of them has.
    What is left over in the end, and makes up no whole, is in the first list.
    """
    whole = Extent((0,) * len(shape), tuple(shape))
    left = list(range(len(pieces)))
    found: list[list[int]] = []
    if sum(piece.num_elements for piece in pieces) < 2 * max(1, whole.num_elements):
        return [left]  # as nearly always
    while sum(pieces[number].num_elements for number in left) >= whole.num_elements:
        parts = cover(whole, [pieces[number] for number in left])
        if parts is None:
            break
        taken = sorted({left[part.piece] for part in parts})
        found.append(taken)
        left = sorted(set(left) - set(taken))
    return [[*found[0], *left], *found[1:]] if found else [left]


def blocks(lengths: Sequence[int], first: int, last: int) -> Iterator[tuple[int, Extent]]:
    """Elements `first` to `last` of a row-major box as few boxes: (number of the first element, where it lies).

    At most two boxes per dimension and one more: a run of elements begins and ends in the middle of rows.
    """
    if first >= last:
        return
    if not lengths:
        yield 0, Extent((), ())
        return
    inner = prod(lengths[1:])
    row, inside = divmod(first, inner)
    if inside:
        end = min(last, (row + 1) * inner)
        yield from _in_row(lengths, row, (inside, end - row * inner))
        first, row = end, row + 1
    rows = (last - first) // inner
    if rows:
        yield first, Extent((row, *(0 for _ in lengths[1:])), (rows, *lengths[1:]))
        first, row = first + rows * inner, row + rows
    if first < last:
        yield from _in_row(lengths, row, (0, last - first))


def blocks_in(box: Extent, piece: Extent, first: int, last: int) -> Iterator[tuple[int, Extent, Extent]]:
    """Yields what a box has of elements `first` to `last` of a piece, in few blocks.

    Each is: number of the first element, where the block lies, the part of that in the box.
    """
    for number, block in blocks(piece.lengths, first, last):
        there = Extent(tuple(a + b for a, b in zip(piece.offsets, block.offsets, strict=True)), block.lengths)
        if (common := overlap(there, box)) is not None:
            yield number, there, common


def _in_row(lengths: Sequence[int], row: int, span: tuple[int, int]) -> Iterator[tuple[int, Extent]]:
    before = row * prod(lengths[1:])
    for number, box in blocks(lengths[1:], *span):
        yield before + number, Extent((row, *box.offsets), (1, *box.lengths))


def spans(piece: Extent, box: Extent, item_bytes: int, unit: int) -> Iterator[tuple[int, int]]:
    """Bytes (start, end) of `piece`, row-major, in which the elements of `box` lie; gaps below `unit` are not left out.

    Ascending and apart. `box` lies inside `piece` and has an element.
    """
    strides = [item_bytes * prod(piece.lengths[dim + 1 :]) for dim in range(len(piece.lengths))]
    # Of the box without its outermost dimensions: its first byte, its end, and whether it has no gap worth a seam.
    low, high, solid = [0], [item_bytes], [True]
    for dim in reversed(range(len(strides))):
        at, length = box.offsets[dim] - piece.offsets[dim], box.lengths[dim]
        gap = strides[dim] - (high[0] - low[0])
        solid.insert(0, solid[0] and (length == 1 or gap < unit))
        first = at * strides[dim]
        low.insert(0, first + low[0])
        high.insert(0, first + (length - 1) * strides[dim] + high[0])

    def walk(dim: int, base: int) -> Iterator[tuple[int, int]]:
        if solid[dim]:
            yield base + low[dim], base + high[dim]
            return
        at = box.offsets[dim] - piece.offsets[dim]
        for row in range(at, at + box.lengths[dim]):
            yield from walk(dim + 1, base + row * strides[dim])

    return walk(0, 0)


def chunk_runs(byte_spans: Iterable[tuple[int, int]], chunk_bytes: int) -> Runs:
    """The chunks in which these bytes lie."""
    return merged((start // chunk_bytes, -(-end // chunk_bytes)) for start, end in byte_spans if end > start)


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same chunks, ascending and apart."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(runs):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > first:
            found.append((first, end))
    return tuple(found)


def minus(runs: Runs, taken: Runs) -> Runs:
    """The chunks of `runs` that are not in `taken`."""
    gone = {chunk for first, end in taken for chunk in range(first, end)}
    return merged((chunk, chunk + 1) for first, end in runs for chunk in range(first, end) if chunk not in gone)


def deal(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Whole things to ranks, balanced by size: largest first, each to whoever has least."""
    load = [0] * ranks
    dealt: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        dealt[name] = rank
        load[rank] += max(1, sizes[name])
    return dealt


def readers(
    needs: Mapping[int, Mapping[str, Runs]], node_of: Sequence[int], read: Mapping[str, Mapping[int, int]]
) -> dict[str, dict[int, int]]:
    """Return which rank reads each chunk that must come from storage: bundle -> chunk -> rank. Every chunk once per
    job.

    Args:
        needs: rank -> bundle -> chunks that it needs and that lie in storage only.
        node_of: rank -> node; what one rank of a node reads the others have.
        read: chunks that were read before, and by whom.

    Returns:
        Every needed chunk with one of the ranks that need it, those of `read` as they were. Chunks that few nodes need
        are dealt first, each to the node that reads least, and there to the rank that does.
    """
    wanted: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank in sorted(needs):
        for bundle, runs in needs[rank].items():
            for first, end in runs:
                for chunk in range(first, end):
                    wanted[bundle, chunk].append(rank)
    by_node: dict[int, int] = defaultdict(int)
    by_rank: dict[int, int] = defaultdict(int)
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for bundle, known in read.items():
        for chunk, rank in known.items():
            found[bundle][chunk] = rank
            by_node[node_of[rank]] += 1
            by_rank[rank] += 1
    for (bundle, chunk), ranks in sorted(wanted.items(), key=lambda item: (len(item[1]), item[0])):
        if chunk in found[bundle]:
            continue
        reader = min(ranks, key=lambda r: (by_node[node_of[r]], by_rank[r], r))
        found[bundle][chunk] = reader
        by_node[node_of[reader]] += 1
        by_rank[reader] += 1
    return dict(found)
