"""Tells which source ranks a target rank needs when a checkpoint goes from one strategy to another: MindSpore's answer.

MindSpore moves a parameter between layouts with slices and concatenations along axes of devices. It cuts the boxes of
devices and the tensor of both layouts finer until both have the same boxes and the same dimensions; then an axis that
splits the same dimension on both sides stays as it is, and along every other axis that splits the source the slices are
concatenated. The ranks that a rank needs are those that it reaches along the axes of concatenation. This may be more
than what holds bytes of its slice, and which of several twins is named matters, so the procedure is followed, not its
aim (https://gitee.com/mindspore/mindspore, parallel/_tensor.py and ccsrc/frontend/parallel/tensor_layout). The shape
of the tensor does not count: one that everything divides stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod

from holdfast.adapters.mindspore.formats.files import PathLike
from holdfast.adapters.mindspore.layout import FULLY, Layout
from holdfast.adapters.mindspore.strategy import Strategy, read_strategy, stage_layouts

# Each turn cuts something finer, so a dozen is more than any layout needs.
_MAX_TURNS = 64


@dataclass(slots=True)
class _Parameter:
    """A parameter as a strategy shows it: one layout, and the stages that have it."""

    layout: Layout
    stages: list[int]


@dataclass(frozen=True, slots=True)
class _Grid:
    """A layout of single axes: the box of devices, the tensor, and per dimension the axis (from the left) or None."""

    devices: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]


class _CannotRefineError(Exception):
    """The two layouts have no common refinement; everything is concatenated then."""


def rank_list_for_transform(
    rank_id: int,
    src_strategy_file: PathLike | Strategy | None = None,
    dst_strategy_file: PathLike | Strategy | None = None,
) -> set[int]:
    """The ranks whose checkpoints are needed to make that of `rank_id`.

    Args:
        rank_id: rank in the target strategy.
        src_strategy_file: strategy of the checkpoints that exist; None for a single device.
        dst_strategy_file: strategy that is wanted; None for a single device.

    Raises:
        TypeError: the rank is no whole number.
        ValueError: a file is missing or empty, there is nothing to transform, or the numbers of devices do not divide.
        CorruptError: not a strategy file.
    """
    if type(rank_id) is not int:  # callers without a type checker, as MindSpore's are
        raise TypeError(f"rank_list_for_transform takes a rank, got {type(rank_id).__name__}")
    if src_strategy_file is None:
        return {0}
    source = _parameters(src_strategy_file, None)
    target = None if dst_strategy_file is None else _parameters(dst_strategy_file, rank_id)
    if target:
        _keep_stage(source, target, rank_id)
    if not source or target == {}:
        raise ValueError(f"the strategies have no parameter of the pipeline stage of rank {rank_id}")
    source_devices = _first(source).layout.num_devices
    target_devices = _first(target).layout.num_devices if target else 1
    local_rank = rank_id % target_devices if target_devices > 1 else rank_id
    needed: set[int] = set()
    for name, parameter in source.items():
        if target is None:
            needed |= _needed_ranks(local_rank, parameter.layout, _whole(parameter.layout))
        elif name in target:
            needed |= _needed_ranks(local_rank, parameter.layout, target[name].layout)
    stages = {stage for parameter in source.values() for stage in parameter.stages}
    return {stage * source_devices + rank for stage in stages for rank in needed}


def _parameters(strategy: PathLike | Strategy, rank: int | None) -> dict[str, _Parameter]:
    """Return the parameters by name without stage.

    Of a parameter in several stages one layout counts: without a rank that of the first stage; for a rank of the first
    stage that of the first, for any other the last one that is not of the first.
    """
    read = strategy if isinstance(strategy, Strategy) else read_strategy(strategy)
    merged = any("-" in name for name in read.layouts)
    found: dict[str, _Parameter] = {}
    for stage, name, layout in stage_layouts(read):
        stage = stage if merged else 0  # a file of one stage stands for a job of that stage
        known = found.setdefault(name, _Parameter(layout, []))
        known.stages.append(stage)
        if rank is None:
            takes_over = stage <= min(known.stages)
        else:
            takes_over = (rank // layout.num_devices > 0) == (stage > 0)
        if takes_over:
            known.layout = layout
    return found


def _keep_stage(source: dict[str, _Parameter], target: dict[str, _Parameter], rank: int) -> None:
    """Leaves only what the target's stage of `rank` has; what only the source has stays."""
    stage = rank // _first(target).layout.num_devices
    for name in [name for name, parameter in target.items() if stage not in parameter.stages]:
        del target[name]
        source.pop(name, None)


def _first(parameters: dict[str, _Parameter]) -> _Parameter:
    return next(iter(parameters.values()))


def _whole(layout: Layout) -> Layout:
    return Layout((1,), (-1,) * len(layout.tensor_map))


