"""Tells how a parameter lies on the devices of a stage, in MindSpore's words.

`dev_matrix` arranges the devices of a stage row-major in a box. Each dimension of the tensor names the axes of that box
that split it, counted from the right; -1 is none. Several axes split one dimension as digits of one number, the first
named being the highest. Devices with equal coordinates on all named axes hold the same slice. Optimizer sharding then
splits that slice once more along its first dimension, among neighbours in the list of these devices.

Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from holdfast.base.errors import UsageError

# More devices than any job has; a file that claims more is damaged.
MAX_DEVICES = 1 << 17
MAX_DIMS = 64
# As `opt_weight_shard_size`: split among all devices that hold the slice.
FULLY = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one parameter, as a strategy file has it.

    Attributes:
        dev_matrix: lengths of the box of devices; empty for a single device.
        tensor_map: per tensor dimension the axis that splits it (from the right), -1 for none, or several of them.
        opt_weight_shard_step: distance of neighbours in the list of devices that share a slice; 0 without sharding.
        opt_weight_shard_size: devices among which optimizer parallelism splits a slice; 0 without, -1 for all.
        param_split_shape, indices_offset, field: splits of embedding tables by hand; kept, not interpreted.
        tensor_shape: shape of the whole tensor, which only JSON files say.
    """

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[int | tuple[int, ...], ...]
    opt_weight_shard_step: int = 0
    opt_weight_shard_size: int = 0
    param_split_shape: tuple[int, ...] = ()
    indices_offset: tuple[int, ...] = ()
    field: int = 0
    tensor_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise UsageError(f"no layout: {problem}", where=f"{self.dev_matrix} {self.tensor_map}")

    @property
    def num_devices(self) -> int:
        """Devices of the stage."""
        return prod(self.dev_matrix)

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """Per tensor dimension the axes that split it, highest digit first, counted from the right; empty for none."""
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in self.tensor_map)
        return tuple(tuple(axis for axis in entry if axis >= 0) for entry in entries)

    @property
    def num_slices(self) -> tuple[int, ...]:
        """Into how many slices each tensor dimension is cut, optimizer sharding not counted."""
        return tuple(prod(self.dev_matrix[-1 - axis] for axis in axes) for axes in self.axes)

    @property
    def num_shards(self) -> int:
        """Into how many shards optimizer parallelism cuts a slice; 1 without.

        Raises:
            UsageError: the devices that share a slice cannot be divided so.
        """
        if self.opt_weight_shard_size == 0:
            return 1
        holders = self.num_devices // prod(self.num_slices)
        shards = self.opt_weight_shard_size
        if shards == FULLY:
            # MindSpore divides by the step; where the holders are no evenly spaced row that says nothing.
            shards = self.num_devices // max(self.opt_weight_shard_step, 1)
            shards = shards if holders % shards == 0 else holders
        if shards < 1 or holders % shards:
            what = f"a slice that {holders} devices hold is not split among {shards}"
            raise UsageError(what, where=f"{self.dev_matrix} {self.tensor_map}")
        return shards

    @property
    def is_lost_to_mindspore(self) -> bool:
        """Return whether MindSpore's rule for full optimizer sharding (all devices divided by the step) finds no
        holder.
        """
        if self.opt_weight_shard_size != FULLY:
            return False
        holders = self.num_devices // prod(self.num_slices)
        return holders % (self.num_devices // max(self.opt_weight_shard_step, 1)) != 0

    def slice_indices(self, device: int) -> tuple[int, ...]:
        """Return which slice along each tensor dimension the device holds, optimizer sharding not counted."""
        indices = []
        for axes in self.axes:
            index = 0
            for axis in axes:
                index = index * self.dev_matrix[-1 - axis] + self.coordinate(device, axis)
            indices.append(index)
        return tuple(indices)

    def coordinate(self, device: int, axis: int) -> int:
        """Return where the device stands on an axis counted from the right."""
        below = prod(self.dev_matrix[len(self.dev_matrix) - axis :])
        return device // below % self.dev_matrix[-1 - axis]

    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The devices that hold each slice, optimizer sharding not counted, in MindSpore's order of slices."""
        used = sorted({axis for axes in self.axes for axis in axes})
        groups: dict[tuple[int, ...], list[int]] = {}
        for device in range(self.num_devices):
            groups.setdefault(tuple(self.coordinate(device, axis) for axis in used), []).append(device)
        return tuple(tuple(groups[key]) for key in sorted(groups))

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The redundancy groups: devices that hold the same bytes, optimizer sharding counted.

        Raises:
            UsageError: the devices that share a slice cannot be divided as optimizer sharding says.
        """
        shards = self.num_shards
        return tuple(holders[shard::shards] for holders in self.holders() for shard in range(shards))


def _problem(layout: Layout) -> str:
    """Return what is wrong with it, or nothing."""
    if any(length < 1 for length in layout.dev_matrix):
        return "a box of devices has no axis below 1"
    if len(layout.dev_matrix) > MAX_DIMS or len(layout.tensor_map) > MAX_DIMS:
        return f"more than {MAX_DIMS} dimensions"
    if layout.num_devices > MAX_DEVICES:
        return f"more than {MAX_DEVICES} devices"
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in layout.tensor_map]
    if any(not -1 <= axis < len(layout.dev_matrix) for entry in entries for axis in entry):
        return "an axis that the box does not have"
    used = [axis for axes in layout.axes for axis in axes]
    if len(set(used)) < len(used):
        return "an axis splits twice"
    if layout.opt_weight_shard_size < FULLY or layout.opt_weight_shard_step < 0:
        return "sharding by a negative number"
    return ""
