"""Sorts everything that loops use, also inside of the script's own objects, into what is kept and what nobody can be sure of.

Kept: all optimizers, the modules that hold their parameters, and what else hands out its state, wherever a name that a loop
reads leads to it: through attributes of the script's objects, lists, dicts. What never changes is left (`../objects.py`). Anything
else (an iterator, an object of an unknown class) may carry state that nobody can restore: it is refused by its path.
"""

from __future__ import annotations

import argparse
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast.adapters.zero_lines.objects import Kept, never_changes, why_no_state
from holdfast.adapters.zero_lines.reach.attributes import (
    added_to,
    attributes_of,
    has_a_reader,
    has_place_in_data,
    is_attributes,
    is_iterator,
    is_output,
)
from holdfast.adapters.zero_lines.reach.loader_places import has_place
from holdfast.adapters.zero_lines.reach.plain_values import is_plain
from holdfast.adapters.zero_lines.reach.tokens import is_sparse
from holdfast.checkpoint.containers import items_of
from holdfast.checkpoint.state.stateful import is_stateful

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_MODULE_KEYS = frozenset(vars(nn.Module()))
MAX_DEPTH = 5


def collect(
    used: Iterable[str], scope: Mapping[str, Any], is_of_user: Callable[[Any], bool], *, by_hand: bool = False
) -> Kept | str:
    """Returns what to keep, or what is in the way.

    Args:
        used: names that loops read.
        scope: what names mean where the outermost loop begins.
        is_of_user: tells whether the class of an object is the user's.
        by_hand: whether parameters are changed one by one where there is no optimizer.
    """
    found = _Found(is_of_user)
    for name in sorted(set(used) & scope.keys()):
        found.visit(name, scope[name], top=True)
    if found.reason:
        return found.reason
    if not found.optimizers:  # stepped through something else: a function, a class
        for name, value in scope.items():
            found.visit(name, value, judge=False)
    if not found.optimizers:
        none = _without_optimizer(found) if by_hand else "no optimizer was found"
        return _why_no_leaf(found.leaves) or none
    stepped = [
        p for optimizer in found.optimizers.values() for group in optimizer.param_groups for p in group["params"]
    ]
    for name, value in scope.items():
        if isinstance(value, nn.Module) and any(part is p for part in value.parameters() for p in stepped[:1]):
            found.visit(name, value, judge=False)
    modules = _outermost(found.modules)
    owned = {id(p) for module in modules for p in module.parameters()}
    bare = {path: leaf for path, leaf in found.leaves.items() if id(leaf) not in owned}
    owned |= {id(leaf) for leaf in bare.values()}
    if why := _why_no_leaf(bare, stepped):
        return why
    modules += [_Bare(bare)] if bare else []
    if not stepped or any(id(p) not in owned for p in stepped):
        return "an optimizer steps parameters of no module that the loops use"
    optimizers = list(found.optimizers.values())
    found.kept.objects["model"] = modules[0] if len(modules) == 1 else modules
    found.kept.objects["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
    return found.kept


def _without_optimizer(found: _Found) -> Kept | str:
    modules = _outermost(found.modules)
    if not modules:
        return "no optimizer was found, and no module that the loops use"
    if any(p.device.type != "cpu" for module in modules for p in module.parameters()):
        return "parameters that lie on a device are changed without an optimizer"
    found.kept.objects["model"] = modules[0] if len(modules) == 1 else modules
    return found.kept


def _why_no_leaf(leaves: Mapping[str, torch.Tensor], stepped: Iterable[torch.Tensor] = ()) -> str:
    """Returns why tensors with a gradient outside of modules are in the way; empty if one rank's optimizers step all of them."""
    trained = {id(p) for p in stepped}
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        trained = set()  # nobody knows whether they are alike on all ranks
    others = (path for path, leaf in leaves.items() if id(leaf) not in trained)
    return next((f"{path!r} is a tensor with a gradient outside of a module" for path in others), "")


class _Bare(nn.Module):
    """Holds tensors that an optimizer steps and that lie in no module of the script: `log_alpha = torch.zeros(1, requires_grad=True)`.

    Args:
        leaves: by path.
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for path, leaf in leaves.items():
            name = re.sub(r"\W+", "_", path).strip("_") or "_"
            while name in self._parameters:
                name += "_"
            self._parameters[name] = leaf  # type: ignore[assignment]


def _outermost(modules: Mapping[int, nn.Module]) -> list[nn.Module]:
    """Returns the modules that lie in no other one."""
    inside = {id(part) for module in modules.values() for part in module.modules() if part is not module}
    return [module for number, module in modules.items() if number not in inside]


class _Found:
    """One search."""

    def __init__(self, is_of_user: Callable[[Any], bool]) -> None:
        self._is_of_user = is_of_user
        self._seen: dict[int, Any] = {}
        self.kept = Kept()
        self.modules: dict[int, nn.Module] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self.leaves: dict[str, torch.Tensor] = {}  # tensors with a gradient that have a name, by path
        self.reason = ""

    def visit(self, path: str, value: Any, depth: int = 0, *, top: bool = False, judge: bool = True) -> None:
        """Sorts one value.

        Args:
            path: how the script comes to it.
            value: what it is.
            depth: how many objects it lies in.
            top: whether it has a name of its own.
            judge: whether what cannot be sorted is told.
        """
        if id(value) in self._seen or is_plain(value) or depth > MAX_DEPTH:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self.modules[id(value)] = value
            for name, part in value.named_modules():
                self._parts(f"{path}.{name}" if name else path, _own(part), depth, judge=False)
        elif isinstance(value, Optimizer):
            self.optimizers[id(value)] = value
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value, top=top and judge, judge=judge)
        elif is_stateful(value) and not has_place_in_data(value, self._is_of_user):
            self._stateful(path, value, depth, judge=judge)
        elif isinstance(value, _CONTAINERS):
            self._parts(path, ((f"[{key!r}]", part) for key, part in items_of(value)), depth, judge=judge)
        elif isinstance(value, _NAMESPACES) or (self._is_of_user(value) and not _is_code(value)):
            if judge and is_iterator(value):
                self._refuse(f"nobody can be sure what {path!r}, a {_kind(value)}, keeps from one step to the next")
            self._parts(path, _attributes(value), depth, judge=judge)
        elif not never_changes(value):
            self._of_library(path, value, depth, judge=judge)

    def _of_library(self, path: str, value: Any, depth: int, *, judge: bool) -> None:
        if is_output(value) and not has_a_reader(value):
            self._parts(path, ((f".{name}", part) for name, part in added_to(value).items()), depth, judge=judge)
        elif is_attributes(value):
            self._parts(path, _attributes(value), depth, judge=False)
        elif judge and not has_place(value):
            self._refuse(f"nobody can be sure what {path!r}, a {_kind(value)}, keeps from one step to the next")

    def _parts(self, path: str, parts: Iterable[tuple[str, Any]], depth: int, *, judge: bool) -> None:
        for name, part in parts:
            self.visit(f"{path}{name}", part, depth + 1, judge=judge)

    def _stateful(self, path: str, value: Any, depth: int, *, judge: bool) -> None:
        if isinstance(value, DataLoader):
            if judge:
                self._refuse(f"{path!r}, a {_kind(value)}, has a place of its own in the data")
            return
        self._keep(path, value)
        if self._is_of_user(value):
            self._parts(path, _attributes(value), depth, judge=False)
        elif reason := why_no_state(path, value):
            self._refuse(reason)

    def _tensor(self, path: str, value: torch.Tensor, *, top: bool, judge: bool) -> None:
        if judge and value.requires_grad and value.is_leaf:
            self.leaves[path] = value
        elif top and not is_sparse(value):
            self._keep(path, {"tensor": value})

    def _keep(self, path: str, value: Any) -> None:
        name = "main_" + re.sub(r"\W+", "_", path).strip("_")
        while name in self.kept.objects:
            name += "_"
        self.kept.objects[name] = value

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from ((f".{name}", part) for name, part in attributes_of(value).items())


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a module that torch does not know: lists of layers, an optimizer."""
    yield from ((f".{name}", part) for name, part in list(vars(module).items()) if name not in _MODULE_KEYS)


def _is_code(value: Any) -> bool:
    return isinstance(value, type | types.FunctionType | types.MethodType | types.ModuleType)


def _kind(value: Any) -> str:
    return type(value).__qualname__
