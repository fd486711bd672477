"""Defines what every kind of object gives to a save and takes from a restore: the `Part` interface and its two
notebooks.

`Collector` is written by parts at a save: tensors with their places, values by group. `Loading` is written by parts at
a restore: which entry of the checkpoint goes to which live tensor, and everything that does not fit. A part changes
nothing while it plans; so a restore that refuses leaves every object as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from holdfast.base.errors import MismatchError, UsageError
from holdfast.base.terminal import some_of
from holdfast.checkpoint.entries.pytree import flatten, references, unflatten
from holdfast.checkpoint.entries.sharding import Layouts, Piece, bits_of, elements_of, local_of
from holdfast.checkpoint.entries.types import Group, LiveTensor, LoadRecord, SavedTensor, torch_dtype
from holdfast.core.layout import reshard
from holdfast.core.model import Extent, Shard
from holdfast.tiers.format.values import TensorRef

Templates: TypeAlias = Mapping[str, torch.Tensor]

# The value of a version that names what was left out of it.
EXCLUDED = "excluded"
# The value that tells, of tensors that a restore makes anew, in which order their dimensions lie in memory.
MEMORY_ORDER = "memory_order"


@dataclass(frozen=True, slots=True)
class Owner:
    """A tensor that an optimizer may own, as optimizers need it.

    Attributes:
        tensor: the parameter itself.
        fqn: its name in optimizer state: DCP's, without `model.`.
        group: ranks known to hold the same plain tensor, None if it is this rank's own or a DTensor.
        piece: what this rank holds of it, if something else than a DTensor cuts it.
        entry: under which it is saved itself; empty where this rank holds nothing of it.
    """

    tensor: torch.Tensor
    fqn: str
    group: Group | None
    piece: Piece | None = None
    entry: str = ""

    @property
    def is_elsewhere(self) -> bool:
        """Return whether other ranks hold all of it: no gradient comes to it here, and no state."""
        return self.piece is not None and not self.piece.extent.num_elements

    def cut(self, state: torch.Tensor) -> Piece | None:
        """The same, for a tensor of the optimizer's state that is cut as the parameter is."""
        return self.piece if self.piece is not None and self.piece.fits(state) else None


class StillNames:
    """Remembers which tensors may stay as they are for many versions, for good from the first look on.

    For good, because a script that freezes and thaws by turns would have the job planned anew with every save. Whether a parameter is
    frozen may look otherwise on each rank: one that was interrupted while it trained something else stands beside one that
    has just begun. So ranks that share a tensor agree, once, and what they share and see later is none.
    """

    def __init__(self) -> None:
        self._names: dict[str, bool] = {}
        self._agreed = False

    def note(self, shard: Shard, *, still: bool, by_kind: bool) -> bool:
        """Return whether a tensor counts as still.

        Args:
            shard: what it is.
            still: whether it looks so now.
            by_kind: that follows from the kind of object it is of, which is the same on all ranks.
        """
        free = by_kind or not self._agreed or len(shard.ranks) == 1
        return self._names.setdefault(shard.name, still and free)

    def agree(self, contested: Iterable[str]) -> None:
        """Takes the names out that ranks do not agree on; what they share and see from now on is none either."""
        self._names.update(dict.fromkeys(contested, False))
        self._agreed = True


