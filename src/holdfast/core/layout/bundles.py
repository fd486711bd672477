"""Shards to bundles: who shares what with whom, cut into shares of equal bytes, and who captures and writes each.

Pure and local: every rank computes the same answer for its own groups from its own shards, because all members of a
redundancy group hold the same shards of it. No collective, no knowledge of other groups, no dependence on the world
size. Called at the first save and whenever the state's structure changes; never per save.

Tensors that may stay as they are for many versions (`still`) lie in bundles of their own, apart from what optimizers change
and from the values: the image of such a bundle is then the same bytes from version to version, and is stored and sent once.
Which these are may look otherwise on each member of a group, so its members compare digests once, at a restore (`contested`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from holdfast.core.model import Bundle, BundleRef, Piece, RankLayout, Shard, Topology
from holdfast.core.rank_runs import runs_of

# A share below this many bytes is not worth a file of its own; a group is cut finer only as far as the ranks of one
# node need it to divide the capture among themselves, and a group of a few kilobytes not at all.
MIN_SHARE_BYTES = 4 << 20
# Shares may be cut down to this, so that all nodes write the same.
MIN_EVEN_BYTES = 512 << 10
# A tensor smaller than this is never cut in two: the header entry would cost more than the balance gains.
MIN_CUT_BYTES = 256 << 10
# Still tensors of one object of a group get bundles of their own from so many bytes on. A small tensor is not counted: the
# statistics of a normalisation layer change with every step, and would change the image of the frozen weights beside them.
MIN_STILL_BYTES = 1 << 20
MIN_STILL_TENSOR_BYTES = 16 << 10


def group_shards(shards: Iterable[Shard]) -> dict[tuple[int, ...], list[Shard]]:
    """Shards by redundancy group, each list sorted by name; the order in which shares are cut."""
    groups: dict[tuple[int, ...], list[Shard]] = defaultdict(list)
    for shard in shards:
        groups[shard.ranks].append(shard)
    return {ranks: sorted(members, key=lambda s: s.name) for ranks, members in sorted(groups.items())}


def kinds(members: Sequence[Shard], still: Container[str]) -> dict[str, list[Shard]]:
    """The shards of one group apart: what changes under the empty name, still ones by a short name of the object they are of.

    Objects are kept apart because they change apart: an average that moves must not drag along a frozen model.

    Args:
        members: in the order in which they are cut.
        still: names of tensors that may stay as they are.
    """
    apart: dict[str, list[Shard]] = defaultdict(list)
    for shard in members:
        if shard.num_bytes >= MIN_STILL_TENSOR_BYTES and shard.name in still:
            apart[_object_name(shard.name)].append(shard)
    enough = {kind for kind, found in apart.items() if sum(shard.num_bytes for shard in found) >= MIN_STILL_BYTES}
    names = {shard.name for kind in enough for shard in apart[kind]}
    changing = [shard for shard in members if shard.name not in names] if names else list(members)
    return {"": changing} | {kind: apart[kind] for kind in sorted(enough)}


def _object_name(name: str) -> str:
    """Return a short name, safe in file names, of the object that an entry is of; it depends on nothing else."""
    owner = name.rpartition("/")[2].partition(".")[0]
    return "s" + hashlib.blake2b(owner.encode(), digest_size=3).hexdigest()


def still_digests(shards: Iterable[Shard]) -> dict[str, str]:
    """Return what a rank has in each kind of bundles that these still tensors lie in: twins must have the same."""
    return {
        f"{_group_name(ranks)}-{kind}": hashlib.blake2b(repr(names).encode(), digest_size=8).hexdigest()
        for (ranks, kind), names in _apart(shards).items()
    }


def contested(shards: Iterable[Shard], told: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of those of a rank's still tensors of whose kind not all ranks that hold them say the same. `told` is what
    `still_digests` returned for the same shards, of every rank.
    """
    found = []
    for (ranks, kind), names in _apart(shards).items():
        key = f"{_group_name(ranks)}-{kind}"
        if len({told[rank].get(key) for rank in ranks}) > 1:
            found += names
    return found


def _apart(shards: Iterable[Shard]) -> dict[tuple[tuple[int, ...], str], list[str]]:
    """Names by group and object, small tensors too: none is looked at again."""
    found: dict[tuple[tuple[int, ...], str], list[str]] = defaultdict(list)
    for shard in shards:
        found[shard.ranks, _object_name(shard.name)].append(shard.name)
    return {key: sorted(names) for key, names in found.items()}


