"""Tells whether what optimizers own is still what it was when a step was reported.

A step may be noted long before anybody asks for its state: at a failure, or at the end of a script that loads other
weights for a last evaluation. What a look sees: `checkpoint.survivors.seen_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors.seen_tensors import SeenTensors


class UnchangedStateCheck:
    """Notes the parameters and the optimizer state of one moment, and compares.

    Attributes:
        owned: what was looked at last, by entry name; on any device.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._storages = -1
        self.owned: Mapping[str, torch.Tensor] = {}
        self._seen = SeenTensors(self.owned)

    def note(self, turn: int) -> None:
        """They are as they should be now.

        Args:
            turn: which spots are looked at.
        """
        storages = self._state.storages()
        if storages != self._storages:
            self._storages, self.owned = storages, self._state.owned()
            self._seen = SeenTensors(self.owned)
        self._seen.look(turn)

    def why_not(self) -> str:
        """Returns why they are not any more what was noted; empty if they are."""
        # A save may have looked at other memory since, which is the same by now; what was noted is not of it.
        if self._storages >= 0 and (self._state.storages() != self._storages or not self._state.still()):
            return "parameters or optimizer state are other tensors by now"
        return self._seen.why_written("parameters or optimizer state")

    def let_go(self) -> None:
        """Lets go of what was noted if the state is other tensors by now: it would be kept until the next note."""
        if self._state.storages() != self._storages:
            self.forget()

    def forget(self) -> None:
        """Lets go of the tensors."""
        self._storages, self.owned, self._seen = -1, {}, SeenTensors({})
