"""TorchTitan: a checkpoint manager at the seam where its Trainer builds one.

    config.checkpoint = keep(CheckpointManager.Config(enable=True, interval=500))     # in the recipe; the one line

The manager stays TorchTitan's `CheckpointManager` for all that is its own: first weights from `initial_load_path` or from Hugging
Face files, the seed checkpoint, the export of the last step's weights. Every step is saved with holdfast besides: captured at its
cadence, durable every `interval` steps, in `<dump_folder>/<folder>/holdfast`. A load takes holdfast's newest version, memory
first, unless TorchTitan's own newest checkpoint there is of a later step. A recipe names the same `load_step` at every restart:
where the launcher starts such a run again, it goes on with the newest version that it has saved since. What is kept: model parts, optimizers,
schedulers, the train state, the data loader, and random numbers, which TorchTitan itself leaves out. The loader of torchdata
is asked past TorchTitan's subclass of it, which pickles: nothing that holdfast reads is ever unpickled.

`keep_latest_k` goes on to mean what it says. Nothing happens under HOLDFAST_DISABLE. Tested with torchtitan 0.3.0.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    CheckpointManager,
)

from holdfast.adapters.dcp.peek import newest
from holdfast.adapters.options import checked
from holdfast.base import config as settings
from holdfast.base.config import Config
from holdfast.base.errors import UsageError
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.core.model import Version

logger = logging.getLogger(__name__)

# Below TorchTitan's own folder of checkpoints.
OWN = "holdfast"
# Name in the saved train state of what the run began with.
_BEGUN = "holdfast.begun"


def keep(checkpoint: Any, *, config: Config | None = None, **options: Any) -> Any:
    """The configuration of a checkpoint manager that also saves with holdfast.

    Args:
        checkpoint: a `CheckpointManager.Config`; its fields keep their meaning.
        config: the settings of holdfast; default: file and environment.
        options: more arguments of `holdfast.Checkpointer`: `every`, `durable_every` (default: `interval`).

    Raises:
        UsageError: the configuration is that of another manager, or leaves the optimizer out of a load; or there is no
            such option.
    """
    if settings.disabled():
        logger.warning("%s is set: TorchTitan saves and loads by itself", settings.DISABLE_VARIABLE)
        return checkpoint
    if not isinstance(checkpoint, CheckpointManager.Config):
        raise UsageError(
            f"{type(checkpoint).__qualname__} is no CheckpointManager.Config of TorchTitan",
            remedy="give the configuration of its own checkpoint manager",
        )
    if OPTIMIZER in checkpoint.exclude_from_loading:
        raise UsageError(
            "a load that leaves out the optimizer cannot go on where training was",
            remedy="start in another folder with initial_load_path",
        )

    checked(OWN, options)

    class HoldfastManager(_Kept):
        """TorchTitan builds the class that declares a Config."""

        given = (config, options)

        @dataclass(kw_only=True, slots=True)
        class Config(CheckpointManager.Config):  # type: ignore[misc]  # TorchTitan is not there without the extra
            """The fields of TorchTitan's own."""

    fields = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}
    return HoldfastManager.Config(**fields)


