"""`StorageReader` for `dcp.load`: any version of a checkpoint root, into any layout.

Two ways, one choice at construction:

- `StorageReader(writer)`, for a job: every rank gets each byte from the nearest copy (own slot, own node, another node's
  memory, storage); what only storage has is read by one rank and handed on; copies that turn out bad are left out and
  another one is taken, on all ranks together. Every rank of the job takes part in every `dcp.load`.
- `StorageReader(root)`, for one process that looks into a checkpoint, or ranks that each read alone: storage only, no
  keeper, no collective.

Bytes are proved against the manifest before they reach a tensor. Nothing of a checkpoint is unpickled: DCP's metadata is
made from the headers, and what DCP hands to `torch.load` are bytes that were made here, a moment before, from typed values.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchReader
from torch.futures import Future

from holdfast.adapters.dcp.dcp_job import number_in
from holdfast.adapters.dcp.dcp_writer import StorageWriter, stock_place
from holdfast.adapters.dcp.items import BOX, MAPPING, OPAQUE, STREAM
from holdfast.adapters.dcp.sources import JobSource, SingleProcessSource, Wanted, values_of
from holdfast.base import config as settings
from holdfast.base.config import Config
from holdfast.base.errors import HoldfastError, MismatchError, UsageError, VersionNotFound
from holdfast.checkpoint.entries.pytree import references, unflatten
from holdfast.checkpoint.entries.types import LiveTensor, dtype_name, torch_dtype
from holdfast.checkpoint.restore.catalog import Catalogue, Place
from holdfast.core.model import Extent, Shard, Version

logger = logging.getLogger(__name__)


class StorageReader(TorchReader):
    """Reads versions of one checkpoint root.

    Args:
        source: the job's writer, or a directory or URL.
        version: only this one, as `holdfast ls` names it; by default the newest that is usable, or the one of the step that
            `checkpoint_id` ends with.
        config: the settings, with a root; default: file and environment.
        opaque: give bytes that a save planner of the user's own made to the load planner. PyTorch's own `load_bytes`
            unpickles what it is given, so a planner that ends there runs code of whoever made the version.

    Attributes:
        loaded: the version that the last `dcp.load` read; None before.
    """

    def __init__(
        self,
        source: StorageWriter | str | os.PathLike[str],
        *,
        version: Version | str | None = None,
        config: Config | None = None,
        opaque: bool = False,
    ) -> None:
        super().__init__()
        self._opaque = opaque
        self.loaded: Version | None = None
        self._given = Version.parse(version) if isinstance(version, str) else version
        if version is not None and self._given is None:
            raise UsageError(f"{version!r} is not a version", remedy="name it as `holdfast ls` does")
        self._step: int | None = None
        self._catalogue: Catalogue | None = None
        root = source.root if isinstance(source, StorageWriter) else str(source)
        self._root = root
        self._stock = FileSystemReader(stock_place(root)) if settings.disabled() else None
        self._source: SingleProcessSource | JobSource | None = None
        if self._stock is None and isinstance(source, StorageWriter):
            self._source = JobSource(source.job)
        elif self._stock is None:
            self._source = SingleProcessSource(root, settings.load() if config is None else config)

    def find(self) -> int | None:
        """The step of the version that `dcp.load` would read; None if there is none at all. With a writer: collective.

        Raises:
            HoldfastError: versions exist, and none of them can be used.
        """
        if self._source is None:
            there = (Path(stock_place(self._root)) / ".metadata").exists()
            return 0 if there else None
        version = self._source.choose(self._given, self._step)
        return None if version is None else version.step

    # What DCP calls, in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins; the name says which step, if it ends with a number."""
        if self._stock is not None:
            self._stock.reset(stock_place(self._root, checkpoint_id))
        elif checkpoint_id is None or Path(checkpoint_id) == Path(self._root):
            self._step = None
        else:
            self._step = number_in(str(checkpoint_id).rstrip("/"))

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:  # noqa: ARG002 - with `kwargs` DCP would ask twice
        """Return what the chosen version holds, from the headers of its files.

        Raises:
            VersionNotFound: there is none. HoldfastError: why none can be used.
        """
        if self._source is None:
            assert self._stock is not None
            return self._stock.read_metadata()
        try:
            return self._chosen(self._source)
        except HoldfastError as error:
            logger.error("nothing is loaded: %s", error)  # the DCP of torch 2.10 drops what is raised
            raise

    def _chosen(self, source: SingleProcessSource | JobSource) -> Metadata:
        if source.choose(self._given, self._step) is None:
            raise VersionNotFound(
                "there is no version to load", where=self._root, remedy="StorageReader.find() asks before"
            )
        self._catalogue = source.catalogue()
        return _metadata(self._catalogue)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Nothing to prepare: the version is chosen."""
        if self._stock is not None:
            self._stock.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: who reads what from storage is agreed on when the boxes are known."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the planner's tensors with proved bytes, and hands it the values.

        Raises:
            CorruptError: no good copy is left of something. MismatchError: a tensor of another size is asked for.
        """
        if self._source is None:
            assert self._stock is not None
            return self._stock.read_data(plan, planner)
        assert self._catalogue is not None
        values = _Values(self._catalogue)
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        places = places_by_name(self._catalogue)
        wanted = [_Target(item, places[item.storage_index.fqn], planner) for item in tensors]
        extra = values.wanted([item.dest_index.fqn for item in plan.items if item.type is LoadItemType.BYTE_IO])
        self._source.read([*[target.wanted for target in wanted], *extra])
        for target in wanted:
            target.commit(planner)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, values.stream(item.storage_index.fqn, planner, opaque=self._opaque))
        self.loaded = self._source.loaded()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """DCP never finds this reader by itself: it is always given."""
        return False


