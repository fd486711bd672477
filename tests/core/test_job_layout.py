"""Layouts by arithmetic say what enumeration says: rank by rank, tensor by tensor, and as torch places tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.base.errors import UsageError
from holdfast.core.layout import bundles, replica_placement
from holdfast.core.layout.cost_plan import JobPlan, uniform
from holdfast.core.layout.job_layout import JobLayout, Mesh, Tensor
from holdfast.core.layout.mesh_inference import infer, resized
from holdfast.core.layout.placement import OWN, REPLICATE, Kind, Placement, held, only, shard, strided_shard
from holdfast.core.layout.redundancy_groups import Census
from holdfast.core.model import DTYPE_BYTES, BundleRef, Shard, Topology

# The same cases in every run, twice as many with `--slow`; a failure is kept as a test of its own, not in a database.
NUM_CASES = settings().max_examples * 3 // 5
CASES = settings(
    max_examples=NUM_CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
Ranks = tuple[int, ...]


def mesh(**sizes: int) -> Mesh:
    return Mesh(tuple(sizes), tuple(sizes.values()))


@st.composite
def placed(draw: st.DrawFn, size: int, num_dims: int) -> Placement:
    """Any placement on an axis of `size` coordinates."""
    kinds = [REPLICATE, OWN, only(draw(st.integers(0, size - 1)))]
    if size > 1:
        kinds.append(only(0, size - 1))
    if num_dims:
        dim = draw(st.integers(0, num_dims - 1))
        kinds += [shard(dim), shard(dim), strided_shard(dim, draw(st.integers(1, 4)))]
    return draw(st.sampled_from(kinds))


@st.composite
def layouts(draw: st.DrawFn) -> JobLayout:
    """Small jobs of one or two meshes and any tensors that are boxes."""
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3).filter(lambda s: len(s) < 3 or 64 not in s)
    )
    meshes = [Mesh(tuple("abc"[: len(sizes)]), tuple(sizes))]
    if draw(st.booleans()):
        meshes.append(Mesh(("x", "y"), (meshes[0].size // sizes[-1], sizes[-1])))
    world = meshes[0].size + draw(st.sampled_from([0, 0, 0, 1]))
    tensors: list[Tensor] = []
    for number in range(draw(st.integers(1, 6))):
        shape = draw(
            st.one_of(
                st.just(()),
                st.tuples(st.integers(0, 9)),
                st.tuples(st.integers(0, 13), st.integers(0, 9)),
                st.tuples(st.integers(100, 500), st.sampled_from([4096, 20_000])),
            )
        )
        index = draw(st.integers(0, len(meshes) - 1))
        place = tuple(draw(placed(size, len(shape))) for size in meshes[index].sizes)
        dtype = draw(st.sampled_from(["F32", "BF16", "U8"]))
        tensor = Tensor(f"t{number}", dtype, shape, place, index)
        if _is_box(meshes[index], tensor):
            tensors.append(tensor)
    assume(tensors)
    return JobLayout(world, meshes, tensors)


def coordinates(where: Mesh, rank: int) -> Ranks:
    return tuple(rank // stride % size for size, stride in zip(where.sizes, where.strides, strict=True))


def chunks(rows: list[int], parts: int) -> list[list[int]]:
    """torch.chunk, with the empty chunks behind that DTensor adds."""
    size = max(1, -(-len(rows) // parts))
    return [rows[at * size : (at + 1) * size] for at in range(parts)]


def rows_of(where: Mesh, tensor: Tensor, dim: int, at: Ranks) -> list[int]:
    """Every row of a dimension that the rank at these coordinates holds, one by one."""
    rows = list(range(tensor.shape[dim]))
    for size, place, coordinate in zip(where.sizes, tensor.placements, at, strict=True):
        if place.kind in (Kind.SHARD, Kind.STRIDED) and place.dim == dim:
            pieces = [chunks(piece, size)[coordinate] for piece in chunks(rows, place.parts)]
            rows = [row for piece in pieces for row in piece]
    return rows


def _is_box(where: Mesh, tensor: Tensor) -> bool:
    corners = product(*map(range, where.sizes))
    found = [rows_of(where, tensor, dim, at) for at in corners for dim in range(len(tensor.shape))]
    return all(rows == list(range(rows[0], rows[0] + len(rows))) for rows in found if rows)


def by_enumeration(layout: JobLayout) -> dict[int, list[Shard]]:
    """Every rank's shards from coordinates alone: who has equal coordinates wherever bytes differ holds the same."""
    found: dict[int, list[Shard]] = {rank: [] for rank in range(layout.world_size)}
    for tensor in layout.tensors:
        where = layout.meshes[tensor.mesh]
        groups: dict[Ranks, list[int]] = defaultdict(list)
        for rank in range(where.size):
            at = coordinates(where, rank)
            if all(p.kind is not Kind.ONLY or c in p.at for p, c in zip(tensor.placements, at, strict=True)):
                same = (Kind.REPLICATE, Kind.ONLY)
                groups[tuple(-1 if p.kind in same else c for p, c in zip(tensor.placements, at, strict=True))].append(
                    rank
                )
        owns = any(p.kind is Kind.OWN and s > 1 for p, s in zip(tensor.placements, where.sizes, strict=True))
        for ranks in groups.values():
            extent = layout.extent(tensor, ranks[0])
            name = f"rank{ranks[0]}/{tensor.name}" if owns else tensor.name
            for rank in ranks:
                found[rank].append(Shard(name, tensor.dtype, tensor.shape, extent, tuple(ranks)))
    return found


