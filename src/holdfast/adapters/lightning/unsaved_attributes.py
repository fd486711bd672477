"""Looks for what a user's module and callbacks count or draw in attributes, which no checkpoint of Lightning's has.

A generator for noise, a count, values of the last steps: a restart begins them anew, and a step that depends on them is another. What
changes from save to save is told once, by name. Objects with hooks of their own for checkpoints are trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from holdfast.adapters.lightning.data_attributes import held, is_own
from holdfast.adapters.lightning.hooks import overrides
from holdfast.checkpoint.state.unsaved_state import UnsavedStateCheck


def check_of(trainer: Any, own: Any) -> UnsavedStateCheck:
    """Returns what looks at the first saves of a fit.

    Args:
        trainer: a Trainer whose `fit` has begun.
        own: the callback that is holdfast's.
    """
    module = trainer.lightning_module
    parts = module.modules() if not overrides(module, "on_save_checkpoint") else ()
    callbacks = [
        each
        for each in trainer.callbacks
        if each is not own and not any(overrides(each, name) for name in ("state_dict", "on_save_checkpoint"))
    ]
    things = [each for each in (*parts, *callbacks) if is_own(type(each).__module__)]
    given = set(vars(nn.Module()))
    for kind in type(module).__mro__:
        if kind.__name__ == "LightningModule":
            given |= set(vars(kind()))
    return UnsavedStateCheck(lambda: _attributes(things, given))


def _attributes(things: list[Any], given: set[str]) -> Iterator[tuple[str, object]]:
    for thing in things:
        seen: set[int] = set()
        for key, value in list(vars(thing).items()):
            if key not in given:
                for name, (now, _) in held(vars(thing), key, value, f"{type(thing).__name__}.{key}", seen, 1):
                    yield name, now
