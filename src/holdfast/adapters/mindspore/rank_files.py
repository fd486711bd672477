"""Every rank's own slices in a file of its own, as MindSpore's guide to recovery keeps them, and a twin's when one is lost.

    files = RankCheckpoints("checkpoints", {"model": model, "optimizer": optimizer})
    last = files.recover()          # (epoch, step) that was loaded, or None: nothing was saved yet
    files.save(epoch, step)         # checkpoints/rank_<n>/checkpoint-<epoch>_<step>.safetensors

Beside each file lies its proof: length, digest, epoch, step, and a digest of what the slices are. A twin's file is taken
only if all of that is right, so a damaged file, one of another step or of other slices is never loaded; all ranks load
the newest step that every one of them finds somewhere, or none does. `rank_<n>/group_info.pb` (or GROUP_INFO_FILE) is
written when the object is made: before the first step.

With `copies=k` a slice is not saved by every rank that holds it, but by k of them, all ranks about equally many bytes
(`rank_copies.py`); a load takes from the others' files what a rank's own lacks.

What twins share is in the file: parameters, optimizer state and the optimizer's numbers. What is a rank's own (random
numbers, the position in the data) is not; a loop sets it from epoch and step. For all of it there is
`holdfast.Checkpointer`.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.adapters.mindspore.formats.files import READ_ONLY, replace_file
from holdfast.adapters.mindspore.groups import write_group_info
from holdfast.adapters.mindspore.rank_copies import Copies, Wanted, encode_numbers, nothing_whole
from holdfast.adapters.mindspore.rank_proofs import (
    PROOF,
    SUFFIX,
    Found,
    Parts,
    Proof,
    bundle_of,
    longest,
    names_in,
    read_good,
    read_proof,
    slices_digest,
)
from holdfast.adapters.mindspore.redundancy import group_info_of_shards
from holdfast.base import config
from holdfast.base.errors import CorruptError, HoldfastError, VersionNotFound
from holdfast.checkpoint.entries.types import Gathered, SavedTensor, torch_dtype
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.state.training_state import State
from holdfast.core.model import Extent, Shard
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.format.image import Entry

_OWNED = re.compile(r"rank\d+/")


def free_prefix(directory: str | os.PathLike[str], prefix: str) -> str:
    """`prefix`, or `prefix_1`, `prefix_2`, ... if files of earlier runs bear it: MindSpore's rule."""
    pattern = re.compile(rf"{re.escape(prefix)}(?:_(\d+))?-\d+_\d+\.")
    matches = [pattern.match(name) for name in names_in(Path(directory))]
    taken = [int(match[1] or 0) for match in matches if match]
    return f"{prefix}_{max(taken) + 1}" if taken else prefix