def kind_of(bundle_id: str) -> str:
    """Return the kind, as in `kinds`, that the bundle of this id is of."""
    parts = bundle_id.split("-")
    return parts[2] if len(parts) == 4 else ""


def num_shares(ranks: Sequence[int], num_bytes: int, topology: Topology) -> int:
    """Into how many shares a group's bytes are cut: enough for the fullest node to divide them, never more than ranks,
    and as many for every node as for the others, where these have as many members and shares do not get tiny.
    """
    if num_bytes < MIN_CUT_BYTES:
        return 1
    on_node = Counter(topology.node_of[rank] for rank in ranks).values()
    count = min(len(ranks), max(*on_node, 1, math.ceil(num_bytes / MIN_SHARE_BYTES)))
    even = math.ceil(count / len(on_node)) * len(on_node)
    return even if len(set(on_node)) == 1 and num_bytes >= even * MIN_EVEN_BYTES else count


def cut(shards: Sequence[Shard], count: int) -> list[tuple[Piece, ...]]:
    """Cuts the shards of one group, laid end to end, into `count` runs of about equal bytes at row boundaries."""
    sizes = [shard.num_bytes for shard in shards]
    total = sum(sizes)
    shares: list[list[Piece]] = [[] for _ in range(count)]
    begin = 0
    for shard, size in zip(shards, sizes, strict=True):
        rows = shard.extent.lengths[0] if shard.extent.lengths else 1
        edges = _row_edges(rows, begin, size, total, count)
        for index, (first, last) in edges.items():
            if last > first or (rows == 0 and first == 0):
                shares[index].append(Piece(shard, first, last - first))
        begin += size
    return [tuple(share) for share in shares]


