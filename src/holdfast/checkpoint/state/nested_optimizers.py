"""Optimizers inside optimizers: which one keeps the state and steps, and which others step the same parameters.

Some classes are an `Optimizer` by name alone: they hold another one, pass every call on to it and never call
`Optimizer.__init__`, so they have no hooks. Others are whole and hold a second one for their parameters (SAM). What is
found here is by attribute and by identity of parameters; nothing of the objects is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.base.errors import UsageError
from holdfast.checkpoint.containers import items_of

_HOOKS = "_optimizer_step_pre_hooks"


def is_made(optimizer: Optimizer) -> bool:
    """Returns whether `Optimizer.__init__` ran, so that hooks can be put on its steps, and are called."""
    return _HOOKS in vars(optimizer) and getattr(type(optimizer).step, "hooked", False)


def chain_to_stepper(name: str, optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizer given and those inside it, down to the one that keeps the state and makes the steps.

    A wrapper stands for the one inside it if that is the only one and has the very same parameters and state.

    Raises:
        UsageError: a class whose steps call no hooks, and it is not certain what stands behind it.
    """
    if is_made(optimizer):
        return [optimizer]
    inner = dict(_held(optimizer))
    if len(inner) == 1:
        attribute, only = next(iter(inner.items()))
        found = chain_to_stepper(f"{name}.{attribute}", only)
        if _stands_for(optimizer, found[-1]):
            return [optimizer, *found]
    kind = type(optimizer).__name__
    why = "has a step() that calls no hooks" if _HOOKS in vars(optimizer) else "never called Optimizer.__init__"
    names = " and ".join(f"its .{attribute}" for attribute in inner)
    raise UsageError(
        f"{kind} {why}, and it is not certain which optimizer makes its steps",
        where=name,
        remedy=f"give what steps in its place ({names}); what {kind} keeps itself goes in as an object with state_dict() "
        "and load_state_dict()"
        if inner
        else f"let {kind}.__init__ call super().__init__(params, defaults), which puts hooks around step()",
    )


def others(name: str, optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yields the optimizers that a whole one holds besides, by name: those that step none but its own parameters."""
    seen, mine = {id(optimizer)}, set(_parameters(optimizer))
    todo = [(name, optimizer)]
    while todo:
        path, holder = todo.pop()
        for attribute, inner in _held(holder):
            if id(inner) in seen or not mine.issuperset(_parameters(inner)):
                continue
            seen.add(id(inner))
            todo.append((f"{path}.{attribute}", inner))
            if is_made(inner):
                yield f"{path}.{attribute}", inner


def attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields what an optimizer keeps beside what every optimizer has, by name."""
    for name, value in vars(optimizer).items():
        if name not in _OF_EVERY_OPTIMIZER and not name.endswith("_hooks"):
            yield name, value


_OF_EVERY_OPTIMIZER = frozenset(("state", "param_groups", "defaults", "step"))


def _held(holder: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yields the optimizers in attributes of another one, and in its lists, tuples and dicts."""
    for name, value in attributes(holder):
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, list | tuple | dict):
            items = items_of(value)
        yield from ((f"{name}.{key}", item) for key, item in items if isinstance(item, Optimizer))


def _stands_for(wrapper: Optimizer, inner: Optimizer) -> bool:
    state = getattr(wrapper, "state", inner.state)
    groups = getattr(wrapper, "param_groups", inner.param_groups)
    return state is inner.state and _listed(groups) == _listed(inner.param_groups)


def _parameters(optimizer: Optimizer) -> list[int]:
    return _listed(getattr(optimizer, "param_groups", ()))


def _listed(groups: Iterable[dict[str, Any]]) -> list[int]:
    found: Iterable[torch.Tensor] = (parameter for group in groups for parameter in group["params"])
    return list(map(id, found))
