"""Turns DCP's plans into shards: what every rank wants to write, and which ranks hold the same.

DCP drops what several ranks offer under one name from all plans but one; holdfast wants to know who has it. So before
that every rank notes its items (`noted`), in the plan's `storage_data`, which travels with the plan; the coordinator
sees the notes of all ranks and adds the holders (`with_holders`). A plan that DCP cached carries both.

Who holds the same: ranks with the same box of a sharded tensor (a DTensor says so). Plain tensors and values are
replicated only if that was declared; otherwise they are those of the lowest rank that has them, as DCP picks one too.

A rank may hold several boxes of one tensor, and a file a name only once: then every box of that tensor is an entry of its own
name, which tells where it begins (`in_parts`). The reader puts them together again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from holdfast.base.errors import UsageError
from holdfast.checkpoint.entries.pytree import flatten
from holdfast.checkpoint.entries.types import Gathered, Group, LiveTensor, dtype_name
from holdfast.core.model import Extent, Shard
from holdfast.tiers.format.values import TensorRef

# Values of ours beside the user's; under the rank that wrote them.
MAPPING = "dcp.mapping"
# Between the name of a tensor and where one of its boxes begins.
BOX = "~box:"
# Stands for bytes that a planner of the user's own made; they are given to its own planner again and to no other.
OPAQUE = "dcp.opaque"
# Stands for an `io.BytesIO`: its bytes, and where it stands in them.
STREAM = "dcp.stream"


@dataclass(frozen=True, slots=True)
class Note:
    """One item of one rank.

    Attributes:
        kind: `tensor` (whole), `shard`, or `value`.
        dtype: name as in a safetensors header; empty for values, like the boxes.
        entry: the name of the entry that it becomes; known with the holders.
        holders: ranks that hold the same, ascending; known when the coordinator has seen all notes. Empty: this rank's is
            not kept, for a lower rank has something under the same name.
    """

    fqn: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    holders: Group = ()
    entry: str = ""

    @property
    def place(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return what it is, whoever has it."""
        return self.fqn, self.offsets, self.lengths

    @property
    def item(self) -> WriteItem:
        """Return as much of DCP's item as a planner needs to find the data."""
        offset = torch.Size(self.offsets) if self.kind != "value" else None
        kinds = {
            "tensor": WriteItemType.TENSOR, "shard": WriteItemType.SHARD, "value": WriteItemType.BYTE_IO
        }  # fmt: skip
        return WriteItem(MetadataIndex(self.fqn, offset), kinds[self.kind])


Notes: TypeAlias = tuple[Note, ...]


def noted(plan: SavePlan) -> Notes:
    """The items of a plan that DCP has not yet thinned out.

    Raises:
        UsageError: a dtype that cannot be saved.
    """
    found: dict[object, Note] = {}
    for item in plan.items:
        fqn, data = item.index.fqn, item.tensor_data
        if data is None:
            note = Note(fqn, "value")
        else:
            note = Note(
                fqn,
                "shard" if item.type is WriteItemType.SHARD else "tensor",
                dtype_name(data.properties.dtype, where=fqn),
                tuple(data.size),
                tuple(data.chunk.offsets),
                tuple(data.chunk.sizes),
            )
        found[note.place] = note
    return tuple(found.values())


def in_parts(fqn: str, offsets: Sequence[int]) -> str:
    """The name of an entry that is one of several boxes of a tensor on one rank."""
    return f"{fqn}{BOX}{'.'.join(map(str, offsets))}"


