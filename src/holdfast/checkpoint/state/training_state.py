"""The training state of one rank: live objects in, named entries and values out, and back.

How it is used, by `checkpoint.checkpointer.checkpointer` and its neighbours:

    state = State({"model": model, "optimizer": optimizer, ...}, rank=0, world_size=4, replicated=["ema.*"])
    shards = state.predict()              # shards to reserve memory for, with the optimizer state to come, or None
    gathered = state.gather()             # at every save, outside a step; see Gathered for what may be reused
    loading = state.fitting(saved, values, strict=True)    # saved: name -> SavedTensor, values: as in Gathered
    targets = state.create(loading)       # once it fits on all ranks
    ...                                   # fill targets[name].local in place with the bytes of `shard.extent`
    record = state.apply(values, targets)  # only when every target holds verified bytes

Tensors are never copied here: `local` shares memory with training. A part whose objects are unchanged is not looked at
again; see `change_detection.py` for what counts as a change. `gather` calls no collective and waits for no device. `fitting`
changes nothing. Behind `create` optimizer state that was missing may exist with undefined content, so a
restore must go on to `apply` or start again. Own methods of optimizers and modules, and hooks on loading, are called in `apply`.

The parts: `model_part.py`, `optimizer.py`, `stateful.py`, `entries/rng.py`; where a tensor belongs: `entries/sharding.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from holdfast.base.errors import MismatchError, UsageError
from holdfast.base.terminal import some_of
from holdfast.checkpoint.entries.entries import (
    EXCLUDED,
    MEMORY_ORDER,
    Collector,
    Loading,
    Part,
    StillNames,
    mismatch,
    twice,
)
from holdfast.checkpoint.entries.gradients_part import SAVES_THEM, GradientsPart
from holdfast.checkpoint.entries.rng import GeneratorState, OwnRandomness, ProcessRandomness, random_state
from holdfast.checkpoint.entries.settings_check import FrozenCheck, ModesCheck, SettingsCheck
from holdfast.checkpoint.entries.sharding import Layouts, as_patterns
from holdfast.checkpoint.entries.types import Gathered, Group, LiveTensor, LiveTensors, LoadRecord, SavedTensor
from holdfast.checkpoint.state import dataloader
from holdfast.checkpoint.state.change_detection import Tensors
from holdfast.checkpoint.state.loop_values import CarriedPart
from holdfast.checkpoint.state.model_part import ModelPart
from holdfast.checkpoint.state.optimizer import OptimizerPart
from holdfast.checkpoint.state.stateful import DictPart, InfoPart, Keys, ScalerState, StatefulPart, is_stateful
from holdfast.checkpoint.state.unsaved_state import UnsavedStateCheck
from holdfast.core.layout import bundles as bundle_layout
from holdfast.core.model import Shard

__all__ = ["Gathered", "Group", "LiveTensor", "LoadRecord", "SavedTensor", "State"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RNG = "rng"
_INFO = "info"
_CARRIED = "carried"
_GRADIENTS = "gradients"
_FROZEN = "frozen_or_thawed"
_MODES = "modes_and_dropout"
_RESERVED = (_RNG, _INFO, _CARRIED, _GRADIENTS, _FROZEN, _MODES, EXCLUDED, MEMORY_ORDER)


class State:
    """All objects whose state makes training go on where it was.

    Args:
        objects: name -> module, optimizer, object with `state_dict` and `load_state_dict`, generator of random
            numbers (torch's, NumPy's, Python's), `DataLoader`, dict of tensors; a list, tuple or dict of such objects gives `name.0`, `name.key`. None is left out.
        world_size: number of ranks of the job.
        replicated: glob patterns of names (`model.pos_table`, `scheduler`, `ema.*`) that all ranks hold alike although
            nothing shows it.
        exclude: glob patterns of names of parameters and buffers (`model.base`) that are not saved; none of them may be
            an optimizer's. A pattern also covers everything below the name it matches.
        allocated: False takes tensors without memory (meta, fake) too: for a plan, not for a save.
        began: what `began` of an earlier state of the same objects was.

    Attributes:
        info: what a caller writes beside a save.
        carried: values of the loop that live from step to step.
        gradients: those that live from step to step.
        excluded: what the version says of entries that were left out of it.
        overwritten: entries of which an attempt that was not finished may have left a part in the objects. Whoever makes
            another state of the same objects hands it on.

    Raises:
        UsageError: an object of another kind, or a name that cannot be used.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        *,
        rank: int,
        world_size: int,
        replicated: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        allocated: bool = True,
        began: Mapping[str, Keys] | None = None,
    ) -> None:
        replicated, exclude = as_patterns(replicated), as_patterns(exclude)
        self._layouts = Layouts(rank, world_size, replicated, exclude=exclude, allocated=allocated)
        self._parts = sorted(_with_inner(list(_parts(objects, began or {}))), key=_order)
        self.info = InfoPart(_INFO)
        self.excluded = InfoPart(EXCLUDED)
        self.excluded.value = {"patterns": list(exclude)} if exclude else {}
        self._order = InfoPart(MEMORY_ORDER)
        self.carried = CarriedPart(_CARRIED)
        theirs = any(getattr(type(value), SAVES_THEM, False) for value in objects.values())
        self.gradients = GradientsPart(_GRADIENTS, lambda: self.optimizers, lambda: self.modules, off=theirs)
        began = began or {}
        self._checks: list[SettingsCheck] = [
            FrozenCheck(_FROZEN, lambda: self.optimizers, began.get(_FROZEN)),
            ModesCheck(_MODES, lambda: self.optimizers, began.get(_MODES), lambda: self._models),
        ]
        self._parts += [self.info, self.excluded, self._order, self.carried, self.gradients, *self._checks]
        self._parts.append(StatefulPart(_RNG, ProcessRandomness()))
        self._still = StillNames()
        self._persistent = Collector(self._layouts)
        self._overlooked = UnsavedStateCheck(self._in_no_version)
        self._owned: dict[str, torch.Tensor] = {}
        self._watch: Tensors | None = None
        self._loading: Loading | None = None
        self.overwritten: set[str] = set()
        self._structure = 0
        self._storages = 0
        self._described: Any = None
        self._glanced: list[int] = []
        self._shape: Any = None

    @property
    def layouts(self) -> Layouts:
        """Return what this rank's tensors are called and who else holds them."""
        return self._layouts

    @property
    def tied(self) -> Mapping[str, str]:
        """Other names of tensors that are kept under one, as of the last look."""
        return self._persistent.tied

    @property
    def stateful(self) -> dict[str, bool]:
        """Objects that hand out their own state, by name; True: it is random numbers, which belong to one rank."""
        return {part.name: part.random for part in self._parts if isinstance(part, StatefulPart)}

    @property
    def began(self) -> dict[str, Keys]:
        """The keys that dicts had when the script began, by name: others came later, and may go when it goes back. And the settings that are checked."""
        return {part.name: part.began for part in self._parts if isinstance(part, DictPart | SettingsCheck)}

    def stepped(self, optimizer: Optimizer, *, made: bool = True) -> None:
        """An optimizer made a step, or a `GradScaler` left it out: either has used the gradients."""
        self.gradients.stepped(optimizer)
        for check in self._checks if made else ():
            check.stepped(optimizer)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Lists all optimizers that make steps, in the order in which they were given; not their wrappers, but those inside."""
        found = (each for part in self._stepping for each in part.steppers)
        return list({id(each): each for each in found}.values())

    @property
    def _stepping(self) -> list[OptimizerPart]:
        return [part for part in self._parts if isinstance(part, OptimizerPart)]

    @property
    def modules(self) -> list[nn.Module]:
        """All models, in the order in which they were given."""
        return [part.module for part in self._parts if isinstance(part, ModelPart)]

    @property
    def _models(self) -> list[dict[str, nn.Module]]:
        return [part.modules for part in self._parts if isinstance(part, ModelPart)]

    @torch.no_grad()
    def gather(self) -> Gathered:
        """The state now. Fast while nothing but bytes and numbers changed since the last call.

        Raises:
            UsageError: a tensor that cannot be saved, an optimizer of a tensor that no object holds; names it.
        """
        self._look()
        transient = self._reported()
        tensors = LiveTensors(self._persistent.tensors, transient.tensors)
        if both := [name for name in transient.tensors if name in self._persistent.tensors]:
            raise twice(both[0])
        self._describe(tensors, transient)
        if self._layouts.allocated and not self.gradients.is_elsewhere:
            self._overlooked.look(self._owned.values())
        return Gathered(tensors, transient.values, self._structure, self._storages)

    @torch.no_grad()
    def glance(self) -> Gathered:
        """Gather as `gather` does, but look at what optimizers own only when an optimizer's state has grown: a fraction of
        the time.

        For whoever asks `still` before the result is used.
        """
        others = (part for part in self._parts if not isinstance(part, OptimizerPart))
        if self._is_grown() or not all(part.unchanged() for part in others):
            self._glanced = self._sizes()
            return self.gather()
        transient = self._reported()
        tensors = LiveTensors(self._persistent.tensors, transient.tensors)
        self._describe(tensors, transient)
        return Gathered(tensors, transient.values, self._structure, self._storages)

    def storages(self) -> int:
        """Returns `Gathered.storages`, looked at again when an optimizer's state has grown; for every step."""
        if self._is_grown():
            self.glance()
        return self._storages

    def owned(self) -> Mapping[str, torch.Tensor]:
        """Returns what optimizers own by entry name, as of the last look; not to be changed."""
        return self._owned

    def _sizes(self) -> list[int]:
        return [len(optimizer.state) for optimizer in self.optimizers]

    def _is_grown(self) -> bool:
        """Return whether nothing was looked at yet, or an optimizer's state has another size than at the last glance."""
        return self._described is None or self._sizes() != self._glanced

    def still(self) -> bool:
        """Return whether what optimizers own is the same memory as at the last look; also in the middle of a forward
        pass, where FSDP has put other parameters into the modules.
        """
        return self._watch is not None and all(part.unchanged() for part in self._stepping) and self._watch.unchanged()

    def agree_on_frozen(self, exchange: Callable[[dict[str, str]], Sequence[Mapping[str, str]]]) -> None:
        """Takes nothing for still of what ranks share, as of the last look, unless all of them do; see `StillNames`.

        Not asked of what objects hand out, which is so by their class, on all ranks.

        Args:
            exchange: gives what this rank says to all ranks, and returns what each said. Collective.
        """
        shared = self._shared_still()
        self._still.agree(bundle_layout.contested(shared, exchange(bundle_layout.still_digests(shared))))
        self._watch = None  # all is looked at once more

    def _shared_still(self) -> list[Shard]:
        live = self._persistent.tensors.values()
        return [each.shard for each in live if each.still and len(each.shard.ranks) > 1]

    @torch.no_grad()
    def predict(self) -> dict[str, Shard] | None:
        """Shards of the state as it will be after the first optimizer step, or None if that is not known."""
        shards = {name: live.shard for name, live in self.gather().tensors.items()}
        for part in self._stepping:
            predicted = part.predict(self._layouts)
            if predicted is None:
                return None
            shards.update((live.shard.name, live.shard) for live in predicted)
        return shards

    @torch.no_grad()
    def trained(self) -> tuple[Shard, ...]:
        """Return what optimizers own, state to come included; all that lasts where there is no optimizer. What
        redundancy is about: random numbers and positions in the data are each rank's own by nature.
        """
        self.gather()
        persistent = self._persistent.tensors
        found = {name: live.shard for name, live in persistent.items() if live.late or not self.optimizers}
        for part in self._stepping:
            found.update((live.shard.name, live.shard) for live in part.predict(self._layouts) or ())
        return tuple(found.values())

    @torch.no_grad()
    def fitting(
        self,
        saved: Mapping[str, SavedTensor],
        values: Mapping[Group, Mapping[str, Any]],
        *,
        strict: bool = True,
    ) -> Loading:
        """Looks whether a checkpoint fits, and changes nothing.

        Args:
            saved: the entries of all groups that this rank belongs to.
            values: their values, decoded.
            strict: refuse unless everything fits.

        Returns:
            What `create` takes, on this rank as soon as it fits on all.

        Raises:
            MismatchError: with all names that are missing, unexpected or different.
        """
        offered = {str(path): v for group in values.values() for path, v in group.items()}
        loading = Loading(self._layouts, saved, offered, strict=strict)
        self.plan(loading)
        problem = mismatch(loading.record()) if strict else None
        if problem is not None:
            raise problem
        return loading

    @torch.no_grad()
    def plan(self, loading: Loading) -> None:
        """Every part claims what it wants; as `fitting`, for who judges by himself what is missing."""
        self._look()
        for part in self._parts:
            part.plan(loading)

    @torch.no_grad()
    def create(self, loading: Loading) -> dict[str, LiveTensor]:
        """Makes state that was claimed and does not exist yet; returns where the entries of a checkpoint go.

        From now on the objects are not as the script made them, until `apply` has made them what was saved.

        Returns:
            Name -> the live tensor to fill in place; the boxes of the entry make up exactly its extent.
        """
        self.overwritten.update(loading.targets)
        for part in self._parts:
            part.create(loading)
        self._loading = loading
        return dict(loading.targets)

    @torch.no_grad()
    def apply(self, values: Mapping[Group, Mapping[str, Any]], tensors: Mapping[str, LiveTensor]) -> LoadRecord:
        """Takes over values: learning rates, schedulers, scaler, loader, objects, random numbers last.

        Args:
            values: those that `fitting` was given.
            tensors: what `create` returned, filled with verified bytes.

        Returns:
            What was left out, empty if `fitting` was strict.

        Raises:
            UsageError: without `create` before, or with other arguments. MismatchError: an attempt before this one left
                something that this version does not fill.
        """
        loading, self._loading = self._loading, None
        if loading is None or loading.targets.keys() != tensors.keys():
            raise UsageError("the tensors are not those that were asked for last", remedy="call create() before")
        if loading.values.keys() != {str(path) for group in values.values() for path in group}:
            raise UsageError("the values are not those that were planned with", remedy="pass the same to both calls")
        loading.fill_repeated()
        for part in self._parts:
            part.apply(loading)
        if left := self.overwritten - tensors.keys():  # of a version that had more
            self.gather()
            left &= self._persistent.tensors.keys()  # what was copied on the way, or is not there any more, is fine
        if left:
            raise MismatchError(
                f"this version lacks {some_of(sorted(left))}, and the objects hold a part of what another version had there",
                remedy="build the objects anew: start this process again",
            )
        self.overwritten.clear()
        return loading.record()

    def require_untouched(self) -> None:
        """Require that no attempt to load something was left unfinished.

        Raises:
            UsageError: the objects may hold a mixture of what the script made and of what was saved.
        """
        if self.overwritten:
            raise UsageError(
                "a restore that failed has left a part of what it read in the objects, so nothing can begin with them",
                remedy="build the objects anew: start this process again",
            )

    def _in_no_version(self) -> Iterator[tuple[str, object]]:
        for part in self._parts:
            if isinstance(part, OptimizerPart | ModelPart):
                yield from part.in_no_version()

    def _reported(self) -> Collector:
        """Return what the parts make anew at every save."""
        transient = Collector(self._layouts, still=self._still)
        for part in self._parts:
            part.report(transient)
        if self._persistent.orders or transient.orders:
            transient.value(MEMORY_ORDER, {**self._persistent.orders, **transient.orders})
        return transient

    def _look(self) -> None:
        """Looks at what lasts, if it is not what it was at the last look."""
        for each in self._stepping:
            each.ask()
        if not self._unchanged():
            self._build()

    def _unchanged(self) -> bool:
        return self._watch is not None and all(part.unchanged() for part in self._parts) and self._watch.unchanged()

    def _build(self) -> None:
        self._watch = None
        owned = (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])
        self._persistent = Collector(self._layouts, late=frozenset(map(id, owned)), still=self._still)
        for part in self._parts:
            part.build(self._persistent)
        self._watch = Tensors(self._persistent.sources if self._layouts.allocated else ())
        self._owned = {name: live.local for name, live in self._persistent.tensors.items() if live.late}
        self._storages += 1

    def _describe(self, tensors: Mapping[str, LiveTensor], transient: Collector) -> None:
        """Looks whether it is another structure than that of the last look: gradients that are added up come and go."""
        described = (
            self._storages,
            [(live.shard, live.local.device) for live in transient.tensors.values()],
            sorted(transient.values),
        )
        if described == self._described:
            return
        self._described = described
        shape = ({n: (live.shard, live.local.device, live.late) for n, live in tensors.items()}, described[2])
        if shape != self._shape:
            self._structure += 1
            self._shape = shape


