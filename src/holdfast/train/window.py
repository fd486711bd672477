"""The update window: whether parameters and optimizer state are those of a step, or something between two.

Hooks of every optimizer say so: before its step the window opens, after it it closes. A process that is interrupted
while it is open, or after it was open, does not hold the state of the step that it noted last. A failure inside
`step()` leaves the window open for ever, which is right: the update may be half done. Used by `train.remains`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Window:
    """Of one set of optimizers; the trainer's thread moves it.

    Attributes:
        begun: optimizer steps that have begun, ever.
        open: whether one of them has not ended.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.begun = 0
        self._ended = 0
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._begin))
            self._hooks.append(optimizer.register_step_post_hook(self._end))

    @property
    def open(self) -> bool:
        """Whether an update is under way, or was left in the middle."""
        return self.begun != self._ended

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, *_: Any) -> None:
        self.begun += 1

    def _end(self, *_: Any) -> None:
        self._ended += 1