@CASES
@given(layouts())
def test_shards_and_groups_are_those_of_the_coordinates(layout: JobLayout) -> None:
    expected = by_enumeration(layout)
    for rank in range(layout.world_size):
        assert list(layout.shards(rank)) == expected[rank]


@CASES
@given(layouts())
def test_extents_are_the_rows_that_chunking_gives(layout: JobLayout) -> None:
    for tensor, rank in product(layout.tensors, range(layout.world_size)):
        where = layout.meshes[tensor.mesh]
        extent = layout.extent(tensor, rank)
        if rank < where.size and layout.base(tensor, rank) is not None:
            for dim in range(len(tensor.shape)):
                rows = rows_of(where, tensor, dim, coordinates(where, rank))
                begin = extent.offsets[dim]
                assert list(range(begin, begin + extent.lengths[dim])) == rows or (not rows and not extent.lengths[dim])


@CASES
@given(layouts())
def test_slices_cover_each_tensor_exactly_once_per_group(layout: JobLayout) -> None:
    for tensor in layout.tensors:
        if any(length > 20 for length in tensor.shape):
            continue
        boxes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for part in layout.slices(tensor):
            spans = (range(o, o + n) for o, n in zip(part.extent.offsets, part.extent.lengths, strict=True))
            boxes[part.name] += list(product(*spans))
        assert set(boxes) == {s.name for s in layout.slices(tensor)}
        for covered in boxes.values():
            everything = list(product(*map(range, tensor.shape)))
            own_cut = any(p.kind is Kind.OWN for p in tensor.placements)
            assert sorted(covered) == everything or own_cut


@CASES
@given(layouts())
def test_groups_divide_the_ranks_that_hold_a_tensor(layout: JobLayout) -> None:
    for tensor in layout.tensors:
        groups = [part.ranks for part in layout.slices(tensor)]
        members = [rank for ranks in groups for rank in ranks]
        assert len(set(members)) == len(members)
        assert set(members) == {r for r in range(layout.world_size) if layout.base(tensor, r) is not None}
        assert all(layout.group(tensor, rank) == ranks for ranks in groups for rank in ranks)


@CASES
@given(layouts())
def test_interchangeable_ranks_are_the_intersection_over_all_entries(layout: JobLayout) -> None:
    twins = Census(layout).twins()
    for rank, shards in by_enumeration(layout).items():
        groups = [set(one.ranks) for one in shards] or [{rank}]
        assert twins[rank] == tuple(sorted(set.intersection(*groups)))


@dataclass(frozen=True)
class Job:
    """A layout on nodes, and everything that core.layout.bundles says of it rank by rank."""

    layout: JobLayout
    topology: Topology

    def bundles(self) -> dict[int, tuple[BundleRef, ...]]:
        return {
            rank: bundles.rank_layout(
                bundles.plan_bundles(own, values_of=(), topology=self.topology), rank, self.topology
            ).bundles
            for rank, own in by_enumeration(self.layout).items()
        }


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    layout = draw(layouts())
    if draw(st.booleans()):
        return Job(layout, uniform(layout.world_size, draw(st.integers(1, 5))))
    homes = [draw(st.integers(0, 3)) for _ in range(layout.world_size)]
    order = list(dict.fromkeys(homes))
    return Job(layout, Topology(tuple(f"n{i}" for i in range(len(order))), tuple(map(order.index, homes))))


