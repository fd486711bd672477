"""The mesh and the placements behind a checkpoint, read back from who holds which part of what.

A manifest tells groups and extents, not axes. Where along the ranks groups and offsets change tells where the axes lie;
what an axis does to a tensor is tried and then proved: the layout that is returned has exactly the given parts, or there
is none. So a plan for another number of ranks never rests on a guess. Axes that no tensor tells apart are one axis.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import gcd, prod
from typing import TypeAlias

from holdfast.base.errors import UsageError
from holdfast.core.layout.job_layout import JobLayout, Mesh, Tensor
from holdfast.core.layout.placement import OWN, REPLICATE, Kind, Placement, only, shard, strided_shard
from holdfast.core.model import Extent, Shard

_OWNED = re.compile(r"rank(\d+)/(.+)\Z", re.DOTALL)
_REMEDY = "describe the mesh and the placements in a file instead: `holdfast plan --help`"

# Which ranks hold which part; of a tensor all there are. What is equal for two tensors is worked out once.
Parts: TypeAlias = tuple[tuple[tuple[int, ...], Extent], ...]


def infer(world_size: int, shards: Iterable[Shard]) -> JobLayout:
    """The layout whose slices are exactly these shards.

    Args:
        world_size: ranks of the job that saved them.
        shards: each different part of each tensor once.

    Raises:
        UsageError: no mesh explains them; names the tensor.
    """
    whole, owned = _sorted_out(shards)
    parts = {name: _parts(found) for name, found in whole.items()}
    mesh = _mesh(world_size, parts)
    known: dict[tuple[tuple[int, ...], Parts], tuple[Placement, ...]] = {}
    tensors = []
    for name, found in whole.items():
        key = (found[0].global_shape, parts[name])
        if key not in known:
            known[key] = _placements(world_size, mesh, found[0], parts[name])
        tensors.append(Tensor(name, found[0].dtype, found[0].global_shape, known[key]))
    return JobLayout(world_size, [mesh], [*tensors, *_owned_tensors(world_size, mesh, owned)])


def resized(layout: JobLayout, mesh: Mesh) -> JobLayout:
    """The same tensors on a mesh of other sizes: stages and owners spread alike, strided shards follow what is inside.

    Raises:
        UsageError: the number of axes differs, or a tensor cannot be laid out so.
    """
    (old,) = layout.meshes
    if len(old.sizes) != len(mesh.sizes):
        raise UsageError(
            f"the checkpoint's mesh has {len(old.sizes)} axes ({old}), not {len(mesh.sizes)}",
            remedy=f"write it like {'x'.join(map(str, old.sizes))}, outermost axis first",
        )
    moved = {t.placements: _moved(t.placements, old, mesh) for t in layout.tensors}
    return JobLayout(mesh.size, [mesh], [replace(t, placements=moved[t.placements]) for t in layout.tensors])


def _moved(placements: Sequence[Placement], old: Mesh, new: Mesh) -> tuple[Placement, ...]:
    found = []
    for axis, placed in enumerate(placements):
        if placed.kind is Kind.STRIDED:
            found.append(strided_shard(placed.dim, _inside(placements, axis, new)))
        elif placed.kind is Kind.ONLY:
            found.append(only(*(at * new.sizes[axis] // old.sizes[axis] for at in placed.at)))
        else:
            found.append(placed)
    return tuple(found)


def _inside(placements: Sequence[Placement], axis: int, mesh: Mesh) -> int:
    """Into how many parts the axes further in cut the dimension that this one cuts."""
    cutting = (at for at in range(axis + 1, len(placements)) if placements[at].kind in (Kind.SHARD, Kind.STRIDED))
    return prod(mesh.sizes[at] for at in cutting if placements[at].dim == placements[axis].dim)


def _sorted_out(shards: Iterable[Shard]) -> tuple[dict[str, list[Shard]], dict[str, dict[int, Shard]]]:
    """Shards by name; and those of single ranks by the name behind `rank<N>/`."""
    whole: dict[str, list[Shard]] = defaultdict(list)
    owned: dict[str, dict[int, Shard]] = defaultdict(dict)
    for one in shards:
        if match := _OWNED.match(one.name):
            if one.ranks != (int(match[1]),) or one.extent.lengths != one.global_shape:
                raise UsageError("the state of one rank is cut, or held by others", where=one.name, remedy=_REMEDY)
            owned[match[2]][int(match[1])] = one
        else:
            whole[one.name].append(one)
    return whole, owned


def _parts(shards: Sequence[Shard]) -> Parts:
    return tuple(sorted(((one.ranks, one.extent) for one in shards), key=lambda part: part[0]))


def _owned_tensors(world_size: int, mesh: Mesh, owned: Mapping[str, Mapping[int, Shard]]) -> Iterator[Tensor]:
    """Yield what each rank has of its own, and what one rank has for all."""
    for name, found in owned.items():
        forms = {(one.dtype, one.global_shape) for one in found.values()}
        if len(forms) == 1 and len(found) == world_size:
            first = found[min(found)]
            yield Tensor(name, first.dtype, first.global_shape, (OWN,) * len(mesh.sizes))
            continue
        for rank, one in found.items():
            at = tuple(
                only(rank // stride % size) for size, stride in zip(mesh.sizes, mesh.strides, strict=True)
            )  # its place, axis by axis
            yield Tensor(name if len(found) == 1 else f"{name} of {rank}", one.dtype, one.global_shape, at)


def _mesh(world_size: int, parts: Mapping[str, Parts]) -> Mesh:
    """The coarsest mesh at whose axes groups and offsets may change."""
    edges = {1, world_size}
    seen: set[Parts] = set()
    for name, found in parts.items():
        if found not in seen:
            seen.add(found)
            edges |= _group_edges(world_size, found) | _part_edges(world_size, found, name)
    ordered = sorted(edges)
    if any(outer % inner for inner, outer in pairwise(ordered)):
        raise UsageError(f"groups and parts change every {ordered} ranks, which no mesh does", remedy=_REMEDY)
    sizes = tuple(outer // inner for inner, outer in reversed(list(pairwise(ordered)))) or (1,)
    return Mesh(tuple(f"dim{axis}" for axis in range(len(sizes))), sizes)


def _group_edges(world_size: int, parts: Parts) -> set[int]:
    """Return where axes must end because groups consist of evenly spaced ranks, of evenly spaced such rows, and so on."""
    edges: set[int] = set()
    for left in {tuple(rank - ranks[0] for rank in ranks) for ranks, _ in parts}:
        while len(left) > 1:
            step = left[1]
            count = next((i for i, rank in enumerate(left) if rank != i * step), len(left))
            edges |= {step, step * count}
            left = left[::count]
    return {edge for edge in edges if world_size % edge == 0}  # stages that are tied may lie at any distance


def _part_edges(world_size: int, parts: Parts, name: str) -> set[int]:
    """Return where axes must end because what ranks hold changes there, and begins anew there."""
    holds: list[Extent | None] = [None] * world_size
    for ranks, extent in parts:
        for rank in ranks:
            if holds[rank] is not None:
                raise UsageError("a rank holds two parts of it", where=name, remedy=_REMEDY)
            holds[rank] = extent
    columns: list[list[object]] = [[extent is None for extent in holds]]
    num_dims = len(parts[0][1].offsets)
    columns += [[None if e is None else e.offsets[dim] for e in holds] for dim in range(num_dims)]
    edges: set[int] = set()
    for column in columns:
        changes = [rank for rank in range(1, world_size) if column[rank] != column[rank - 1]]
        step = gcd(*changes) if changes else 0
        if step:
            rounds = (p for p in range(2 * step, world_size, step) if world_size % p == 0)
            again = (p for p in rounds if column[p:] == column[:-p])
            edges |= {gcd(step, world_size), next(again, world_size)}
    return edges


def _placements(world_size: int, mesh: Mesh, sample: Shard, parts: Parts) -> tuple[Placement, ...]:
    """Return what each axis does to a tensor with these parts; the first combination that has exactly these parts."""
    choices = [_choices(axis, mesh, len(sample.global_shape), parts) for axis in range(len(mesh.sizes))]
    for plain in product(*choices):
        for placements in {plain, _strided(plain, mesh)}:
            tensor = Tensor(sample.name, sample.dtype, sample.global_shape, placements)
            try:
                layout = JobLayout(world_size, [mesh], [tensor])
            except UsageError:
                continue  # not what lies here: no part of this tensor would be a box
            if _parts(list(layout.slices(tensor))) == parts:
                return placements
    raise UsageError(f"no placement on a mesh {mesh} has these parts", where=sample.name, remedy=_REMEDY)


def _choices(axis: int, mesh: Mesh, num_dims: int, parts: Parts) -> list[Placement]:
    size, stride = mesh.sizes[axis], mesh.strides[axis]
    ranks = parts[0][0]
    together = sorted({rank // stride % size for rank in ranks})
    everywhere = sorted({rank // stride % size for ranks, _ in parts for rank in ranks})
    if len(together) == size:
        return [REPLICATE]
    if together == everywhere:
        return [only(*together)]
    return [shard(dim) for dim in range(num_dims)]


def _strided(placements: tuple[Placement, ...], mesh: Mesh) -> tuple[Placement, ...]:
    """The same with every axis cutting what the axes further in will have cut."""
    return tuple(
        strided_shard(placed.dim, _inside(placements, axis, mesh)) if placed.kind is Kind.SHARD else placed
        for axis, placed in enumerate(placements)
    )
