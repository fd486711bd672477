"""Lightning's own checkpoints through holdfast: a `CheckpointIO`, for DDP and for one process.

    trainer = Trainer(plugins=[checkpoint_io("ckpts/run1/holdfast")], callbacks=[ModelCheckpoint("ckpts/run1", ...)])
    trainer.fit(model, ckpt_path="ckpts/run1/last.ckpt")

For scripts that stay with ModelCheckpoint; the callback of `adapters.lightning` saves more, more often, on all ranks. Lightning
hands a checkpoint to rank 0 alone, the whole of it, so rank 0 is a holdfast job of one rank here: what it saves is a version,
copied into the keeper's memory when the call returns, durable behind training. Where Lightning's file would be, there is
a pointer of a few bytes that names the version; versions that a pointer names are pinned.

Rules: nothing is unpickled of what was saved here; a save waits until the one before is durable, and so does a
removal, so the newest durable checkpoint is never removed for one that is only in memory; random numbers stay as they
are, as with Lightning's own files. Those are still loaded, by Lightning. Under HOLDFAST_DISABLE Lightning writes its
own. Tested with lightning 2.6.6; imported when it is there.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from holdfast.adapters.native_tree import durably, live, plain
from holdfast.adapters.save_only import SaveOnly
from holdfast.base import config as settings
from holdfast.base.config import Config
from holdfast.base.errors import LevelNotReached, UsageError, VersionNotFound
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries.pytree import flatten, unflatten
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.entries.types import dtype_name, torch_dtype
from holdfast.checkpoint.job import collectives
from holdfast.core.model import Version
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.format.strict_json import parse_loose
from holdfast.tiers.format.values import TensorRef

logger = logging.getLogger(__name__)

# A pointer is smaller than any file of torch.save.
MAX_POINTER_BYTES = 1024
_ROOT, _VERSIONS = "holdfast", "versions"


def checkpoint_io(root: str | os.PathLike[str], *, config: Config | None = None) -> Any:
    """The plugin for a Trainer of `lightning`.

    Args:
        root: directory or URL of the versions, the same on every rank; nothing else uses it.
        config: the settings; default: file and environment.

    Raises:
        UsageError: Lightning is not installed.
    """
    torch_io = _torch_io()
    saved = _Saved(root, config)

    class HoldfastIO(torch_io):  # type: ignore[misc, valid-type]
        """Pointers to versions; Lightning's own files where it finds them."""

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            if settings.disabled():
                super().save_checkpoint(checkpoint, path, storage_options)
            elif storage_options is not None:
                raise UsageError("storage_options are not known here", remedy="leave them out")
            else:
                saved.save(checkpoint, str(path))

        def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
            versions = _pointed(str(path))
            return saved.load(versions, str(path)) if versions else super().load_checkpoint(path, *args, **options)

        def remove_checkpoint(self, path: Any) -> None:
            saved.remove(str(path)) if _pointed(str(path)) else super().remove_checkpoint(path)

        def teardown(self) -> None:
            saved.close()

    return HoldfastIO()


def _torch_io() -> Any:
    """Lightning's own class for files of torch.save."""
    try:
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO  # noqa: PLC0415 - not there without the extra
    except ImportError as error:
        raise UsageError(f"Lightning cannot be imported: {error}", remedy="pip install lightning") from error
    return TorchCheckpointIO