@CASES
@given(jobs())
def test_costs_are_the_sums_over_all_bundles_of_all_ranks(job: Job) -> None:
    plan, topology = JobPlan(job.layout, job.topology), job.topology
    node_of = topology.node_of
    copied: Counter[int] = Counter()
    replicated: Counter[int] = Counter()
    for rank, refs in job.bundles().items():
        mine = set(bundles.captures(refs, rank, topology))
        copied[rank] = sum(ref.num_bytes for ref in refs if ref.bundle_id in mine)
        lonely = [
            ref for ref in refs if ref.bundle_id in mine and replica_placement.only_home(ref, topology) is not None
        ]
        replicated[rank] = sum(ref.num_bytes for ref in lonely)
    everything = {ref.bundle_id: ref for refs in job.bundles().values() for ref in refs}.values()
    placed = replica_placement.place(everything, topology)
    written: Counter[int] = Counter()
    kept: Counter[int | None] = Counter()
    for ref in everything:
        written[node_of[bundles.representative(ref)]] += ref.num_bytes
        kept[placed.get(ref.bundle_id)] += ref.num_bytes
    world, nodes = range(topology.world_size), range(len(topology.nodes))
    assert plan.ranks.held == tuple(sum(s.num_bytes for s in job.layout.shards(rank)) for rank in world)
    assert plan.ranks.copied == tuple(copied[rank] for rank in world)
    assert plan.ranks.replicated == tuple(replicated[rank] for rank in world)
    assert plan.nodes.written == tuple(written[node] for node in nodes)
    assert plan.nodes.kept == tuple(kept[node] for node in nodes)
    assert plan.nodes.copied == tuple(sum(copied[r] for r in topology.ranks_on(node)) for node in nodes)
    assert plan.num_bundles == len(everything)
    assert plan.unique_bytes == sum(ref.num_bytes for ref in everything)
    for node in nodes:
        slots = [2 * [copied[r]] for r in topology.ranks_on(node)]
        assert sum(plan.slots(node, 2)) == sum(map(sum, slots)) + 2 * kept[node]
        lonely = {ref for ref in everything if replica_placement.only_home(ref, topology) == node}
        assert plan.nodes.alone[node] == sum(ref.num_bytes for ref in lonely)


@CASES
@given(jobs(), st.data())
def test_any_set_of_lost_nodes_is_reported_exactly(job: Job, data: st.DataObject) -> None:
    plan, node_of = JobPlan(job.layout, job.topology), job.topology.node_of
    gone = data.draw(st.sets(st.sampled_from(range(len(job.topology.nodes)))))
    everything = {ref.bundle_id: ref for refs in job.bundles().values() for ref in refs}.values()
    placed = replica_placement.place(everything, job.topology)
    slices = {(t.name, s.ranks): s for t in job.layout.tensors for s in job.layout.slices(t) if s.num_bytes}
    for replicas in (False, True):
        lost: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for (name, ranks), part in slices.items():
            homes = {node_of[rank] for rank in ranks}
            kept = {placed.get(ref.bundle_id) for ref in everything if ref.ranks == ranks and ref.num_bytes}
            if homes <= gone and not (replicas and None not in kept and kept.isdisjoint(gone)):
                lost[name] += 1
                sizes[name] += part.num_bytes
        found = plan.lost(gone, replicas=replicas)
        assert {loss.name: (loss.num_slices, loss.num_bytes) for loss in found} == {
            n: (lost[n], sizes[n]) for n in lost
        }
    for node in range(len(job.topology.nodes)):
        alone = {name for (name, ranks) in slices if {node_of[rank] for rank in ranks} == {node}}
        assert plan.alone_on(node) == sorted(alone)


@CASES
@given(layouts(), st.data())
def test_any_set_of_lost_ranks_is_reported_exactly(layout: JobLayout, data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.sampled_from(range(layout.world_size))))
    plan = JobPlan(layout, uniform(layout.world_size, 2))
    slices = [(t.name, s) for t in layout.tensors for s in layout.slices(t) if s.num_bytes]
    expected = Counter(name for name, part in slices if gone.issuperset(part.ranks))
    assert {loss.name: loss.num_slices for loss in plan.lost_with(gone)} == expected


