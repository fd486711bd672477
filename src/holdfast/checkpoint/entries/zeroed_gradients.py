"""Finds the gradients that were set to zero in place behind the optimizer's step that used them.

Each step that is reported asks this, and to read every gradient would cost a save as much as its share of the copy. So of most a
report reads the two ends, and all of each in turn. That is enough where all of this holds; else all of it is read:

- the last looks have read all of it, and found it zero
- neither end was all zero when the step used it, and both are now
- torch counts one write to it since, which is no backward pass then: that adds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from holdfast.checkpoint.entries import living_gradients

FULL_FIRST = 3
# One of so many reports reads all of a gradient.
IN_TURN = 64


class ZeroedGradients:
    """Knows, of one rank, which gradients its script clears from step to step."""

    def __init__(self) -> None:
        self._reports = 0
        self._proven: dict[int, int] = {}  # by a parameter's id: how many looks in a row found its gradient zero
        # By a parameter's id: the number of its gradient as it was seen last, and where that lies.
        self._seen: dict[int, tuple[int, tuple[int, int]]] = {}
        self._had_numbers: set[int] = set()  # ids of parameters of which both ends were not zero when a step used them

    def used(self, parameters: Sequence[torch.Tensor]) -> None:
        """A step of an optimizer has used the gradients of these."""
        for parameter in parameters:
            key = id(parameter)
            if self._proven.get(key, 0) >= FULL_FIRST:
                had = not any(self._zero_ends(parameter) or (True,))
                (self._had_numbers.add if had else self._had_numbers.discard)(key)

    def found(self, candidates: Mapping[int, tuple[torch.Tensor, bool]]) -> set[int]:
        """Returns the ids of the parameters whose gradient is zero, of those that have one.

        Args:
            candidates: by `id`, a parameter, and whether torch counts one write to its gradient since the step that used it.
        """
        self._reports += 1
        at_its_ends = {
            key
            for number, (key, (_, once)) in enumerate(candidates.items())
            if once
            and key in self._had_numbers
            and self._proven.get(key, 0) >= FULL_FIRST
            and (self._reports + number) % IN_TURN
        }
        looks = (
            self._is_zero_at_its_ends(p) if key in at_its_ends else living_gradients.is_zero(p)
            for key, (p, _) in candidates.items()
        )
        zero = {key for key, is_zero in zip(candidates, looks, strict=True) if is_zero}
        if len(zero) < len(candidates):  # something lives, so more may
            zero -= {key for key in at_its_ends & zero if not living_gradients.is_zero(candidates[key][0])}
        self._proven = {key: self._proven.get(key, 0) + 1 for key in zero}
        return zero

    def _is_zero_at_its_ends(self, parameter: torch.Tensor) -> bool:
        return all(self._zero_ends(parameter) or (False,))

    def _zero_ends(self, parameter: torch.Tensor) -> tuple[bool, bool] | None:
        """Returns the same of a gradient in host memory, which is held while it is read: another thread may take it from the parameter."""
        grad = parameter.grad
        memory = self._memory(parameter, grad) if grad is not None else None
        return living_gradients.zero_ends(*memory) if memory is not None else None

    def _memory(self, parameter: torch.Tensor, grad: torch.Tensor) -> tuple[int, int] | None:
        """Returns address and bytes of a gradient in host memory; of one that is as it was seen last, without asking for all that it is."""
        seen = self._seen.get(id(parameter))
        if (
            seen
            and seen[0] == living_gradients.number_of(grad)
            and (grad.data_ptr(), grad.nbytes) == seen[1]
            and grad.is_contiguous()
        ):
            return seen[1]
        found = living_gradients.host_memory(parameter, grad)
        if found is not None and type(grad) is torch.Tensor and (number := living_gradients.number_of(grad)):
            self._seen[id(parameter)] = number, found
        return found
