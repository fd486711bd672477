"""Megatron Core: save and load strategies for `dist_checkpointing`, three changed lines.

    save_strategy, load_strategy = holdfast.adapters.megatron.strategies("ckpts/run1")
    dist_checkpointing.save(state, "ckpts/run1/iter_0000010", sharded_strategy=save_strategy)
    state = dist_checkpointing.load(state, "ckpts/run1/iter_0000010", sharded_strategy=load_strategy)

A save makes a version of holdfast in `<root>/holdfast`: this rank's part is copied into the keepers' memory first, what
several ranks hold is known by its key and offset and stored once; then Megatron's own `torch_dist` files are written by
Megatron's own strategy, also with `async_sharded_save=True`. So the tree and the caller's tracker file stay what the native
loader reads. A load takes the sharded part from holdfast, memory first and verified, if it holds that iteration in
this layout; every rank does or none. Else, and for another layout, it is Megatron's own load. What Megatron keeps outside the sharded part
(`common.pt`, `metadata.json`) is read from the directory in either case.

The step of a version is the number at the end of the directory's name. Tested with megatron-core 0.16.1, and in part
with 0.19.2; the calls of 0.17.1 are tested with a stand-in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from holdfast.adapters.native_tree import live, plain
from holdfast.adapters.save_only import SaveOnly, number_of
from holdfast.base import config as settings
from holdfast.base.config import Config
from holdfast.checkpoint.job import collectives

logger = logging.getLogger(__name__)

OWN = "holdfast"


def strategies(root: str | Path, *, config: Config | None = None) -> tuple[Any, Any]:
    """Return what goes to `dist_checkpointing.save` and `load` as `sharded_strategy`. Every rank calls it.

    Args:
        root: the directory in which the directories of iterations lie.
        config: the settings; default: file and environment.
    """
    if settings.disabled():
        logger.warning("%s is set: Megatron saves and loads by itself", settings.DISABLE_VARIABLE)
        return TorchDistSaveShardedStrategy("torch_dist", 1), TorchDistLoadShardedStrategy()
    own = Own(Path(root), config)
    return SaveStrategy(own), LoadStrategy(own)


class _Shards:
    """This rank's part of one checkpoint; the object that is saved.

    Attributes:
        tensors: name (key and offset) -> data.
        objects: the same for what is not a tensor.
        groups: name -> the ranks that hold the same.
        iteration: of Megatron.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.objects: dict[str, Any] = {}
        self.groups: Mapping[str, tuple[int, ...]] = {}
        self.iteration = -1

    def state_dict(self) -> dict[str, Any]:
        objects = {name: plain(value, {}) for name, value in self.objects.items()}
        return {"iteration": self.iteration, "shards": self.tensors, "objects": objects}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration, self.tensors = state["iteration"], state["shards"]
        self.objects = {name: live(value, {}) for name, value in state["objects"].items()}

    def holders(self, path: str) -> tuple[int, ...] | None:
        """The ranks that hold the tensor of this name alike."""
        return self.groups.get(path.removeprefix("megatron.shards."))


