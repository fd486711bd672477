"""An Accelerator among the names of a script: the line that keeps it is `wrap`, which takes all that was prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

MODULE = "holdfast.adapters.huggingface"


@dataclass(frozen=True, slots=True)
class Wrapped:
    """An Accelerator that has prepared the optimizer that steps.

    Attributes:
        loaders: data loaders that it has prepared.
        things: all that `wrap` keeps, by its `id`, the models' parameters too.
    """

    name: str
    loaders: list[Any]
    things: frozenset[int]

    def has(self, value: Any) -> bool:
        """Tell whether `wrap` keeps this: what was prepared, what lies in it, or a module around it."""
        if id(value) in self.things:
            return True
        if isinstance(value, nn.Module):
            return {id(p) for p in value.parameters()} <= self.things and any(True for _ in value.parameters())
        return isinstance(value, Optimizer) and id(getattr(value, "optimizer", None)) in self.things


def wrapped_by(names: Mapping[str, Any], optimizer: Optimizer) -> Wrapped | None:
    """Returns the Accelerator that has prepared this optimizer, if the script has a name for it."""
    for name, value in sorted(names.items()):
        if not any(
            (part.__module__, part.__name__) == ("accelerate.accelerator", "Accelerator")
            for part in type(value).__mro__
        ):
            continue
        prepared = [*value._models, *value._optimizers, *value._schedulers, *value._dataloaders, *value._custom_objects]
        bare = [getattr(each, "optimizer", each) for each in value._optimizers]
        parts = [each for model in value._models for each in (*model.modules(), *model.parameters())]
        if any(each is optimizer for each in bare):
            return Wrapped(name, value._dataloaders, frozenset(map(id, [value, *prepared, *bare, *parts])))
    return None
