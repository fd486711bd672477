"""The Checkpointer of frameworks that save when they like: no step is reported, and the state is there during `save` only."""

from __future__ import annotations

import os
import re
from typing import Any

from holdfast.base.errors import LevelNotReached, UsageError
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.checkpointer.session import Run
from holdfast.checkpoint.checkpointer.stop_signal import StopSignal
from holdfast.core.model import Version

_NUMBER = re.compile(r"(\d+)\Z")


def number_of(checkpoint: str | os.PathLike[str]) -> int:
    """Return the number at the end of a checkpoint's name, which becomes the step of its version.

    Raises:
        UsageError: there is none.
    """
    found = _NUMBER.search(os.fspath(checkpoint).rstrip("/"))
    if found is None:
        raise UsageError(
            "the number of the checkpoint is not known",
            where=os.fspath(checkpoint),
            remedy="end the directory's name with it, as in iter_0000010",
        )
    return int(found[1])


class SaveOnly(Checkpointer):
    """Serves frameworks that save when they like.

    SIGTERM keeps the effect that it had, for nobody would ask whether it came; and the end of a job saves nothing again.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(path, **options)
        self._signal = _Unheard()

    def version_of(self, step: int) -> Version | None:
        """Return the newest durable version of a step; None if there is none."""
        return max((version for version in self._storage.versions() if version.step == step), default=None)

    def _finish(self, run: Run) -> bool:
        last, run.optimizer_steps = run.last, -1  # it never counts as the state that was saved
        whole = super()._finish(run)
        if last is not None and last.given_up:
            raise LevelNotReached(f"{last.version} is not saved: {last.given_up}", remedy="the save before counts")
        return whole


class _Unheard(StopSignal):
    def install(self) -> None:
        """Leaves SIGTERM to whoever has it."""
