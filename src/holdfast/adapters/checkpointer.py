"""The `Checkpointer` of the public door: the trainer's side, and the files that other frameworks' tools look for.

With GROUP_INFO_FILE in the environment every rank writes, before its first step, whose slices can replace its own, as
MindSpore's ranks do; `restore_group_info_list` reads it back. The file that cannot be written is an error on every
rank: it was asked for, and nothing is trained yet.

With HOLDFAST_DISABLE=1 the object does nothing: the script trains from the start as if its lines were not there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from holdfast.adapters.mindspore.groups import write_group_info
from holdfast.adapters.mindspore.redundancy import group_info_of_shards
from holdfast.base import config
from holdfast.base.errors import LevelNotReached, StorageError
from holdfast.checkpoint.checkpointer import checkpointer
from holdfast.checkpoint.checkpointer.session import Run
from holdfast.checkpoint.checkpointer.stop_signal import StopSignal
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.bootstrap import Job
from holdfast.checkpoint.restore.restorer import RestoreReport
from holdfast.checkpoint.save.save_handle import SaveHandle, as_level, never
from holdfast.core.model import Level, Shard, Version

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Checkpointer(checkpointer.Checkpointer):
    """Keeps the training state of this rank alive; see `checkpoint.checkpointer.checkpointer.Checkpointer` for arguments and methods."""

    @property
    def off(self) -> bool:
        """Return whether HOLDFAST_DISABLE switched everything off."""
        return config.disabled()

    def restore(
        self,
        version: Version | str | None = None,
        *,
        fresh: bool = False,
        strict: bool | None = None,
        required: bool | None = None,
    ) -> int:
        """Restore as `checkpoint.checkpointer.checkpointer` does; return 0 if everything is switched off."""
        if not self.off:
            return super().restore(version, fresh=fresh, strict=strict, required=required)
        logger.warning("%s is set: nothing is restored and nothing is saved", config.DISABLE_VARIABLE)
        self.last_restore = RestoreReport(None, f"{config.DISABLE_VARIABLE} is set")
        return 0

    def carry(self, name: str, value: T) -> T:
        """Carry as `checkpoint.checkpointer.checkpointer` does; return the value as it is if everything is switched off."""
        return value if self.off else super().carry(name, value)

    def step(self, step: int, **carry: Any) -> SaveHandle | None:
        """Report a step as `checkpoint.checkpointer.checkpointer` does; do nothing if everything is switched off."""
        return None if self.off else super().step(step, **carry)

    def save(
        self,
        step: int,
        level: Level | str = "captured",
        *,
        also_to: Sequence[str] = (),
        info: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Save as `checkpoint.checkpointer.checkpointer` does; return a version that is given up at once if everything is switched off."""
        if not self.off:
            return super().save(step, level, also_to=also_to, info=info)
        return never(step, as_level(level), f"{config.DISABLE_VARIABLE} is set")

    def flush(self, timeout_s: float | None = None) -> None:
        """Flush as `checkpoint.checkpointer.checkpointer` does; do nothing if everything is switched off."""
        if not self.off:
            super().flush(timeout_s)

    def _laid_out(self, job: Job, shards: Sequence[Shard]) -> None:
        super()._laid_out(job, shards)
        path = config.group_info_file()
        if path:
            collectives.together(job.group, lambda: _write(path, job, shards))


class SaveOnly(Checkpointer):
    """Serves frameworks that save when they like: no step is reported, and the state is there during `save` only.

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


def _write(path: str, job: Job, shards: Sequence[Shard]) -> None:
    path = path.replace("{rank}", str(job.group.rank))
    try:
        write_group_info(path, group_info_of_shards(shards, job.group.rank, job.group.world_size))
    except OSError as error:
        raise StorageError(
            f"the group information cannot be written: {error.strerror}",
            where=path,
            remedy=f"correct or unset {config.GROUP_INFO_VARIABLE}",
        ) from error
