"""Says which cells find which planted bug, and what it breaks: the matrix on itself.

A bug counts as found if a cell reports one of its invariants broken, and the same cell reports none without it. What is
planted in keepers stands in faults_keeper.py; those below are planted in the ranks that come back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from holdfast.base.errors import StorageError
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Facts
from holdfast.testing.faults import rig
from holdfast.testing.faults.cells import CELLS
from holdfast.testing.faults.fault_drill import run_cell
from holdfast.tiers.format import image as image_format
from planted import faults_keeper
from planted.crash import always
from planted.path import tests_in_path

# How often each cell is tried: some bugs need two things to meet, which a busy machine keeps apart.
TRIES = 3


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug.

    Attributes:
        what: what it does, in a few words.
        invariants: at least one of these is reported broken.
        cells: in which it shows; the first that finds it is enough.
        kind: replication, takeover, commit, loading, retention or fencing.
    """

    kind: str
    what: str
    invariants: tuple[str, ...]
    cells: tuple[str, ...]


def hunt(name: str) -> tuple[str, tuple[str, str] | None]:
    """The first cell that finds the bug, and the violation; no cell and None if it is missed in all of its TRIES."""
    bug = BUGS[name]
    for cell in bug.cells * TRIES:
        with planted(name):
            outcome = run_cell(CELLS[cell])
        for violation in outcome.violations:
            if violation[0] in bug.invariants:
                return cell, violation
    return "", None


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Keepers that are started in the block have the bug, or the ranks of this process."""
    if name in faults_keeper.BUGS:
        with tests_in_path(), mock.patch.object(rig, "INJECT", ("planted.faults_inject", name)):
            yield
    else:
        owner, attribute, bug = _IN_RANKS[name]
        with mock.patch.object(owner, attribute, bug(getattr(owner, attribute))):
            yield


def _oldest_first(real: Any) -> Any:
    def choose(facts: Facts, **more: Any) -> Any:
        return real(facts, **{**more, "wanted": min(facts.stored, default=None)})

    return choose


_IN_RANKS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "oldest-first": (version_choice, "choose_version", _oldest_first),
    "own-slot-unchecked": (image_format, "verify", lambda _: always(None)),
    "refusal-is-damage": (StorageError, "condemns", lambda _: True),
}

BUGS: dict[str, Planted] = {
    "counted-before-it-is-here": Planted(
        "replication", "a replica counts before its bytes are here", ("S1",), ("kill@send-1",)
    ),
    "wire-unchecked": Planted("replication", "what comes from a peer is not proved", ("S1", "S5"), ("flip@wire-1",)),
    "safest-replica-overwritten": Planted(
        "replication", "a new replica goes over the newest one that counts", ("S1",), ("kill@send-1",)
    ),
    "no-replicas": Planted("replication", "nobody pulls replicas", ("V1",), ("EIO@link-0",)),
    "replicated-when-captured": Planted(
        "replication", "replicated is named when the version is captured", ("S1",), ("kill@send-1",)
    ),
    "nobody-takes-over": Planted("takeover", "nobody watches a representative", ("V1",), ("ENOSPC@write-1",)),
    "parts-differ-by-writer": Planted(
        "takeover", "a successor writes another part than the representative", ("S2", "S7", "V1"), ("stop@part-1",)
    ),
    "signs-for-ever": Planted("takeover", "who stalls still gives signs of work", ("V1",), ("stall@write-1",)),
    "pins-of-another-order": Planted(
        "takeover",
        "an order that ends frees slots that another one still writes from, and nothing written is proved",
        ("S2",),
        ("stall@takeover-1",),
    ),
    "written-unproved": Planted(
        "takeover", "what is written is not compared with its seal", ("S2",), ("flip@persist-1",)
    ),
    "durable-when-ordered": Planted("commit", "durable is named when the commit is ordered", ("S13",), ("EIO@link-0",)),
    "failed-commit-is-success": Planted("commit", "a commit that failed counts", ("S13",), ("EIO@link-0",)),
    "suspect-is-captured": Planted(
        "commit", "differing twins are told and not acted on", ("S16",), ("differ@twins-1",)
    ),
    "nothing-is-retried": Planted("commit", "what failed is not tried again", ("V1",), ("EIO@storage-0",)),
    "one-is-kept": Planted("retention", "only the newest version stays", ("S11",), ("lost@node-1",)),
    "unfinished-counts": Planted(
        "retention", "versions without a commit count as kept", ("S11", "S13"), ("EIO@link-0",)
    ),
    "inventory-of-one": Planted("loading", "only the own keeper is asked", ("S1",), ("lost@node-2",)),
    "own-slot-unchecked": Planted("loading", "what lies in the own slot is not proved", ("S5",), ("flip@memory-1",)),
    "oldest-first": Planted("loading", "the oldest version is taken", ("S1",), ("lost@node-1",)),
    "refusal-is-damage": Planted(
        "loading", "storage that refuses condemns its copy", ("S1",), ("refuses@file-0", "refuses@manifest-0")
    ),
    "past-assembles": Planted("fencing", "an older incarnation may come together", ("S7",), ("skip@save-1",)),
    "past-saves": Planted("fencing", "an older incarnation is given slots", ("S7",), ("skip@save-1",)),
    "past-is-served": Planted("fencing", "keepers of an older incarnation are served", ("S7",), ("skip@save-1",)),
    "everybody-may-say-everything": Planted("fencing", "roles mean nothing", ("S18",), ("forged@socket-0",)),
}