class Own:
    """Holds what holdfast holds of one job."""

    def __init__(self, root: Path, config: Config | None) -> None:
        self._shards = _Shards()
        self._group = collectives.ranks()
        self._checkpointer = SaveOnly(root / OWN, config=config, megatron=self._shards)
        self._started = False
        self._known: list[str] = []

    def save(self, parts: Mapping[str, Any], iteration: int) -> None:
        """A version of this rank's parts; copied when it returns. Collective, where the parts have changed."""
        if not self._started:  # saved without having loaded: a run of its own
            self._checkpointer.restore(fresh=True)
            self._started = True
        shards = self._shards
        shards.iteration = iteration
        shards.tensors = {name: part.data for name, part in parts.items() if isinstance(part, ShardedTensor)}
        shards.objects = {name: part.data for name, part in parts.items() if isinstance(part, ShardedObject)}
        names = list(shards.tensors)
        if not collectives.unanimous(self._group, names == self._known):
            shards.groups, self._known = _groups(collectives.gather_json(self._group, names)), names
        self._checkpointer.save(iteration, "durable")
        shards.tensors, shards.objects = {}, {}

    def load(self, parts: Mapping[str, Any], iteration: int) -> bool:
        """Return whether every rank holds every part of that iteration; `tensors` and `objects` then have them.
        Collective.
        """
        shards = self._shards
        shards.iteration = -1
        self._checkpointer.restore()
        self._started = True
        if not collectives.unanimous(self._group, shards.iteration == iteration):
            version = self._checkpointer.version_of(iteration)
            if version is None:
                return False
            self._checkpointer.restore(version)
        misfit = [name for name, part in parts.items() if not self._has(name, part)]
        if misfit:
            logger.warning("%d parts are not held in this layout, the first is %s", len(misfit), misfit[0])
        return collectives.unanimous(self._group, not misfit)

    def _has(self, name: str, part: Any) -> bool:
        shards = self._shards
        if isinstance(part, ShardedObject):
            return name in shards.objects
        return name in shards.tensors and _fits(part, shards.tensors[name])

    def of(self, name: str) -> Any:
        """The data of a part that was loaded."""
        shards = self._shards
        return shards.tensors[name] if name in shards.tensors else shards.objects[name]

    def forget(self) -> None:
        """Forget what was loaded: it is handed over."""
        self._shards.tensors, self._shards.objects = {}, {}

    def close(self) -> None:
        """The last save is durable. Every rank calls it.

        Raises:
            LevelNotReached: it is not.
        """
        self._checkpointer.close()


class SaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron carries no types
    """Into holdfast's memory first, then Megatron's own files by Megatron's own strategy."""

    def __init__(self, own: Own) -> None:
        super().__init__("torch_dist", 1)
        self.own = own

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *strategy: Any, **named: Any) -> Any:
        """Everything that may change is copied when it returns; the request writes Megatron's own files.

        Megatron Core from 0.17 on also says how its own files are written (`async_strategy`): its own strategy is told.
        """
        self.own.save(dict(_parts(sharded_state_dict)), number_of(checkpoint_dir))
        return super().async_save(sharded_state_dict, Path(checkpoint_dir), *strategy, **named)

    def close(self) -> None:
        """See `Own.close`."""
        self.own.close()


class LoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]  # Megatron carries no types
    """Loads from holdfast if it holds the iteration in this layout, else by Megatron's own load."""

    def __init__(self, own: Own) -> None:
        super().__init__()
        self.own = own
        self.loaded_from = ""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *strategy: Any, **named: Any) -> Any:
        """The state dict with data in place of what is sharded; `async_strategy` (from 0.17 on) is for Megatron's load."""
        if not self.own.load(dict(_parts(sharded_state_dict)), number_of(checkpoint_dir)):
            self.loaded_from = "Megatron's own files"
            logger.warning("%s is not held in this layout; it is loaded from %s", checkpoint_dir, self.loaded_from)
            return super().load(sharded_state_dict, Path(checkpoint_dir), *strategy, **named)
        self.loaded_from = "holdfast"
        try:
            return _filled(sharded_state_dict, self.own)
        finally:
            self.own.forget()


def _name(part: Any) -> str:
    """Return what tells a part of the whole apart from the others; the same on all ranks that hold it."""
    if isinstance(part, ShardedObject):
        return str(part.unique_key)
    return f"{part.key}@{'_'.join(map(str, part.global_offset))}"


def _parts(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, ShardedTensor | ShardedObject):
        yield _name(tree), tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _parts(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _parts(item)


def _filled(tree: Any, own: Own) -> Any:
    if isinstance(tree, ShardedTensor):
        found = own.of(_name(tree))
        return found if tree.data is None else found.to(tree.data.device)
    if isinstance(tree, ShardedObject):
        return own.of(_name(tree))
    if isinstance(tree, Mapping):
        return {key: _filled(item, own) for key, item in tree.items()}
    return [_filled(item, own) for item in tree] if isinstance(tree, list | tuple) else tree


def _fits(part: Any, saved: torch.Tensor) -> bool:
    return tuple(saved.shape) == tuple(part.local_shape) and saved.dtype == part.dtype


def _groups(rows: list[list[str]]) -> dict[str, tuple[int, ...]]:
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(rows):
        for name in names:
            holders.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in holders.items()}
