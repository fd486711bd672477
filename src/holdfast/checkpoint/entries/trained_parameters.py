"""Keeps which parameters are trained, where a callback of the script changes that on the way.

A callback that thaws a layer behind a step does so once. In a run that goes on behind that step it has nothing to do, and
the layer would stay frozen. So a version says which parameters were changed since the training began. They are changed again where
the script begins as the run did that saved; where it begins otherwise, it has decided by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash


class Trained:
    """Tells which parameters of a model are trained, as an object with a state.

    Args:
        model: as its training begins, before anything was changed on the way.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.named_parameters())
        self._began = [parameter.requires_grad for _, parameter in self._parameters]
        told = repr([(name, began) for (name, _), began in zip(self._parameters, self._began, strict=True)])
        self._digest = xxhash.xxh3_64_hexdigest(told.encode())
        self._changed: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return how the training began, and the names of what was changed since."""
        pairs = zip(self._parameters, self._began, strict=True)
        return {
            "began": self._digest,
            "changed": [name for (name, parameter), began in pairs if parameter.requires_grad is not began],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Note what is to be changed again."""
        self._changed = set(state["changed"]) if state.get("began") == self._digest else set()

    def change(self) -> None:
        """Change it, behind all that the script does before its first step."""
        for (name, parameter), began in zip(self._parameters, self._began, strict=True):
            if name in self._changed:
                parameter.requires_grad_(not began)
        self._changed = set()