def with_holders(notes: Mapping[int, Notes], replicated: Sequence[str]) -> dict[int, Notes]:
    """The notes of every rank, with who holds the same. `replicated` has glob patterns of names whose plain tensors and
    values are the same on all ranks that have them.
    """
    ranks: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    split: set[str] = set()
    for rank in sorted(notes):
        names = [note.fqn for note in notes[rank]]
        split |= {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        for note in notes[rank]:
            ranks.setdefault(note.place, []).append(rank)

    def holders(rank: int, note: Note) -> Group:
        group = tuple(ranks[note.place])
        if note.kind == "shard" or any(fnmatchcase(note.fqn, pattern) for pattern in replicated):
            return group
        return group[:1] if rank == group[0] else ()

    def named(note: Note) -> str:
        return in_parts(note.fqn, note.offsets) if note.fqn in split else note.fqn

    return {
        rank: tuple(replace(note, holders=holders(rank, note), entry=named(note)) for note in rows)
        for rank, rows in notes.items()
    }


def bare(note: Note) -> Note:
    """The note as a rank makes it, before it is known who holds the same."""
    return replace(note, holders=(), entry="")


class Contents:
    """Holds what one rank saves, made anew for each save; `checkpoint.save.memory_saver` asks it as it asks the state of a Checkpointer.

    Attributes:
        optimizers: none: everything is copied at the call, whatever is trained beside it.
    """

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._now = Gathered({}, {}, 0, 0)
        self._shape: object = None

    def stepped(self, optimizer: torch.optim.Optimizer, *, made: bool = True) -> None:
        """Nothing is known of steps."""

    def gather(self) -> Gathered:
        """Return what `take` took."""
        return self._now

    def predict(self) -> None:
        """Nothing is known of later saves."""

    @torch.no_grad()
    def take(self, notes: Notes, planner: SavePlanner, mapping: Any, *, rank: int) -> None:
        """Looks up what is to be saved now.

        Raises:
            UsageError: a value that is no plain data; names it.
        """
        tensors: dict[str, LiveTensor] = {}
        values: dict[Group, dict[str, Any]] = {}
        for note in notes:
            if not note.holders:
                continue
            if note.kind == "value":
                values.setdefault(note.holders, {})[note.fqn] = _value_of(note, planner, tensors)
                continue
            local = planner.resolve_data(note.item)
            assert isinstance(local, torch.Tensor)
            shard = Shard(note.entry, note.dtype, note.shape, Extent(note.offsets, note.lengths), note.holders)
            tensors[note.entry] = LiveTensor(shard, local.detach(), late=False)
        mine = {note.fqn for note in notes if note.holders[:1] == (rank,)}
        paths = {name: tuple(path) for name, path in (mapping or {}).items() if name in mine}
        values.setdefault((rank,), {})[f"rank{rank}/{MAPPING}"] = paths
        shape = ({name: live.shard for name, live in tensors.items()}, sorted(values))
        number = self._now.structure + (shape != self._shape)
        self._shape = shape
        # The memory may be another at each save, so nothing that was learnt about it holds.
        self._now = Gathered(tensors, values, number, self._now.storages + 1)


def _value_of(note: Note, planner: SavePlanner, tensors: dict[str, LiveTensor]) -> Any:
    """The object under a name, with references to the tensors in it; opaque bytes where a planner makes its own."""
    look_up = _look_up(planner)
    if look_up is None:
        data = planner.resolve_data(note.item)
        assert not isinstance(data, torch.Tensor)
        return {OPAQUE: data.getvalue()}

    def emit(name: str, tensor: torch.Tensor) -> TensorRef:
        while name in tensors:
            name += "~"  # the keys 1 and "1" of one dict
        box = Extent((0,) * tensor.dim(), tuple(tensor.shape))
        shard = Shard(name, dtype_name(tensor.dtype, where=name), tuple(tensor.shape), box, note.holders)
        tensors[name] = LiveTensor(shard, tensor.detach(), late=False)
        return TensorRef(name)

    value = look_up(note.item.index)
    if type(value) is io.BytesIO:
        return {STREAM: (value.getvalue(), value.tell())}
    return flatten(value, note.fqn, emit)


def _look_up(planner: SavePlanner) -> Callable[[MetadataIndex], Any] | None:
    """Return how the stock planner finds objects; None for one that turns them into bytes in its own way."""
    if not isinstance(planner, DefaultSavePlanner):
        return None
    own = [getattr(type(planner), name) for name in ("resolve_data", "transform_object")]
    stock = [DefaultSavePlanner.resolve_data, DefaultSavePlanner.transform_object]
    return planner.lookup_object if own == stock else None


def all_notes(plans: Iterable[SavePlan]) -> dict[int, Notes | None]:
    """Return what every rank noted; None where DCP found nothing new and sent no plan."""
    found: dict[int, Notes | None] = {}
    for rank, plan in enumerate(plans):
        if plan.usable and not isinstance(plan.storage_data, tuple):
            raise UsageError(
                "the planner dropped what the writer noted in its plans",
                remedy="keep SavePlan.storage_data in create_global_plan, as dataclasses.replace does",
            )
        found[rank] = plan.storage_data if plan.usable else None
    return found
