"""k copies of every slice among the ranks' files: which of its slices a rank saves, and whose files hold what it lacks.

`core.layout.k_copies` deals the slices; all ranks tell theirs once, when the object is made, so that no save waits for anybody.
A slice that was not known then (an optimizer nobody can predict) is saved by every rank that holds it. Numbers
(learning rates) are a few hundred bytes and in every rank's file.

A rank's own file holds some of its slices; the others are in the files of ranks of their groups. All files of a state
are of one run, so that two runs that made the same step are never mixed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.adapters.mindspore.rank_proofs import SUFFIX, Found, Parts, names_in, read_good, read_proof
from holdfast.base.errors import CorruptError, HoldfastError, UsageError, VersionNotFound
from holdfast.base.handler_errors import pass_on
from holdfast.base.terminal import some_of
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.core.layout.k_copies import share_table
from holdfast.core.model import Shard
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.format.image import Entry

# Epoch, step, and which of the runs that saved it.
Key: TypeAlias = tuple[int, int, int]
Group: TypeAlias = tuple[int, ...]
# By state, and by the rank in whose directory it lies.
Files: TypeAlias = Mapping[Key, dict[int, Found]]


class Copies:
    """Decides who saves which slice. Collective: every rank makes one, of what it holds.

    Args:
        shards: what this rank shares with its twins.
        copies: of every slice; a slice that fewer ranks hold has as many as there are.

    Raises:
        UsageError: less than one copy, or another number on another rank.
    """

    def __init__(self, group: Ranks, shards: Sequence[Shard], copies: int) -> None:
        self.rank = group.rank
        # One rank of each group tells, so that the table is as long as the job has slices.
        mine = [shard.row() for shard in shards if shard.ranks[0] == group.rank]
        told = collectives.gather_json(group, [copies, mine])
        if any(number != copies for number, _ in told):
            numbers = [number for number, _ in told]
            raise UsageError(f"ranks want different numbers of copies: {numbers}", remedy="pass the same to all ranks")
        self._holders = share_table((Shard.of_row(row) for _, rows in told for row in rows), copies)

    def holders(self, shard: Shard) -> Group:
        """The ranks that save the slice."""
        return self._holders.get(shard, shard.ranks)

    def saved(self, shards: Iterable[Shard]) -> list[Shard]:
        """Those that this rank saves."""
        return [shard for shard in shards if self.rank in self.holders(shard)]


class Wanted:
    """Tells what this rank needs of a state, and where it is.

    Args:
        shards: all that the rank shares with others.
        groups: those that share numbers.
    """

    def __init__(self, copies: Copies, shards: Sequence[Shard], groups: Iterable[Group]) -> None:
        self._copies = copies
        self._shards = list(shards)
        self._groups = list(groups)

    def find(self, directory: Path, stem: str, held: Sequence[tuple[str, int]], faults: list[str]) -> Files:
        """All files that may hold some of it, by what their names and proofs say.

        Args:
            directory: of all ranks.
            stem: what names begin with, without the number of the run.
            held: by rank the digest of what it holds, and how long a file of that is at most.
            faults: gets a line for every file that will not do.
        """
        pattern = re.compile(rf"{re.escape(stem)}(?:_(\d+))?-(\d+)_(\d+){re.escape(SUFFIX)}\Z")
        members = {rank for ranks in (*(s.ranks for s in self._shards), *self._groups) for rank in ranks}
        found: dict[Key, dict[int, Found]] = defaultdict(dict)
        for rank in sorted(members):
            home = directory / f"rank_{rank}"
            for match in filter(None, map(pattern.match, names_in(home))):
                run, epoch, step = (int(number or 0) for number in match.groups())
                path = home / match[0]
                try:
                    proof = read_proof(path, (epoch, step), *held[rank])
                    if proof.names is None:
                        remedy = "load it without copies="
                        raise CorruptError("it was saved without a number of copies", where=str(path), remedy=remedy)
                except HoldfastError as error:
                    faults.append(str(error))
                else:
                    found[epoch, step, run][rank] = Found(path, proof)
        return found

    def lacking(self, files: Mapping[int, Found]) -> list[str]:
        """Return what none of the files holds, each with the ranks that saved it."""
        names = {rank: frozenset(found.proof.names or ()) for rank, found in files.items()}
        gone = [
            f"{shard.name} (saved by ranks {list(self._copies.holders(shard))})"
            for shard in self._shards
            if not any(shard.name in names.get(rank, ()) for rank in shard.ranks)
        ]
        numbers = [f"the numbers of ranks {list(ranks)}" for ranks in self._groups if not names.keys() & set(ranks)]
        return gone + numbers

    def collect(self, files: dict[int, Found], faults: list[str]) -> Parts | None:
        """All of it, from this rank's own file and from as many others' as that takes; None if something is missing.

        A file that is not what its proof says is taken out of `files`.
        """
        parts = Parts()
        shards = {shard.name: shard for shard in self._shards}
        groups = set(self._groups)
        # Own first, then round from there: ranks that lack the same do not all read the same file first.
        for rank in sorted(files, key=lambda other: (other < self._copies.rank, other)):
            offered = [n for n in files[rank].proof.names or () if n in shards and rank in shards[n].ranks]
            if not offered and not any(rank in ranks for ranks in groups):
                continue
            data = read_good(files[rank], faults)
            try:
                taken = None if data is None else _take(data, {n: shards[n] for n in offered}, str(files[rank].path))
            except HoldfastError as error:
                faults.append(str(error))
                taken = None
            if data is None or taken is None:
                del files[rank]
                continue
            for entry in taken[0]:
                parts.entries[entry.name] = entry
                parts.data[entry.name] = memoryview(bytearray(memoryview(data)[entry.start : entry.end]))
                del shards[entry.name]
            for ranks in [ranks for ranks in groups if ranks in taken[1] and rank in ranks]:
                parts.values[ranks] = taken[1][ranks]
                groups.remove(ranks)
        return None if shards or groups else parts


def encode_numbers(values: Mapping[Group, Mapping[str, Any]]) -> bytes:
    """Numbers by group, as they lie in a file."""
    spelt = {",".join(map(str, ranks)): dict(tree) for ranks, tree in sorted(values.items())}
    return image_format.pad_values(value_codec.encode(spelt))


def _take(data: bytes, shards: Mapping[str, Shard], where: str) -> tuple[list[Entry], dict[Group, Mapping[str, Any]]]:
    """The slices and the numbers of a file whose bytes are proved. Raises CorruptError if a slice is another."""
    image = image_format.read_image(data, where)
    entries = [entry for entry in image.entries if entry.name in shards]
    for entry in entries:
        shard = shards[entry.name]
        is_it = (entry.dtype, entry.global_shape, entry.extent)
        if is_it != (shard.dtype, shard.global_shape, shard.extent):
            raise CorruptError(f"{entry.name} in it is another slice", where=where)
    if len(entries) != len(shards) or image.values is None:
        raise CorruptError("it lacks slices that its proof names", where=where)
    spelt = value_codec.decode(memoryview(data)[image.values.start : image.values.end], where=where)
    if not isinstance(spelt, dict) or not all(isinstance(tree, dict) for tree in spelt.values()):
        raise CorruptError("its numbers are not by groups of ranks", where=where)
    return entries, {_group(ranks, where): tree for ranks, tree in spelt.items()}


def _group(spelt: object, where: str) -> Group:
    try:
        return tuple(int(rank) for rank in str(spelt).split(","))
    except ValueError as error:
        pass_on(error)
        raise CorruptError(f"{spelt!r} is no group of ranks", where=where) from error


def nothing_whole(key: Sequence[int], told: Sequence[tuple[Sequence[str], Sequence[str]]]) -> HoldfastError:
    """Return why no state can be loaded.

    Args:
        key: the newest state there is anything of.
        told: by rank what it lacks of that state, and what is wrong with files.
    """
    without = [rank for rank, (lacking, faults) in enumerate(told) if lacking or faults]
    gone = list(dict.fromkeys(text for lacking, _ in told for text in lacking))
    faults = list(dict.fromkeys(text for _, problems in told for text in problems))
    what = (
        f"no step can be loaded on all ranks: of step {key[1]} of epoch {key[0]} ranks {without} find no good copy of "
        f"{some_of(gone, 4) or 'some slices'}"
    )
    if faults:
        return CorruptError(f"{what}; {'; '.join(faults[:4])}")
    return VersionNotFound(what, remedy="bring back the files of one of these ranks, or start anew elsewhere")
