"""Between MindSpore's layouts and the project's own words: boxes in the whole tensor, and the ranks that hold each.

One way, a layout and the tensor's shape give for every redundancy group its extent. The other way, extents by rank give
a layout that places the same bytes on the same ranks, if there is one: MindSpore cuts evenly, and its ranks count in a
box of devices. Pipelines: stage s of n devices is ranks s * n to s * n + n - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.adapters.mindspore.layout import Layout
from holdfast.adapters.mindspore.strategy import OperatorStrategy, Strategy, stage_layouts
from holdfast.base.errors import UsageError
from holdfast.core.model import Extent, Shard


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor, and the ranks that hold it."""

    extent: Extent
    ranks: tuple[int, ...]


def slices_of(layout: Layout, shape: Sequence[int], first_rank: int = 0) -> tuple[Slice, ...]:
    """The slices of a tensor, in the order of the layout's redundancy groups.

    Args:
        layout: how the tensor lies on the devices of its stage.
        shape: of the whole tensor.
        first_rank: the stage's first rank.

    Raises:
        UsageError: the shape does not divide as the layout says.
    """
    where = f"{layout.dev_matrix} {layout.tensor_map}"
    parts = layout.num_slices
    if len(shape) != len(parts) or any(length % count for length, count in zip(shape, parts, strict=True)):
        raise UsageError(f"a tensor of shape {tuple(shape)} is not cut into {parts}", where=where)
    lengths = tuple(length // count for length, count in zip(shape, parts, strict=True))
    shards = layout.num_shards
    if shards > 1 and (not lengths or lengths[0] % shards):
        raise UsageError(f"slices of shape {lengths} are not cut into {shards} optimizer shards", where=where)
    found = []
    for holders in layout.holders():
        offsets = tuple(i * n for i, n in zip(layout.slice_indices(holders[0]), lengths, strict=True))
        for shard in range(shards):
            ranks = tuple(first_rank + device for device in holders[shard::shards])
            found.append(Slice(_shard_extent(offsets, lengths, shard, shards), ranks))
    return tuple(found)


def _shard_extent(offsets: tuple[int, ...], lengths: tuple[int, ...], shard: int, shards: int) -> Extent:
    """The part of a slice that optimizer sharding leaves to one device: some of its first rows."""
    if shards == 1:
        return Extent(offsets, lengths)
    rows = lengths[0] // shards
    return Extent((offsets[0] + shard * rows, *offsets[1:]), (rows, *lengths[1:]))


def extents_by_rank(layout: Layout, shape: Sequence[int], first_rank: int = 0) -> dict[int, Extent]:
    """Return which box of the tensor each rank of the stage holds. Raises UsageError as `slices_of`."""
    return {rank: piece.extent for piece in slices_of(layout, shape, first_rank) for rank in piece.ranks}


def shards_of_rank(
    strategy: Strategy, rank: int, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, str]
) -> list[Shard]:
    """Return what a rank holds of all parameters, and who holds the same.

    Args:
        strategy: of one stage, or merged.
        rank: global rank; one of a stage that the strategy does not have holds nothing.
        shapes: of the whole tensors, by parameter name without stage.
        dtypes: keys of `core.model.DTYPE_BYTES`, by parameter name without stage.

    Raises:
        UsageError: a parameter without shape or dtype, or one that does not divide.
    """
    found = []
    for stage, name, layout in stage_layouts(strategy):
        first_rank = stage * layout.num_devices
        if not first_rank <= rank < first_rank + layout.num_devices:
            continue
        if name not in shapes or name not in dtypes:
            raise UsageError(f"shape and dtype of {name} are not given")
        shape = tuple(shapes[name])
        held = next(piece for piece in slices_of(layout, shape, first_rank) if rank in piece.ranks)
        found.append(Shard(name, dtypes[name], shape, held.extent, held.ranks))
    return found