class RankCheckpoints:
    """The files of all ranks of a job, of which each writes its own. Every rank makes one, with the same arguments.

    Args:
        directory: `rank_<n>` lie in it; all ranks see it, or each its own and its twins'.
        objects: name -> model, optimizer, as `holdfast.Checkpointer` takes them by keyword.
        prefix: of file names; `_1`, `_2`, ... is added where an earlier run has used it.
        replicated: as `holdfast.Checkpointer` takes it.
        copies: how many ranks save each slice. None: all that hold it, so that a twin's file alone replaces a lost one.

    Attributes:
        interchangeable: the ranks whose slices can replace this rank's, itself included.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        objects: Mapping[str, Any],
        *,
        prefix: str = "checkpoint",
        replicated: Sequence[str] = (),
        copies: int | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._group = collectives.ranks()
        rank, size = self._group.rank, self._group.world_size
        self._state = State(objects, rank=rank, world_size=size, replicated=replicated)
        info = group_info_of_shards(self._state.trained(), rank, size)
        self.interchangeable = tuple(info.restore_ranks)
        self._stem = prefix
        path = (config.group_info_file() or str(self._home(rank) / "group_info.pb")).replace("{rank}", str(rank))
        collectives.together(self._group, lambda: write_group_info(path, info))
        self._prefix = max(collectives.gather_json(self._group, free_prefix(self._home(rank), prefix)), key=_number)
        self._copies = None if copies is None else Copies(self._group, self._shards(), copies)

    def save(self, epoch: int, step: int) -> Path:
        """Writes this rank's slices, or its share of them, as the state after `step` of `epoch`; no rank waits.

        Raises:
            OSError: the directory refuses.
        """
        gathered = self._state.gather()
        held = [live.shard for name, live in gathered.tensors.items() if not _OWNED.match(name)]
        shared = held if self._copies is None else self._copies.saved(held)
        values = _values(gathered) if self._copies is None else encode_numbers(_numbers(gathered))
        bundle = bundle_of(shared)
        plan = image_format.plan_image(bundle, len(values))
        image = bytearray(plan.length)
        image[: len(plan.header)] = plan.header
        for name, (start, size) in plan.spans.items():
            if size:
                target = torch.frombuffer(image, dtype=torch.uint8, count=size, offset=start)
                target.copy_(gathered.tensors[name].local.contiguous().reshape(-1).view(torch.uint8))
        if plan.values_span is not None:
            start, size = plan.values_span
            image[start : start + size] = values
        seal = image_format.seal(bundle.bundle_id, memoryview(image))
        names = None if self._copies is None else tuple(sorted(shard.name for shard in shared))
        proof = Proof(epoch, step, slices_digest(held), seal.length, seal.digest, seal.chunk_digests, names)
        path = self._home(self._group.rank) / f"{self._prefix}-{epoch}_{step}{SUFFIX}"
        replace_file(path, [image], mode=READ_ONLY)
        replace_file(path.with_suffix(PROOF), [msgspec.json.encode(proof)], mode=READ_ONLY)
        return path

    def recover(self) -> tuple[int, int] | None:
        """Loads the newest state that every rank finds, in its own file or others' that hold its slices. Collective.

        Returns:
            Epoch and step that the objects hold now; None if no rank has a file.

        Raises:
            CorruptError: there are files, and of no step every rank finds a good one; says why; nothing was loaded.
            VersionNotFound: some ranks have no file of any step, and nor have their twins; nothing was loaded.
            MismatchError: the objects are others.
        """
        if self._copies is not None:
            return self._recover_shares(self._copies)
        faults: list[str] = []
        found = self._candidates(faults)
        steps = [{tuple(one) for one in told} for told in collectives.gather_json(self._group, sorted(found))]
        for epoch, step in sorted(set.intersection(*steps), reverse=True):
            data = _first_good(found[epoch, step], faults)
            if collectives.unanimous(self._group, data is not None):
                assert data is not None  # everybody has one
                collectives.together(self._group, partial(self._fill, data))
                return epoch, step
        told = collectives.gather_json(self._group, [len(found), faults])
        if not any(count or problems for count, problems in told):
            return None
        raise _nothing_common(told)

    def _recover_shares(self, copies: Copies) -> tuple[int, int] | None:
        """`recover` where a rank's own file holds some of its slices."""
        faults: list[str] = []
        shards = self._shards()
        wanted = Wanted(copies, shards, _numbers(self._state.gather()))
        held = collectives.gather_json(self._group, [slices_digest(shards), longest(shards)])
        files = wanted.find(self._directory, self._stem, held, faults)
        whole = [key for key in files if not wanted.lacking(files[key])]
        told = collectives.gather_json(self._group, [sorted(files), whole, bool(faults)])
        for key in sorted(set.intersection(*({tuple(one) for one in keys} for _, keys, _ in told)), reverse=True):
            parts = wanted.collect(files[key], faults)
            if collectives.unanimous(self._group, parts is not None):
                assert parts is not None  # everybody has them
                collectives.together(self._group, partial(self._load, parts))
                return key[0], key[1]
        if not any(keys or problems for keys, _, problems in told):
            return None
        newest = max((tuple(key) for keys, _, _ in told for key in keys), default=(0, 0, 0))
        lacks = wanted.lacking(files.get(newest, {}))
        raise nothing_whole(newest, collectives.gather_json(self._group, [lacks, faults]))

    def _home(self, rank: int) -> Path:
        return self._directory / f"rank_{rank}"

    def _candidates(self, faults: list[str]) -> dict[tuple[int, int], list[Found]]:
        """Return by step the files of this rank and its twins that fit as far as their proofs say; this rank's own
        first.
        """
        shards = self._shards()
        slices, most = slices_digest(shards), longest(shards)
        rank = self._group.rank
        found: dict[tuple[int, int], list[Found]] = defaultdict(list)
        for twin in sorted(self.interchangeable, key=lambda other: other != rank):
            for name in reversed(names_in(self._home(twin))):  # of a step that was made twice, the later run's
                match = re.match(rf"{re.escape(self._stem)}(?:_\d+)?-(\d+)_(\d+){re.escape(SUFFIX)}\Z", name)
                if match is None:
                    continue
                path = self._home(twin) / name
                try:
                    proof = read_proof(path, (int(match[1]), int(match[2])), slices, most)
                    if proof.names is not None:
                        remedy = "pass the same copies= to load it"
                        raise CorruptError("it holds a share of the slices", where=str(path), remedy=remedy)
                except HoldfastError as error:
                    faults.append(str(error))
                else:
                    found[proof.epoch, proof.step].append(Found(path, proof))
        return found

    def _fill(self, data: bytes) -> None:
        """A whole file into the objects; that it fits was proved by the digest of the slices."""
        image = image_format.read_image(data, "slices")
        parts = Parts({entry.name: entry for entry in image.entries})
        parts.data.update({e.name: memoryview(data)[e.start : e.end] for e in image.entries})
        if image.values is not None:
            tree = value_codec.decode(data[image.values.start : image.values.end])
            parts.values[self.interchangeable] = tree
        self._load(parts)

    def _load(self, parts: Parts) -> None:
        """Proved bytes into the objects."""
        saved = {
            name: SavedTensor(e.dtype, e.global_shape, (Extent(e.offsets, e.shape),))
            for name, e in parts.entries.items()
        }
        # Not strict, for what is each rank's own is not in the file.
        targets = self._state.create(self._state.fitting(saved, parts.values, strict=False))
        for name, live in targets.items():
            if live.local.numel():
                live.local.copy_(_tensor(parts.data[name], parts.entries[name]))
        self._state.apply(parts.values, targets)

    def _shards(self) -> list[Shard]:
        """Return what twins share of the state, optimizer state to come included; what a file of it holds."""
        shards = self._state.predict() or {n: live.shard for n, live in self._state.gather().tensors.items()}
        return [shard for name, shard in shards.items() if not _OWNED.match(name)]