def _row_edges(rows: int, begin: int, size: int, total: int, count: int) -> dict[int, tuple[int, int]]:
    """Share index -> (first row, last row) of a shard of `size` bytes, which begins at byte `begin` of `total`."""
    if count == 1:
        return {0: (0, rows)}
    if size < MIN_CUT_BYTES or rows < 2:
        middle = begin + size // 2
        return {min(count - 1, middle * count // max(total, 1)): (0, rows)}
    edges: dict[int, tuple[int, int]] = {}
    row_bytes = size // rows
    first = 0
    for index in range(begin * count // total, min(count - 1, (begin + size) * count // total) + 1):
        boundary = (index + 1) * total / count - begin
        last = rows if index == count - 1 else max(first, min(rows, round(boundary / row_bytes)))
        if last > first:
            edges[index] = (first, last)
        first = last
    return edges


def bundle_id(ranks: Sequence[int], index: int) -> str:
    """File-name safe identity of share `index` of the group: lowest rank, size and a digest of the members."""
    return f"{_group_name(ranks)}-{index}"


def _group_name(ranks: Sequence[int]) -> str:
    digest = hashlib.blake2b(",".join(map(str, ranks)).encode(), digest_size=6).hexdigest()
    return f"g{ranks[0]}x{len(ranks)}-{digest}"


def plan_bundles(
    shards: Iterable[Shard],
    *,
    values_of: Iterable[tuple[int, ...]],
    topology: Topology,
    still: Container[str] = (),
) -> tuple[Bundle, ...]:
    """All bundles of the groups that these shards and values belong to.

    Args:
        shards: every shard of one rank.
        values_of: the redundancy groups that carry non-tensor values.
        topology: who runs where.
        still: names of tensors that may stay as they are for many versions. Twins MUST name the same.
    """
    with_values = set(values_of)
    groups = group_shards(shards)
    for ranks in sorted(with_values - set(groups)):
        groups[ranks] = []
    bundles: list[Bundle] = []
    for ranks, members in groups.items():
        for kind, alike in kinds(members, still).items():
            count = num_shares(ranks, sum(s.num_bytes for s in alike), topology)
            name = "-".join(filter(None, (_group_name(ranks), kind)))
            for index, pieces in enumerate(cut(alike, count)):
                values = index == 0 and not kind and ranks in with_values
                if pieces or values:  # one tensor that cannot be cut fills one share and leaves the others empty
                    bundles.append(Bundle(f"{name}-{index}", ranks, index, count, pieces, values))
    return tuple(bundles)


def captures(bundles: Iterable[Bundle | BundleRef], rank: int, topology: Topology) -> tuple[str, ...]:
    """Ids of the bundles that `rank` copies; within each node every bundle of a group is captured exactly once."""
    here = set(topology.ranks_on(topology.node_of[rank]))
    # Groups recur as the same object, and may have very many members: to hash all of them for each bundle takes long.
    local: dict[int, tuple[tuple[int, ...], list[int]]] = {}
    found = []
    for bundle in bundles:
        ranks = bundle.ranks
        if id(ranks) not in local:
            local[id(ranks)] = ranks, [r for r in ranks if r in here]
        if _capturer(bundle, local[id(ranks)][1]) == rank:
            found.append(bundle.bundle_id)
    return tuple(found)


def capturer(bundle: Bundle | BundleRef, node: int, topology: Topology) -> int | None:
    """The rank on `node` that copies the bundle, or None if no member of its group lives there."""
    return _capturer(bundle, [r for r in bundle.ranks if topology.node_of[r] == node])


def _capturer(bundle: Bundle | BundleRef, local: Sequence[int]) -> int | None:
    return local[bundle.index * len(local) // bundle.count] if local else None


def representative(bundle: Bundle | BundleRef) -> int:
    """The rank whose node persists the bundle. Shares are dealt over the group and groups start at different members,
    so every node writes about the same.
    """
    size = len(bundle.ranks)
    return bundle.ranks[(bundle.index * size // bundle.count + bundle.ranks[0]) % size]


def single_node(shards: Iterable[Shard], topology: Topology) -> list[Shard]:
    """Those of which no other node holds the bytes: what its own redundancy does not protect against a lost node."""
    found = []
    for shard in shards:
        home = topology.node_of[shard.ranks[0]]
        if shard.num_bytes and all(topology.node_of[rank] == home for rank in shard.ranks):
            found.append(shard)
    return found


def fingerprint(bundle: Bundle) -> str:
    """Digest of what the bundle's tensors are (not of their content): names, dtypes, global shapes, extents."""
    state = hashlib.blake2b(digest_size=16)
    for piece in bundle.pieces:
        extent = piece.extent
        row = (piece.shard.name, piece.shard.dtype, piece.shard.global_shape, extent.offsets, extent.lengths)
        state.update(repr(row).encode())
    return state.hexdigest()


def rank_layout(bundles: Sequence[Bundle], rank: int, topology: Topology) -> RankLayout:
    """Return what a rank tells its keeper about its bundles."""
    groups = {id(bundle.ranks): bundle.ranks for bundle in bundles}
    runs = {key: runs_of(ranks) for key, ranks in groups.items()}
    refs = tuple(
        BundleRef(b.bundle_id, (), b.index, b.count, b.num_bytes, fingerprint(b), runs=runs[id(b.ranks)])
        for b in bundles
    )
    return RankLayout(rank, refs, captures(refs, rank, topology))


def shared_layout(layout: RankLayout) -> dict[str, tuple[int, str]]:
    """Return, for each group of several ranks that a rank belongs to, how many these are and a digest of its bundles.

    All members must have the same, for each writes its share of them.
    """
    found: dict[str, list[BundleRef]] = defaultdict(list)
    for ref in layout.bundles:
        if len(ref.ranks) > 1:
            found[_group_name(ref.ranks)].append(ref)
    told = {}
    for name, refs in found.items():
        rows = sorted((ref.bundle_id, ref.count, ref.fingerprint) for ref in refs)
        told[name] = len(refs[0].ranks), hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()
    return told


def layout_fingerprint(layouts: Mapping[int, RankLayout]) -> str:
    """Digest of the layout of the whole job; equal for equal bundles whatever the order of arrival."""
    rows = {(b.bundle_id, b.fingerprint) for row, _ in distinct(layouts.values()) for b in row}
    return fingerprint_of(len(layouts), rows)


def distinct(layouts: Collection[RankLayout]) -> list[tuple[tuple[BundleRef, ...], int]]:
    """The lists of bundles that are different objects, and how many ranks share each.

    Twins hold the same bundles, and thousands of ranks may be twins: the board keeps one list for all of them.
    """
    shared = Counter(id(layout.bundles) for layout in layouts)
    lists = {id(layout.bundles): layout.bundles for layout in layouts}
    return [(lists[key], count) for key, count in shared.items()]


def fingerprint_of(world_size: int, bundles: Iterable[tuple[str, str]]) -> str:
    """The same from (id, fingerprint) of every bundle of the job, each once."""
    return hashlib.blake2b(repr((world_size, sorted(bundles))).encode(), digest_size=16).hexdigest()
