"""The cells of the matrix: what goes wrong, where, with whom, and what has to hold all the same.

A cell is one job of two or three nodes that is hurt once. `where` is a place of `hurt.PLACES`, a system call, or one of
the places that `strikes` knows beside the keepers: the trainer, memory and files at rest, the socket. Groups are those of
the catalogue of faults: processes, memory, storage, network, nodes, hostile, lifecycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

PHASES = ("save", "seal", "replicate", "persist", "commit", "takeover", "retention", "idle", "restore")
GROUPS = ("processes", "memory", "storage", "network", "nodes", "hostile", "lifecycle")

_PHASE_OF = {
    "begin": "save", "copying": "save", "copied": "seal", "idle": "idle", "seal": "seal", "send": "replicate",
    "receive": "replicate", "wire": "replicate", "line": "replicate", "persist": "persist", "part": "persist",
    "write": "persist", "fsync": "persist", "rename": "persist", "storage": "persist", "commit": "commit",
    "link": "commit", "announce": "commit", "retire": "retention", "unlink": "retention", "takeover": "takeover",
    "obtain": "restore", "file": "restore", "manifest": "restore", "memory": "idle", "descriptors": "save",
    "node": "replicate", "socket": "save", "save": "save", "twins": "seal",
}  # fmt: skip
_TRAINERS = ("copying", "copied", "idle")


@dataclass(frozen=True, slots=True)
class Cell:
    """`what` is wrong at `where` with the keeper of `node`; or `what` happens to it at once.

    Attributes:
        node: of trainers, the rank.
        group: of GROUPS.
        finished: others finish what the hurt one should have written: it is durable while the fault lasts.
        caught_up: what waited for storage becomes durable once the fault is over, without a newer version.
        lost: the node is lost before the ranks come back, and nothing is durable meanwhile: what was called replicated is
            needed from the others.
    """

    what: str
    where: str
    node: int
    group: str
    finished: bool = False
    caught_up: bool = False
    lost: bool = False
    num_nodes: int = 2

    def __str__(self) -> str:
        return f"{self.what}@{self.where}-{self.node}"

    @property
    def phase(self) -> str:
        """Return the one of PHASES that the job is in when it is hurt."""
        return _PHASE_OF[self.where]

    @property
    def of_trainer(self) -> bool:
        """Return whether a trainer is struck, not a keeper."""
        return self.where in _TRAINERS


# Where a keeper is struck, and on which of two nodes: 0 coordinates and commits.
KEEPER_PLACES = [
    ("begin", 1), ("seal", 1), ("send", 1), ("receive", 1), ("persist", 1), ("part", 1), ("persist", 0), ("commit", 0),
    ("retire", 0), ("announce", 0),
]  # fmt: skip

_processes = [
    *(Cell(what, where, node, "processes") for what in ("kill", "stop") for where, node in KEEPER_PLACES),
    *(Cell(what, where, 1, "processes") for what in ("kill", "stop") for where in _TRAINERS),
    *(Cell(what, "takeover", 1, "processes", num_nodes=3) for what in ("kill", "stop")),
    Cell("kill", "takeover", 0, "processes", num_nodes=3),
    Cell("kill", "obtain", 1, "processes"),
    Cell("stop", "obtain", 0, "processes"),
]
_memory = [
    *(Cell("flip", "memory", node, "memory") for node in (0, 1)),
    Cell("flip", "persist", 1, "memory", finished=True),
    *(Cell("EMFILE", "descriptors", node, "memory") for node in (0, 1)),
]
_storage = [
    *(
        Cell(code, where, 1, "storage", finished=True)
        for code in ("ENOSPC", "EIO")
        for where in ("write", "fsync", "rename")
    ),
    Cell("EIO", "unlink", 0, "storage"),
    *(Cell("EIO", where, 0, "storage", caught_up=True) for where in ("link", "storage")),
    *(Cell("stall", where, 1, "storage", finished=True) for where in ("write", "fsync")),
    Cell("stall", "rename", 0, "storage"),
    Cell("stall", "link", 0, "storage", caught_up=True),
    *(Cell("slow", "storage", node, "storage") for node in (0, 1)),
    *(Cell("ENOENT", "storage", node, "storage", caught_up=True) for node in (0, 1)),
    *(Cell(what, "takeover", 1, "storage", num_nodes=3) for what in ("ENOSPC", "EIO", "stall")),
    *(Cell(what, "file", 0, "storage") for what in ("flip", "cut", "empty", "gone", "stale")),
    *(Cell(what, "manifest", 0, "storage") for what in ("flip", "cut", "gone")),
    *(Cell("refuses", where, 0, "storage") for where in ("file", "manifest")),
]
_network = [
    *(Cell(what, "wire", node, "network", lost=True) for what in ("flip", "cut") for node in (0, 1)),
    *(Cell("cut", "line", node, "network") for node in (0, 1)),
    Cell("stall", "send", 1, "network"),
]
_nodes = [
    *(Cell("lost", "node", node, "nodes") for node in (0, 1)),
    Cell("lost", "node", 2, "nodes", num_nodes=3),
    Cell("both", "node", 0, "nodes"),
]
_hostile = [Cell(what, "socket", 0, "hostile") for what in ("garbage", "flood", "forged", "stranger")]
_lifecycle = [
    Cell("skip", "save", 1, "lifecycle"),
    Cell("apart", "save", 1, "lifecycle"),
    Cell("differ", "twins", 1, "lifecycle"),
]

CELLS: dict[str, Cell] = {
    str(cell): cell for cell in (*_processes, *_memory, *_storage, *_network, *_nodes, *_hostile, *_lifecycle)
}


def chosen(patterns: tuple[str, ...] = (), *, phase: str = "", fault: str = "", group: str = "") -> list[Cell]:
    """The cells whose names match any of the patterns (all, if there is none), of this phase, fault and group."""
    return [
        cell
        for name, cell in CELLS.items()
        if (not patterns or any(fnmatchcase(name, pattern) for pattern in patterns))
        and phase in ("", cell.phase)
        and fault in ("", cell.what)
        and group in ("", cell.group)
    ]