class _Target:
    """One item of DCP's plan: a box of a saved tensor, and the tensor that takes it."""

    def __init__(self, item: ReadItem, places: Sequence[Place], planner: LoadPlanner) -> None:
        self._item = item
        fqn = item.storage_index.fqn
        entry = places[0].entry
        start = item.storage_index.offset if item.storage_index.offset is not None else (0,) * len(item.lengths)
        offsets = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
        box = Extent(offsets, tuple(item.lengths))
        self._tensor = planner.resolve_tensor(item).detach()
        if tuple(self._tensor.shape) != box.lengths:
            raise MismatchError(
                f"a part of shape {tuple(item.lengths)} is asked for, the tensor for it has {tuple(self._tensor.shape)}",
                where=fqn,
            )
        same = dtype_name(self._tensor.dtype, where=fqn) == entry.dtype
        self._buffer = self._tensor if same else torch.empty(box.lengths, dtype=torch_dtype(entry.dtype), device="cpu")
        shard = Shard(fqn, entry.dtype, entry.global_shape, box, (0,))
        self.wanted: Wanted = (LiveTensor(shard, self._buffer, late=False), places)

    def commit(self, planner: LoadPlanner) -> None:
        """The bytes are there; a tensor of another dtype takes them over as DCP does."""
        if self._buffer is not self._tensor:
            self._tensor.copy_(self._buffer)
        planner.commit_tensor(self._item, self._tensor)


class _Values:
    """The values of a version, as streams for DCP's planners."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._trees = values_of(catalogue)
        self._tensors: dict[str, torch.Tensor] = {}

    def wanted(self, names: Sequence[str]) -> list[Wanted]:
        """Memory for the tensors that lie inside these values."""
        found: list[Wanted] = []
        for name in names:
            for inner in references(self._trees.get(name)):
                if inner in self._tensors:
                    continue
                places = self._catalogue.places(inner)
                entry = places[0].entry
                tensor = torch.empty(entry.global_shape, dtype=torch_dtype(entry.dtype), device="cpu")
                self._tensors[inner] = tensor
                box = Extent((0,) * len(entry.global_shape), entry.global_shape)
                shard = Shard(inner, entry.dtype, entry.global_shape, box, (0,))
                found.append((LiveTensor(shard, tensor, late=False), places))
        return found

    def stream(self, name: str, planner: LoadPlanner, *, opaque: bool) -> io.BytesIO:
        """Return what the planner's `load_bytes` takes.

        Raises:
            UsageError: bytes of a planner of the user's own, asked for by the stock one, or without a word of the user.
        """
        tree = self._trees[name]
        stream = io.BytesIO()
        if isinstance(tree, dict) and tree.keys() == {OPAQUE}:
            if not opaque or type(planner).load_bytes is DefaultLoadPlanner.load_bytes:
                raise UsageError(
                    "these bytes were made by a save planner of the user's own; PyTorch's planner would unpickle them",
                    where=name,
                    remedy="load with a planner whose load_bytes understands them, and StorageReader(..., opaque=True)",
                )
            stream.write(tree[OPAQUE])
        elif isinstance(tree, dict) and tree.keys() == {STREAM}:
            data, position = tree[STREAM]
            held = io.BytesIO(data)
            held.seek(position)
            torch.save(held, stream)
        else:
            torch.save(unflatten(tree, self._tensors.__getitem__), stream)
        stream.seek(0)
        return stream


def places_by_name(catalogue: Catalogue) -> dict[str, list[Place]]:
    """Return where the pieces of every tensor are, those of its boxes together."""
    found: dict[str, list[Place]] = {}
    for name in catalogue.names():
        found.setdefault(name.partition(BOX)[0], []).extend(catalogue.places(name))
    return found


def _metadata(catalogue: Catalogue) -> Metadata:
    """DCP's description of a version."""
    values = values_of(catalogue)
    inner = {name for tree in values.values() for name in references(tree)}
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, places in places_by_name(catalogue).items():
        if name in inner:
            continue
        entry = places[0].entry
        boxes = dict.fromkeys((place.entry.offsets, place.entry.shape) for place in places)
        found[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(entry.dtype)),
            torch.Size(entry.global_shape),
            [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for offsets, shape in boxes],
        )
    found.update((name, BytesStorageMetadata()) for name in values if name not in found)
    return Metadata(
        found, planner_data=_mapping(catalogue, found), storage_data={MetadataIndex(name): "" for name in found}
    )


def _mapping(catalogue: Catalogue, names: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    """Return how flat names lie in nested dicts: as they were saved; of versions without that, one level each."""
    found: dict[str, tuple[str | int, ...]] = {name: (name,) for name in names}
    for head in catalogue.heads.values():
        for name, tree in head.values.items():
            if name.endswith(f"/{MAPPING}"):
                found.update((flat, tuple(path)) for flat, path in tree.items() if flat in names)
    return found