@CASES
@given(jobs())
def test_nodes_alike_are_alike(job: Job) -> None:
    plan = JobPlan(job.layout, job.topology)
    classes = plan.nodes_alike()
    assert sorted(node for alike in classes for node in alike) == list(range(len(job.topology.nodes)))
    for alike in classes:
        for costs in (plan.nodes.copied, plan.nodes.written, plan.nodes.kept, plan.nodes.alone):
            assert len({costs[node] for node in alike}) == 1
        assert len({tuple(plan.alone_on(node)) for node in alike}) == 1


@CASES
@given(st.data())
def test_torch_places_tensors_the_same(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape = data.draw(st.tuples(st.integers(0, 11), st.integers(0, 5)))
    options = [(REPLICATE, Replicate())] + [(shard(dim), TorchShard(dim)) for dim in (0, 1)]
    options += [(strided_shard(0, 2), _StridedShard(0, split_factor=2))]
    chosen = [data.draw(st.sampled_from(options)) for _ in sizes]
    where = Mesh(tuple("abc"[: len(sizes)]), tuple(sizes))
    tensor = Tensor("w", "F32", shape, tuple(ours for ours, _ in chosen))
    assume(_is_box(where, tensor))
    layout = JobLayout(where.size, [where], [tensor])
    for rank in range(where.size):
        at = list(coordinates(where, rank))
        lengths, offsets = _compute_local_shape_and_global_offset(shape, tuple(sizes), at, [t for _, t in chosen])
        extent = layout.extent(tensor, rank)
        assert (extent.offsets, extent.lengths) == (tuple(offsets), tuple(lengths))


@CASES
@given(st.data())
def test_what_is_no_box_is_refused_by_name(data: st.DataObject) -> None:
    where = Mesh(("dp", "tp"), (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))))
    place = (strided_shard(0, data.draw(st.integers(2, 5))), data.draw(st.sampled_from([REPLICATE, shard(0)])))
    tensor = Tensor("model.w", "F32", (data.draw(st.integers(0, 30)),), place)
    if _is_box(where, tensor):
        assert JobLayout(where.size, [where], [tensor]).tensors == (tensor,)
        return
    with pytest.raises(UsageError, match="not neighbours") as caught:
        JobLayout(where.size, [where], [tensor])
    assert "model.w" in caught.value.where


# --- the strategies in use


def lists(layout: JobLayout) -> list[Ranks]:
    return Census(layout).twins()


def weights(where: Mesh, **place: Placement) -> JobLayout:
    placements = tuple(place.get(axis, REPLICATE) for axis in where.names)
    return JobLayout(where.size, [where], [Tensor("w", "F32", (64, 64), placements)])


def test_a_weight_cut_on_the_axis_of_four() -> None:
    layout = weights(mesh(dp=2, mp=4), mp=shard(0))
    assert lists(layout)[0] == (0, 4)
    assert lists(layout) == [(rank % 4, rank % 4 + 4) for rank in range(8)]


def test_losing_both_holders_loses_exactly_their_slice() -> None:
    where = mesh(dp=2, mp=4)
    tensors = [Tensor("w1", "F32", (8, 4), (REPLICATE, shard(0)))]
    tensors += [Tensor(name, "F32", (4, 4), (REPLICATE, REPLICATE)) for name in ("w2", "w3")]
    plan = JobPlan(JobLayout(8, [where], tensors), uniform(8, 4))
    (loss,) = plan.lost_with({0, 4})
    assert (loss.name, loss.num_slices, loss.num_bytes) == ("w1", 1, 2 * 4 * 4)
    assert plan.lost_with({0}) == ()
    assert lists(plan.layout)[0] == (0, 4)


def test_hybrid_sharding_with_tensor_parallelism() -> None:
    layout = weights(mesh(replicate=2, shard=2, tp=2), shard=shard(0), tp=shard(1))
    assert lists(layout) == [(rank % 4, rank % 4 + 4) for rank in range(8)]


def test_full_sharding_leaves_no_twin() -> None:
    assert lists(weights(mesh(fsdp=8), fsdp=shard(0))) == [(rank,) for rank in range(8)]


def test_data_parallelism_makes_all_ranks_alike() -> None:
    assert lists(weights(mesh(dp=8))) == [tuple(range(8))] * 8


@pytest.mark.parametrize("state", [shard(0), OWN])
def test_zero_one_replicates_weights_and_not_states(state: Placement) -> None:
    where = mesh(dp=4)
    weight, moment = Tensor("model.w", "F32", (8,), (REPLICATE,)), Tensor("optimizer.m", "F32", (8,), (state,))
    layout = JobLayout(4, [where], [weight, moment])
    assert layout.group(weight, 2) == (0, 1, 2, 3)
    assert layout.group(moment, 2) == (2,)
    assert lists(layout) == [(0,), (1,), (2,), (3,)]


