"""All redundancy groups of a job by kind, without looking at every tensor of every rank.

Tensors with the same roles on the axes of their mesh form a family: they have the same groups. Of a family only those
places matter where the size of some part changes; between them all groups are of one kind. Groups of several families
that consist of the same ranks are one group, as they are one bundle when they are saved. Bytes are added up where they
change and summed along the axes afterwards. So work grows with the number of groups plus that of different tensors, never
with their product.

Equal to grouping every rank's shards by their ranks, which a property test holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from holdfast.core.layout import placement
from holdfast.core.layout.job_layout import Form, JobLayout, Role, Tensor, offsets
from holdfast.core.model import DTYPE_BYTES, Shard

# Which family, and between which breaks.
_Part = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Holding:
    """Tensors of one dtype, shape and placement, of which a group holds equally long parts.

    Attributes:
        num_bytes: of the group's part of one of them.
    """

    tensors: tuple[Tensor, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Groups that hold equally many bytes of the same tensors.

    Attributes:
        form: their ranks, relative to the lowest.
        base: lowest rank of one of them.
        parts: which families they hold, and between which breaks.
        num_bytes: what one group holds, once.
    """

    form: Form
    base: int
    parts: tuple[_Part, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Family:
    """Tensors of one mesh whose placements have the same roles.

    Attributes:
        specs: the tensors by dtype, shape and placements.
        places: per axis the coordinates (but 0) at which the size of some tensor's part changes.
    """

    mesh: int
    roles: tuple[Role, ...]
    specs: tuple[tuple[Tensor, ...], ...]
    places: tuple[frozenset[int], ...]


class Census:
    """The groups of a layout.

    Attributes:
        kinds: every kind of group.
        groups: per form the lowest rank of each group and the index of its kind.
    """

    def __init__(self, layout: JobLayout) -> None:
        self.layout = layout
        self._families = _families(layout)
        sizes = [_sizes(layout, family) for family in self._families]
        found: dict[Form, dict[int, tuple[_Part, ...]]] = {}
        for index, family in enumerate(self._families):
            groups = found.setdefault(layout.form(family.specs[0][0]), {})
            for base, part in _bases(layout, family, index):
                groups[base] = (*groups[base], part) if base in groups else (part,)
        self.groups: dict[Form, dict[int, int]] = {}
        self.kinds: list[GroupKind] = []
        for form, groups in sorted(found.items()):
            known: dict[tuple[_Part, ...], int] = {}
            for base, parts in groups.items():
                if parts not in known:
                    known[parts] = len(self.kinds)
                    num_bytes = sum(sizes[index][place] for index, place in parts)
                    self.kinds.append(GroupKind(form, base, parts, num_bytes))
            self.groups[form] = {base: known[parts] for base, parts in sorted(groups.items())}

    def holdings(self, kind: GroupKind) -> Iterator[Holding]:
        """Yield what each group of the kind holds, by dtype, shape and placement."""
        for index, _ in kind.parts:
            for tensors in self._families[index].specs:
                yield Holding(tensors, _num_bytes(self.layout, tensors[0], kind.base))

    def names(self, kind: GroupKind) -> set[str]:
        """Tensors of which a group of the kind holds at least a byte."""
        return {tensor.name for held in self.holdings(kind) if held.num_bytes for tensor in held.tensors}

    def shards(self, kind: GroupKind) -> list[Shard]:
        """The shards of the kind's first group, as `core.layout.bundles.cut` takes them: sorted by name."""
        shards: list[Shard] = []
        for holding in self.holdings(kind):
            extent = self.layout.extent(holding.tensors[0], kind.base)
            names = ((self.layout.entry_name(tensor, kind.base), tensor) for tensor in holding.tensors)
            shards += [Shard(name, tensor.dtype, tensor.shape, extent, (kind.base,)) for name, tensor in names]
        return sorted(shards, key=lambda shard: shard.name)

    def twins(self) -> list[tuple[int, ...]]:
        """Per rank the ranks that hold all that it holds, itself included; ascending.

        The intersection of the rank's groups over all its tensors, which `group_info.pb` lists. It is not
        symmetric: a rank that holds more stands in for one that holds less.
        """
        membership = list(self._membership())
        holds = [
            frozenset(index for index, bases in enumerate(membership) if bases[rank] >= 0)
            for rank in range(self.layout.world_size)
        ]
        found: list[tuple[int, ...]] = [(rank,) for rank in range(self.layout.world_size)]
        for wanted in set(holds) - {frozenset()}:
            columns = [membership[index] for index in sorted(wanted)]
            classes: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for rank, key in enumerate(zip(*columns, strict=True)):
                if min(key) >= 0:
                    classes[key].append(rank)
            for members in classes.values():
                together = tuple(members)
                for rank in together:
                    if holds[rank] == wanted:
                        found[rank] = together
        return found

    def _membership(self) -> Iterator[list[int]]:
        """Per form the lowest rank of each rank's group of that form, -1 for none; groups that overlap come apart."""
        for form, groups in self.groups.items():
            waiting = list(groups)
            steps = offsets(form)
            while waiting:
                lowest = [-1] * self.layout.world_size
                again: list[int] = []
                for base in waiting:
                    members = [base + step for step in steps]
                    if any(lowest[rank] >= 0 for rank in members):
                        again.append(base)
                        continue
                    for rank in members:
                        lowest[rank] = base
                yield lowest
                waiting = again


def _families(layout: JobLayout) -> list[_Family]:
    found: dict[tuple[object, ...], dict[tuple[object, ...], list[Tensor]]] = {}
    for tensor in layout.tensors:
        roles = layout.roles(tensor)
        specs = found.setdefault((tensor.mesh, roles), {})
        specs.setdefault((tensor.dtype, tensor.shape, tensor.placements), []).append(tensor)
    families = []
    for specs in found.values():
        lists = tuple(tuple(tensors) for tensors in specs.values())
        columns = zip(*(_spec_breaks(layout, tensors[0]) for tensors in lists), strict=True)
        places = tuple(frozenset[int]().union(*column) for column in columns)
        families.append(_Family(lists[0][0].mesh, layout.roles(lists[0][0]), lists, places))
    return families


def _bases(layout: JobLayout, family: _Family, index: int) -> list[tuple[int, _Part]]:
    """The lowest rank of every group of a family, and between which breaks it lies."""
    mesh = layout.meshes[family.mesh]
    found = [(0, 0)]
    for axis, (role, size, stride) in enumerate(zip(family.roles, mesh.sizes, mesh.strides, strict=True)):
        if role.at:
            first = role.at.start * stride
            found = [(base + first, key) for base, key in found] if first else found
            continue
        spans = placement.intervals(size, family.places[axis])
        steps = [(at * stride, number) for number, span in enumerate(spans) for at in span]
        found = [(base + step, key * len(spans) + number) for base, key in found for step, number in steps]
    parts = {key: (index, key) for _, key in found}
    return [(base, parts[key]) for base, key in found]


def _spec_breaks(layout: JobLayout, tensor: Tensor) -> list[set[int]]:
    """Per axis the coordinates (but 0) at which the size of the tensor's part changes."""
    places: list[set[int]] = [set() for _ in tensor.placements]
    for dim, steps in layout.steps(tensor).items():
        found = placement.breaks(tensor.shape[dim], [step for _, step in steps])
        for (axis, _), here in zip(steps, found, strict=True):
            places[axis] |= here
    return places


def _sizes(layout: JobLayout, family: _Family) -> list[int]:
    """Bytes that a group of the family holds, by the place between breaks; the order is that of `_bases`."""
    strides = layout.meshes[family.mesh].strides
    starts = [sorted({0, *places}) for places in family.places]
    lengths = [len(column) for column in starts]
    position = [{at: number for number, at in enumerate(column)} for column in starts]
    table = [0] * prod(lengths)
    for tensors in family.specs:
        own = [sorted({0, *places}) for places in _spec_breaks(layout, tensors[0])]
        corners = list(product(*own))
        ranks = (sum(at * stride for at, stride in zip(corner, strides, strict=True)) for corner in corners)
        values = [_num_bytes(layout, tensors[0], rank) * len(tensors) for rank in ranks]
        _along_axes(values, [len(column) for column in own], subtract=True)
        for corner, value in zip(corners, values, strict=True):
            index = 0
            for at, places, length in zip(corner, position, lengths, strict=True):
                index = index * length + places[at]
            table[index] += value
    _along_axes(table, lengths, subtract=False)
    return table


def _along_axes(values: list[int], lengths: Sequence[int], *, subtract: bool) -> None:
    """Turns values in a box (row-major) into their differences along every axis, or sums such differences up again."""
    step = 1
    for length in reversed(lengths):
        inner = [at for at in range(len(values)) if at // step % length]
        for at in reversed(inner) if subtract else inner:
            values[at] += -values[at - step] if subtract else values[at - step]
        step *= length


def _num_bytes(layout: JobLayout, tensor: Tensor, rank: int) -> int:
    return layout.extent(tensor, rank).num_elements * DTYPE_BYTES[tensor.dtype]
