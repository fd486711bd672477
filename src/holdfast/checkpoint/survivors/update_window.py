"""The update window: whether parameters and optimizer state are those of a step, or something between two.

The window opens before the step of an optimizer and closes behind it. A process that is interrupted while it is open, or
after it was open, does not hold the state of the step that it noted last. A failure inside `step()` leaves the window open
for ever, which is right: the update may be half done.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdfast.checkpoint.state.step_observer import Steps


class Window(Steps):
    """The window of one set of optimizers, and of whoever else steps their parameters."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._num_ended = 0
        self._seen: set[int] = set()  # optimizers that made a step
        super().__init__(optimizers, after=self._made)

    @property
    def open(self) -> bool:
        """Return whether an update is under way, or was left in the middle."""
        return self.begun != self._num_ended

    def has_seen(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Return whether each of them made a step that was seen."""
        return self._seen.issuperset(map(id, optimizers))

    def _made(self, optimizer: torch.optim.Optimizer) -> None:
        self._seen.add(id(optimizer))
        self._num_ended += 1
