"""The Checkpointer of frameworks that save when they like: no step is reported, and the state is there during `save` only."""

from __future__ import annotations

import os
from typing import Any

from holdfast.base.errors import LevelNotReached
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.checkpointer.session import Run
from holdfast.checkpoint.checkpointer.stop_signal import StopSignal


class SaveOnly(Checkpointer):
    """Serves frameworks that save when they like.

    SIGTERM keeps the effect that it had, for nobody would ask whether it came; and the end of a job saves nothing again.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(path, **options)
        self._signal = _Unheard()

    def _finish(self, run: Run) -> None:
        last, run.optimizer_steps = run.last, -1  # it never counts as the state that was saved
        super()._finish(run)
        if last is not None and last.given_up:
            raise LevelNotReached(f"{last.version} is not saved: {last.given_up}", remedy="the save before counts")


class _Unheard(StopSignal):
    def install(self) -> None:
        """Leaves SIGTERM to whoever has it."""
