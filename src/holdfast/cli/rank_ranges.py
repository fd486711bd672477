"""Ranks as a person reads them: runs of numbers, and a picture of small meshes."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from holdfast.base.terminal import some_of
from holdfast.cli import console
from holdfast.core.model import Topology
from holdfast.core.rank_runs import runs_of

# What is larger than this is told in numbers.
MAX_RANKS = 64
MAX_RUNS = 4
MAX_NAMES = 4


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-7`, `0,4`, `0-28 step 4`; the first few runs of more."""
    found = runs_of(ranks)
    shown = ",".join(_run_text(*run) for run in found[:MAX_RUNS])
    return shown if len(found) <= MAX_RUNS else f"{shown},... ({len(ranks)})"


def _run_text(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    if last == first + step and step > 1:
        return f"{first},{last}"
    return f"{first}-{last}" if step == 1 else f"{first}-{last} step {step}"


def nodes_text(nodes: Sequence[int], labels: Sequence[str]) -> str:
    """The label of one node; of several their labels too, or their numbers if the labels are nothing but these."""
    if len(nodes) > 1 and all(labels[node] == f"node{node}" for node in nodes):
        return ranks_text(nodes)
    return names_text([labels[node] for node in nodes])


def count_text(count: int, what: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {what}{'s' * (count != 1)}"


def names_text(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return some_of(names, MAX_NAMES)


def stand_ins(twins: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Per different list of interchangeable ranks: for which ranks it holds, and the list."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, together in enumerate(twins):
        found.setdefault(together, []).append(rank)
    return [(tuple(ranks), together) for together, ranks in found.items()]


def stand_ins_document(twins: Sequence[tuple[int, ...]]) -> list[dict[str, object]]:
    """The same for `--json`."""
    return [{"for": ranks, "ranks": together} for ranks, together in stand_ins(twins)]


def print_stand_ins(twins: Sequence[tuple[int, ...]], topology: Topology | None) -> None:
    """Print who can stand in for whom: a picture of a small job, a few lines of a large one."""
    classes = stand_ins(twins)
    console.say()
    if len(twins) <= MAX_RANKS and len(classes) <= len(string.ascii_letters):
        console.say("ranks with the same letter are interchangeable:")
        letters = {
            rank: letter for (ranks, _), letter in zip(classes, string.ascii_letters, strict=False) for rank in ranks
        }
        for line in _drawn(letters, topology):
            console.say(f"  {line}")
        if all(len(together) == 1 for _, together in classes):
            console.say("  none is: no rank holds all that another one holds")
        classes = [(ranks, together) for ranks, together in classes if ranks != together]
    elif all(len(together) == 1 for _, together in classes):
        console.say("no rank holds all that another one holds")
        return
    for ranks, together in classes[:MAX_NAMES]:
        console.say(f"  all that rank {ranks_text(ranks)} holds is held by {ranks_text(together)}")
    if len(classes) > MAX_NAMES:
        console.say(f"  ... and {len(classes) - MAX_NAMES} more such lists; --json shows all")


def _drawn(letters: dict[int, str], topology: Topology | None) -> Iterator[str]:
    """A row per node, a cell per rank."""
    rows = [list(letters)] if topology is None else [topology.ranks_on(node) for node in range(len(topology.nodes))]
    labels = [] if topology is None else list(topology.nodes)
    width = len(str(len(letters)))
    for label, row in zip_longest(labels, rows, fillvalue=""):
        cells = "  ".join(f"{rank:>{width}}{letters[int(rank)]}" for rank in row)
        yield f"{label}  {cells}" if label else cells