class Collector:
    """One look at the state."""

    def __init__(self, layouts: Layouts, late: frozenset[int] = frozenset(), still: StillNames | None = None) -> None:
        self.layouts = layouts
        self.tensors: dict[str, LiveTensor] = {}
        self.values: dict[Group, dict[str, Any]] = {}
        self.owners: dict[int, Owner] = {}
        self.sources: list[torch.Tensor] = []
        self.orders: dict[str, list[int]] = {}
        self.kept_back: dict[int, str] = {}  # parameters that their model does not hand out
        self._late = late
        self._still = StillNames() if still is None else still
        self.tied: dict[str, str] = {}  # other names of memory that is kept under its first
        self._by_memory: dict[object, str] = {}

    def persistent(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        group: Group | None = None,
        late: bool = False,
        still: bool = False,
        piece: Piece | None = None,
    ) -> TensorRef | None:
        """Adds a tensor that stays the same object from save to save.

        Memory that is listed twice (tied weights) is kept once, under its first name.

        Args:
            name: what it is called.
            tensor: the tensor.
            group: the ranks known to hold it alike.
            late: an optimizer owns it.
            still: it may stay as it is for many versions, as far as this rank can tell by itself; see `StillNames`.
            piece: which part of a parameter that something else than a DTensor cuts.

        Returns:
            The entry that holds it; None where this rank holds nothing of it.
        """
        live = self.layouts.live(name, tensor, group=group, late=late or id(tensor) in self._late, piece=piece)
        known = None if piece or isinstance(tensor, DTensor) else self.layouts.known(name, group)
        owner = Owner(tensor, name.removeprefix("model."), known, piece)
        if live is None:
            self.owners.setdefault(id(tensor), owner)
            return None
        self.sources.append(tensor)
        shown = elements_of(live.local) if live.local.numel() else id(tensor)
        first = self._by_memory.setdefault(shown, live.shard.name)
        self.owners.setdefault(id(tensor), replace(owner, entry=first))
        if first == live.shard.name:
            self._add(live, still=still, by_kind=False)
        else:
            self.tied[live.shard.name] = first
        return TensorRef(first)

    def left_out(
        self, name: str, tensor: torch.Tensor, *, group: Group | None = None, piece: Piece | None = None
    ) -> LiveTensor | None:
        """A tensor that is not saved, and where it belongs; None where this rank holds nothing of it.

        Raises:
            UsageError: an optimizer steps it, so leaving it out would lose what was learnt.
        """
        if id(tensor) in self._late:
            raise UsageError(
                "a parameter that an optimizer steps cannot be left out of checkpoints",
                where=name,
                remedy="freeze it (requires_grad_(False), and not in the optimizer), or make the pattern narrower",
            )
        return self.layouts.live(name, tensor, group=group, piece=piece)

    def transient(
        self,
        path: str,
        tree: Any,
        *,
        group: Group | None = None,
        holders: Callable[[str], Group | None] | None = None,
        known: Mapping[int, TensorRef] | None = None,
        still: bool = False,
    ) -> None:
        """Adds a value that is made anew at every save, with the tensors in it.

        Args:
            path: its name.
            tree: the value.
            group: the ranks known to hold all of it alike.
            holders: the same for single tensors in it, by name.
            known: by id, tensors that are entries already.
            still: all tensors in it may stay as they are, on every rank.
        """

        def emit(name: str, tensor: torch.Tensor) -> TensorRef | None:
            if known and id(tensor) in known:
                return known[id(tensor)]
            ranks = holders(name) if holders is not None else group
            while self.layouts.resolve(name, ranks)[0] in self.tensors:
                name += "~"  # the keys 1 and "1" of one dict
            live = self.layouts.live(name, tensor, group=ranks)
            if live is None:
                return None
            self._add(live, still=still, by_kind=True)
            if not live.local.is_contiguous():
                self.note_order(name, live.local)
            return TensorRef(live.shard.name)

        self.value(path, flatten(tree, path, emit), group=group)

    def note_order(self, name: str, local: torch.Tensor) -> None:
        """Keeps how a tensor lies in memory, for a restore that has to make it: products of matrices round by that."""
        strides = local.stride()
        self.orders[name] = sorted(range(local.dim()), key=lambda dim: (-strides[dim], dim))

    def value(self, path: str, tree: Any, *, group: Group | None = None) -> None:
        """Adds a value without tensors, or with references in their place."""
        entry, ranks = self.layouts.resolve(path, group)
        if entry in (held := self.values.setdefault(ranks, {})):
            raise twice(entry)
        held[entry] = tree

    def _add(self, live: LiveTensor, *, still: bool, by_kind: bool) -> None:
        name = live.shard.name
        if name in self.tensors:
            raise twice(name)
        is_still = self._still.note(live.shard, still=still, by_kind=by_kind)
        self.tensors[name] = replace(live, still=True) if is_still else live


def twice(name: str) -> UsageError:
    """The error for two things of one name."""
    return UsageError(
        "two things have the same name", where=name, remedy="give the objects to the Checkpointer under other names"
    )