def _needed_ranks(rank: int, source: Layout, target: Layout) -> set[int]:
    """Ranks of the source's stage that the target's `rank` needs for a parameter."""
    if len(source.tensor_map) != len(target.tensor_map):
        raise ValueError("a parameter has different numbers of dimensions in the two strategies")
    few, many = sorted((source.num_devices, target.num_devices))
    if many % few:
        raise ValueError(f"checkpoints of {source.num_devices} devices cannot become those of {target.num_devices}")
    if rank >= many:
        raise ValueError(f"there is no rank {rank} among {many} devices")
    shards = _opt_shards(source)
    shape = tuple(many * parts for parts in source.num_slices)
    shape = (shape[0] * (shards or 1), *shape[1:]) if shape else shape
    before = _with_devices(_grid(source, shape), many)
    after = _with_devices(_grid(target, shape), many)
    try:
        refined, along = _axes_of_concatenation(before, after)
    except _CannotRefineError:
        refined = _standard(before)
        along = {axis for axis in refined.axes if axis is not None}
    return {reached % source.num_devices for reached in _reach(rank, refined.devices, along)}


def _reach(rank: int, devices: Sequence[int], along: set[int]) -> Iterable[int]:
    """The ranks that differ from `rank` only on the axes `along`."""
    strides = [prod(devices[axis + 1 :]) for axis in range(len(devices))]
    base = rank - sum(rank // strides[axis] % devices[axis] * strides[axis] for axis in along)
    steps = [[index * strides[axis] for index in range(devices[axis])] for axis in along]
    return (base + sum(chosen) for chosen in product(*steps))


# From a layout to a grid.


def _opt_shards(layout: Layout) -> int:
    """Shards of optimizer parallelism; 0 without."""
    if layout.opt_weight_shard_size == FULLY:
        return layout.num_devices // prod(layout.num_slices)
    return layout.opt_weight_shard_size


def _grid(layout: Layout, shape: tuple[int, ...]) -> _Grid:
    """The layout with an axis per dimension: dimensions that several axes split are cut, and so are optimizer shards."""
    devices, axes = layout.dev_matrix, [[_left(layout, axis) for axis in axes] for axes in layout.axes]
    lengths = list(shape)
    shards = _opt_shards(layout)
    if shards and layout.opt_weight_shard_step:
        free = [i for i, length in enumerate(devices) if length > 1 and all(i not in used for used in axes)]
        if not free:
            raise ValueError(f"{devices} {layout.tensor_map} leaves no axis for optimizer sharding")
        if not any(isinstance(entry, tuple) for entry in layout.tensor_map):
            _check_step(layout, free)
            if free == [0] or len(free) == len(devices):
                return _grid_by_dimensions(layout, shape, shards)
        devices, axes, taken = _take_shards(devices, axes, free, shards)
        lengths[0:1] = [layout.num_slices[0], *_cut(shape[0] // layout.num_slices[0], [devices[i] for i in taken])]
        axes[1:1] = [[axis] for axis in taken]
    return _one_axis_each(devices, lengths, axes)


def _left(layout: Layout, axis: int) -> int:
    return len(layout.dev_matrix) - 1 - axis


def _check_step(layout: Layout, free: list[int]) -> None:
    below = prod(layout.dev_matrix[free[0] + 1 :])
    if len(free) == 1 and below != layout.opt_weight_shard_step:
        raise ValueError(f"optimizer sharding by steps of {layout.opt_weight_shard_step} is not that of {below} slices")


def _grid_by_dimensions(layout: Layout, shape: tuple[int, ...], shards: int) -> _Grid:
    """Return the grid: with the free axis outermost, MindSpore takes the axes in the order of the tensor's dimensions."""
    parts = layout.num_slices
    repeats = layout.num_devices // (layout.opt_weight_shard_step * shards)
    head = (repeats, shards) if repeats > 1 else (shards,)
    axes: list[int | None] = [len(head) + i if count > 1 else None for i, count in enumerate(parts)]
    axes.insert(1, len(head) - 1)
    return _Grid(head + parts, (parts[0], shape[0] // parts[0], *shape[1:]), tuple(axes))


def _take_shards(
    devices: Sequence[int], axes: list[list[int]], free: list[int], shards: int
) -> tuple[tuple[int, ...], list[list[int]], list[int]]:
    """Takes free axes from the right until they make up `shards`; of the last one perhaps only the lower part."""
    taken: list[int] = []
    box = list(devices)
    for axis in reversed(free):
        length = box[axis]
        if shards < length:
            if length % shards:
                raise ValueError(f"an axis of {length} devices cannot be divided for {shards} optimizer shards")
            box[axis : axis + 1] = [length // shards, shards]
            axes = [[i + (i > axis) for i in used] for used in axes]
            taken = [i + 1 for i in taken]
            axis, length = axis + 1, shards
        if shards % length:
            raise ValueError(f"{shards} optimizer shards do not divide by an axis of {length} devices")
        taken.insert(0, axis)
        shards //= length
        if shards == 1:
            break
    return tuple(box), axes, taken


def _cut(length: int, parts: Sequence[int]) -> list[int]:
    """A length as a box whose last side is what the parts before leave."""
    return [*parts[:-1], length // prod(parts[:-1])]


def _one_axis_each(devices: Sequence[int], lengths: Sequence[int], axes: Sequence[Sequence[int]]) -> _Grid:
    shape: list[int] = []
    single: list[int | None] = []
    for length, used in zip(lengths, axes, strict=True):
        shape += _cut(length, [devices[axis] for axis in used]) if used else [length]
        single += used or [None]
    return _Grid(tuple(devices), tuple(shape), tuple(single))


def _with_devices(grid: _Grid, many: int) -> _Grid:
    """The same on as many devices as the other side has, each doing what the ones before do."""
    repeats = many // prod(grid.devices)
    if repeats == 1:
        return grid
    return _Grid((repeats, *grid.devices), grid.shape, tuple(None if a is None else a + 1 for a in grid.axes))


# The common refinement of two grids.


def _axes_of_concatenation(before: _Grid, after: _Grid) -> tuple[_Grid, set[int]]:
    """The refined source, and its axes that do not split the same dimension of the target."""
    before, after = _squeezed(_standard(before)), _squeezed(_standard(after))
    devices = _common(before.devices, after.devices)
    before, after = _refine_devices(before, devices), _refine_devices(after, devices)
    for _ in range(_MAX_TURNS):
        if before.shape == after.shape:
            break
        before, after = _refine_shape(before, after)
        after, before = _refine_shape(after, before)
    along = {x for x, y in zip(before.axes, after.axes, strict=True) if x is not None and x != y}
    return before, along


def _standard(grid: _Grid) -> _Grid:
    """Without axes of one device."""
    kept = [axis for axis, length in enumerate(grid.devices) if length > 1]
    axes = tuple(kept.index(axis) if axis in kept else None for axis in grid.axes)
    return _Grid(tuple(grid.devices[axis] for axis in kept), grid.shape, axes)


def _squeezed(grid: _Grid) -> _Grid:
    """Without dimensions of length one."""
    kept = [dim for dim, length in enumerate(grid.shape) if length > 1]
    return _Grid(grid.devices, tuple(grid.shape[dim] for dim in kept), tuple(grid.axes[dim] for dim in kept))


def _common(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """The coarsest box that refines both; both have the same product."""
    borders = sorted({*accumulate(first, lambda x, y: x * y), *accumulate(second, lambda x, y: x * y)})
    return _lengths(borders)


def _lengths(borders: Sequence[int]) -> tuple[int, ...]:
    """Lengths from their running products."""
    lengths = []
    for below, border in zip([1, *borders], borders, strict=False):
        if border % below:
            raise _CannotRefineError
        lengths.append(border // below)
    return tuple(lengths)


def _parts(coarse: Sequence[int], fine: Sequence[int]) -> list[tuple[int, ...]]:
    """The consecutive lengths of `fine` that make up each length of `coarse`."""
    found, at = [], 0
    for length in coarse:
        start, size = at, 1
        while size < length and at < len(fine):
            size *= fine[at]
            at += 1
        if size != length:
            raise _CannotRefineError
        found.append(tuple(fine[start:at]))
    return found


def _refine_devices(grid: _Grid, devices: tuple[int, ...]) -> _Grid:
    """Cuts the axes, and with each the dimension that it splits."""
    parts = _parts(grid.devices, devices)
    starts = [0, *accumulate(map(len, parts))]
    axes = [[] if axis is None else list(range(starts[axis], starts[axis + 1])) for axis in grid.axes]
    return _checked(_one_axis_each(devices, grid.shape, axes))


def _refine_shape(grid: _Grid, other: _Grid) -> tuple[_Grid, _Grid]:
    """Cuts the dimensions of `grid` wherever those of `other` are cut, and the axes of both where that asks for it."""
    for _ in range(_MAX_TURNS):
        shape = _cut_like(grid.shape, other.shape)
        if shape == grid.shape:
            return grid, other
        parts = dict(zip(grid.axes, _parts(grid.shape, shape), strict=True))
        devices = tuple(
            piece for axis, length in enumerate(grid.devices) for piece in _front(parts.get(axis, ()), length)
        )
        finer = _refine_devices(grid, devices)
        axes = [[] if axis is None else [axis] for axis in finer.axes]
        pieces = _parts(finer.shape, shape)
        spread = [(used if i == 0 else []) for used, p in zip(axes, pieces, strict=True) for i in range(len(p))]
        grid, other = _checked(_one_axis_each(devices, shape, spread)), _refine_devices(other, devices)
    raise _CannotRefineError


def _cut_like(shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """`shape`, cut wherever `other` is cut; both have the same product, and the rightmost dimension counts first."""
    borders = {prod(lengths[i:]) for lengths in (shape, other) for i in range(len(lengths))}
    return tuple(reversed(_lengths(sorted(borders))))


def _front(parts: Sequence[int], length: int) -> tuple[int, ...]:
    """The first of `parts` that make up `length`, the last one perhaps in part."""
    found: list[int] = []
    size = 1
    for part in parts:
        if size >= length:
            break
        size *= part
        found.append(part if size <= length else length * part // size)
    return tuple(found) or (length,)


def _checked(grid: _Grid) -> _Grid:
    """Refuses a dimension that its axis does not divide."""
    if any(a is not None and n % grid.devices[a] for n, a in zip(grid.shape, grid.axes, strict=True)):
        raise _CannotRefineError
    return grid
