"""Tells which part of which tensor this rank holds, and who holds the same: from live tensors to shards.

Four sources and no guess. A DTensor says it itself: placements and mesh. Of what the first FSDP cuts, FSDP says it. Another
plain tensor is replicated only when that is known: its module is wrapped by DistributedDataParallel, or its name is
declared. Everything else is this rank's own and named `rank<N>/...`, because two ranks that hold different bytes under one name would overwrite each other.

Pure with regard to training: no collective, no copy, no synchronisation with a device. Called when the structure of
the state changes and for the few tensors that objects make anew at every save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.base.errors import UsageError
from holdfast.checkpoint.entries.types import Group, LiveTensor, dtype_name
from holdfast.core.model import Extent, Shard

# Placements are told apart by class name: a strided shard is private to torch and has changed its base class.
_SHARDED = ("Shard", "_StridedShard")
_STRIDED = "_StridedShard"
_REPLICATED = "Replicate"

# Global shape, box, group; None: this rank is outside the tensor's mesh and holds nothing of it.
Layout: TypeAlias = tuple[tuple[int, ...], Extent, Group] | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Says what this rank holds of a plain tensor that something else than a DTensor cuts (`checkpoint.entries.fsdp1`).

    Attributes:
        shape: of the whole tensor, as its entry has it.
        extent: what this rank holds; without elements, if nothing.
        ranks: who else holds the same, and this rank.
    """

    shape: tuple[int, ...]
    extent: Extent
    ranks: Group

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the shape of this part: the tensor that is cut, or state that is cut with it."""
        return tuple(tensor.shape) == self.extent.lengths


class Layouts:
    """Answers for one rank of one job.

    Args:
        replicated: glob patterns of names whose plain tensors and values all ranks hold alike; a pattern also covers
            everything below the name it matches.
        exclude: glob patterns of names of parameters and buffers that are not saved, in the same way.
        allocated: whether tensors must have memory; without it a state can be planned and not saved.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        replicated: Sequence[str],
        *,
        exclude: Sequence[str] = (),
        allocated: bool = True,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.allocated = allocated
        self.everyone: Group = tuple(range(world_size))
        self._patterns = _with_all_below(replicated)
        self._excluded = _with_all_below(exclude)
        self._layouts: dict[tuple[tuple[int, ...], DeviceMesh, tuple[Placement, ...]], Layout] = {}

    def excludes(self, name: str) -> bool:
        """Return whether a parameter or buffer of this name is not saved."""
        return any(fnmatchcase(name, pattern) for pattern in self._excluded)

    def resolve(self, name: str, group: Group | None = None) -> tuple[str, Group]:
        """Entry name and redundancy group of something whole that this rank holds.

        Args:
            name: its name without regard to ranks.
            group: the ranks that are known to hold the same, if any are.
        """
        if self.world_size == 1:
            return name, self.everyone
        if self._patterns and any(fnmatchcase(name, pattern) for pattern in self._patterns):
            return name, self.everyone
        if group is not None:
            return name, group
        return f"rank{self.rank}/{name}", (self.rank,)

    def known(self, name: str, group: Group | None) -> Group | None:
        """The ranks known to hold the same as this one under `name`, None if it is this rank's own."""
        entry, ranks = self.resolve(name, group)
        return ranks if entry == name else None

    def live(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        group: Group | None = None,
        late: bool = False,
        piece: Piece | None = None,
    ) -> LiveTensor | None:
        """The tensor with its place, or None where this rank holds nothing of it.

        Raises:
            UsageError: its dtype, kind or placement cannot be saved; names it.
        """
        if piece is not None:
            return self._of_piece(name, tensor, piece, late=late)
        _check_kind(name, local_of(tensor), allocated=self.allocated)
        local = local_of(tensor).detach()
        if isinstance(tensor, DTensor):
            layout = self._of_dtensor(name, tensor)
            if layout is None:
                return None
            shape, extent, ranks = layout
            if tuple(local.shape) != extent.lengths:
                raise UsageError(
                    f"the local part has shape {tuple(local.shape)} where its placements say {extent.lengths}",
                    where=name,
                    remedy="build the DTensor with the shape of the whole tensor",
                )
            return LiveTensor(Shard(name, dtype_name(local.dtype, where=name), shape, extent, ranks), local, late)
        return LiveTensor(self.whole(name, local.dtype, tuple(local.shape), group), local, late)

    def whole(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], group: Group | None = None) -> Shard:
        """The shard of a plain tensor."""
        entry, ranks = self.resolve(name, group)
        extent = Extent((0,) * len(shape), shape)
        return Shard(entry, dtype_name(dtype, where=name), shape, extent, ranks)

    def of_piece(self, name: str, dtype: torch.dtype, piece: Piece) -> Shard:
        """The shard of a plain tensor that something else than a DTensor cuts."""
        return Shard(name, dtype_name(dtype, where=name), piece.shape, piece.extent, piece.ranks)

    def _of_piece(self, name: str, tensor: torch.Tensor, piece: Piece, *, late: bool) -> LiveTensor | None:
        if not piece.fits(tensor):
            raise UsageError(
                f"the parameter has shape {tuple(tensor.shape)} where FSDP says {piece.extent.lengths}: it is gathered",
                where=name,
                remedy="save between two steps, not after a forward pass without its backward pass",
            )
        if not piece.extent.num_elements:
            return None
        _check_kind(name, tensor, allocated=self.allocated)
        return LiveTensor(self.of_piece(name, tensor.dtype, piece), tensor.detach(), late)

    def _of_dtensor(self, name: str, tensor: DTensor) -> Layout:
        key = (tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))
        if key not in self._layouts:
            self._layouts[key] = _layout(name, *key)
        return self._layouts[key]


