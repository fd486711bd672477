"""Keeps what TRL's trainers count beside the state of a `transformers.Trainer`, in attributes of their own.

SFT, DPO and others count tokens and collect figures for the next log entry. GRPO, RLOO and distillation also make completions for
several steps at once: which of them comes next, and the completions, have to outlive a restart, or the steps until the next
ones are made learn from others. Names that a trainer does not have are left out. What else changes in its attributes is said
once, by name. Only trainers whose class comes from TRL are looked at; it is never imported. Tested with trl 1.16.0.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.adapters.native_tree import live, plain

logger = logging.getLogger(__name__)

PACKAGE = "trl"
_KEPT = (
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_total_train_tokens",
    "_current_train_step_time",
    "_logs",
    "_pending_extra_logs",
    "_pending_metrics",
)
# The coefficient is an argument of the script unless the trainer adapts it.
_ADAPTED = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
# The step whose weights an engine for inference has: an engine that was started anew has none of them.
_OF_THE_PROCESS = ("_last_loaded_step",)
# So many steps show what changes.
_STEPS = 2
_SCALARS = (int, float, str, bytes, type(None))


def is_of_trl(trainer: Any) -> bool:
    """Return whether a class of the trainer comes from TRL."""
    return any(kind.__module__.partition(".")[0] == PACKAGE for kind in type(trainer).__mro__)


def moving_reference(trainer: Any) -> Any:
    """Return the reference model if the training changes it, else None: another one is as the script made it."""
    return getattr(trainer, "ref_model", None) if getattr(trainer.args, "sync_ref_model", False) else None


class Attributes:
    """The attributes of one trainer, as an object with a state.

    Args:
        trainer: one of TRL's, before its first step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._names = _KEPT + (_ADAPTED if getattr(trainer.args, "use_adaptive_entropy", False) else ())
        self._before, self._began = self._others(), trainer.state.global_step

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept: tensors as they are, other containers than dicts, lists and tuples as lists."""
        held = vars(self._trainer)
        if self._before and self._trainer.state.global_step >= self._began + _STEPS:
            self._tell(self._others())
        return {name: plain(_bare(held[name]), {}) for name in self._names if name in held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fill containers of the trainer in place, so that they stay of their kind; set what is none."""
        held = vars(self._trainer)
        for name in self._names:
            if name in held and name in state:
                setattr(self._trainer, name, _filled(held[name], live(state[name], {})))

    def _others(self) -> dict[str, Any]:
        """Return the plain attributes that nobody keeps."""
        known = {*self._names, *_OF_THE_PROCESS}
        mine = {name: value for name, value in vars(self._trainer).items() if isinstance(value, _SCALARS)}
        return {name: value for name, value in mine.items() if name not in known and name not in of_transformers()}

    def _tell(self, now: Mapping[str, Any]) -> None:
        before, self._before = self._before, {}
        changed = sorted(name for name, value in before.items() if name in now and now[name] != value)
        if changed:
            logger.warning(
                "%s changes its %s, which holdfast does not keep: after a restart it begins anew",
                type(self._trainer).__name__,
                ", ".join(changed),
            )


@functools.cache
def of_transformers() -> frozenset[str]:
    """Return the names that a `transformers.Trainer` itself uses: these are its adapter's affair."""
    import transformers  # noqa: PLC0415 - there, for a trainer is

    methods = (getattr(value, "__wrapped__", value) for value in vars(transformers.Trainer).values() if callable(value))
    return frozenset(name for method in methods if hasattr(method, "__code__") for name in method.__code__.co_names)


def _bare(value: Any) -> Any:
    """Return the tree with containers that can be stored: a queue is a list, a dict with a default is a dict."""
    if isinstance(value, Mapping):
        return {key: _bare(item) for key, item in value.items()}
    if isinstance(value, deque):
        return [_bare(item) for item in value]
    return type(value)(map(_bare, value)) if type(value) in (list, tuple) else value


def _filled(now: Any, saved: Any) -> Any:
    """Return the container that the trainer has, with what was saved; what was saved where it has none."""
    if isinstance(now, deque):
        now.clear()
        now.extend(saved)
        return now
    if not isinstance(now, dict) or not isinstance(saved, Mapping):
        return saved.to(now.device) if isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor) else saved
    for key in [key for key in now if key not in saved]:
        del now[key]
    for key, value in saved.items():
        has_default = getattr(now, "default_factory", None) is not None
        now[key] = _filled(now[key] if has_default or key in now else None, value)
    return now
