"""Finds the gradients that were set to zero in place behind the optimizer's step that used them.

Each step that is reported asks this, and to read every gradient would cost a save as much as its share of the copy. So of most a
report reads the two ends, and all of each in turn. That is enough where all of this holds; else all of it is read:

- the last looks have read all of it, and found it zero
- neither end was all zero when the step used it, and both are now
- torch counts one write to it since, which is no backward pass then: that adds
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from holdfast.checkpoint.entries import living_gradients

FULL_FIRST = 3
# One of so many reports reads all of a gradient.
IN_TURN = 64
Held = tuple[int, torch.Tensor, torch.Tensor, int]
"""A parameter's id, the parameter, its gradient, which is held while it is read, and the number by which that is known; 0: it has none."""


class ZeroedGradients:
    """Knows, of one rank, which gradients its script clears from step to step."""

    def __init__(self) -> None:
        self._reports = 0
        self._proven: dict[int, int] = {}  # by a parameter's id: how many looks in a row found its gradient zero
        # By a parameter's id: the number of its gradient as it was seen last, where that lies, and how its ends are read.
        self._seen: dict[int, tuple[int, tuple[int, int], _Ends]] = {}
        self._had_numbers: set[int] = set()  # ids of parameters of which both ends were not zero when a step used them

    def used(self, grads: Iterable[Held]) -> None:
        """A step of an optimizer has used these gradients."""
        for key, parameter, grad, number in grads:
            if self._proven.get(key, 0) >= FULL_FIRST:
                ends = self._ends(key, parameter, grad, number)
                had = ends is not None and not any(ends.are_zero())
                (self._had_numbers.add if had else self._had_numbers.discard)(key)

    def found(self, candidates: Sequence[tuple[int, torch.Tensor, torch.Tensor, int, bool]]) -> set[int]:
        """Returns the ids of the parameters whose gradient is zero.

        Args:
            candidates: of each what `Held` says, and whether torch counts one write to its gradient since the step that used it.
        """
        self._reports += 1
        zero, in_part = set[int](), dict[int, torch.Tensor]()
        for turn, (key, parameter, grad, number, is_next) in enumerate(candidates, self._reports):
            if is_next and turn % IN_TURN and key in self._had_numbers and self._proven.get(key, 0) >= FULL_FIRST:
                ends = self._ends(key, parameter, grad, number)
                if ends is not None and all(ends.are_zero()):
                    zero.add(key)
                    in_part[key] = parameter
            elif living_gradients.is_zero(parameter):
                zero.add(key)
        if len(zero) < len(candidates):  # something lives, so more may
            zero -= {key for key, parameter in in_part.items() if not living_gradients.is_zero(parameter)}
        self._proven = {key: self._proven.get(key, 0) + 1 for key in zero}
        return zero

    def _ends(self, key: int, parameter: torch.Tensor, grad: torch.Tensor, number: int) -> _Ends | None:
        """Returns the ends of a gradient in host memory; of one that is as it was seen last, without asking for all that it is."""
        seen = self._seen.get(key)
        if seen and seen[0] == number and (grad.data_ptr(), grad.nbytes) == seen[1] and grad.is_contiguous():
            return seen[2]
        if (found := living_gradients.host_memory(parameter, grad)) is None:
            return None
        ends = _Ends(*found)
        if number and type(grad) is torch.Tensor:
            self._seen[key] = number, found, ends
        return ends


class _Ends:
    """The first and the last 2,048 bytes of memory, which whoever reads them holds. A call of C for each would take most of the time."""

    def __init__(self, address: int, num_bytes: int) -> None:
        size = min(num_bytes, 2048)
        kind = ctypes.c_char * size
        self._first, self._last = kind.from_address(address), kind.from_address(address + num_bytes - size)
        self._zeros = bytes(size)

    def are_zero(self) -> tuple[bool, bool]:
        """Return whether each is zero now."""
        return self._first.raw == self._zeros, self._last.raw == self._zeros