def as_patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return patterns as a caller gives them: one string is one pattern, and not its letters, of which `*` matches all."""
    return (given,) if isinstance(given, str) else tuple(given)


def _with_all_below(patterns: Sequence[str]) -> tuple[str, ...]:
    return tuple(p for pattern in patterns for p in (pattern, f"{pattern}.*"))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor on this rank, without autograd and without the price of `to_local()`."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def mesh_ranks(tensor: DTensor) -> Group | None:
    """All ranks of the mesh that the tensor lives on: who holds the same step count. None outside the mesh."""
    mesh = tensor.device_mesh
    return None if mesh.get_coordinate() is None else _ranks(mesh.mesh)


def memory_of(local: torch.Tensor) -> object:
    """Return what tells the memory of two tensors apart, also where there is none yet: each device may have addresses of its own."""
    if local.device.type == "meta" or isinstance(local, FakeTensor):
        return local.untyped_storage()._cdata, local.storage_offset()
    return local.device, local.data_ptr()


def elements_of(local: torch.Tensor) -> object:
    """Return what two tensors have in common that show the very same elements."""
    where = memory_of(local) if local.numel() else local.device
    return where, tuple(local.shape), local.stride(), local.dtype, local.is_conj(), local.is_neg()


def bits_of(local: torch.Tensor) -> torch.Tensor:
    """Return the bytes of all elements, row by row, as uint8; of a conjugated or negated tensor as it shows them."""
    plain = local.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def is_same_memory(one: torch.Tensor, other: Any) -> bool:
    """Returns whether another object is a tensor that shows the very same elements."""
    return isinstance(other, torch.Tensor) and elements_of(local_of(one)) == elements_of(local_of(other))


def _check_kind(name: str, local: torch.Tensor, *, allocated: bool) -> None:
    """Refuses what is not plain memory: its bytes would not be its value."""
    is_wrapper: bool = is_traceable_wrapper_subclass(local)
    if local.is_nested:
        kind = "nested tensors"
    elif local.layout is not torch.strided:
        kind = f"sparse tensors ({local.layout})"
    elif is_wrapper:
        kind = f"tensors of the class {type(local).__name__}"
    elif is_lazy(local) or (allocated and local.device.type == "meta"):
        raise UsageError(
            "the tensor has no memory yet (a lazy module, or the meta device)",
            where=name,
            remedy="materialise the model before its state is saved",
        )
    elif allocated and _end_bytes(local) > local.untyped_storage().nbytes():
        raise UsageError(
            "the memory of the tensor was taken away: its storage is smaller than it",
            where=name,
            remedy="give it its memory back (resize_ of the storage) before its state is saved or restored",
        )
    else:
        return
    raise UsageError(
        f"{kind} cannot be saved", where=name, remedy="keep it out of state_dict() or convert it to a plain tensor"
    )


def span_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of memory from the first element of a strided tensor to behind its last one."""
    if not tensor.numel():
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def _end_bytes(local: torch.Tensor) -> int:
    """Return how many bytes of its storage a tensor needs; a read of less ends the process."""
    return int(local.storage_offset()) * local.element_size() + span_bytes(local) if local.numel() else 0


def _layout(name: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Layout:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    kinds = [type(placement).__name__ for placement in placements]
    for placement, kind in zip(placements, kinds, strict=True):
        if kind not in (*_SHARDED, _REPLICATED):
            raise UsageError(
                f"a DTensor placed as {placement!r} cannot be saved",
                where=name,
                remedy="redistribute it to Shard or Replicate first",
            )
    lengths, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    extent = Extent(tuple(offsets), tuple(lengths))
    for dim in {p.dim for p, kind in zip(placements, kinds, strict=True) if kind == _STRIDED}:  # type: ignore[attr-defined]
        _require_box(name, dim, extent, (shape, mesh, placements))
    held = tuple(c if kind in _SHARDED else slice(None) for c, kind in zip(coordinate, kinds, strict=True))
    return shape, extent, _ranks(mesh.mesh[held])


def _ranks(part: torch.Tensor) -> Group:
    return tuple(sorted(int(rank) for rank in part.flatten().tolist()))


def _require_box(
    name: str, dim: int, extent: Extent, where: tuple[tuple[int, ...], DeviceMesh, tuple[Placement, ...]]
) -> None:
    """Follows the rows of a strided shard (FSDP over TP on one dimension): they must be neighbours.

    FSDP cuts what TP has cut, while the mesh lists FSDP first; the strided placement puts that right, and the rows
    are neighbours again. Any other use leaves gaps, which one box with an offset cannot tell.
    """
    shape, mesh, placements = where
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    rows = torch.arange(shape[dim], device="cpu")
    for mesh_dim, placement in enumerate(placements):
        if type(placement).__name__ in _SHARDED and placement.dim == dim:  # type: ignore[attr-defined]
            parts, _ = placement._split_tensor(rows, mesh.size(mesh_dim), with_padding=False, contiguous=False)  # type: ignore[attr-defined]
            rows = parts[coordinate[mesh_dim]]
    start = int(rows[0]) if len(rows) else extent.offsets[dim]
    if (
        not torch.equal(rows, torch.arange(start, start + extent.lengths[dim], device="cpu"))
        or start != extent.offsets[dim]
    ):
        raise UsageError(
            f"the rows that this rank holds of dimension {dim} are not neighbours ({placements})",
            where=name,
            remedy="choose a dimension that the number of ranks divides, or shard another one",
        )