class _Checkpoint:
    """Holds what rank 0 was given; the object that is saved."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"tree": plain(self.tree, {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tree = live(state["tree"], {})


class _Saved:
    """The versions of one root. Only rank 0 opens it."""

    def __init__(self, root: str | os.PathLike[str], config: Config | None) -> None:
        self._root = root
        self._config = config
        self._checkpoint = _Checkpoint()
        self._checkpointer: SaveOnly | None = None
        self._last: int | None = None  # step of the last version; None before there is an incarnation

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """A version, and the pointer to it.

        Raises:
            LevelNotReached: the save before is not durable, or this one is not in memory.
        """
        if "://" in path:
            raise UsageError("pointers are files", where=path, remedy="give ModelCheckpoint a directory")
        checkpointer = self._open()
        if self._last is None:
            checkpointer.restore(fresh=True)
            self._last = -1
        checkpointer.flush()
        self._last = max(int(checkpoint.get("global_step", 0)), self._last + 1)
        self._checkpoint.tree = checkpoint
        try:
            handle = checkpointer.save(self._last, "durable")
        finally:
            self._checkpoint.tree = {}
        if handle.given_up:
            raise LevelNotReached(f"it is not saved: {handle.given_up}", where=path, remedy="the next save tries again")
        checkpointer.pin(handle.version)
        old, durable = _pointed(path), checkpointer._storage.versions()
        before = [version for version in old if version in durable][:1]
        names = [str(version) for version in (handle.version, *before)]
        text = json.dumps({_ROOT: str(self._root), _VERSIONS: names}).encode()
        durably(Path(path), lambda file: file.write(text))
        for version in old:
            if version not in before:
                checkpointer.unpin(version)

    def load(self, versions: list[Version], path: str) -> dict[str, Any]:
        """The checkpoint, on every rank: rank 0 has it from the nearest copy and hands it on. Collective.

        Raises:
            VersionNotFound: memory is lost, and storage has none of what the pointer names. CorruptError: damage.
        """
        ranks = collectives.ranks()
        tree = collectives.together(ranks, lambda: self._restored(versions, path) if ranks.rank == 0 else {})
        return tree if ranks.world_size == 1 else _handed_on(ranks, tree)

    def _restored(self, versions: list[Version], path: str) -> dict[str, Any]:
        checkpointer, random = self._open(), ProcessRandomness()
        numbers = random.state_dict()
        try:
            for version in versions:
                try:
                    checkpointer.restore(version)
                except VersionNotFound:
                    logger.warning("%s: %s is lost; the checkpoint before has the same name", path, version)
                    continue
                self._last, tree = version.step, self._checkpoint.tree
                return tree
        finally:
            random.load_state_dict(numbers)
            self._checkpoint.tree = {}
        raise VersionNotFound(
            f"{' and '.join(map(str, versions))} are neither in memory nor in storage",
            where=path,
            remedy=f"`holdfast ls {self._root}` shows what is there",
        )

    def remove(self, path: str) -> None:
        """Takes a pointer away, and the pins of its versions; after the last save is durable."""
        checkpointer, versions = self._open(), _pointed(path)
        if self._last is not None:
            checkpointer.flush()
        Path(path).unlink()
        for version in versions:
            checkpointer.unpin(version)

    def close(self) -> None:
        """The last save is durable, or an error says what is missing."""
        checkpointer, self._checkpointer, self._last = self._checkpointer, None, None
        if checkpointer is not None:
            checkpointer.close()

    def _open(self) -> SaveOnly:
        if self._checkpointer is None:
            self._checkpointer = SaveOnly(self._root, config=self._config, lightning=self._checkpoint)
            self._checkpointer._ranks = collectives.Alone
        return self._checkpointer


def _pointed(path: str) -> list[Version]:
    """The versions that a pointer names, the newest first; none if there is no pointer."""
    try:
        with Path(path).open("rb") as file:
            facts = parse_loose(file.read(MAX_POINTER_BYTES))
    except (OSError, ValueError) as error:
        pass_on(error)
        return []
    named = facts.get(_VERSIONS) if isinstance(facts, dict) and _ROOT in facts else []
    found = [Version.parse(text) for text in named if isinstance(text, str)] if isinstance(named, list) else []
    return [version for version in found if version is not None]


def _handed_on(ranks: collectives.Ranks, tree: dict[str, Any]) -> dict[str, Any]:
    """Return what rank 0 has, on every rank; nothing is pickled. Collective."""
    tensors: list[torch.Tensor] = []

    def emit(_: str, tensor: torch.Tensor) -> TensorRef:
        tensors.append(tensor.contiguous())
        return TensorRef(str(len(tensors) - 1))

    def told() -> bytes:
        values = value_codec.encode(flatten(plain(tree, {}), "checkpoint", emit)).decode()
        kinds = [[dtype_name(each.dtype, where="checkpoint"), list(each.shape)] for each in tensors]
        return json.dumps([values, kinds]).encode()

    values, kinds = json.loads(collectives.share(ranks, told))
    if ranks.rank == 0:
        for each in (tensor for tensor in tensors if tensor.numel()):
            for other in range(1, ranks.world_size):
                ranks.send(each.reshape(-1).view(torch.uint8), other)
        return tree
    for kind, shape in kinds:
        tensor = torch.empty(shape, dtype=torch_dtype(kind), device="cpu")
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).copy_(ranks.receive(tensor.nbytes, 0))
        tensors.append(tensor)
    found = unflatten(value_codec.decode(values.encode(), where="checkpoint"), lambda name: tensors[int(name)])
    return dict(live(found, {}))
