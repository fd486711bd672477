"""torch_checkpointing, the PyTorch team's library: its manager, which also saves with holdfast.

    manager = holdfast.adapters.torch_checkpointing.manager("ckpts/run1", CheckpointManager.Config(...))
    last = holdfast.adapters.torch_checkpointing.newest("ckpts/run1", last)       # the later: what holdfast holds, what you found
    manager.load(last, into={...}); manager.save("ckpts/run1/step_13", {...}); manager.close()     # as before

A save makes a version of holdfast in `<root>/holdfast`: what is handed over is copied into the keepers' memory before `save`
returns; then the library writes its own files by its own saver, synchronous or not. So its tree stays what it reads without
holdfast. A load takes holdfast's version, memory first and verified, if it holds that checkpoint and every item fits; every
rank does or none. Else it is the library's own load. DTensors are saved by placement and mesh; tensors that all ranks
hold alike are stored once where `replicated` says so. Random numbers of the process are kept too, which the library leaves out.

Its storage backends are another seam, and it is not taken: they are given pickled files, by another process.
Tested with torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch_checkpointing import CheckpointManager
from torch_checkpointing.barriers import DefaultStoreBarrierConfig
from torch_checkpointing.walk_utils import walk_checkpoint_structure

from holdfast.adapters.dcp import peek
from holdfast.adapters.save_only import SaveOnly, number_of
from holdfast.base import config as settings
from holdfast.base.config import Config
from holdfast.base.errors import UsageError
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.entries.sharding import local_of
from holdfast.checkpoint.job import collectives

logger = logging.getLogger(__name__)

# Below the directory in which the library's checkpoints lie.
OWN = "holdfast"
_NAME = "torch_checkpointing"
_ITEMS = "items"


def manager(
    root: str | os.PathLike[str],
    library: CheckpointManager.Config | None = None,
    *,
    replicated: Sequence[str] = (),
    config: Config | None = None,
) -> CheckpointManager:
    """Return a `CheckpointManager` that also saves with holdfast. Collective: every rank calls it.

    Args:
        root: the directory in which the checkpoints lie; one with another parent is the library's alone.
        library: the configuration of its manager.
        replicated: names of items whose tensors all ranks hold alike, as under DDP.
        config: the settings of holdfast; default: file and environment.

    Raises:
        UsageError: `replicated` is a single name, and no list of names.
    """
    if settings.disabled():
        logger.warning("%s is set: torch_checkpointing saves and loads by itself", settings.DISABLE_VARIABLE)
        return CheckpointManager(library)
    if isinstance(replicated, str):
        raise UsageError(f"replicated={replicated!r} is no list of names", remedy=f"write [{replicated!r}]")
    return HoldfastManager(os.fspath(root), library, replicated=replicated, config=config)


def newest(
    root: str | os.PathLike[str], found: str | os.PathLike[str] | None = None, *, config: Config | None = None
) -> str | None:
    """Return the newest checkpoint, as it is given to `load`; None if there is none. Collective.

    Memory has one that was not written yet, and storage may lack one that the library has written: the later counts.

    Args:
        root: as for `manager`.
        found: the newest one among the library's own, as the script finds it; that of rank 0 counts.
        config: the settings of holdfast; default: file and environment.

    Raises:
        HoldfastError: versions exist, and none can be used.
        UsageError: the name of what was found does not end with a number.
    """
    theirs = None if found is None else os.fspath(found)
    if settings.disabled():
        return theirs
    theirs = collectives.gather_json(collectives.ranks(), theirs)[0]
    version = peek.newest(os.path.join(root, OWN), config or settings.load(), _id_in)
    ours = None if version is None else os.path.join(root, version[1])
    return max((each for each in (ours, theirs) if each is not None), key=number_of, default=None)


class HoldfastManager(CheckpointManager):  # type: ignore[misc]  # the library is not there without the extra
    """See `manager`; what the library's own does not know is `holdfast_loaded`, the checkpoint that holdfast loaded last."""

    def __init__(
        self, root: str, library: Any, *, replicated: Sequence[str] = (), config: Config | None = None
    ) -> None:
        super().__init__(_with_one_barrier(library or CheckpointManager.Config()))
        self._root = root
        self._held = _Held(root, replicated, config)
        self.holdfast_loaded = ""

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> Any:
        """Save with holdfast too: what is handed over is copied when it returns; the library's own files follow as it is configured."""
        if not self._closed and self._is_own(checkpoint_id):
            self._held.save(checkpoint_id, checkpoint)
        return super().save(checkpoint_id, checkpoint)

    def load(
        self, checkpoint_id: str | os.PathLike[str], into: Mapping[str, Any] | None = None, **how: Any
    ) -> Mapping[str, Any]:
        """The items with what was saved: from holdfast if it holds them as they are asked for, else from the library's files."""
        self.holdfast_loaded = ""
        where = how.get("map_location")
        plain = how.get("metadata_format") is None and isinstance(where, str | torch.device | None)
        asked = dict.fromkeys(self._config.items) if into is None else into
        if self._closed or not (plain and asked and self._is_own(checkpoint_id)):
            return super().load(checkpoint_id, into, **how)  # type: ignore[no-any-return]
        if not self._held.load(checkpoint_id, asked):
            logger.warning("holdfast does not hold %s as it is asked for; the library loads it", checkpoint_id)
            return super().load(checkpoint_id, into, **how)  # type: ignore[no-any-return]
        self.holdfast_loaded = os.fspath(checkpoint_id)
        return self._held.fill(asked, where, strict=how.get("strict", False))

    def close(self) -> None:
        """The last save is durable, in holdfast and in the library's files. Every rank calls it; again does nothing.

        After an error nothing is copied, and what was saved before is sent to storage.

        Raises:
            LevelNotReached: it is not in holdfast.
        """
        try:
            super().close()
        finally:
            self._held.close(*sys.exc_info())

    def _is_own(self, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _place(os.path.dirname(os.fspath(checkpoint_id).rstrip("/"))) == _place(self._root)


class _Payload:
    """This rank's part of one checkpoint; the object that is saved.

    Attributes:
        name: of the checkpoint, below the root.
        items: what was handed over or loaded; while a version is loaded, what it goes into.
        cut: paths of the DTensors among what was saved.
        devices: path -> device, of tensors that were not in the memory of the host.
    """

    def __init__(self) -> None:
        self.name = ""
        self.items: Mapping[str, Any] = {}
        self.cut: list[str] = []
        self.devices: dict[str, str] = {}

    def take(self, name: str, items: Mapping[str, Any]) -> None:
        """Notes what is to be saved, or loaded into."""
        found = list(_tensors(items))
        self.name, self.items = name, items
        self.cut = [path for path, tensor in found if isinstance(tensor, DTensor)]
        self.devices = {path: str(tensor.device) for path, tensor in found if tensor.device.type != "cpu"}

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, _ITEMS: dict(self.items), "cut": self.cut, "devices": self.devices}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.name, self.items = state["name"], state[_ITEMS]
        self.cut, self.devices = state["cut"], state["devices"]


