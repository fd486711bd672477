"""A look at the newest version before there is anything to fill: for frameworks that must know the step first.

The job comes together, tells what the newest usable version is and what plain values it holds, from memory or storage, and
leaves again; the Checkpointer that is built later names just that version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from holdfast.adapters.dcp.dcp_job import DcpJob
from holdfast.adapters.dcp.sources import JobSource, values_of
from holdfast.base.config import Config
from holdfast.core.model import Version

T = TypeVar("T")


def newest(root: str, config: Config, read: Callable[[Mapping[str, Any], int], T]) -> tuple[Version, T] | None:
    """The newest usable version and what `read` finds in its values; None if there is no version. Collective.

    Args:
        root: directory or URL of the checkpoints.
        config: the settings.
        read: takes the values by name, and this rank.

    Raises:
        HoldfastError: versions exist, and none can be used.
    """
    job = DcpJob(root, config)
    try:
        source = JobSource(job)
        if source.choose(None, None) is None:
            return None
        values = values_of(source.catalogue())
        version = source.chosen
        return version, read(values, job.group.rank)
    finally:
        job.abandon()