def _with_inner(parts: Sequence[Part]) -> Iterator[Part]:
    """Yields the parts, and after an optimizer parts for those inside it that were not given themselves."""
    known = {id(each) for part in parts if isinstance(part, OptimizerPart) for each in part.chain}
    for part in parts:
        yield part
        for inner in part.apart() if isinstance(part, OptimizerPart) else ():
            if id(inner.optimizer) not in known:
                known.add(id(inner.optimizer))
                yield inner


def _order(part: Part) -> int:
    """Those that hold tensors before the optimizers that step them; the rest as given."""
    return {ModelPart: 0, DictPart: 0, OptimizerPart: 1}.get(type(part), 2)


def _parts(objects: Mapping[str, Any], began: Mapping[str, Keys]) -> Iterator[Part]:
    for name, value in objects.items():
        if not _NAME.match(name) or name in _RESERVED:
            remedy = f"choose an identifier other than {', '.join(map(repr, _RESERVED))}"
            raise UsageError(f"an object cannot be called {name!r}", remedy=remedy)
        yield from _parts_of(name, value, began)


def _parts_of(name: str, value: Any, began: Mapping[str, Keys]) -> Iterator[Part]:
    if value is None:
        return
    part = _part(name, value)
    if part is not None:
        yield part
    elif isinstance(value, dict) and not any(_part(name, item) for item in value.values()):
        yield DictPart(name, value, began.get(name))
    elif isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _parts_of(f"{name}.{key}", item, began)
    else:
        raise UsageError(
            f"nothing is known about saving {type(value).__module__}.{type(value).__qualname__}",
            where=name,
            remedy="give an object with state_dict() and load_state_dict(), or a dict of tensors",
        )


def _part(name: str, value: Any) -> Part | None:
    if isinstance(value, nn.Module):
        return ModelPart(name, value)
    if isinstance(value, Optimizer):
        return OptimizerPart(name, value)
    if isinstance(value, GradScaler):
        return StatefulPart(name, ScalerState(value))
    if isinstance(value, torch.Generator):
        return StatefulPart(name, GeneratorState(value))
    if dataloader.is_plain(value):
        return StatefulPart(name, dataloader.place_of(value))
    if dataloader.draws_itself(value):
        return StatefulPart(name, dataloader.OwnPlace(value))
    if (found := random_state(value)) is not None:
        return StatefulPart(name, OwnRandomness(*found))
    return StatefulPart(name, value) if is_stateful(value) else None