def test_zero_one_with_states_held_by_one_rank_each() -> None:
    tensors = [Tensor(f"m{i}", "F32", (8,), (only(i),)) for i in range(3)]
    layout = JobLayout(3, [mesh(dp=3)], tensors)
    assert [[s.name for s in layout.shards(rank)] for rank in range(3)] == [["m0"], ["m1"], ["m2"]]


def test_groups_of_a_pipeline_stay_in_their_stage_unless_tied() -> None:
    where = mesh(pp=2, dp=2, tp=2)
    first = Tensor("layer0", "F32", (8, 8), (only(0), REPLICATE, shard(0)))
    second = Tensor("layer1", "F32", (8, 8), (only(1), REPLICATE, shard(0)))
    tied = Tensor("embedding", "F32", (8, 8), (only(0, 1), REPLICATE, shard(0)))
    layout = JobLayout(8, [where], [first, second, tied])
    assert [layout.group(first, rank) for rank in (0, 3, 4)] == [(0, 2), (1, 3), ()]
    assert [layout.group(second, rank) for rank in (0, 4, 7)] == [(), (4, 6), (5, 7)]
    assert layout.group(tied, 6) == (0, 2, 4, 6)
    assert lists(layout)[:4] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_experts_on_a_mesh_of_their_own() -> None:
    """Attention on dp x tp; every expert on one coordinate of another mesh of the same ranks."""
    dense, sparse = mesh(dp=4, tp=2), mesh(edp=2, ep=4)
    attention = Tensor("attention", "F32", (8, 8), (REPLICATE, shard(0)))
    experts = [Tensor(f"expert{i}", "F32", (8, 8), (REPLICATE, only(i)), 1) for i in range(4)]
    layout = JobLayout(8, [dense, sparse], [attention, *experts])
    assert layout.group(experts[1], 5) == (1, 5)
    assert layout.group(attention, 5) == (1, 3, 5, 7)
    assert lists(layout)[5] == (1, 5)


def test_uneven_and_empty_shards() -> None:
    layout = weights(mesh(fsdp=4), fsdp=shard(0))
    tensor = Tensor("w", "F32", (5, 2), layout.tensors[0].placements)
    layout = JobLayout(4, [mesh(fsdp=4)], [tensor])
    assert [s.extent.lengths[0] for s in layout.slices(tensor)] == [2, 2, 1, 0]
    assert [s.extent.offsets[0] for s in layout.slices(tensor)] == [0, 2, 4, 5]
    assert JobPlan(layout, uniform(4, 1)).alone_on(3) == []


def test_full_sharding_over_tensor_parallelism_on_one_dimension() -> None:
    layout = weights(mesh(fsdp=2, tp=2), fsdp=strided_shard(0, 2), tp=shard(0))
    assert [s.extent.offsets[0] for s in layout.slices(layout.tensors[0])] == [0, 32, 16, 48]


