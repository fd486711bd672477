"""Ranks that differ on purpose although DDP stands around the model: local SGD, and hooks that reduce nothing.

DDP keeps parameters equal by giving every rank the same gradients, and a save counts on it: of equal ranks one writes for
all. A communication hook that reduces within a part of the ranks, or averaging of parameters every few steps, makes them
differ between two averagings. That is seen by the classes of torch that do it; a hook of somebody's own cannot be told by
looking. Nothing of torch is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.base.errors import UsageError
from holdfast.checkpoint.state.nested_optimizers import attributes

# torch.distributed.algorithms.ddp_comm_hooks: states of hooks, and a hook, after which ranks differ.
_STATES = frozenset(("PostLocalSGDState",))
_HOOKS = frozenset(("noop_hook",))
# torch.distributed.algorithms.model_averaging: all averagers derive from it.
_AVERAGER = "ModelAverager"


def refuse_hooks(name: str, model: DistributedDataParallel) -> None:
    """Refuses a model whose communication hook lets the ranks differ.

    Raises:
        UsageError: names the hook.
    """
    for hook, state in getattr(model, "_comm_hooks", ()):
        hook_name = getattr(hook, "__name__", type(hook).__name__)
        if _is_one_of(state, _STATES) or hook_name in _HOOKS:
            raise _refusal(name, f"DDP's communication hook {hook_name} lets the parameters of the ranks differ")


def refuse_averagers(name: str, optimizers: Iterable[Optimizer]) -> None:
    """Refuses an optimizer that averages parameters of ranks that DDP is believed to keep equal.

    Raises:
        UsageError: names the averager.
    """
    for optimizer in optimizers:
        for attribute, value in attributes(optimizer):
            if _is_one_of(value, (_AVERAGER,)):
                kind = f"{type(optimizer).__name__}.{attribute}"
                raise _refusal(name, f"{kind} averages parameters that differ from rank to rank in between")


def _is_one_of(thing: Any, names: Iterable[str]) -> bool:
    return not {kind.__name__ for kind in type(thing).__mro__}.isdisjoint(names)


def _refusal(name: str, what: str) -> UsageError:
    return UsageError(
        f"{what}, so one rank cannot be saved for all",
        where=name,
        remedy="give the module inside (ddp.module): every rank's parameters are then saved as its own; and the counters of "
        "hook and averager as an object with state_dict() and load_state_dict()",
    )