def layout_from_extents(extents: Mapping[int, Extent], shape: Sequence[int]) -> Layout:
    """A layout that places these boxes on these ranks.

    Optimizer sharding comes out as one more axis of the first dimension, which says the same.

    Args:
        extents: by rank; the ranks are those of one stage, consecutive.
        shape: of the whole tensor.

    Raises:
        UsageError: no layout of MindSpore does that (uneven pieces, ranks in no regular order).
    """
    first = min(extents, default=0)
    ranks = range(first, first + len(extents))
    if not extents or set(extents) != set(ranks):
        raise UsageError("the ranks of a stage are consecutive, and there is at least one")
    indices = [_index(extents[rank], tuple(shape)) for rank in ranks]
    devices, maps = _axes_from(indices, len(shape))
    layout = _layout(devices, maps, tuple(shape))
    if extents_by_rank(layout, shape, first) != dict(extents):
        raise _irregular()
    return layout


def _irregular() -> UsageError:
    return UsageError("no layout of MindSpore places these pieces so", remedy="reshard to even pieces before")


def _index(extent: Extent, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return which of the even pieces along each dimension this is."""
    for offset, length, whole in zip(extent.offsets, extent.lengths, shape, strict=True):
        if whole % max(length, 1) or offset % max(length, 1):
            raise _irregular()
    return tuple(o // max(n, 1) for o, n in zip(extent.offsets, extent.lengths, strict=True))


def _axes_from(indices: Sequence[tuple[int, ...]], num_dims: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Reads the box of devices off the ranks, innermost axis first.

    An axis is a run of ranks at one distance along which nothing changes, or one dimension's index by a fixed step.

    Returns:
        Lengths of the axes from the right; per dimension its (step, axis from the right).
    """
    devices: list[int] = []
    maps: list[list[tuple[int, int]]] = [[] for _ in range(num_dims)]
    stride = 1
    while stride < len(indices):
        change = tuple(b - a for a, b in zip(indices[0], indices[stride], strict=True))
        moved = [dim for dim, step in enumerate(change) if step]
        length = 1
        while stride * length < len(indices) and _follows(indices, stride * length, change, length):
            length += 1
        if len(moved) > 1 or min(change, default=0) < 0 or len(indices) % (stride * length):
            raise _irregular()
        if moved:
            maps[moved[0]].append((change[moved[0]], len(devices)))
        devices.append(length)
        stride *= length
    return devices, maps


def _follows(indices: Sequence[tuple[int, ...]], at: int, change: tuple[int, ...], steps: int) -> bool:
    return indices[at] == tuple(first + step * steps for first, step in zip(indices[0], change, strict=True))


def _layout(devices: list[int], maps: list[list[tuple[int, int]]], shape: tuple[int, ...]) -> Layout:
    axes = [tuple(axis for _, axis in sorted(entries, reverse=True)) for entries in maps]
    tensor_map: tuple[int | tuple[int, ...], ...] = tuple(entry[0] if entry else -1 for entry in axes)
    if any(len(entry) > 1 for entry in axes):
        tensor_map = tuple(entry or (-1,) for entry in axes)
    return Layout(tuple(reversed(devices)) or (1,), tensor_map, tensor_shape=shape)


def strategy_from_extents(
    parameters: Mapping[str, tuple[Sequence[int], Mapping[int, Extent]]], *, stage: int = 0
) -> Strategy:
    """The strategy of a stage from what its ranks hold.

    Args:
        parameters: by name: the tensor's shape, and the box that each rank of the stage holds.
        stage: index of the pipeline stage.

    Raises:
        UsageError: a parameter lies as MindSpore cannot say it; the message names it.
    """
    layouts = {}
    for name, (shape, extents) in parameters.items():
        try:
            layouts[name] = layout_from_extents(extents, shape)
        except UsageError as error:
            raise UsageError(error.what, where=name, remedy=error.remedy) from error
    # MindSpore reads the stage off the first operator.
    operators = (OperatorStrategy("holdfast", stage, ()),)
    return Strategy(stage + 1, operators, layouts)
