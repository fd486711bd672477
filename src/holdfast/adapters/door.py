"""The `Checkpointer` of the public door: the trainer's side, and the files that other frameworks' tools look for.

With GROUP_INFO_FILE in the environment every rank writes, before its first step, whose slices can replace its own, as
MindSpore's ranks do; `restore_group_info_list` reads it back. The file that cannot be written is an error on every
rank: it was asked for, and nothing is trained yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.adapters.mindspore.groups import write_group_info
from holdfast.adapters.mindspore.redundancy import group_info_of_shards
from holdfast.base import config
from holdfast.base.errors import StorageError
from holdfast.core.model import Shard
from holdfast.train import agree, checkpointer
from holdfast.train.assembly import Job


class Checkpointer(checkpointer.Checkpointer):
    """Keeps the training state of this rank alive; see `train.checkpointer.Checkpointer` for arguments and methods."""

    def _laid_out(self, job: Job, shards: Sequence[Shard]) -> None:
        super()._laid_out(job, shards)
        path = config.group_info_file()
        if path:
            agree.together(job.group, lambda: _write(path, job, shards))


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
