"""A model as part of the state: parameters and persistent buffers by clean name, extra state as values.

Names are those of `state_dict()` without what wrappers put into them (DDP's `module.`, torch.compile's `_orig_mod.`,
activation checkpointing's). Parameters and buffers are filled in place, so nothing that holds them notices a restore;
extra state, and what a hook or a class of one's own makes up, go back through the module and are compared with what it hands
out then. Where nothing is made up no `load_state_dict` is called, but the hooks that follow one are. A parameter with two names (tied
weights) is kept under the first; a reference to it stands under the other, for layouts in which they are two.

What DDP keeps equal is its parameters. Buffers it sends from its first rank before the next forward; between two steps
BatchNorm's differ by rank. So the first rank's buffers bear the plain name and every other rank keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from holdfast.base.errors import MismatchError, UsageError
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries import fsdp1
from holdfast.checkpoint.entries.entries import Collector, Loading
from holdfast.checkpoint.entries.fsdp1 import EXTRA
from holdfast.checkpoint.entries.sharding import is_same_memory, mesh_ranks
from holdfast.checkpoint.entries.types import Group, LiveTensor
from holdfast.checkpoint.state.change_detection import Containers
from holdfast.checkpoint.state.divergent_ranks import refuse_hooks
from holdfast.checkpoint.state.optimizer_extras import REFUSALS, overrides, same
from holdfast.checkpoint.state.unsaved_state import token
from holdfast.tiers.format.values import TensorRef

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """A DDP or DataParallel inside a model: `prefix` (with `module.`) is replaced by `outer` in names below it."""

    prefix: str
    outer: str
    ranks: Group | None
    ignored: frozenset[str]


class ModelPart:
    """One `nn.Module`.

    Args:
        name: what its entries begin with.
        module: wrapped or not; of one that the first FSDP wraps this rank's parts are taken (`checkpoint.entries.fsdp1`).
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self._persistent: list[tuple[LiveTensor, torch.Tensor]] = []
        self._extra: dict[str, nn.Module] = {}
        self._made_up: dict[str, str] = {}
        self._tied: dict[str, tuple[TensorRef, Group | None]] = {}
        self._excluded: list[tuple[LiveTensor | None, torch.Tensor]] = []
        self._watch = Containers(())
        self._sized: list[Sized] = []
        self._sizes: list[int] = []
        self.modules: dict[str, nn.Module] = {}  # all inside it by name, as of the last look

    def build(self, out: Collector) -> None:
        """Adds parameters and persistent buffers; finds out what else `state_dict()` returns."""
        wrappers = tuple(_wrappers(self.name, self.module))
        pieces = fsdp1.pieces(self.name, self.module, out.layouts.rank)
        state = _handed_out(self.name, self.module) if pieces is None else fsdp1.state_of(self.module)
        owned = {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        handed = set(map(id, state.values()))
        averaged = isinstance(self.module, AveragedModel)
        out.kept_back.update(
            (id(p), f"{self.name}.{n}") for n, p in self.module.named_parameters() if id(p) not in handed
        )
        extra = {f"{path}.{EXTRA}".lstrip("."): m for path, m in self.module.named_modules(remove_duplicate=False)}
        self._watch = Containers(_containers(self.module))
        self._sized = list(_of_what_is_handed_out(self.module))
        self._sizes = list(map(len, self._sized))
        named = ((_clean(f"{path}.", wrappers).removesuffix("."), m) for path, m in self.module.named_modules())
        self.modules = {f"{self.name}.{path}".removesuffix("."): module for path, module in named}
        self._persistent, self._extra, self._made_up, self._tied, self._excluded = [], {}, {}, {}, []
        for raw, value in state.items():
            name = f"{self.name}.{_clean(raw, wrappers)}"
            if raw in extra:
                self._extra[name] = extra[raw]
                _require_way_back(name, type(extra[raw]).set_extra_state is not nn.Module.set_extra_state)
            elif not isinstance(value, torch.Tensor) or id(value) not in owned:
                self._made_up[raw] = name
                _require_way_back(name, _takes(self.module, raw))
            else:
                group, piece = _group(raw, value, wrappers, out.layouts.rank), (pieces or {}).get(id(value))
                if out.layouts.excludes(name):
                    self._excluded.append((out.left_out(name, value, group=group, piece=piece), value))
                    continue
                # Not by who owns it: twins must agree, and an optimizer may own other parameters on every rank.
                still = averaged or not value.requires_grad
                ref = out.persistent(name, value, group=group, still=still, piece=piece)
                if ref is None:
                    continue
                self._persistent.append((out.tensors[ref.name], value))
                if ref.name not in (name, out.layouts.resolve(name, group)[0]):
                    self._tied[name] = ref, mesh_ranks(value) if isinstance(value, DTensor) else group

    def unchanged(self) -> bool:
        return self._watch.unchanged() and list(map(len, self._sized)) == self._sizes

    def in_no_version(self) -> Iterator[tuple[str, object]]:
        """Yields buffers that are not persistent, and what DDP's communication hooks keep, as tokens."""
        for path, inner in self.module.named_modules():
            prefix = f"{self.name}.{path}".rstrip(".")
            for name in inner._non_persistent_buffers_set:
                yield f"{prefix}.{name}", token(inner._buffers.get(name))
            for hook, state in getattr(inner, "_comm_hooks", ()) if isinstance(inner, DistributedDataParallel) else ():
                names = (*getattr(state, "__dict__", ()), *getattr(type(state), "__slots__", ()))
                kept = {name: getattr(state, name, None) for name in names}
                yield f"{prefix} ({getattr(hook, '__name__', 'communication hook')})", token(kept)

    def report(self, out: Collector) -> None:
        """Adds extra state, whatever hooks make up, and other names."""
        for name, module in self._extra.items():
            out.transient(name, module.get_extra_state())
        if self._made_up:
            state = self.module.state_dict()
            for raw, name in self._made_up.items():
                out.transient(name, state[raw])
        for name, (ref, group) in self._tied.items():
            out.value(name, ref, group=group)

    def plan(self, loading: Loading) -> None:
        """Claims every parameter and buffer in place."""
        for live, tensor in self._persistent:
            if live.shard.name not in loading.targets:
                loading.claim(live, tensor)
        for left, tensor in self._excluded:
            if left is not None:
                loading.claim_if_there(left, tensor)
        for name in (*self._extra, *self._made_up.values()):
            loading.claim_value(name)
        for name, (ref, group) in self._tied.items():
            loading.pass_over(name, ref, group=group)

    def create(self, loading: Loading) -> None:
        """Nothing: a module has all its tensors from the start."""

    def apply(self, loading: Loading) -> None:
        """Sets extra state; hands made-up tensors to `load_state_dict` together with the live ones."""
        for name, module in self._extra.items():
            if loading.has(name):
                module.set_extra_state(loading.value(name))
        made_up = {raw: loading.value(name) for raw, name in self._made_up.items() if loading.has(name)}
        if made_up:
            self._hand_back(loading, made_up)
            return
        for inner in self.module.modules():
            for hook in inner._load_state_dict_post_hooks.values():
                if not _is_torchs(hook):
                    hook(inner, _NOTHING_ODD)

    def _hand_back(self, loading: Loading, made_up: dict[str, Any]) -> None:
        state = self.module.state_dict()  # with its metadata, by which modules know of which version it is
        state.update(made_up)
        own = overrides(self.module, "load_state_dict")
        try:
            result = self.module.load_state_dict(state) if own else self.module.load_state_dict(state, strict=False)
        except REFUSALS as error:
            pass_on(error)
            raise MismatchError(f"the module refuses the saved state: {error}", where=self.name) from error
        again = self.module.state_dict()
        lost = {raw for raw, value in made_up.items() if raw not in again or not same(again[raw], value)}
        lost.update(made_up.keys() & set(getattr(result, "unexpected_keys", ())))
        if lost:
            names = ", ".join(sorted(self._made_up[raw] for raw in lost)[:5])
            loading.refuse(f"{names} (load_state_dict() of the module did not take it back)")


_NOTHING_ODD = _IncompatibleKeys([], [])


def _handed_out(name: str, module: nn.Module) -> dict[str, Any]:
    """Returns what `state_dict()` hands out, with the parameters and buffers themselves where it hands out their memory.

    Raises:
        UsageError: it is no dict.
    """
    if not overrides(module, "state_dict"):
        return module.state_dict(keep_vars=True)
    state: Any = module.state_dict()  # a method of somebody's own need not know `keep_vars`
    if not isinstance(state, dict):
        raise UsageError(
            f"state_dict() of the module returns {type(state).__name__}", where=name, remedy="return a dict from it"
        )
    own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    return {raw: own[raw] if raw in own and is_same_memory(own[raw], value) else value for raw, value in state.items()}


def _takes(module: nn.Module, raw: str) -> bool:
    """Returns whether somebody takes a key of `state_dict()` back: a hook, a method of its own, or a tensor of its name."""
    own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    return raw in own or any(
        inner._load_state_dict_pre_hooks or any(overrides(inner, method) for method in _LOADING)
        for path, inner in module.named_modules(remove_duplicate=False)
        if f"{raw}.".startswith(f"{path}." if path else "")
    )


_LOADING = ("load_state_dict", "_load_from_state_dict")


def _require_way_back(name: str, is_there: bool) -> None:
    if not is_there:
        raise UsageError(
            "the module hands it out in its state, and nothing takes it back",
            where=name,
            remedy="write set_extra_state(), or a load_state_dict pre-hook, beside what hands it out; or leave it out",
        )


def _is_torchs(hook: Any) -> bool:
    made = getattr(hook, "func", hook)
    return str(getattr(made, "__module__", "")).partition(".")[0] == "torch"


def _wrappers(name: str, module: nn.Module) -> Iterator[_Wrapper]:
    """Yields the wrappers inside a module, innermost first.

    Raises:
        UsageError: one is known not to keep its ranks equal.
    """
    found = []
    for path, inner in module.named_modules(remove_duplicate=False):
        outer = f"{path}." if path else ""
        if isinstance(inner, DistributedDataParallel):
            ranks = tuple(sorted(get_process_group_ranks(inner.process_group)))
            ignored = frozenset(getattr(inner, "parameters_to_ignore", ()))
            if len(ranks) > 1:
                refuse_hooks(f"{name}.{path}".rstrip("."), inner)
            found.append(_Wrapper(f"{outer}module.", outer, ranks, ignored))
        elif isinstance(inner, DataParallel):
            found.append(_Wrapper(f"{outer}module.", outer, None, frozenset()))
    yield from reversed(found)


def _clean(raw: str, wrappers: tuple[_Wrapper, ...]) -> str:
    for wrapper in wrappers:
        if raw.startswith(wrapper.prefix):
            raw = wrapper.outer + raw.removeprefix(wrapper.prefix)
    for infix in _WRAPPERS:
        raw = raw.replace(infix, "")
    return raw


def _group(raw: str, tensor: torch.Tensor, wrappers: tuple[_Wrapper, ...], rank: int) -> Group | None:
    """The ranks that hold the same plain tensor because DDP keeps them equal."""
    if isinstance(tensor, DTensor):
        return None
    for wrapper in wrappers:
        if wrapper.ranks is None or not raw.startswith(wrapper.prefix):
            continue
        if raw.removeprefix(wrapper.prefix) in wrapper.ignored:
            return None
        if isinstance(tensor, nn.Parameter):
            return wrapper.ranks
        return (rank,) if rank == wrapper.ranks[0] else None
    return None


def _of_what_is_handed_out(module: nn.Module) -> Iterator[Sized]:
    """Yields, of each module, what makes its `state_dict()` another one without another tensor in it: hooks, and which buffers stay behind."""
    for inner in module.modules():
        yield from (inner._state_dict_hooks, inner._state_dict_pre_hooks, inner._non_persistent_buffers_set)


def _containers(module: nn.Module) -> Iterator[dict[str, Any]]:
    for inner in module.modules():
        held: tuple[Any, ...] = (inner._parameters, inner._buffers, inner._modules)
        yield from (each for each in held if isinstance(each, dict))  # a scripted module has none of its own