class _Kept(CheckpointManager):  # type: ignore[misc]  # TorchTitan is not there without the extra
    """See the top of this file; the hooks of `BaseCheckpointManager`, which calls them when it is enabled."""

    given: tuple[Config | None, dict[str, Any]]

    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.holdfast: Checkpointer | None = None
        if not config.enable or config.create_seed_checkpoint:
            return
        own, options = self.given
        ours, options = _settings(config, own), {"durable_every": config.interval, **options}
        self._settings = ours
        begun = {"launch": settings.launch(), "load_step": config.load_step}
        objects = _objects(self.states, config.exclude_from_loading, begun)
        self.holdfast = Checkpointer(os.path.join(self.folder, OWN), config=ours, **objects, **options)

    def _load(self, step: int = -1) -> bool:
        if self.holdfast is None:
            return bool(super()._load(step))
        version = None if step < 0 else self._saved_since(step) or self._version_of(step)
        start = self.holdfast.restore(version, fresh=step >= 0 and version is None)
        if step >= 0:
            return version is not None or bool(super()._load(step))
        theirs = self._find_load_step()
        if start and theirs <= start:
            return True
        if start:
            logger.warning("TorchTitan's own checkpoint of step %d is newer than holdfast's of step %d", theirs, start)
        return bool(super()._load(step))

    def _saved_since(self, step: int) -> Version | None:
        """The newest version, if this launch has saved it since it began at this step, and starts its workers again."""
        if not settings.is_restart():
            return None
        found = newest(os.path.join(self.folder, OWN), self._settings, _begun)
        if found is None or found[1] != {"launch": settings.launch(), "load_step": step}:
            return None
        logger.warning(
            "step %d is not gone back to: this run goes on with step %d, which holdfast has", step, found[0].step + 1
        )
        return found[0]

    def _version_of(self, step: int) -> Any:
        assert self.holdfast is not None
        versions = [version for version in self.holdfast._storage.versions() if version.step == step - 1]
        return max(versions, default=None)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.holdfast is None or self.load_only:
            return bool(super()._save(curr_step, last_step))
        handle = self.holdfast.step(curr_step - 1)
        if curr_step == 1 and self.enable_first_step_checkpoint:
            handle = self.holdfast.save(0, "durable")
        if last_step and self.last_save_model_only:  # the export; a whole last step is what `close` makes durable
            self._save_last_step(curr_step)
        return handle is not None

    def _close(self) -> None:
        kept, self.holdfast = getattr(self, "holdfast", None), None
        try:
            if kept is not None and sys.is_finalizing():  # TorchTitan's finaliser: nobody can be waited for here
                kept.abandon()
            elif kept is not None:  # the trainer closes after an error too, and then nothing is saved
                kept.__exit__(*sys.exc_info())
        finally:
            super()._close()


def _settings(theirs: Any, own: Config | None) -> Config:
    """TorchTitan's retention in ours: so many newest ones, or all."""
    ours = settings.load() if own is None else own
    if theirs.keep_latest_k:
        return dataclasses.replace(ours, keep_last=theirs.keep_latest_k)
    return dataclasses.replace(ours, keep_every="1")


def _objects(states: Mapping[str, Any], excluded: list[str], begun: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept, by name: TorchTitan's own names where they are not known to the Checkpointer by another.

    With the train state goes how the run began.
    """
    objects: dict[str, Any] = {}
    for name, state in states.items():
        if name == MODEL:
            objects["model"] = dict(_tensors(state.model))
        elif name == OPTIMIZER:
            objects["optimizer"] = _one(state.optimizers)
        elif state is not None:
            known = {LR_SCHEDULER: "scheduler", DATALOADER: "loader", TRAIN_STATE: "trainer"}.get(name, name)
            more = {_BEGUN: dict(begun)} if name == TRAIN_STATE else {}
            objects[known] = _Part(state, deaf=name in excluded, more=more)
    return objects


def _begun(values: Mapping[str, Any], rank: int) -> Any:
    """Return what a version says of how its run began; None if it says nothing."""
    for name in (f"rank{rank}/trainer", "trainer", "rank0/trainer"):
        if name in values:
            return values[name].get(_BEGUN)
    return None


def _tensors(parts: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of all parts by name, as they train.

    Not `state_dict()`: there TorchTitan's modules show fused weights apart, as copies. Names of parts do not collide.
    """
    for part in parts:
        yield from part.named_parameters()
        for path, module in part.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                raise UsageError(
                    f"{path} has state that is no tensor", remedy="save it as an object of its own, by keyword"
                )
            for name, buffer in module.named_buffers(path, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, buffer


class _Part:
    """An object with a state.

    Args:
        deaf: it is saved, and not loaded.
        more: is saved with it, under names that the object has not.
    """

    def __init__(self, inner: Any, *, deaf: bool, more: Mapping[str, Any]) -> None:
        self._inner = inner
        self._deaf = deaf
        self._more = more
        # TorchTitan's subclass hands out its state pickled; that of torchdata has plain values.
        self._kind: Any = StatefulDataLoader if isinstance(inner, StatefulDataLoader) else type(inner)

    def state_dict(self) -> Any:
        """Return the state as plain values."""
        state = self._kind.state_dict(self._inner)
        return {**state, **self._more} if self._more else state

    def load_state_dict(self, state: Any) -> None:
        """The object goes on from there."""
        if not self._deaf:
            if self._more:
                state = {name: value for name, value in state.items() if name not in self._more}
            self._kind.load_state_dict(self._inner, state)


def _one(found: Any) -> Any:
    """A single thing by itself, several as a list."""
    return found[0] if len(found) == 1 else list(found)
