"""Twins that hold different bytes: which entry, and which of them is wrong.

Twins hold the same bytes by definition, so a difference is silent corruption, found for nothing. When the digests of a
bundle differ every holder digests each entry of its copy, and here they are compared. With three or more twins the
minority is wrong; with two nobody can say which.

Twins of one node divide the copy of what they share, so no two of them seal the same bytes. Some elements of every shared
tensor (spots, folded to a word of 8 bytes each) are compared instead, at every version. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.base.terminal import some_of
from holdfast.core.model import Version

# Entries of one bundle that are compared, and those of them that are named.
MAX_ENTRIES = 4096
MAX_NAMED = 3
WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Examined:
    """One rank's copy of a bundle whose twins differ: a digest per entry."""

    version: Version
    rank: int
    bundle_id: str
    entries: tuple[tuple[str, str], ...]


def verdict(exams: Mapping[int, Examined]) -> str:
    """Return which ranks differ in which entries; empty as long as too few were examined to say."""
    found: dict[str, list[str]] = {}
    digests = {rank: dict(exam.entries) for rank, exam in sorted(exams.items())}
    for name in sorted({name for entries in digests.values() for name in entries}):
        if said := _judge({rank: entries.get(name, "") for rank, entries in digests.items()}):
            found.setdefault(said, []).append(name)
    return "; ".join(f"{said} in {some_of(names, MAX_NAMED)}" for said, names in sorted(found.items()))


def words(names: Sequence[str], spots: bytes) -> dict[str, bytes]:
    """Returns the word of each tensor; nothing if there are not as many words as names.

    A name is `GROUP/TENSOR`, with a digest of the ranks that hold this shard: under HSDP, or FSDP with tensor parallelism,
    ranks of one node hold different shards of a tensor of one name, and only those of one group are compared.
    """
    if len(spots) != WORD_BYTES * len(names):
        return {}
    return {name: spots[WORD_BYTES * i : WORD_BYTES * (i + 1)] for i, name in enumerate(names)}


def differing(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> str:
    """Says in which tensors that both name two ranks differ; empty if they do not."""
    if one == other:
        return ""
    names = sorted(name.partition("/")[2] for name in one.keys() & other.keys() if one[name] != other[name])
    return f"hold different values of {some_of(names, MAX_NAMED)}, which they should share" if names else ""


def _judge(digest_of: Mapping[int, str]) -> str:
    """Return who differs from whom in one entry."""
    camps: dict[str, list[int]] = {}
    for rank, digest in digest_of.items():
        camps.setdefault(digest, []).append(rank)
    if len(camps) < 2:
        return ""
    largest, second = sorted(camps.values(), key=len, reverse=True)[:2]
    if len(largest) == len(second):
        return f"ranks {_listed(digest_of)} differ"
    wrong = sorted(rank for camp in camps.values() if camp is not largest for rank in camp)
    who = f"rank {wrong[0]} differs" if len(wrong) == 1 else f"ranks {_listed(wrong)} differ"
    return f"{who} from ranks {_listed(largest)}"


def _listed(ranks: Mapping[int, str] | list[int]) -> str:
    *most, last = map(str, sorted(ranks))
    return f"{', '.join(most)} and {last}" if most else last