class _Held:
    """Holds what holdfast holds of one job."""

    def __init__(self, root: str, replicated: Sequence[str], config: Config | None) -> None:
        self._payload = _Payload()
        self._group = collectives.ranks()
        alike = [f"{_NAME}.{_ITEMS}.{item}" for item in replicated]
        self._checkpointer = SaveOnly(
            os.path.join(root, OWN), config=config, replicated=alike, **{_NAME: self._payload}
        )
        self._started = False

    def save(self, checkpoint_id: str, items: Mapping[str, Any]) -> None:
        """A version of these items; copied when it returns."""
        if not self._started:  # saved without having loaded: a run of its own
            self._checkpointer.restore(fresh=True)
            self._started = True
        step = number_of(checkpoint_id)
        self._payload.take(_name(checkpoint_id), items)
        self._checkpointer.save(step, "durable")
        self._payload.take("", {})

    def load(self, checkpoint_id: str | os.PathLike[str], targets: Mapping[str, Any]) -> bool:
        """Return whether every rank holds these items as they are asked for; `fill` then hands them over. Collective."""
        name, random = _name(checkpoint_id), ProcessRandomness().state_dict()
        if self._restored(name, targets) or self._restored_again(name, targets, number_of(checkpoint_id)):
            wrong = list(_misfits(self._payload, targets))
            if wrong:
                logger.warning("%d parts are not held as they are asked for, the first is %s", len(wrong), wrong[0])
            if collectives.unanimous(self._group, not wrong):
                self._started = True
                return True
        self._payload.take("", {})
        self._started = False  # what the library loads gets a lineage of its own, with its first save
        ProcessRandomness().load_state_dict(random)
        return False

    def _restored_again(self, name: str, targets: Mapping[str, Any], step: int) -> bool:
        """Return whether the newest durable version of a step is that checkpoint; rank 0 says which version it is."""
        version = collectives.gather_json(self._group, str(self._checkpointer.version_of(step) or ""))[0]
        return bool(version) and self._restored(name, targets, version)

    def _restored(self, name: str, targets: Mapping[str, Any], version: str | None = None) -> bool:
        """Return whether the newest version, or this one, is that checkpoint on every rank."""
        self._payload.take("", targets)
        self._checkpointer.restore(version, strict=False)  # another number of ranks has none of some ranks' values
        return collectives.unanimous(self._group, self._payload.name == name)

    def fill(self, targets: Mapping[str, Any], where: str | torch.device | None, *, strict: bool) -> dict[str, Any]:
        """The items as the library returns them: in their targets, or new where there is none.

        Raises:
            RuntimeError: of a strict load, as the library has it: what was asked for and not saved.
        """
        held, missing, devices = self._payload.items, [], self._payload.devices
        self._payload.take("", {})

        def leaf(place: Any, source: Any, target: Any) -> Any:
            if isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor):
                local_of(target).copy_(local_of(source))
                return target
            if isinstance(source, torch.Tensor):
                return source.to(where or devices.get(_path(place.item_key, *place.nested_path), "cpu"))
            return source

        filled = {}
        for key, target in targets.items():
            filled[key], paths = walk_checkpoint_structure(item_key=key, source=held[key], target=target, leaf_fn=leaf)
            missing += [str(path) for path in paths]
        if missing and strict:
            raise RuntimeError(f"the checkpoint is missing keys: {missing}")
        if missing:
            logger.warning("%d keys are not in the checkpoint, the first is %s", len(missing), missing[0])
        return filled

    def close(self, *error: Any) -> None:
        """The last save is durable; see `Checkpointer.__exit__` for what an error changes.

        Raises:
            LevelNotReached: it is not.
        """
        self._checkpointer.__exit__(*error)