def _values(gathered: Gathered) -> bytes:
    """The numbers that twins share: learning rates, groups."""
    trees = (tree for _, tree in sorted(gathered.values.items()))
    shared = {path: value for tree in trees for path, value in tree.items() if not _OWNED.match(path)}
    return image_format.pad_values(value_codec.encode(shared))


def _numbers(gathered: Gathered) -> dict[tuple[int, ...], dict[str, Any]]:
    """The same by the group that shares them."""
    found = {
        ranks: {path: value for path, value in tree.items() if not _OWNED.match(path)}
        for ranks, tree in gathered.values.items()
    }
    return {ranks: tree for ranks, tree in found.items() if tree}


def _number(prefix: str) -> int:
    """Return which of a row of runs the prefix stands for."""
    tail = prefix.rpartition("_")[2]
    return int(tail) if tail.isdigit() else 0


def _first_good(files: Sequence[Found], faults: list[str]) -> bytes | None:
    """The bytes of the first file that is what its proof says."""
    return next((data for found in files if (data := read_good(found, faults)) is not None), None)


def _tensor(data: memoryview, entry: Entry) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch_dtype(entry.dtype))
    return flat.reshape(entry.shape)


def _nothing_common(told: Sequence[Any]) -> HoldfastError:
    """Return why there is no step that all ranks can load. `told` by rank: files that might do, and what is wrong with
    others.
    """
    faults = list(dict.fromkeys(fault for _, problems in told for fault in problems))
    without = [rank for rank, (count, problems) in enumerate(told) if problems or not count]
    what = f"no step can be loaded on all ranks: ranks {without} find no good file, neither their own nor a twin's"
    if faults:
        return CorruptError(f"{what}; {'; '.join(faults[:4])}")
    return VersionNotFound(what, remedy="bring back the files of one of the twins, or start anew in another directory")
