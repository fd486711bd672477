"""Tells how many processor cores this process may use: its affinity, and the quota of its cgroups.

A container of a large machine sees all its cores, and is stopped for most of each period once its threads have used up its
quota (`cpu.max`, or `cpu.cfs_quota_us` of cgroup v1; Linux, Documentation/admin-guide/cgroup-v2.rst).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may keep busy; a part of a core counts as one.

    Args:
        proc: where the kernel tells of processes.
        cgroup: where the control groups are mounted.
    """
    num_cores = len(os.sched_getaffinity(0))
    groups = groups_above("cpu", proc=proc, cgroup=cgroup)
    quotas = [_quota(directory) for _, directories in groups for directory in directories]
    return max(1, min([num_cores, *(math.ceil(quota) for quota in quotas if quota > 0)]))


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
            yield path, [own, *(above for above in own.parents if above.is_relative_to(base))]


def _quota(directory: Path) -> float:
    """Cores that a group may keep busy; 0 where it has no limit or says nothing that can be read."""
    try:
        if (both := directory / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(0.0, int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0
