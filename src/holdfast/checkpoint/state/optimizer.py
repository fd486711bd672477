"""An optimizer as part of the state: its tensors by parameter name, its numbers as values, state made when missing.

Entries are named as DCP names them, `optimizer.state.<parameter>.exp_avg`; numbers and lists that a class keeps per
parameter go under the same path as values, and `optimizer.param_groups` lists parameters by name. State tensors follow
their parameter: a DTensor says it itself, a plain tensor of a parameter that is known to be replicated is replicated,
a step count (no dimensions) of a sharded parameter is equal on all ranks of its mesh. Where an optimizer deals its
parameters over the ranks (ZeRO-1, ZeroRedundancyOptimizer), the state of each is held by the rank that steps it, and by
no other. The rest is this rank's own.

State that does not exist before the first step is created through `load_state_dict`, so that an optimizer's own way
of taking state is respected; dtypes and objects are put right afterwards, because `load_state_dict` casts state to the
parameter's dtype and a restore must not change a bit. What a class, a wrapper or hooks hand out besides is in `optimizer_extras.py`,
optimizers inside others in `nested_optimizers.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.base.errors import MismatchError, UsageError
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries.entries import Collector, Loading, Owner, templates
from holdfast.checkpoint.entries.sharding import Layouts, local_of, memory_of, mesh_ranks
from holdfast.checkpoint.entries.types import Group, LiveTensor, dtype_name, torch_dtype
from holdfast.checkpoint.state.change_detection import SCALARS, Containers, same_objects
from holdfast.checkpoint.state.divergent_ranks import refuse_averagers
from holdfast.checkpoint.state.nested_optimizers import attributes, chain_to_stepper, others
from holdfast.checkpoint.state.optimizer_extras import (
    OWN_KEYS,
    OptimizerExtras,
    hooks_of,
    is_handed,
    keep_objects,
    kept,
    more_keys,
    overrides,
)
from holdfast.checkpoint.state.optimizer_forecast import predict_state
from holdfast.checkpoint.state.unsaved_state import keys, token, tokens
from holdfast.tiers.format.values import TensorRef

logger = logging.getLogger(__name__)

_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


class OptimizerPart:
    """One `torch.optim.Optimizer`.

    Args:
        name: what its entries begin with.
        optimizer: its parameters belong to models or dicts of tensors that are part of the state too.

    Attributes:
        optimizer: the one that makes the steps; not a wrapper that was given.

    Raises:
        UsageError: a wrapper of which it is not certain what steps.
    """

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        self.chain = chain_to_stepper(name, optimizer)
        self.optimizer = optimizer = self.chain[-1]
        self._owners: dict[int, Owner] = {}
        self._params: list[torch.Tensor] = []
        self._group: Group | None = None
        self._watch = Containers(())
        self._held: Any = None
        self._state: dict[torch.Tensor, dict[Any, Any]] = {}
        self._live: dict[tuple[int, str], LiveTensor] = {}
        self._loose: dict[torch.Tensor, dict[Any, TensorRef | None]] = {}
        self._names: list[list[str]] = []
        self._wanted: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._stays: set[torch.Tensor] = set()  # parameters that keep the state that they have
        self._fits = False
        # ZeRO-1: the optimizer that really steps, with this rank's share of the parameters; the others step the rest.
        self._dealt = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
        self._stepper = _stepper_of(name, optimizer) if self._dealt else optimizer
        speakers = [] if self._dealt else [each for each in self.chain if overrides(each, "state_dict")]
        self._handed = OptimizerExtras(name, speakers[0] if speakers else self._stepper, self._stepper)
        self._refs: dict[int, TensorRef] = {}
        self._host_state: list[str] = []  # as `_state_on_host` lists it
        self._saved_on_host: frozenset[str] = frozenset()  # the same of the checkpoint that is restored
        self._rank: Group = ()
        self._inner = [] if self._dealt else list(others(name, self._stepper))

    @property
    def steppers(self) -> list[Optimizer]:
        """Lists all optimizers that step these parameters, the one of this part first."""
        return [self.optimizer, *(inner for _, inner in self._inner)]

    def apart(self) -> list[OptimizerPart]:
        """Returns parts for the optimizers inside whose state is neither this one's nor handed out by it."""
        if self._handed.says_all:
            return []
        return [OptimizerPart(path, inner) for path, inner in self._inner if inner.state is not self._stepper.state]

    def build(self, out: Collector) -> None:
        """Adds all state tensors that stand directly under a parameter."""
        if self._dealt and any(hooks_of(self.optimizer, method) for method in ("state_dict", "load_state_dict")):
            raise UsageError(
                "state_dict hooks of an optimizer that deals its parameters over the ranks would see one share of them",
                where=self.name,
                remedy="register them at the local optimizer (.optim), or keep what they carry in an object with state_dict()",
            )
        self._params = self._listed()
        self._held = self._stepper.state
        self._rank = (out.layouts.rank,)
        self._state = _by_parameter(self._held)
        self._handed.found_odd(len(self._state) < len(self._held))
        self._owners = {id(p): self._owner(out, p) for p in (*self._params, *self._state)}
        self._names = [[self._owners[id(p)].fqn for p in group["params"]] for group in self.optimizer.param_groups]
        self._group = _common_group([self._owners[id(p)] for p in self._params])
        if self._group is not None and len(self._group) > 1:
            refuse_averagers(self.name, self.chain)
        self._watch = Containers((self._held, *self._state.values()))
        self._live, self._loose, self._refs = {}, {}, {}
        for parameter in self._owned():  # not in the order in which state came to be: a restore may change that
            self._build_state(out, parameter, self._state.get(parameter, {}))
        self._host_state = self._state_on_host()

    def _state_on_host(self) -> list[str]:
        """Lists what stands in host memory beside a parameter on a device: by key where all parameters agree, else by name.

        No key is listed that torch.optim's own rule places there.
        """
        options = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        found: dict[str, dict[str, bool]] = {}
        for parameter in self._owned():
            if _is_on_host(parameter):
                continue
            for key, value in self._state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and type(key) is str:
                    is_odd = _is_on_host(value) and _lies_on_device(key, options.get(id(parameter), {}))
                    found.setdefault(key, {})[self._owners[id(parameter)].fqn] = is_odd
        whole = {key for key, odd in found.items() if all(odd.values())}
        parts = (
            f"{fqn}.{key}" for key, odd in found.items() if key not in whole for fqn, is_odd in odd.items() if is_odd
        )
        return sorted([*whole, *parts])

    def _build_state(self, out: Collector, parameter: torch.Tensor, state: Mapping[Any, Any]) -> None:
        owner = self._owners[id(parameter)]
        loose: dict[Any, TensorRef | None] = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or type(key) is not str:
                loose[key] = None
                continue
            name, group = self._entry(owner, key), self._follow(owner, value)
            ref = out.persistent(name, value, group=group, late=True, piece=owner.cut(value))
            if ref is not None:
                self._refs[id(value)] = ref
            if ref is not None and ref.name in (name, out.layouts.resolve(name, group)[0]):
                self._live[id(parameter), key] = out.tensors[ref.name]
                if not _lies_like(value, owner):
                    out.note_order(name, value)
            else:  # memory that has a name already: the parameter itself, or a step count that parameters share
                loose[key] = ref
        if loose:
            self._loose[parameter] = loose

    def unchanged(self) -> bool:
        """Return whether parameters and state are the same objects."""
        return (
            self._stepper.state is self._held
            and self._watch.unchanged()
            and same_objects(self._listed(), self._params)
            and [len(group["params"]) for group in self.optimizer.param_groups] == [*map(len, self._names)]
        )

    def report(self, out: Collector) -> None:
        """Adds parameter groups, and of the state all that is not a tensor."""
        named = zip(self.optimizer.param_groups, self._names, strict=True)
        groups = [{**group, "params": names} for group, names in named]
        out.transient(f"{self.name}.param_groups", groups, group=self._group)
        if self._host_state:
            out.transient(f"{self.name}.host_state", self._host_state, group=self._group)
        for parameter, loose in self._loose.items():
            # In an order of their own: a restore puts keys in another one than the first step does.
            ordered = sorted(loose.items(), key=lambda item: str(item[0]))
            rest = {key: self._state[parameter][key] if ref is None else ref for key, ref in ordered}
            path, group = self._state_path(parameter)
            out.transient(path, rest, group=group)
        more = self._handed.more()
        if more is not None:
            out.transient(self._more, more, known=self._refs)

    def ask(self) -> None:
        """Lets the optimizer say what it hands out, before anything is read of it."""
        self._handed.ask()

    def in_no_version(self) -> Iterator[tuple[str, object]]:
        """Yields attributes of the optimizers that none of them hands out, by name or by value; the value as a token."""
        said = self._handed.more()
        names, values = (set(), set()) if said is None else (set(keys(said)), set(tokens(said)))
        mine = [*self._params, *(t for s in self._state.values() for t in s.values() if isinstance(t, torch.Tensor))]
        grads = [p.grad for p in self._params if p.grad is not None and p.grad.layout is torch.strided]
        known = {memory_of(local_of(tensor)) for tensor in (*mine, *grads)}
        for each in {id(each): each for each in (*self.chain, self._stepper, *(i for _, i in self._inner))}.values():
            for name, value in attributes(each):
                seen = token(value, known)
                if name.lstrip("_") not in names and seen not in values:
                    yield f"{self.name} ({type(each).__name__}.{name})", seen

    def predict(self, layouts: Layouts) -> list[LiveTensor] | None:
        """State that the first step will make, as tensors without memory; None if that is not known."""
        predicted = predict_state(self._stepper)
        if predicted is None:
            return None
        made: list[LiveTensor] = []
        for id_, state in predicted.items():
            owner = self._owners[id_]
            if owner.is_elsewhere:
                continue
            for key, tensor in state.items():
                live = _predicted(layouts, self._entry(owner, key), owner, tensor, self._follow(owner, tensor))
                if live is None:
                    return None
                made.append(live)
        return made

    def plan(self, loading: Loading) -> None:
        """Claims groups and state; state that is missing here gets memory now and is put in place by `create`."""
        self._wanted, self._stays = {}, set()
        path = f"{self.name}.param_groups"
        loading.regroup(path, self._group, self._names)
        groups = loading.claim_value(path, group=self._group, templates=self._group_tensors(loading))
        self._fits = groups is not None and self._check_groups(loading, groups)
        place = f"{self.name}.host_state"
        is_told = loading.layouts.resolve(place, self._group)[0] in loading.values
        self._saved_on_host = frozenset((loading.claim_value(place, group=self._group) or ()) if is_told else ())
        saved = self._saved_entries(loading)
        predicted = predict_state(self._stepper) or {}
        for parameter in self._owned():
            self._plan_state(loading, parameter, saved.get(id(parameter), {}), predicted.get(id(parameter), {}))
        self._plan_more(loading)

    def create(self, loading: Loading) -> None:
        """Puts state in place that the checkpoint has; removes the state of parameters that had none then.

        A class with a `load_state_dict` of its own gets it in `apply`, with everything else that was saved.
        """
        state = self._loaded(loading)
        changed = any(not _same_items(state.get(p, {}), self._state.get(p, {})) for p in self._owned())
        if changed and not self._handed.makes_state:
            self._install(state)

    def apply(self, loading: Loading) -> None:
        """Takes over learning rates and the other numbers of the groups, and what the optimizer takes by itself."""
        if not self._fits:
            return
        groups = loading.value(f"{self.name}.param_groups")
        if self._handed.takes or loading.has(self._more):
            self._give_back(loading, groups)
            if not self._dealt:
                return
        rest = [{key: value for key, value in saved.items() if key != "params"} for saved in groups]
        for group, values in zip(self.optimizer.param_groups, kept(self.optimizer.param_groups, rest), strict=True):
            group.update(values)

    def _loaded(self, loading: Loading) -> dict[torch.Tensor, dict[Any, Any]]:
        """Returns the state by parameter as it is to be, with the tensors that are claimed."""
        state: dict[torch.Tensor, dict[Any, Any]] = {p: self._state[p] for p in self._stays if p in self._state}
        for parameter, tensors in self._wanted.items():
            path, _ = self._state_path(parameter)
            rest = loading.value(path) if loading.has(path) else {}
            state[parameter] = {**self._state.get(parameter, {}), **tensors, **rest}
        # Of a checkpoint that does not know this optimizer nothing can be concluded.
        return state if self._fits else {**self._state, **state}

    @property
    def _more(self) -> str:
        """Names the value that holds what the optimizer handed out besides; it is each rank's own."""
        return f"{self.name}.state_dict"

    def _plan_more(self, loading: Loading) -> None:
        here, there = self._handed.more(), loading.offered(self._more)
        if not self._handed.takes and set(more_keys(there)) - set(OWN_KEYS):
            return  # nothing here would take it: nobody uses it
        if here is None and there is None:
            return
        devices = {local_of(parameter).device for parameter in self._params}
        saved = loading.claim_value(
            self._more,
            templates=templates(loading.layouts, self._more, here),
            device=devices.pop() if len(devices) == 1 else None,
            kind=dict,
        )
        if saved is not None and not is_handed(saved):
            loading.misfit.append(f"{self._more} (not what an optimizer hands out)")

    def _give_back(self, loading: Loading, groups: list[dict[str, Any]]) -> None:
        saved = loading.value(self._more) if loading.has(self._more) else None
        lost = self._handed.give_back(saved, self._loaded(loading), groups)
        if odd := sorted(set(lost) & set(OWN_KEYS)):
            logger.warning(
                "%s: load_state_dict() made something else of %s than was handed out at the save: training goes on from "
                "that, and not bit for bit if the class did not mean it",
                self.name,
                " and ".join(odd),
            )
        if lost := [key for key in lost if key not in OWN_KEYS]:
            loading.refuse(f"{self._more} (load_state_dict() did not take back {', '.join(lost[:5])})")

    def _listed(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _owned(self) -> list[torch.Tensor]:
        """Parameters whose state this rank keeps, if there is any yet."""
        params = self._params if not self._dealt else [p for g in self._stepper.param_groups for p in g["params"]]
        return [p for p in {id(p): p for p in (*params, *self._state)}.values() if not self._owners[id(p)].is_elsewhere]

    def _follow(self, owner: Owner, value: torch.Tensor) -> Group | None:
        return self._rank if self._dealt else follow(owner, value)

    def _owner(self, out: Collector, parameter: torch.Tensor) -> Owner:
        owner = out.owners.get(id(parameter))
        if owner is None and id(parameter) in out.kept_back:
            raise UsageError(
                "the optimizer steps a parameter that state_dict() of its model does not hand out as it is",
                where=f"{self.name}: {out.kept_back[id(parameter)]}",
                remedy="hand it out, or freeze it and leave it out of the optimizer",
            )
        if owner is None:
            raise UsageError(
                f"the optimizer steps a tensor of shape {tuple(parameter.shape)} that no given model has",
                where=self.name,
                remedy="give the Checkpointer the model (or a dict of tensors) that holds it, and build the optimizer "
                "after the model is wrapped",
            )
        return owner

    def _entry(self, owner: Owner, key: str) -> str:
        return f"{self.name}.state.{owner.fqn}.{key}"

    def _state_path(self, parameter: torch.Tensor) -> tuple[str, Group | None]:
        """Return where values of a parameter's state go, and who holds the same."""
        owner = self._owners[id(parameter)]
        return f"{self.name}.state.{owner.fqn}", self._rank if self._dealt else spread(owner)

    def _group_tensors(self, loading: Loading) -> Mapping[str, torch.Tensor]:
        """Tensors that stand in parameter groups now, such as a learning rate on a device."""
        scratch = Collector(loading.layouts)
        self.report(scratch)
        return {name: live.local for name, live in scratch.tensors.items()}

    def _check_groups(self, loading: Loading, groups: Any) -> bool:
        if not isinstance(groups, list) or not all(
            isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
        ):
            loading.misfit.append(f"{self.name}.param_groups (no parameter groups)")
            return False
        here, there = self._names, [group["params"] for group in groups]
        if here == there:
            pairs = zip(self.optimizer.param_groups, groups, strict=True)
            foreign = {key for pair in pairs for key in _foreign_keys(*pair)}
            if not foreign:
                return True
            what = f"saved by another class of optimizer: {', '.join(sorted(foreign))}"
        elif len(here) != len(there):
            what = f"{len(there)} groups saved, {len(here)} here"
        else:
            index = next(i for i, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1])
            odd = [n for n in (*there[index], *here[index]) if (n in there[index]) != (n in here[index])]
            what = f"group {index} has other parameters: {', '.join(odd[:3]) or 'in another order'}"
        loading.misfit.append(f"{self.name}.param_groups ({what})")
        return False

    def _saved_entries(self, loading: Loading) -> dict[int, dict[str, str]]:
        """Parameter's id -> key -> entry, for every entry of the checkpoint that is state of this optimizer.

        Entries below a key that is stored as a value (a list of tensors) belong to that value.
        """
        by_name = {owner.fqn: id_ for id_, owner in self._owners.items()}
        prefix, found = f"{self.name}.state.", dict[int, dict[str, str]]()
        for entry in loading.saved:
            name = entry.removeprefix(f"rank{loading.layouts.rank}/")
            if not name.startswith(prefix):
                continue
            fqn, _, key = name.removeprefix(prefix).rpartition(".")
            while fqn and fqn not in by_name:
                fqn, _, first = fqn.rpartition(".")
                key = f"{first}.{key}"
            if not fqn:
                continue
            values = loading.values.get(entry.removesuffix(f".{key}"), {})
            if not isinstance(values, dict) or not any(
                key == k or key.startswith((f"{k}.", f"{k}~")) for k in map(str, values)
            ):
                found.setdefault(by_name[fqn], {})[key] = entry
        return found

    def _plan_state(
        self,
        loading: Loading,
        parameter: torch.Tensor,
        entries: Mapping[str, str],
        predicted: Mapping[str, torch.Tensor],
    ) -> None:
        """Claims the state of one parameter: `entries` is key -> entry of the checkpoint."""
        path, group = self._state_path(parameter)
        has_values = loading.layouts.resolve(path, group)[0] in loading.values
        if not entries and not has_values:
            return
        if loading.is_misfit(self._owners[id(parameter)].entry):
            # Moments of one tensor are no moments of another one: what the script made stays, also what would fit by itself.
            loading.used.update((*entries.values(), *([loading.layouts.resolve(path, group)[0]] if has_values else [])))
            loading.misfit += [f"{path}.{key} (its parameter differs)" for key in sorted(entries)]
            self._stays.add(parameter)
            return
        mine = ((key, self._live.get((id(parameter), key))) for key in self._state.get(parameter, ()))
        existing = {key: live for key, live in mine if live is not None}
        complete = True
        if has_values:
            device = local_of(parameter).device
            complete = loading.claim_value(path, group=group, device=device, kind=dict) is not None
        claimed: dict[str, torch.Tensor] = {}
        for key, live in existing.items():
            if loading.claim(live, self._state[parameter][key]):
                claimed[key] = loading.tensor(live.shard.name)
        # In the order in which the optimizer makes it, and so alike on all ranks: scripts go through it with collectives.
        order = dict.fromkeys((*predicted, *sorted(entries)))
        fresh = {key: entries[key] for key in order if key in entries and key not in existing}
        if existing or predicted.keys() == fresh.keys() or not predicted:
            for key, entry in fresh.items():
                tensor = self._claim_new(loading, parameter, entry, predicted.get(key), key)
                if tensor is not None:
                    claimed[key] = tensor
        else:  # another class, or other options of it, wrote this; its own entries stay unexpected
            owner = self._owners[id(parameter)]
            loading.missing += [self._entry(owner, key) for key in predicted if key not in fresh]
        if existing or (complete and len(claimed) == len(fresh)):
            self._wanted[parameter] = claimed

    def _claim_new(
        self, loading: Loading, parameter: torch.Tensor, entry: str, predicted: torch.Tensor | None, key: str
    ) -> torch.Tensor | None:
        owner = self._owners[id(parameter)]
        on_device = self._on_device(parameter, key) if predicted is None else predicted.device.type == "meta"
        on_device = on_device and self._saved_on_host.isdisjoint((key, f"{owner.fqn}.{key}"))
        tensor = _skeleton(loading, entry, owner, on_device=on_device)
        if tensor is None:
            return None
        name, group = self._entry(owner, key), self._follow(owner, tensor)
        live = loading.layouts.live(name, tensor, group=group, late=True, piece=owner.cut(tensor))
        return loading.tensor(live.shard.name) if live is not None and loading.claim(live, tensor) else None

    def _on_device(self, parameter: torch.Tensor, key: str) -> bool:
        """Return whether state of a class that cannot be asked lies on the parameter's device."""
        group = next((g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"])), {})
        return _lies_on_device(key, group)

    def _install(self, state: Mapping[torch.Tensor, dict[Any, Any]]) -> None:
        optimizer = self._stepper
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = {id(p): index for index, p in enumerate(listed)}
        before = optimizer.state, optimizer.param_groups
        groups = [{**g, "params": [numbers[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
        numbered = {numbers[id(p)]: s for p, s in state.items() if id(p) in numbers}
        try:
            with _muted(optimizer):
                optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            pass_on(error)
            raise MismatchError(f"the optimizer refuses the saved state: {error}", where=self.name) from error
        for parameter, wanted in state.items():
            optimizer.state[parameter].update(wanted)
        keep_objects(optimizer, *before)


def _stepper_of(name: str, optimizer: Optimizer) -> Optimizer:
    """The local optimizer inside one that deals its parameters over the ranks."""
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        raise UsageError(
            "the optimizer that steps this rank's share of the parameters does not exist yet",
            where=name,
            remedy="do not let ZeroRedundancyOptimizer overlap with DDP, or shard with fully_shard",
        )
    return inner


def _lies_on_device(key: str, options: Mapping[str, Any]) -> bool:
    """Return whether state lies on its parameter's device by the rule of torch.optim, for a group of these options."""
    return key != "step" or bool(options.get("fused") or options.get("capturable"))


def _is_on_host(tensor: torch.Tensor) -> bool:
    return local_of(tensor).device.type == "cpu"


def follow(owner: Owner, value: torch.Tensor) -> Group | None:
    """The ranks that hold the same of a plain state tensor of this parameter, None if it is this rank's own."""
    if isinstance(owner.tensor, DTensor):
        return mesh_ranks(owner.tensor) if value.dim() == 0 else None
    return owner.group


def spread(owner: Owner) -> Group | None:
    """The ranks that hold the same numbers for this parameter."""
    return mesh_ranks(owner.tensor) if isinstance(owner.tensor, DTensor) else owner.group


def _common_group(owners: list[Owner]) -> Group | None:
    groups = {spread(owner) for owner in owners}
    return groups.pop() if len(groups) == 1 else None


def _by_parameter(state: Mapping[Any, Any]) -> dict[torch.Tensor, dict[Any, Any]]:
    """Returns the dicts that stand under parameters; what else an optimizer keeps there it has to hand out itself."""
    return {p: s for p, s in state.items() if isinstance(p, torch.Tensor) and isinstance(s, dict)}


def _foreign_keys(here: Mapping[str, Any], there: Mapping[str, Any]) -> set[str]:
    """Options that only one side has, if each has some. One side alone may be a newer torch, or a scheduler's notes."""
    only_here, only_there = set(here) - set(there), set(there) - set(here)
    return only_here | only_there if only_here and only_there else set()


def _same_items(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> bool:
    return left.keys() == right.keys() and all(
        value is right[key] or (type(value) in SCALARS and type(right[key]) is type(value) and value == right[key])
        for key, value in left.items()
    )


def _predicted(
    layouts: Layouts, name: str, owner: Owner, tensor: torch.Tensor, group: Group | None
) -> LiveTensor | None:
    parameter = owner.tensor
    if isinstance(parameter, DTensor) and tensor.dim():
        if tensor.shape != local_of(parameter).shape:
            return None
        like = layouts.live(name, parameter)
        if like is None:
            return None
        shard = dataclasses.replace(like.shard, dtype=dtype_name(tensor.dtype, where=name))
    elif piece := owner.cut(tensor):
        shard = layouts.of_piece(name, tensor.dtype, piece)
    else:
        shard = layouts.whole(name, tensor.dtype, tuple(tensor.shape), group)
    return LiveTensor(shard, tensor, late=True)


def _skeleton(loading: Loading, entry: str, owner: Owner, *, on_device: bool) -> torch.Tensor | None:
    """Memory for saved state that does not exist yet: saved dtype, placed like the parameter if shaped like it."""
    saved = loading.saved[entry]
    dtype = torch_dtype(saved.dtype)
    parameter = owner.tensor.detach()
    whole = tuple(parameter.shape) if owner.piece is None else owner.piece.shape
    if on_device and whole == saved.global_shape and loading.order(entry) is None:
        return torch.empty_like(parameter, dtype=dtype)
    device = local_of(parameter).device if on_device else torch.device("cpu")
    return loading.memory(entry, device)


def _lies_like(state: torch.Tensor, owner: Owner) -> bool:
    """Returns whether state lies in memory as `_skeleton` would make it."""
    if isinstance(state, DTensor) or state.dim() < 2:
        return True
    parameter = owner.tensor
    if isinstance(parameter, DTensor) or parameter.shape != state.shape:
        return state.is_contiguous()
    return state.stride() == parameter.stride()


@contextmanager
def _muted(optimizer: Optimizer) -> Iterator[None]:
    """Leaves out the hooks that others put on loading: they are called in `apply`, with everything that was saved."""
    held = {name: getattr(optimizer, name) for name in _HOOKS if name in vars(optimizer)}
    for name, hooks in held.items():
        setattr(optimizer, name, type(hooks)())
    try:
        yield
    finally:
        for name, hooks in held.items():
            setattr(optimizer, name, hooks)
