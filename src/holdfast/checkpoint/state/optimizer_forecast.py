"""Tells what an optimizer's state will be, before its first step: the same class stepped on the meta device.

The memory for a save is reserved before it is needed, and a restore has to make state that does not exist yet. A copy
of the optimizer steps once on parameters of the same local shapes that have no memory. Only classes of `torch.optim`
are asked: a step of someone else's may count, log or draw random numbers.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries.sharding import local_of

# These choose among implementations that need a real device. They change where the step count lives, not the state.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable")
# Answers that are kept, the newest: a start asks four times about each optimizer, and a step on meta costs milliseconds.
MAX_KNOWN = 32

# Shape, strides and dtype of a local parameter: all that a step on meta sees of it.
Kind = tuple[torch.Size, tuple[int, ...], torch.dtype]
# Per group and kind: key of the state -> a tensor on meta, or what is not one.
Made = list[dict[Kind, Mapping[str, Any]]]

_known: OrderedDict[Hashable, Made] = OrderedDict()


def predict_state(optimizer: Optimizer) -> dict[int, Mapping[str, torch.Tensor]] | None:
    """Tensors of the state that the first step will make.

    Returns:
        Parameter's id -> key -> a tensor with the local shape and the dtype to come, on the device meta if it will be
        on the parameter's, else on its own. For parameters that need a gradient and have no state yet. None if the
        class is not of `torch.optim` or cannot step without data.
    """
    if not _is_torchs(inspect.unwrap(type(optimizer).step)):
        return None
    kinds = [_kinds(optimizer, group) for group in optimizer.param_groups]
    if not any(kinds):
        return {}
    made = _made(optimizer, kinds)
    if made is None:
        return None
    states = {
        id_: _as_made(group, of_group[kind])
        for group, of_group, kind_of in zip(optimizer.param_groups, made, kinds, strict=True)
        for id_, kind in kind_of.items()
        if kind in of_group
    }
    if not all(isinstance(value, torch.Tensor) for state in states.values() for value in state.values()):
        return None
    return states


def _is_torchs(made: Any) -> bool:
    return str(made.__module__).startswith("torch.optim.")


def _kinds(optimizer: Optimizer, group: dict[str, Any]) -> dict[int, Kind]:
    """The kind of each parameter, by its id, that the step will make state for."""
    found = {}
    for parameter in group["params"]:
        if parameter.requires_grad and not optimizer.state.get(parameter):
            local = local_of(parameter)
            found[id(parameter)] = (local.shape, local.stride(), local.dtype)
    return found


def _made(optimizer: Optimizer, kinds: Sequence[Mapping[int, Kind]]) -> Made | None:
    """Return what a step makes of each kind; remembered where nothing but numbers decides it."""
    question = _question(optimizer, kinds)
    if question is None:
        return _step(optimizer, kinds)
    made = _known.get(question)
    if made is None:
        made = _step(optimizer, kinds)
        if made is None:
            return None
        _known[question] = made
        while len(_known) > MAX_KNOWN:
            _known.popitem(last=False)
    return made


def _question(optimizer: Optimizer, kinds: Sequence[Mapping[int, Kind]]) -> Hashable | None:
    """Everything that the answer depends on; None if that cannot be listed (a class of one's own, a tensor as rate)."""
    if not _is_torchs(type(optimizer)):
        return None
    groups = []
    for group, kind_of in zip(optimizer.param_groups, kinds, strict=True):
        options = tuple((name, value) for name, value in group.items() if name != "params")
        if not all(_is_plain(value) for _, value in options):
            return None
        groups.append((options, frozenset(kind_of.values())))
    return (type(optimizer), torch.get_default_dtype(), tuple(groups))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _step(optimizer: Optimizer, kinds: Sequence[Mapping[int, Kind]]) -> Made | None:
    """One step of a copy of the optimizer with one parameter on meta for all that are alike: 0.4 ms each."""
    twins = [{kind: _twin(kind) for kind in dict.fromkeys(kind_of.values())} for kind_of in kinds]
    stand_in = copy.copy(optimizer)
    groups = []
    for group, of_group in zip(optimizer.param_groups, twins, strict=True):
        off = {name: False for name in _IMPLEMENTATIONS if name in group}
        groups.append({**group, **off, "params": list(of_group.values())})
    stand_in.__dict__.update(state=defaultdict(dict), param_groups=groups)
    for name, value in vars(stand_in).items():
        if name.endswith("_hooks"):
            stand_in.__dict__[name] = OrderedDict() if isinstance(value, dict) else value
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(stand_in)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        NotImplementedError,
        AttributeError,
        KeyError,
        AssertionError,
    ) as error:
        pass_on(error)
        return None  # it needs a closure, or looks at numbers; then nothing is known
    return [{k: stand_in.state[twin] for k, twin in of_group.items() if twin in stand_in.state} for of_group in twins]


def _twin(kind: Kind) -> nn.Parameter:
    fresh = nn.Parameter(_on_meta(kind))
    fresh.grad = _on_meta(kind)
    return fresh


def _on_meta(kind: Kind) -> torch.Tensor:
    """Return the tensor on the meta device, by its numbers, not by asking the tensor: one of a rehearsal would give one
    of its own kind.
    """
    shape, stride, dtype = kind
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _as_made(group: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the state with the step count as the chosen implementation will make it: a float32 on the parameter's
    device if fused or
    capturable (torch.optim, note on special device hosting for step).
    """
    if "step" in state and (group.get("fused") or group.get("capturable")):
        return {**state, "step": torch.empty((), dtype=torch.float32, device="meta")}
    return state
