"""The layout of a script: what its rehearsal says each rank will hold (`checkpoint.dry_run`), read strictly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.base.errors import UsageError
from holdfast.cli import subcommands
from holdfast.core.layout.job_layout import MAX_RANKS, JobLayout
from holdfast.core.layout.mesh_inference import infer
from holdfast.core.model import Extent, Shard


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """One part of one tensor."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    ranks: tuple[int, ...]


class _Answer(msgspec.Struct, frozen=True):
    """Holds what a rehearsal says: parts, or what went wrong and what to do."""

    shards: tuple[_Row, ...] = ()
    error: tuple[str, str] = ("", "")


def layout_of_script(path: str, arguments: Sequence[str], *, world_size: int, ranks_per_node: int) -> JobLayout:
    """The layout of the job that this script would be.

    Raises:
        UsageError: there is no such script, it fails before its `restore()`, or no mesh explains what its ranks hold.
    """
    if not Path(path).is_file():
        raise UsageError("there is no such script", where=path)
    if not 1 <= world_size <= MAX_RANKS:
        raise UsageError(f"{world_size} ranks are none that a job could have")
    words = ["--world-size", str(world_size), "--ranks-per-node", str(ranks_per_node), path, *arguments]
    try:
        answer = msgspec.json.decode(subcommands.ask("rehearsal", words), type=_Answer)
    except msgspec.MsgspecError:
        raise UsageError("the rehearsal of the script ended without an answer", where=path) from None
    if answer.error[0]:
        raise UsageError(answer.error[0], where=path, remedy=answer.error[1])
    return infer(world_size, map(_shard, answer.shards))


def _shard(row: _Row) -> Shard:
    return Shard(row.name, row.dtype, row.global_shape, Extent(row.offsets, row.lengths), row.ranks)