class Loading:
    """One restore: what is offered, what fits where, what is wrong.

    Args:
        saved: entries offered to this rank.
        values: values offered to this rank, by path, whatever their group.
        strict: what shows only while values are taken over is an error too.
    """

    def __init__(
        self, layouts: Layouts, saved: Mapping[str, SavedTensor], values: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        self.layouts = layouts
        self._strict = strict
        self.saved = saved
        self.values = values
        self.targets: dict[str, LiveTensor] = {}
        self.missing: list[str] = []
        self.misfit: list[str] = []
        self.left_out: list[str] = []
        self.used: set[str] = set()
        self._asked: set[str] = set()
        self._tensors: dict[str, torch.Tensor] = {}
        self._repeated: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._ready: dict[str, Any] = {}

    def claim(self, live: LiveTensor, tensor: torch.Tensor) -> bool:
        """Asks for the entry that belongs into a live tensor.

        Args:
            live: the tensor and its place.
            tensor: the whole object that the entry is part of: a DTensor, or the same memory as `live.local`.

        Returns:
            Whether it will be loaded; if not, the reason is noted.
        """
        shard = live.shard
        if shard.name in self._asked:
            return shard.name in self.targets
        self._asked.add(shard.name)
        saved = self.saved.get(shard.name)
        if saved is None:
            if shard.extent.num_elements:  # nobody need write an empty shard
                self.missing.append(shard.name)
            return False
        self.used.add(shard.name)
        wrong = _difference(saved, shard)
        if wrong:
            self.misfit.append(f"{shard.name} ({wrong})")
            return False
        once = _once(live.local)
        if once is not live.local:  # torch refuses to write to an element that is seen several times
            full = torch.empty(live.local.shape, dtype=live.local.dtype, device=live.local.device)
            self._repeated.append((shard.name, once, full))
            live = replace(live, local=full)
        self.targets[shard.name] = live
        self._tensors[shard.name] = tensor
        return True

    def is_misfit(self, entry: str) -> bool:
        """Return whether an entry was asked for that is there and differs."""
        return entry in self._asked and entry in self.saved and entry not in self.targets

    def fill_repeated(self) -> None:
        """Fills tensors made by `expand` from what was loaded in their place: every element once. What they cannot show is refused."""
        for name, once, full in self._repeated:
            first = full.as_strided(once.shape, full.stride(), full.storage_offset())
            if torch.equal(bits_of(first.expand_as(full)), bits_of(full)):
                once.copy_(first)
            else:
                self.refuse(f"{name} was saved with several values, and is one value here that `expand` repeats")

    def claim_if_there(self, live: LiveTensor, tensor: torch.Tensor) -> None:
        """Claim as `claim` does what is not saved: an older version may have it all the same."""
        if live.shard.name in self.saved:
            self.claim(live, tensor)
        else:
            self.left_out.append(live.shard.name)

    def claim_value(
        self,
        path: str,
        *,
        group: Group | None = None,
        templates: Templates | None = None,
        device: torch.device | None = None,
        kind: type = object,
    ) -> Any:
        """Asks for a value and for every entry that it refers to; each of these gets memory of its own.

        Args:
            path: what it is called without regard to ranks.
            group: as at the save.
            templates: tensors that stand at the names of its entries now, for device and placement.
            device: where entries without a template go; None is the CPU.
            kind: what the value must be.

        Returns:
            The saved tree; None (and noted) if it is not there or an entry of it is not.
        """
        entry, _ = self.layouts.resolve(path, group)
        if entry not in self.values:
            self.missing.append(entry)
            return None
        self.used.add(entry)
        tree = self.values[entry]
        if not isinstance(tree, kind):
            self.misfit.append(f"{entry} (saved as {type(tree).__name__}, here {kind.__name__})")
            return None
        templates = templates or {}
        claimed = [self._claim_new(name, templates.get(name), device) for name in references(tree)]
        if not all(claimed):
            if not self._strict:
                self.misfit.append(f"{entry} (all of it stays as it is, for a tensor in it is left out)")
            return None
        self._ready[path] = tree
        return tree

    def pass_over(self, path: str, ref: TensorRef, *, group: Group | None = None) -> None:
        """A value that says nothing new to these objects: another name of the tensor `ref`, which has both names here."""
        entry, _ = self.layouts.resolve(path, group)
        saved = self.values.get(entry)
        if not isinstance(saved, TensorRef):
            return
        self.used.add(entry)
        if saved.name != ref.name and saved.name in self._asked:  # that is a tensor of its own here
            self.misfit.append(f"{entry} (saved as another name of {saved.name}, here of {ref.name})")

    def regroup(self, path: str, group: Group | None, names: Sequence[Sequence[str]]) -> None:  # noqa: ARG002
        """Parameter groups are about to be claimed under `path`; these are the names of the parameters in them here.

        In the layout that was saved there is nothing to do. In another the groups may have been saved by several ranks.
        """
        return

    def states_of_ranks(self, path: str) -> list[Any] | None:  # noqa: ARG002
        """Return what every saved rank had under `path`, for an object that can make its own of all; None in the saved
        layout.
        """
        return None

    def offered(self, path: str) -> Any:
        """Returns the value of a path that is each rank's own, as the checkpoint has it; None if it has none."""
        return self.values.get(self.layouts.resolve(path)[0])

    def refuse(self, what: str) -> None:
        """Notes what turned out not to fit while values were taken over.

        Raises:
            MismatchError: the restore is strict.
        """
        self.misfit.append(what)
        if self._strict:
            raise MismatchError(
                f"the objects do not take what was saved: {what}",
                remedy="let load_state_dict() take back all that state_dict() hands out, or restore with strict=False",
            )

    def has(self, path: str) -> bool:
        """Return whether a value was claimed with all its entries."""
        return path in self._ready

    def value(self, path: str) -> Any:
        """A claimed value with its tensors in place, which hold the saved bytes once they are filled."""
        return unflatten(self._ready[path], self.tensor)

    def tensor(self, name: str) -> torch.Tensor:
        """The whole object that a claimed entry is part of."""
        return self._tensors[name]

    def memory(self, name: str, device: torch.device | None) -> torch.Tensor | None:
        """Memory for a whole entry; None (and noted) if the checkpoint offers less than the whole of it."""
        saved = self.saved[name]
        whole = Extent((0,) * len(saved.global_shape), saved.global_shape)
        if reshard.cover(whole, saved.pieces) is None:
            self.used.add(name)
            self._asked.add(name)
            self.misfit.append(f"{name} (parts of shape {saved.global_shape} are missing)")
            return None
        dtype, order = torch_dtype(saved.dtype), self.order(name)
        if order is None:
            return torch.empty(saved.global_shape, dtype=dtype, device=device or "cpu")
        return torch.empty_permuted(saved.global_shape, order, dtype=dtype, device=device or "cpu")

    def order(self, name: str) -> list[int] | None:
        """Returns the dimensions of an entry as they lay in memory, the outermost first; None if as a restore makes them."""
        orders = self.values.get(self.layouts.resolve(MEMORY_ORDER)[0])
        order = orders.get(name.removeprefix(f"rank{self.layouts.rank}/")) if isinstance(orders, dict) else None
        dims = list(range(len(self.saved[name].global_shape)))
        is_one = isinstance(order, list) and all(type(dim) is int for dim in order) and sorted(order) == dims
        return order if is_one else None

    def unused(self) -> list[str]:
        """Entries and values that nobody asked for."""
        return sorted((set(self.saved) | set(self.values)) - self.used)

    def record(self) -> LoadRecord:
        """Return what did not fit."""
        found = tuple(self.missing), tuple(self.unused()), tuple(self.misfit)
        return LoadRecord(*found, tuple(self.left_out), self.patterns)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the patterns by which the save left entries out, as far as the version says."""
        said = self.values.get(self.layouts.resolve(EXCLUDED)[0])
        return tuple(map(str, said.get("patterns", ()))) if isinstance(said, dict) else ()

    def _claim_new(self, name: str, template: torch.Tensor | None, device: torch.device | None) -> bool:
        saved = self.saved.get(name)
        if name in self._asked or saved is None:
            self.missing += [] if name in self._asked else [name]
            return name in self.targets
        dtype = torch_dtype(saved.dtype)
        tensor: torch.Tensor
        if isinstance(template, DTensor) and tuple(template.shape) == saved.global_shape:
            tensor = torch.empty_like(template, dtype=dtype)
            live = self.layouts.live(name, tensor)
            assert live is not None
            return self.claim(live, tensor)
        fresh = self.memory(name, device if template is None else template.device)
        if fresh is None:
            return False
        tensor = fresh
        whole = Extent((0,) * len(saved.global_shape), saved.global_shape)
        shard = Shard(name, saved.dtype, saved.global_shape, whole, (self.layouts.rank,))
        return self.claim(LiveTensor(shard, local_of(tensor), late=False), tensor)


def templates(layouts: Layouts, path: str, tree: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a value that is each rank's own, by the names of their entries."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        found[name if isinstance(tensor, DTensor) else layouts.resolve(name)[0]] = tensor

    flatten(tree, path, note)
    return found


def _once(local: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor in which `expand` repeats nothing; the tensor itself if it repeats nothing at all."""
    for dim, (size, stride) in enumerate(zip(local.shape, local.stride(), strict=True)):
        if size > 1 and stride == 0:
            local = local.narrow(dim, 0, 1)
    return local


def _difference(saved: SavedTensor, shard: Shard) -> str:
    """Return what keeps an entry from being loaded into a shard; empty if nothing does."""
    if saved.dtype != shard.dtype:
        return f"saved as {saved.dtype}, here {shard.dtype}"
    if saved.global_shape != shard.global_shape:
        return f"saved with shape {saved.global_shape}, here {shard.global_shape}"
    if saved.pieces == (shard.extent,):
        return ""
    if reshard.cover(shard.extent, saved.pieces) is None:
        boxes = ", ".join(f"{p.offsets}+{p.lengths}" for p in saved.pieces[:3])
        return (
            f"this rank holds {shard.extent.offsets}+{shard.extent.lengths}, the checkpoint offers {boxes or 'nothing'}"
        )
    return ""


def left_out_text(record: LoadRecord) -> str:
    """All that does not fit, in words; empty if everything does."""
    kinds = (
        ("missing in the checkpoint", record.not_loaded),
        ("unexpected in the checkpoint", record.not_used),
        ("different", record.misfit),
    )
    return "; ".join(f"{len(names)} {what}: {some_of(names)}" for what, names in kinds if names)


def mismatch(record: LoadRecord) -> MismatchError | None:
    """All that does not fit as one error, or None if everything does."""
    found = left_out_text(record)
    if not found:
        return None
    return MismatchError(
        f"the checkpoint does not fit these objects; {found}",
        remedy="build the objects as they were when it was saved, or restore with strict=False"
        + (f"; it was saved with exclude={list(record.patterns)}" if record.patterns else ""),
    )


class Part(Protocol):
    """One object of the training state under one name.

    A save calls `build` when the structure may have changed, else `unchanged`; then `report`. A restore calls `build`,
    then `plan` of all parts, and only if that is accepted `create` of all; after the entries are filled, `apply`.
    """

    name: str

    def build(self, out: Collector) -> None:
        """Adds the tensors that last."""

    def unchanged(self) -> bool:
        """Return whether what `build` added still holds."""

    def report(self, out: Collector) -> None:
        """Adds values, and the tensors that are made anew at every save."""

    def plan(self, loading: Loading) -> None:
        """Claims what it wants from a checkpoint; changes nothing."""

    def create(self, loading: Loading) -> None:
        """Makes state that is claimed and does not exist yet."""

    def apply(self, loading: Loading) -> None:
        """Takes over the values; all claimed tensors hold the saved bytes."""


class TransientPart:
    """A part of which nothing lasts: it is made anew at every save."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self, out: Collector) -> None:
        """Nothing lasts."""

    def unchanged(self) -> bool:
        """Nothing lasts that could change."""
        return True

    def create(self, loading: Loading) -> None:
        """Nothing to make."""

    def offered(self, loading: Loading) -> dict[str, Any] | None:
        """Returns what a checkpoint has, if it is a dict of which all entries are there."""
        found = loading.offered(self.name)
        return found if isinstance(found, dict) and all(name in loading.saved for name in references(found)) else None


class NotedPart(TransientPart):
    """A part of one save: what was restored is kept until somebody asks for it.

    Attributes:
        restored: what the version that was restored has; empty if it has nothing.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.restored: dict[str, Any] = {}

    def apply(self, loading: Loading) -> None:
        """Notes what was restored; what it means is the caller's."""
        self.restored = dict(loading.value(self.name)) if loading.has(self.name) else {}
