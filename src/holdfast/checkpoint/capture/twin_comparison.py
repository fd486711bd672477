"""Spots of what ranks of one node share, so that no version is made of rows of two ranks that differ.

Ranks of one node that should hold the same tensors (DDP, HSDP) divide the copy of them, and nobody holds the whole twice to
compare. So every rank folds some elements of each shared tensor at the call of every save into a word, sends the words
with the version, and the keeper compares them (`core.versions.twin_vote`). Which elements these are follows from the name and the
step, so that all ranks look at the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import xxhash

from holdfast.checkpoint.capture.spot_check import MemoryMoved, Spots, Words, has_spots
from holdfast.checkpoint.entries.types import LiveTensor


class Shared:
    """The tensors in host memory that this rank shares with some others.

    Args:
        others: the ranks that the copy is divided with.

    Attributes:
        names: `GROUP/TENSOR` of each, in the order of their words, after `look_at`; GROUP is a digest of the ranks that hold
            this shard.
    """

    def __init__(self, others: Iterable[int]) -> None:
        self._others = frozenset(others)
        self._key: object = None
        self._spots = Spots((), ())
        self._addresses: list[int] = []
        self.names: tuple[str, ...] = ()
        self._tensors: tuple[str, ...] = ()
        self._groups: dict[str, list[int]] = {}  # which of the names belong to one group of ranks

    def look_at(self, key: object, tensors: Mapping[str, LiveTensor]) -> None:
        """These are the tensors of the state; `key` changes whenever their names, groups or memory do.

        Tensors that no optimizer owns may be others at every save; then the addresses are worked out anew.
        """
        if not self._others or (key == self._key and self._now(tensors) == self._addresses):
            return
        self._key = key
        names = sorted(
            name
            for name, live in tensors.items()
            if not self._others.isdisjoint(live.shard.ranks) and has_spots(live.local)
        )
        self._tensors = tuple(names)
        self._addresses = self._now(tensors)
        self._spots = Spots([tensors[name].local for name in names], names)
        self._groups = {}
        digests: dict[tuple[int, ...], str] = {}
        keys = []
        for number, name in enumerate(names):
            ranks = tuple(tensors[name].shard.ranks)
            group = digests.get(ranks) or xxhash.xxh3_64_hexdigest(",".join(map(str, ranks)).encode())
            digests[ranks] = group
            self._groups.setdefault(group, []).append(number)
            keys.append(f"{group}/{name}")
        self.names = tuple(keys)

    def _now(self, tensors: Mapping[str, LiveTensor]) -> list[int]:
        """Return where the tensors of the names are."""
        return [tensors[name].local.data_ptr() for name in self._tensors]

    def _read(self, step: int) -> Words:
        try:
            return self._spots.folded(self._spots.read(step))
        except MemoryMoved:  # the next save works the addresses out anew, whatever they are then
            self._key = None
            raise

    def words(self, step: int) -> bytes:
        """Returns 8 bytes for each name, which follow from the tensors' elements now."""
        if not self.names:
            return b""
        return self._read(step).astype("<u8").tobytes()

    def digests(self, step: int) -> dict[str, str]:
        """Returns the same by group of ranks, one digest each, for who cannot send every word."""
        if not self.names:
            return {}
        words = self._read(step)
        return {group: xxhash.xxh3_64_hexdigest(words[numbers].tobytes()) for group, numbers in self._groups.items()}
