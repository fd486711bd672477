"""Tells whether a fixed list of tensors was written since it was looked at.

A look costs some ten microseconds for hundreds of tensors: torch's counts of writes, and spots (`checkpoint.capture.spot_check`). A
write past torch's counts of a part of a tensor may be missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.checkpoint.capture.spot_check import MemoryMoved, Spots, has_spots
from holdfast.checkpoint.entries.tensor_words import Writes


class SeenTensors:
    """The tensors, by name, and what was seen of them last. Nothing was before the first look."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        seen = {name: tensor for name, tensor in tensors.items() if has_spots(tensor)}
        self._spots = Spots(list(seen.values()), list(seen))
        self._counts = Writes(list(tensors.values()))
        self._turn = 0
        self._seen: tuple[npt.NDArray[Any], tuple[Any, ...]] | None = None

    def look(self, turn: int) -> None:
        """They are as they should be now. `turn`: which spots are looked at."""
        self._turn = turn
        try:
            self._seen = self._read()
        except MemoryMoved:
            self._seen = None

    def why_written(self, what: str) -> str:
        """Returns why they, called `what`, are not any more what was seen; empty if they are."""
        if self._seen is None:
            return "it was not looked at"
        try:
            writes, spots = self._read()
        except MemoryMoved as error:
            return error.what
        if not np.array_equal(writes, self._seen[0]) or self._spots.differing(spots, self._seen[1]):
            return f"{what} were written outside of an optimizer step"
        return ""

    def _read(self) -> tuple[npt.NDArray[Any], tuple[Any, ...]]:
        return self._counts.read(), self._spots.read(self._turn)