def _with_one_barrier(library: Any) -> Any:
    """Return the configuration with a barrier that all ranks call by one name. Collective.

    The library names it by how many a process has built. Where a rank was lost and the others keep their processes, they
    count on and its successor begins anew: they would wait for each other.
    """
    writer = library.save.writer_config
    if not isinstance(writer.barrier_config, DefaultStoreBarrierConfig):
        return library
    name = collectives.gather_json(collectives.ranks(), secrets.token_hex(8))[0]
    writer = replace(writer, barrier_config=replace(writer.barrier_config, generation=name))
    return replace(library, save=replace(library.save, writer_config=writer))


def _misfits(saved: _Payload, targets: Mapping[str, Any]) -> Iterator[str]:
    """Yields the paths of items and tensors that cannot go where they are asked for."""
    cut = set(saved.cut)
    for key, target in targets.items():
        if key in saved.items:
            yield from _below(saved.items[key], target, key, cut)
        else:
            yield key


def _below(source: Any, target: Any, path: str, cut: set[str]) -> Iterator[str]:
    if isinstance(source, torch.Tensor) or isinstance(target, torch.Tensor):
        if not _fits(source, target, path in cut):
            yield path
    elif isinstance(source, Mapping):
        for key in source if target is None else source.keys() & _keys(target):
            yield from _below(source[key], target and target[key], _path(path, key), cut)
    elif isinstance(source, list | tuple):
        into = target if isinstance(target, list | tuple) and target else [None] * len(source)
        for index, (item, place) in enumerate(zip(source, into, strict=False)):
            yield from _below(item, place, _path(path, index), cut)


def _fits(source: Any, target: Any, cut: bool) -> bool:
    if target is None:
        return not cut  # there is no mesh for it
    if not (isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor)):
        return False
    return (
        cut == isinstance(target, DTensor) == isinstance(source, DTensor)
        and source.shape == target.shape
        and source.dtype == target.dtype
    )


def _keys(target: Any) -> Any:
    return target.keys() if isinstance(target, Mapping) else set()


def _tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _tensors(item, _path(path, key) if path else str(key))
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from _tensors(item, _path(path, index))


def _path(*parts: object) -> str:
    return ".".join(map(str, parts))


def _name(checkpoint_id: str | os.PathLike[str]) -> str:
    return os.path.basename(os.fspath(checkpoint_id).rstrip("/"))


def _place(directory: str) -> str:
    """Return a directory as it is compared: whole, if it is one of this machine."""
    return directory.rstrip("/") if "://" in directory else os.path.realpath(directory)


def _id_in(values: Mapping[str, Any], rank: int) -> str:
    """Return the name of the checkpoint that a version is of, from its values."""
    found = next(each for each in (f"rank{rank}/{_NAME}", _NAME, f"rank0/{_NAME}") if each in values)
    return str(values[found]["name"])
