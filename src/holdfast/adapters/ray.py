"""Ray Train: a Checkpointer inside the training function.

    def train(config):
        model = ray.train.torch.prepare_model(...)
        checkpointer = keep(model=model, optimizer=optimizer)
        for step in range(checkpointer.restore(), config["steps"]):
            ...
            checkpointer.step(step, {"loss": loss.item()})
        checkpointer.close()

State goes into the keepers' memory at every step, so that a worker group that Ray starts again goes on where the last one was; Ray
uploads nothing. What Ray is told, by `ray.train.report` with `NO_UPLOAD`, is a pointer: a small directory among the run's
files that names the newest version that is durable, never one that is still on its way. Ray waits in `report` for all ranks, so
they must report equally often, and when a version becomes durable each finds at a step of its own. So every `look_every` steps
rank 0 says whether there is one that Ray does not know; then, and at the end, all report. Ray may remove pointers
(`num_to_keep`); versions are removed by holdfast alone.

When Ray announces that a node of the job is to be taken away (`ray.train.get_preemption_info`), every look from then on saves
to storage, until the node is gone. A look costs two round trips of all workers.

Tested with ray 2.60.0. Nothing happens under HOLDFAST_DISABLE.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import pyarrow.fs
import ray.train
from ray.train.collective import broadcast_from_rank_zero

from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.save.durable_tracker import OnDurable
from holdfast.checkpoint.save.save_handle import SaveHandle
from holdfast.core.model import Version

logger = logging.getLogger(__name__)

# Below the directory of the run; and the file in a pointer's directory.
OWN = "holdfast"
POINTER = "holdfast.json"


def keep(root: str | os.PathLike[str] | None = None, *, look_every: int = 10, **options: Any) -> RayCheckpointer:
    """The Checkpointer of this worker. Every worker calls it, in the training function.

    Args:
        root: directory or URL of the versions; default: below the run's own directory, if that is a local or shared one.
        look_every: steps between two looks, for a preemption and for what Ray is to be told; 0 never looks.
        options: arguments of `holdfast.Checkpointer`: model, optimizer and other objects, `every`, `durable_every`.

    Raises:
        UsageError: this is no training function of Ray Train, or the run's directory is none of a file system.
    """
    return RayCheckpointer(root, look_every=look_every, **options)


class RayCheckpointer(Checkpointer):
    """See the top of this file.

    Attributes:
        notice: what Ray said of nodes that are to be taken away; None so far.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        look_every: int = 10,
        on_durable: OnDurable | None = None,
        **options: Any,
    ) -> None:
        self._place, self._files = _run()
        self._told: OnDurable | None = on_durable
        self._newest: Version | None = None
        self._reported: Version | None = None  # on rank 0
        self._lock = threading.Lock()
        self._look_every = look_every
        self.notice: Any = None
        super().__init__(self._default() if root is None else root, on_durable=self._is_durable, **options)

    def step(self, step: int, metrics: Mapping[str, Any] | None = None, **carry: Any) -> SaveHandle | None:
        """Report a step as `Checkpointer` does; at every look see to a preemption too, and tell Ray what is durable.

        Args:
            step: the step that is finished, the same on all ranks.
            metrics: what Ray is told at a look that finds a newer durable version; plain numbers.
            carry: as in `Checkpointer`.
        """
        if self.off:
            return None
        handle = super().step(step, **carry)
        if self._look_every and step % self._look_every == 0:
            self.notice = ray.train.get_preemption_info()
            if self.notice is not None:
                logger.warning("Ray takes a node away (%s): step %d is saved to storage", self.notice, step)
                handle = self.save(step, "durable")
            if broadcast_from_rank_zero(self._has_news()):
                self._report(metrics or {"step": step})
        return handle

    def close(self) -> None:
        """Close as `Checkpointer` does; Ray is told of the last version."""
        run = None if self._closed else self._run
        super().close()
        if run is not None and run.last is not None:
            self._newest = run.last.version  # which is durable, else `close` has raised
            self._report({"step": run.last.version.step})

    def _is_durable(self, version: Version, error: HoldfastError | None) -> None:
        """Takes note of a durable version, in a thread of the Checkpointer."""
        with self._lock:
            if error is None and (self._newest is None or version > self._newest):
                self._newest = version
        if self._told is not None:
            self._told(version, error)

    def _has_news(self) -> bool:
        """Return whether a version is durable that Ray was not told of. What rank 0 says counts."""
        with self._lock:
            return self._newest != self._reported

    def _report(self, metrics: Mapping[str, Any]) -> None:
        """Every worker at the same steps; rank 0 alone knows of a pointer."""
        with self._lock:
            newest = self._reported = self._newest
        pointer = None
        if newest is not None and ray.train.get_context().get_world_rank() == 0:
            pointer = self._pointer(newest)
        ray.train.report(
            dict(metrics), checkpoint=pointer, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD
        )

    def _pointer(self, version: Version) -> Any:
        path = f"{self._place}/{OWN}-{version}"
        self._files.create_dir(path, recursive=True)
        with self._files.open_output_stream(f"{path}/{POINTER}") as file:
            file.write(json.dumps({"path": self._root, "version": str(version)}).encode())
        return ray.train.Checkpoint(path, filesystem=self._files)

    def _default(self) -> str:
        if not isinstance(self._files, pyarrow.fs.LocalFileSystem):
            raise UsageError(
                "the run's directory is no directory of a file system",
                where=self._place,
                remedy="give keep() the path or URL for the versions",
            )
        return f"{self._place}/{OWN}"


def _run() -> tuple[str, Any]:
    """The directory of this run, and the file system that it is in."""
    try:
        storage = ray.train.get_context().get_storage()
    except (RuntimeError, NotImplementedError) as error:
        pass_on(error)
        raise UsageError(
            f"this is no worker of Ray Train: {error}", remedy="call keep() in the function that the TorchTrainer runs"
        ) from error
    return storage.experiment_fs_path, storage.storage_filesystem
