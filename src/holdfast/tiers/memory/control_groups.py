"""Finds the control groups of this process, which limit its cores and its memory: of cgroup version 2 or 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def groups_above(controller: str, *, proc: Path, cgroup: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yields each group of this process that may limit it: its name, and its directory and those of all groups above it.

    Args:
        controller: hierarchies of cgroup v1 count if they have it; version 2 has one hierarchy for all.
        proc: where the kernel tells of processes.
        cgroup: where the control groups are mounted.
    """
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = cgroup / controller if controllers else cgroup
            own = base / path.strip("/")
            yield path, [own, *(above for above in own.parents if base in (above, *above.parents))]
