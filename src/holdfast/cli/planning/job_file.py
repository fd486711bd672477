"""The description of a job for `holdfast plan`: a small TOML or JSON file, strictly read.

    ranks_per_node = 8

    [mesh]                                  # outermost axis first; `[meshes.<name>]` divides the same ranks otherwise
    pp = 2
    dp = 2
    tp = 4

    [[tensors]]
    name = "model.layers.{i}.wq.weight"     # {i}: 0 .. repeat - 1
    repeat = 32
    stage = "pp"                            # the i-th lies in stage i * pp / repeat
    dtype = "BF16"
    shape = [4096, 4096]
    place = { tp = "shard(0)" }             # else: replicate. own, only(0, 1), strided_shard(0, 4)

    [optimizer]                             # for every tensor whose name begins with `of`
    states = ["exp_avg", "exp_avg_sq"]      # optimizer.state.layers.0.wq.weight.exp_avg
    scalars = ["step"]
    dtype = "F32"
    place = { dp = "shard(0)" }             # ZeRO-1: placed as its tensor, but for this

Unknown keys, axes and placements are errors that name their place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from holdfast.base.errors import UsageError
from holdfast.core.layout.job_layout import JobLayout, Mesh, Tensor
from holdfast.core.layout.placement import REPLICATE, Kind, Placement, only

MAX_FILE_BYTES = 16 << 20
MAX_TENSORS = 10**6

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Described = TypeVar("_Described")
_Axes: TypeAlias = dict[str, _Count]


class TensorLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor, or `repeat` of them."""

    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 48)], ...]
    place: dict[str, str] = {}
    mesh: str = ""
    repeat: _Count = 1
    stage: str = ""


class Optimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """States that an optimizer keeps of every tensor."""

    states: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    dtype: str = "F32"
    place: dict[str, str] = {}
    of: str = "model."


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    mesh: _Axes
    tensors: tuple[TensorLine, ...]
    meshes: dict[str, _Axes] = {}
    optimizer: Optimizer | None = None
    ranks_per_node: _Count | None = None


def load(path: Path) -> Description:
    """Reads the description of a job.

    Raises:
        UsageError: it cannot be read or understood; says where.
    """
    return read(path, Description, what="job")


def read(path: Path, kind: type[_Described], *, what: str) -> _Described:
    """Reads a description; TOML, unless the name ends in `.json`.

    Raises:
        UsageError: it cannot be read or understood; says where.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"the description cannot be read: {error.strerror}",
            where=str(path),
            remedy="give a TOML or JSON file, or a script; of a checkpoint: `--from ROOT`",
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"the description has more than {MAX_FILE_BYTES >> 20} MiB", where=str(path))
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - other commands do not load the parser
    else:
        import tomli as tomllib  # noqa: PLC0415
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(data, type=kind)
        return msgspec.convert(tomllib.loads(data.decode()), kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(
            f"this describes no {what}: {error}", where=str(path), remedy="`holdfast plan --help` shows an example"
        ) from error


def layout_of(described: Description, mesh: Mesh) -> JobLayout:
    """The layout that is described, on a main mesh of these sizes.

    Raises:
        UsageError: an axis, mesh or placement that does not exist; or the layout is impossible.
    """
    meshes = {"": mesh} | {name: mesh_of(axes) for name, axes in described.meshes.items()}
    tensors = list(_tensors(described, meshes))
    return JobLayout(max(one.size for one in meshes.values()), list(meshes.values()), tensors)


def mesh_of(axes: Mapping[str, int]) -> Mesh:
    """The mesh with these axes, outermost first."""
    return Mesh(tuple(axes), tuple(axes.values()))


def _tensors(described: Description, meshes: Mapping[str, Mesh]) -> Iterator[Tensor]:
    if sum(line.repeat for line in described.tensors) > MAX_TENSORS:
        raise UsageError(f"more than {MAX_TENSORS} tensors are described")
    known = {axis for mesh in meshes.values() for axis in mesh.names}
    if described.optimizer is not None and (strange := sorted(set(described.optimizer.place) - known)):
        raise UsageError(f"no mesh has an axis {strange[0]!r}", where="optimizer.place")
    numbers = {name: number for number, name in enumerate(meshes)}
    for line in described.tensors:
        if line.mesh not in meshes:
            raise UsageError(f"there is no mesh {line.mesh!r}", where=line.name, remedy=f"add [meshes.{line.mesh}]")
        if line.repeat > 1 and "{i}" not in line.name:
            raise UsageError("a tensor that repeats needs {i} in its name", where=line.name)
        mesh = meshes[line.mesh]
        placed = _placements(line.place, mesh, line.name)
        for index in range(line.repeat):
            here = _staged(line, mesh, placed, index)
            tensor = Tensor(line.name.replace("{i}", str(index)), line.dtype, line.shape, here, numbers[line.mesh])
            yield tensor
            if described.optimizer is not None:
                yield from _states(described.optimizer, tensor, mesh)


def _placements(place: Mapping[str, str], mesh: Mesh, where: str) -> dict[str, Placement]:
    """Placement by axis; what is not named replicates."""
    if strange := sorted(set(place) - set(mesh.names)):
        raise UsageError(f"the mesh {mesh} has no axis {strange[0]!r}", where=where)
    found = {axis: Placement.parse(text) for axis, text in place.items()}
    for axis, placed in found.items():
        if placed is None:
            raise UsageError(
                f"{place[axis]!r} is no placement",
                where=where,
                remedy="replicate, own, shard(0), strided_shard(0, 4), only(0)",
            )
    return {axis: placed for axis, placed in found.items() if placed is not None}


def _staged(line: TensorLine, mesh: Mesh, placed: Mapping[str, Placement], index: int) -> tuple[Placement, ...]:
    """The placements of the `index`-th of the tensors that a line stands for."""
    placed = dict(placed)
    if line.stage:
        if line.stage not in mesh.names or line.stage in placed:
            raise UsageError(f"{line.stage!r} is no axis whose stages could hold it", where=line.name)
        placed[line.stage] = only(index * mesh.sizes[mesh.names.index(line.stage)] // line.repeat)
    return tuple(placed.get(axis, REPLICATE) for axis in mesh.names)


def _states(optimizer: Optimizer, tensor: Tensor, mesh: Mesh) -> Iterator[Tensor]:
    """The optimizer's states of a tensor. What has no dimension to cut stays whole."""
    if not tensor.name.startswith(optimizer.of):
        return
    changed = _placements({a: t for a, t in optimizer.place.items() if a in mesh.names}, mesh, "optimizer")
    moved = tuple(
        changed[axis] if axis in changed and _fits(changed[axis], tensor) else placed
        for axis, placed in zip(mesh.names, tensor.placements, strict=True)
    )
    scalar = tuple(REPLICATE if p.kind in (Kind.SHARD, Kind.STRIDED) else p for p in tensor.placements)
    stem = f"optimizer.state.{tensor.name[len(optimizer.of) :]}"
    for state in optimizer.states:
        yield Tensor(f"{stem}.{state}", optimizer.dtype, tensor.shape, moved, tensor.mesh)
    for state in optimizer.scalars:
        yield Tensor(f"{stem}.{state}", "F32", (), scalar, tensor.mesh)


def _fits(placed: Placement, tensor: Tensor) -> bool:
    return placed.kind not in (Kind.SHARD, Kind.STRIDED) or placed.dim < len(tensor.shape)
