"""Everything that a loop uses, sorted into what is kept, what never changes, and what nobody can be sure of.

Kept: one optimizer, the modules that hold its parameters, schedulers, scaler, tensors, and everything else that has
`state_dict` and `load_state_dict`. Taken as it is found: plain values, generators of random numbers, functions, classes,
settings, datasets and samplers without a position of their own; that these are as they were, or are carried, is proven at
every step (`reach.py`, `changes.py`). Everything else (an iterator, an object of an unknown class) may carry state that
nobody can restore: then nothing is restored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from holdfast.adapters.zero_lines.reach.attributes import has_place_in_data, is_attributes, is_iterator
from holdfast.adapters.zero_lines.reach.plain_values import is_plain
from holdfast.adapters.zero_lines.reach.tokens import is_sparse
from holdfast.adapters.zero_lines.reach.walk import STANDING
from holdfast.checkpoint.entries.rng import random_state
from holdfast.checkpoint.state.stateful import is_stateful

_CONSTANT = (type(None), bool, int, float, complex, str, bytes, *STANDING)
_CONTAINERS = (list, dict, set, deque)


@dataclass(slots=True)
class Kept:
    """The objects that are restored and saved.

    Attributes:
        objects: arguments of a Checkpointer, by name.
    """

    objects: dict[str, Any] = field(default_factory=dict)

    @property
    def things(self) -> list[Any]:
        """Lists them one by one."""
        found: list[Any] = []
        for value in self.objects.values():
            parts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
            found += parts
        return found


def sort_out(
    used: Iterable[str], carried: Iterable[str], scope: Mapping[str, Any], is_of_user: Callable[[Any], bool]
) -> Kept | str:
    """Returns what to keep, or what is in the way.

    Args:
        used: names that the loop reads.
        carried: names that live from one step to the next.
        scope: what names mean now: the loop's own, and the script's.
        is_of_user: tells whether the class of an object is the user's.
    """
    kept, modules, optimizers = Kept(), {}, {}
    reason = _carried_badly(carried, scope)
    if reason:
        return reason
    for name in sorted(set(used) - set(carried)):
        value = scope.get(name)
        if isinstance(value, nn.Module):
            modules[name] = value
        elif isinstance(value, Optimizer):
            optimizers[name] = value
        elif isinstance(value, _CONTAINERS):
            reason = _why_no_container(name, value)
        elif isinstance(value, torch.Tensor):
            if value.requires_grad:
                return f"{name!r} is a tensor with a gradient outside of a module"
            if is_sparse(value):
                continue  # that it stays as it is, is seen at every step
            kept.objects[f"main_{name}"] = {"tensor": value}
        elif is_stateful(value) and not has_place_in_data(value, is_of_user):
            reason = "" if is_of_user(value) else why_no_state(name, value)
            kept.objects[f"main_{name}"] = value
        elif not never_changes(value) and not is_plain(value) and not is_attributes(value):
            return f"nobody can be sure what {name!r}, a {_kind(value)}, keeps from one step to the next"
        if reason:
            return reason
    return _with_model(kept, modules, optimizers, scope)


def _carried_badly(carried: Iterable[str], scope: Mapping[str, Any]) -> str:
    """Returns why a carried name cannot be restored; empty if all can."""
    for name in carried:
        if name not in scope:
            return f"{name!r} is carried from one step to the next and has no value before the loop"
        if not is_plain(scope[name]):
            return f"{name!r}, a {_kind(scope[name])}, is carried from one step to the next"
    return ""


def _with_model(
    kept: Kept, modules: dict[str, nn.Module], optimizers: dict[str, Optimizer], scope: Mapping[str, Any]
) -> Kept | str:
    different = {id(optimizer): optimizer for optimizer in optimizers.values()}
    if not different:  # stepped through something else: a Trainer, a list
        different = {id(value): value for value in scope.values() if isinstance(value, Optimizer)}
    if len(different) != 1:
        return f"{len(different)} optimizers were found, and one is needed"
    (optimizer,) = different.values()
    if not modules:
        modules = {name: value for name, value in scope.items() if isinstance(value, nn.Module)}
    outer = {
        name: module
        for name, module in modules.items()
        if not any(
            module is not other and any(module is part for part in other.modules()) for other in modules.values()
        )
    }
    unique = list({id(module): module for _, module in sorted(outer.items())}.values())
    owned = {id(p) for module in unique for p in module.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if not stepped or any(id(p) not in owned for p in stepped):
        return "the optimizer steps parameters of no module that the loop uses"
    kept.objects["model"] = unique[0] if len(unique) == 1 else unique
    kept.objects["optimizer"] = optimizer
    return kept


def _why_no_container(name: str, value: Any) -> str:
    """Returns why nobody can be sure of a container; empty if it is one of plain values, or of what never changes."""
    if is_plain(value):
        return ""
    parts = value.values() if isinstance(value, dict) else value
    for part in parts:
        if isinstance(part, torch.Tensor):  # data: what trains is in a module
            sure = not part.requires_grad
        else:
            sure = (never_changes(part) and not isinstance(part, nn.Module)) or is_plain(part)
        if not sure:
            return f"{name!r} is a {_kind(value)} of things that nobody can be sure of"
    return ""


def why_no_state(path: str, value: Any) -> str:
    """Returns why an object that hands out its state does not; empty if it does. One of the user's is asked when it is looked at."""
    try:
        value.state_dict()
    except Exception as error:  # noqa: BLE001 - objects of other people are asked
        return f"{path!r}, a {_kind(value)}, cannot hand out its state: {type(error).__name__}: {error}"
    return ""


def never_changes(value: Any) -> bool:
    """Tell whether this keeps nothing from one step to the next, or what `reach.py` sees."""
    if isinstance(value, tuple | frozenset):
        return all(never_changes(part) for part in value)
    if is_iterator(value) and not isinstance(value, type):
        return False
    if isinstance(value, Dataset):
        return hasattr(value, "__getitem__")
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        return not value.dtype.hasobject
    return isinstance(value, _CONSTANT) or random_state(value) is not None


def _kind(value: Any) -> str:
    return type(value).__qualname__
