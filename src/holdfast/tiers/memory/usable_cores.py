"""Tells how many processor cores this process may use: its affinity, and the quota of its cgroups.

A container of a large machine sees all its cores, and is stopped for most of each period once its threads have used up its
quota (`cpu.max`, or `cpu.cfs_quota_us` of cgroup v1; Linux, Documentation/admin-guide/cgroup-v2.rst).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from holdfast.base.handler_errors import forgive
from holdfast.tiers.memory.control_groups import groups_above


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


def _quota(directory: Path) -> float:
    """Cores that a group may keep busy; 0 where it has no limit or says nothing that can be read."""
    with forgive(OSError, ValueError, ZeroDivisionError):
        if (both := directory / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(0.0, int(quota) / int(period))
    return 0.0
