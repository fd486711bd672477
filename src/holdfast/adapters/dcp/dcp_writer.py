"""`StorageWriter` for `dcp.save` and `dcp.async_save`: into the memory of the keepers, and from there into storage.

What differs from PyTorch's own writers:

- Every rank hands over what it holds, not what DCP's plan left to it: twins are known, so one of them writes it, copies
  in memory are counted, and a difference between twins is found.
- `dcp.save` returns when the version is at `level`: `durable` as one expects of a save; with `captured` it returns when
  all ranks' bytes are sealed in memory, and training goes on while one copy is written.
- All checkpoints lie under one root. `checkpoint_id` names the step (the digits it ends with); without, saves count on.
  Retention removes old ones (`keep_last`, `keep_every` of the settings); `pin` keeps one.
- Objects that are no tensors are kept as typed values, never pickled: numbers, strings, bytes, lists, tuples, dicts.

Under HOLDFAST_DISABLE the stock file system writer is used, in `<root>/dcp`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as TorchWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.adapters.dcp import items
from holdfast.adapters.dcp.dcp_job import DcpJob, patterns, require
from holdfast.adapters.dcp.items import Notes
from holdfast.base import config as settings
from holdfast.base.config import Config
from holdfast.base.errors import UsageError
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.save.save_handle import SaveHandle, as_level
from holdfast.core.model import Level, Version

logger = logging.getLogger(__name__)


class StorageWriter(TorchWriter):
    """Writes versions of one checkpoint root. Built by every rank, after `init_process_group`; collective.

    Args:
        root: directory or URL of the checkpoints, the same on every rank.
        level: what a version must be when `dcp.save` returns: `captured`, `replicated` or `durable`.
        replicated: glob patterns of names whose plain tensors and values all ranks that have them hold alike, for
            example `["model"]` under DistributedDataParallel. What DTensors say is known.
        config: the settings; default: file and environment.

    Attributes:
        level: as above; may be changed between two saves.
        last: the last save of this rank; None before. `last.wait("durable")` waits for more than was asked for.

    Raises:
        HoldfastError: the job cannot come together; of the same class on every rank.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        level: Level | str = Level.DURABLE,
        replicated: str | Sequence[str] = (),
        config: Config | None = None,
    ) -> None:
        super().__init__()
        self._root = str(Path(root)) if isinstance(root, os.PathLike) else root
        self.level = as_level(level)
        self.last: SaveHandle | None = None
        self._patterns = patterns(replicated)
        self._notes: Notes | None = None  # of the last plan that DCP made
        self._noted: Notes | None = None  # of the last plan that this rank made
        self._all_notes: dict[int, Notes] = {}  # of every rank, on the coordinator
        self._step: int | None = None
        self._staged: Version | None = None
        self._version: Version | None = None
        self._stock: FileSystemWriter | None = None
        if settings.disabled():
            logger.warning("%s is set: PyTorch's own writer takes over", settings.DISABLE_VARIABLE)
            self._stock = FileSystemWriter(stock_place(self._root))
            return
        self._job = DcpJob(self._root, settings.load() if config is None else config)
        open_checkpointers.register(self._job)

    @property
    def job(self) -> DcpJob:
        """The ranks, the keeper and what was loaded; for reader and stager.

        Raises:
            UsageError: holdfast is switched off.
        """
        if self._stock is not None:
            raise UsageError(f"{settings.DISABLE_VARIABLE} is set", remedy="unset it")
        return self._job

    @property
    def root(self) -> str:
        """Return where the versions are."""
        return self._root

    @property
    def stock(self) -> FileSystemWriter | None:
        """PyTorch's writer, if holdfast is switched off."""
        return self._stock

    # What DCP calls, in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins; the name says which step, if it ends with a number."""
        if self._stock is not None:
            self._stock.reset(stock_place(self._root, checkpoint_id))
            return
        self._step = None if checkpoint_id is None else self.job.step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Chooses the version; the coordinator records once what this incarnation came from."""
        if self._stock is not None:
            self._stock.set_up_storage_writer(is_coordinator, *args, **kwargs)
            return
        step, self._step = self._step, None
        if self._staged is None:
            self._version = self.job.next_version(step)
        elif step in (None, self._staged.step):
            self._version, self._staged = self._staged, None
        else:
            staged, self._staged = self._staged.step, None
            raise UsageError(
                f"the state was staged as step {staged} and is saved as step {step}",
                remedy="give the stager the step: AsyncStager(writer, step=...)",
            )
        self.job.record()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Notes what this rank has, before DCP leaves out what others have too."""
        if self._stock is not None:
            return self._stock.prepare_local_plan(plan)
        if not plan.usable:  # as the planner has it in its cache
            return plan
        self._noted = items.noted(plan)
        return dataclasses.replace(plan, storage_data=self._noted)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: tells every rank who holds the same."""
        if self._stock is not None:
            return self._stock.prepare_global_plan(plans)
        noted = items.all_notes(plans)
        fresh = {rank: rows for rank, rows in noted.items() if rows is not None}
        if not fresh:
            return plans  # nothing changed on any rank: all have their notes
        before = items.with_holders(self._all_notes, self._patterns)
        self._all_notes = {**self._all_notes, **fresh}
        if len(self._all_notes) < len(plans):
            raise UsageError(
                "the planner has plans of another writer in its cache", remedy="use one writer for the whole job"
            )
        held = items.with_holders(self._all_notes, self._patterns)
        stale = [rank for rank in noted.keys() - fresh.keys() if before.get(rank) != held[rank]]
        if stale:
            raise UsageError(
                f"what ranks {stale} share has changed with the plans of others, and the planner keeps their old plans",
                remedy="switch plan caching off for this save",
            )
        return [
            dataclasses.replace(plan, storage_data=held[rank]) if plan.usable else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copies what this rank holds into its slot, or finds that the stager has done so.

        Raises:
            LevelNotReached: this rank gave the version up; says why. UsageError: the plan is of another state.
        """
        if self._stock is not None:
            return self._stock.write_data(plan, planner)
        assert self._version is not None
        if self._noted is not None and [items.bare(note) for note in plan.storage_data] != list(self._noted):
            # Without what other ranks write too, the plan of the whole job looks the same, and DCP hands out the old ones.
            raise UsageError(
                "what this rank has is not what it had, and the planner gave it its old plan",
                remedy="switch plan caching off for this save",
            )
        self._notes = plan.storage_data
        if self.last is None or self.last.version != self._version:
            self.capture(plan.storage_data, planner, plan.planner_data, self._version)
        assert self.last is not None
        require(self.last)
        sizes = {note.fqn: note.lengths for note in plan.storage_data}
        results = [
            WriteResult(item.index, _num_bytes(sizes, item.index.fqn), str(self._version)) for item in plan.items
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: waits until the version is at `level` everywhere.

        Raises:
            LevelNotReached: it is not; says which level it has, and why.
        """
        if self._stock is not None:
            self._stock.finish(metadata, results)
            return
        assert self.last is not None
        self.last.wait(self.level)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """DCP never finds this writer by itself: it is always given."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """Return where it is saved, for planners that want to know."""
        return StorageMeta(checkpoint_id=self._root)

    # What the stager calls.

    def staging(self, step: int | None) -> Version:
        """The version that is staged now and saved by the next `dcp.save` of DCP's thread.

        Raises:
            UsageError: the one before has not been taken up.
        """
        if self._staged is not None:
            raise UsageError(
                f"{self._staged} is staged and not yet saved", remedy="wait for the future of the save before"
            )
        self._staged = self.job.next_version(step)
        return self._staged

    def holders_of(self, notes: Notes) -> Notes | None:
        """The same notes with who else holds it, if the last plan had just these."""
        known = self._notes
        if known is None or [items.bare(note) for note in known] != list(notes):
            return None
        return known

    def capture(self, notes: Notes, planner: SavePlanner, mapping: Any, version: Version) -> SaveHandle:
        """Copies what the notes name into the slot; the handle says if that failed."""
        self.job.contents.take(notes, planner, mapping, rank=self.job.group.rank)
        self.last = self.job.save(version, self.level)
        return self.last

    # For the user.

    def __getstate__(self) -> object:
        """Copied into no other process: that one would have no place at the keeper."""
        if self._stock is None:
            raise UsageError(
                "the writer belongs to the process that built it",
                remedy="leave async_checkpointer_type of async_save at its default, a thread",
            )
        return vars(self)

    def pin(self, version: Version | str) -> None:
        """Keeps a version from ever being removed by retention."""
        named = version if isinstance(version, Version) else Version.parse(version)
        if named is None:
            raise UsageError(f"{version!r} is not a version", remedy="name it as `holdfast ls` does")
        self.job.storage.pin(named)

    def close(self) -> None:
        """Leaves the job in good order: the last save is durable, or an error says what is missing. Again: nothing.

        Raises:
            LevelNotReached: the last save is not durable.
        """
        if self._stock is not None or self.job.closed:
            return
        try:
            ours = self.last is not None and self.last.version.incarnation == self.job.job.incarnation
            if self.last is not None and ours and not self.last.given_up:
                if self.last.level is not Level.DURABLE:
                    self.job.link.require().persist(self.last.version)
                self.last.wait(Level.DURABLE)
        finally:
            self.job.close()


def stock_place(root: str, checkpoint_id: object = None) -> str:
    """Return where PyTorch's own files go when holdfast is switched off: never among versions."""
    name = Path(str(checkpoint_id)).name if checkpoint_id is not None else ""
    return str(Path(root.removeprefix("file://")) / "dcp" / name)


def _num_bytes(sizes: dict[str, tuple[int, ...]], fqn: str) -> int:
    return torch.Size(sizes.get(fqn, (0,))).numel()
