"""`AsyncStager` for `dcp.async_save`: one copy, into the slot where the version stays.

    future = dcp.async_save(state, storage_writer=writer, async_stager=AsyncStager(writer, step=step))

The stock stager copies to host memory, and a writer copies from there. Here the training thread copies into the keeper's
slot, and what DCP does afterwards in its thread is planning and waiting. That needs to know who holds the same, which is
known from the save before; the first save, and one after a change of names or shapes, is staged as PyTorch does it.
The state must be that of DCP's default planner; whoever plans otherwise leaves the stager out.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from holdfast.adapters.dcp import items
from holdfast.adapters.dcp.dcp_writer import StorageWriter


class AsyncStager:
    """Stages for one writer; one for each save, or one for all of them if saves count on.

    Args:
        writer: the job's writer, also given to `dcp.async_save`.
        step: the step that is saved; None counts on.
    """

    # What DCP asks of a stager by attribute: when `stage` returns, nothing is left to wait for.
    should_synchronize_after_execute = False

    def __init__(self, writer: StorageWriter, *, step: int | None = None) -> None:
        self._writer = writer
        self._step = step
        self._stock: DefaultStager | None = None

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]] | dict[str, Any]:
        """The state as it is now, kept; returns what DCP plans with.

        Raises:
            UsageError: the version staged before has not been saved yet; or a step that is not later.
        """
        if self._writer.stock is not None:
            return self._copied(state_dict)
        version = self._writer.staging(self._step)
        planner = DefaultSavePlanner()
        planner.set_up_planner(state_dict)
        plan = planner.create_local_plan()
        notes = self._writer.holders_of(items.noted(plan))
        if notes is None:
            return self._copied(state_dict)
        # A version that is given up here is told by the future of the save, not to the training loop.
        self._writer.capture(notes, planner, plan.planner_data, version)
        return state_dict

    def synchronize_staging(self) -> None:
        """Nothing: `stage` returns when all is copied."""

    def close(self) -> None:
        """Ends what PyTorch's stager has; called by its owner after the last save."""
        if self._stock is not None:
            self._stock.close()

    def _copied(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]] | dict[str, Any]:
        if self._stock is None:
            self._stock = DefaultStager(StagingOptions(False, False, False, False))
        return self._stock.stage(state_dict)
