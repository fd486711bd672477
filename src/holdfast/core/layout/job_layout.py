"""The layout of a job, from meshes and placements: which rank holds which part of which tensor, and who holds the same.

A description, not an enumeration: every question about one rank or one tensor is answered by arithmetic on the rank's
coordinates, whatever the number of ranks. Ranks lie in a mesh row-major, the last axis innermost, as torch lays them;
several meshes may divide the same ranks differently (experts). Every tensor has one placement per axis of its mesh.

- Data parallelism replicates, FSDP and ZeRO shard a dimension, HSDP does one on each of two axes.
- ZeRO-1: the weights replicate, the optimizer's states shard, or are held by one rank each (`only`).
- Tensor, sequence, context and expert parallelism shard or replicate on an axis of their own.
- A stage of a pipeline holds its tensors `only` at its coordinate; a tensor tied over stages is held at several.
- Memory that has two names within a rank (tied weights) is one tensor here, as it is one entry when it is saved.

The groups of all tensors together are `core.layout.redundancy_groups`; what they cost is `core.layout.cost_plan`. All of it says the same as
`core.layout.bundles` does rank by rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeAlias

from holdfast.base.errors import UsageError
from holdfast.core.layout import placement
from holdfast.core.layout.placement import Kind, Placement, Step
from holdfast.core.model import DTYPE_BYTES, Extent, Shard

# More than any job has; a description that claims more is a mistake.
MAX_RANKS = 1 << 20
# Parts of a strided shard: coordinates of the axes further in.
MAX_PARTS = 1 << 12
# How state of one rank alone is named when it is saved; see core.model.Shard.
_OWNED = re.compile(r"rank\d")

# The ranks of a group relative to its lowest: (count, stride) per axis, outermost first, adjacent axes made one.
Form: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, outermost first. Ranks 0 .. size - 1 lie in it row-major; ranks beyond it hold nothing of it."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise UsageError("every axis of a mesh has one name of its own and one size", where=str(self))
        if any(size < 1 for size in self.sizes):
            raise UsageError("an axis of a mesh has at least one coordinate", where=str(self))

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Per axis how far apart neighbouring ranks are."""
        return tuple(prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the state, as the description has it.

    Attributes:
        name: entry name. A tensor that some axis makes each rank's own gets the name `rank<lowest of group>/<name>`.
        dtype: a key of DTYPE_BYTES.
        shape: of the whole tensor.
        placements: one per axis of its mesh.
        mesh: index of its mesh.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    mesh: int = 0


@dataclass(frozen=True, slots=True)
class Role:
    """Says what a placement means to groups: which ranks along the axis hold the same, and where.

    Attributes:
        at: coordinates that hold the same bytes, evenly spaced; empty where each holds another part, whose size may differ.
        owns: each coordinate holds bytes of its own under a name of its own.
    """

    at: range = range(0)
    owns: bool = False


class JobLayout:
    """Knows who holds what, of every tensor of a job.

    Args:
        meshes: how they are arranged.
        tensors: the whole state; names are unique.

    Raises:
        UsageError: the description contradicts itself, or a part of a tensor is no box; names the tensor.
    """

    def __init__(self, world_size: int, meshes: Sequence[Mesh], tensors: Sequence[Tensor]) -> None:
        self.world_size = world_size
        self.meshes = tuple(meshes)
        self.tensors = tuple(tensors)
        self._strides = [mesh.strides for mesh in meshes]
        self._steps: dict[tuple[int, tuple[Placement, ...]], dict[int, list[tuple[int, Step]]]] = {}
        self._roles: dict[tuple[int, tuple[Placement, ...]], tuple[Role, ...]] = {}
        if not 1 <= world_size <= MAX_RANKS or any(mesh.size > world_size for mesh in meshes):
            raise UsageError(f"{world_size} ranks do not fill the mesh {', '.join(map(str, meshes))}")
        self._check()

    def roles(self, tensor: Tensor) -> tuple[Role, ...]:
        """Return what the tensor's placements mean to groups, per axis."""
        key = (tensor.mesh, tensor.placements)
        if key not in self._roles:
            sizes = self.meshes[tensor.mesh].sizes
            self._roles[key] = tuple(_role(p, size) for p, size in zip(tensor.placements, sizes, strict=True))
        return self._roles[key]

    def form(self, tensor: Tensor) -> Form:
        """The shape of the tensor's groups."""
        strides = self._strides[tensor.mesh]
        return _canonical(
            (len(role.at), stride * role.at.step)
            for role, stride in zip(self.roles(tensor), strides, strict=True)
            if len(role.at) > 1
        )

    def base(self, tensor: Tensor, rank: int) -> int | None:
        """The lowest rank of the rank's group; None where the rank holds nothing of the tensor."""
        mesh = self.meshes[tensor.mesh]
        if not 0 <= rank < mesh.size:
            return None
        base = rank
        for role, size, stride in zip(self.roles(tensor), mesh.sizes, self._strides[tensor.mesh], strict=True):
            if role.at:
                coordinate = rank // stride % size
                if coordinate not in role.at:
                    return None
                base -= (coordinate - role.at[0]) * stride
        return base

    def group(self, tensor: Tensor, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same bytes as `rank`, ascending, itself included; empty where it holds nothing."""
        base = self.base(tensor, rank)
        return () if base is None else tuple(base + offset for offset in offsets(self.form(tensor)))

    def extent(self, tensor: Tensor, rank: int) -> Extent:
        """Return which part of the tensor the rank holds, if it holds one; an empty one stands at the end, as torch's
        does.
        """
        starts, lengths = [0] * len(tensor.shape), list(tensor.shape)
        sizes, strides = self.meshes[tensor.mesh].sizes, self._strides[tensor.mesh]
        for dim, steps in self.steps(tensor).items():
            rows = tensor.shape[dim]
            coordinates = [rank // strides[axis] % sizes[axis] for axis, _ in steps]
            runs = placement.held(rows, [step for _, step in steps], coordinates)
            starts[dim], lengths[dim] = runs[0] if runs else (rows, 0)
        return Extent(tuple(starts), tuple(lengths))

    def steps(self, tensor: Tensor) -> dict[int, list[tuple[int, Step]]]:
        """Per tensor dimension that is cut: the axes that cut it, outermost first, and how."""
        key = (tensor.mesh, tensor.placements)
        if key not in self._steps:
            found: dict[int, list[tuple[int, Step]]] = {}
            for axis, placed in enumerate(tensor.placements):
                if placed.kind in (Kind.SHARD, Kind.STRIDED):
                    step = Step(self.meshes[tensor.mesh].sizes[axis], placed.parts)
                    found.setdefault(placed.dim, []).append((axis, step))
            self._steps[key] = found
        return self._steps[key]

    def entry_name(self, tensor: Tensor, base: int) -> str:
        """The name under which the group of lowest rank `base` saves the tensor."""
        return f"rank{base}/{tensor.name}" if any(role.owns for role in self.roles(tensor)) else tensor.name

    def shard(self, tensor: Tensor, rank: int) -> Shard | None:
        """Return what the rank holds of the tensor, as `core.layout.bundles` takes it."""
        base = self.base(tensor, rank)
        if base is None:
            return None
        name = self.entry_name(tensor, base)
        return Shard(name, tensor.dtype, tensor.shape, self.extent(tensor, rank), self.group(tensor, rank))

    def shards(self, rank: int) -> tuple[Shard, ...]:
        """Everything that the rank holds, in order of the tensors."""
        found = (self.shard(tensor, rank) for tensor in self.tensors)
        return tuple(shard for shard in found if shard is not None)

    def slices(self, tensor: Tensor) -> Iterator[Shard]:
        """Every different part of the tensor once, by lowest rank of its group."""
        mesh, strides = self.meshes[tensor.mesh], self._strides[tensor.mesh]
        choices = (
            role.at[:1] if role.at else range(size) for role, size in zip(self.roles(tensor), mesh.sizes, strict=True)
        )
        for corner in product(*choices):
            found = self.shard(tensor, sum(c * stride for c, stride in zip(corner, strides, strict=True)))
            assert found is not None  # the corner is one of the coordinates that hold it
            yield found

    def _check(self) -> None:
        names: set[str] = set()
        boxes: set[tuple[int, tuple[Step, ...]]] = set()
        for tensor in self.tensors:
            problem = self._problem(tensor) or ("this name is used twice" if tensor.name in names else "")
            if not problem:
                cuts = {(tensor.shape[d], tuple(s for _, s in steps)) for d, steps in self.steps(tensor).items()}
                if not all(placement.are_neighbours(*cut) for cut in cuts - boxes):
                    problem = "the rows that a rank would hold are not neighbours"
                boxes |= cuts
            if problem:
                placed = ", ".join(map(str, tensor.placements))
                raise UsageError(problem, where=f"{tensor.name} {list(tensor.shape)} ({placed})")
            names.add(tensor.name)

    def _problem(self, tensor: Tensor) -> str:
        """Return what is wrong with the tensor alone; empty if nothing is."""
        if not 0 <= tensor.mesh < len(self.meshes):
            return f"there is no mesh {tensor.mesh}"
        sizes = self.meshes[tensor.mesh].sizes
        if tensor.dtype not in DTYPE_BYTES:
            return f"{tensor.dtype!r} is no dtype; known are {', '.join(DTYPE_BYTES)}"
        if not tensor.name or _OWNED.match(tensor.name):
            return "a name is not empty and does not begin as those of a single rank do (rank0/...)"
        if any(length < 0 for length in tensor.shape):
            return "a dimension is negative"
        if len(tensor.placements) != len(sizes):
            return f"there are {len(tensor.placements)} placements for {len(sizes)} axes"
        wrong = (_misplaced(p, size, len(tensor.shape)) for p, size in zip(tensor.placements, sizes, strict=True))
        return next((text for text in wrong if text), "")


def offsets(form: Form) -> list[int]:
    """The ranks of a group relative to its lowest, ascending."""
    found = [0]
    for count, stride in reversed(form):
        found = [step * stride + offset for step in range(count) for offset in found]
    return found


def _canonical(axes: Iterator[tuple[int, int]]) -> Form:
    """Axes (outermost first) of which one continues the next made one, so that equal groups have equal forms."""
    found: list[tuple[int, int]] = []
    for count, stride in axes:
        if found and found[-1][1] == count * stride:
            found[-1] = (found[-1][0] * count, stride)
        else:
            found.append((count, stride))
    return tuple(found)


def _role(placed: Placement, size: int) -> Role:
    if placed.kind is Kind.ONLY:
        step = placed.at[1] - placed.at[0] if len(placed.at) > 1 else 1
        return Role(at=range(placed.at[0], placed.at[-1] + 1, step))
    if placed.kind is Kind.REPLICATE or size == 1:
        return Role(at=range(size))
    return Role(owns=placed.kind is Kind.OWN)


def _misplaced(placed: Placement, size: int, num_dims: int) -> str:
    """Return what is wrong with a placement on an axis of `size` coordinates; empty if nothing is."""
    if placed.kind in (Kind.SHARD, Kind.STRIDED):
        if not 0 <= placed.dim < num_dims:
            return f"it has no dimension for {placed}"
        return "" if 1 <= placed.parts <= MAX_PARTS else f"{placed} cuts no number of parts up to {MAX_PARTS}"
    if placed.kind is Kind.ONLY:
        steps = {b - a for a, b in zip(placed.at, placed.at[1:], strict=False)}
        if not placed.at or placed.at[0] < 0 or placed.at[-1] >= size or len(steps) > 1 or min(steps, default=1) < 1:
            return f"{placed} names no evenly spaced coordinates below {size}"
    return ""