def test_data_parallelism_inside_a_host_names_what_is_unprotected() -> None:
    where = mesh(tp=2, dp=2)
    tensors = [Tensor("w", "F32", (8,), (shard(0), REPLICATE)), Tensor("norm", "F32", (8,), (REPLICATE, REPLICATE))]
    inside = JobPlan(JobLayout(4, [where], tensors), uniform(4, 2))
    assert [inside.alone_on(node) for node in (0, 1)] == [["w"], ["w"]]
    assert [(loss.name, loss.num_slices) for loss in inside.lost([0], replicas=False)] == [("w", 1)]
    assert inside.lost([0]) == ()
    across = JobPlan(JobLayout(4, [mesh(dp=2, tp=2)], [Tensor("w", "F32", (8,), (REPLICATE, shard(0)))]), uniform(4, 2))
    assert [across.alone_on(node) for node in (0, 1)] == [[], []]
    single = JobPlan(JobLayout(4, [where], tensors), uniform(4, 4))
    assert [loss.name for loss in single.lost([0])] == ["norm", "w"]


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (Tensor("w", "F31", (4,), (REPLICATE,)), "no dtype"),
        (Tensor("rank3/w", "F32", (4,), (REPLICATE,)), "single rank"),
        (Tensor("w", "F32", (4,), (shard(1),)), "no dimension"),
        (Tensor("w", "F32", (4,), (REPLICATE, REPLICATE)), "2 placements for 1 axes"),
        (Tensor("w", "F32", (4,), (only(4),)), "evenly spaced"),
        (Tensor("w", "F32", (4,), (only(0, 1, 3),)), "evenly spaced"),
        (Tensor("w", "F32", (-4,), (REPLICATE,)), "negative"),
        (Tensor("w", "F32", (4,), (REPLICATE,), 1), "no mesh"),
        (Tensor("w", "F32", (4,), (strided_shard(0, 10**9),)), "number of parts"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(tensor: Tensor, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        JobLayout(4, [mesh(dp=4)], [tensor])
    assert tensor.name in caught.value.where


@pytest.mark.parametrize("text", ["replicate", "own", "shard(0)", "strided_shard(1, 4)", "only(0, 3)"])
def test_placements_read_as_they_are_written(text: str) -> None:
    assert str(Placement.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "shard", "shard(-1)", "shard(0, 1)", "only()", "replicate(0)", "partial", "own()"]
)
def test_other_placements_are_none(text: str) -> None:
    assert Placement.parse(text) is None


def test_a_box_has_one_run_of_rows() -> None:
    assert held(6, [], []) == [(0, 6)]
    assert DTYPE_BYTES["F32"] == 4


# --- read back from a checkpoint


def all_slices(layout: JobLayout) -> list[Shard]:
    return [part for tensor in layout.tensors for part in layout.slices(tensor)]


@CASES
@given(layouts())
def test_what_is_read_back_has_exactly_the_same_parts_or_is_refused(layout: JobLayout) -> None:
    slices = [s for s in all_slices(layout) if not s.name.startswith("rank") or len(s.ranks) == 1]
    assume(slices)
    try:
        found = infer(layout.world_size, slices)
    except UsageError:
        return
    parts = {(s.ranks, s.extent, s.global_shape, s.dtype) for s in all_slices(found)}
    assert parts == {(s.ranks, s.extent, s.global_shape, s.dtype) for s in slices}


STRATEGIES = {
    "ddp": (mesh(dp=4), {"w": (REPLICATE,)}),
    "fsdp": (mesh(fsdp=4), {"w": (shard(0),), "b": (shard(0),), "rng": (OWN,)}),
    "hsdp": (mesh(dp=2, fsdp=4), {"w": (REPLICATE, shard(0))}),
    "tp": (mesh(dp=2, tp=4), {"wq": (REPLICATE, shard(0)), "wo": (REPLICATE, shard(1)), "n": (REPLICATE, REPLICATE)}),
    "fsdp x tp": (mesh(fsdp=2, tp=2), {"wq": (strided_shard(0, 2), shard(0)), "n": (shard(0), REPLICATE)}),
    "pp": (mesh(pp=2, dp=2), {"l0": (only(0), REPLICATE), "l1": (only(1), REPLICATE)}),
    "zero": (mesh(dp=4), {"w": (REPLICATE,), "m": (shard(0),), "v": (only(3),)}),
    "hsdp x tp": (
        mesh(dp=2, fsdp=2, tp=2),
        {"w": (REPLICATE, shard(0), shard(1)), "n": (REPLICATE, shard(0), REPLICATE)},
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_usual_strategies_are_read_back(strategy: str) -> None:
    where, placements = STRATEGIES[strategy]
    tensors = [Tensor(name, "F32", (16, 16), place) for name, place in placements.items()]
    layout = JobLayout(where.size, [where], tensors)
    found = infer(where.size, all_slices(layout))
    assert found.meshes[0].sizes == where.sizes
    assert {t.name: t.placements for t in found.tensors} == placements


def test_a_layout_moves_to_another_mesh() -> None:
    where, placements = STRATEGIES["fsdp x tp"]
    layout = JobLayout(4, [where], [Tensor(name, "F32", (16, 16), place) for name, place in placements.items()])
    moved = resized(layout, mesh(fsdp=2, tp=4))
    assert moved.tensors[0].placements == (strided_shard(0, 4), shard(0))
    assert [s.extent.lengths[0] for s in moved.slices(moved.tensors[0])] == [2] * 8
    staged = JobLayout(4, [mesh(pp=2, dp=2)], [Tensor("l1", "F32", (4,), (only(1), REPLICATE))])
    assert resized(staged, mesh(pp=4, dp=2)).tensors[0].placements == (only(2), REPLICATE)
    with pytest.raises(UsageError, match="2 axes"):
        resized(layout, mesh(dp=4))
