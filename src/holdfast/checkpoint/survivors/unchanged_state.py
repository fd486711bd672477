"""Tells whether what optimizers own is still what it was when a step was reported.

A step may be noted long before anybody asks for its state: at a failure, or at the end of a script that loads other
weights for a last evaluation. What is noted costs some ten microseconds for hundreds of tensors: torch's counts of writes,
and spots (`checkpoint.capture.spot_check`). A write past torch's counts of a part of a tensor may be missed.

Used by `checkpoint.survivors.survivor_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.checkpoint.capture.spot_check import MemoryMoved, Spots, has_spots
from holdfast.checkpoint.entries.tensor_words import Writes
from holdfast.checkpoint.state.training_state import State


class UnchangedStateCheck:
    """Notes the parameters and the optimizer state of one moment, and compares.

    Attributes:
        owned: what was looked at last, by entry name; on any device.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._storages = -1
        self.owned: Mapping[str, torch.Tensor] = {}
        self._spots, self._counts = Spots((), ()), Writes(())
        self._seen: tuple[npt.NDArray[Any], tuple[Any, ...]] | None = None
        self._turn = 0

    def note(self, turn: int) -> None:
        """They are as they should be now.

        Args:
            turn: which spots are looked at.
        """
        storages = self._state.storages()
        if storages != self._storages:
            self._storages, self.owned = storages, self._state.owned()
            seen = {name: tensor for name, tensor in self.owned.items() if has_spots(tensor)}
            self._spots = Spots(list(seen.values()), list(seen))
            self._counts = Writes(list(self.owned.values()))
        self._turn = turn
        try:
            self._seen = self._look()
        except MemoryMoved:
            self._seen = None

    def why_not(self) -> str:
        """Returns why they are not any more what was noted; empty if they are."""
        if self._seen is None:
            return "it was not looked at"
        # A save may have looked at other memory since, which is the same by now; what was noted is not of it.
        if self._state.storages() != self._storages or not self._state.still():
            return "parameters or optimizer state are other tensors by now"
        try:
            writes, spots = self._look()
        except MemoryMoved as error:
            return error.what
        if not np.array_equal(writes, self._seen[0]) or self._spots.differing(spots, self._seen[1]):
            return "parameters or optimizer state were written outside of an optimizer step"
        return ""

    def let_go(self) -> None:
        """Lets go of what was noted if the state is other tensors by now: it would be kept until the next note."""
        if self._state.storages() != self._storages:
            self.forget()

    def forget(self) -> None:
        """Lets go of the tensors."""
        self._seen, self._storages, self.owned = None, -1, {}
        self._spots, self._counts = Spots((), ()), Writes(())

    def _look(self) -> tuple[npt.NDArray[Any], tuple[Any, ...]]:
        return self._counts.read(), self._spots.read(self._turn)
