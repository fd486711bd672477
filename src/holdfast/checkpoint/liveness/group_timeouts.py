"""The time limits that a script gives its process groups, seen where torch makes a group.

A script that gives none gets torch's own object, so a limit of the same length that the script names is told apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from holdfast.base.handler_errors import pass_on

_TORCHS_OWN = (c10d.default_pg_timeout, getattr(c10d, "default_pg_nccl_timeout", None))


def watch(granted: Callable[[float], None]) -> None:
    """Call `granted` with the seconds of each limit that the script names, whenever it makes a group. Once per process."""
    make: Any = getattr(c10d, "_new_process_group_helper", None)
    if make is None:
        return  # this torch makes groups elsewhere: what careful mode does without a limit holds

    @functools.wraps(make)
    def noting(*args: Any, **kwargs: Any) -> Any:
        limit = kwargs.get("timeout")
        if isinstance(limit, timedelta) and not any(limit is own for own in _TORCHS_OWN):
            granted(limit.total_seconds())
        return make(*args, **kwargs)

    c10d._new_process_group_helper = noting


def default_group() -> dict[str, Any] | None:
    """Return the arguments of `init_process_group` that make the default group again as it is; None if there is none."""
    if not c10d.is_initialized():
        return None
    backend = c10d.get_backend_config()
    limit = limit_of(c10d.group.WORLD)
    if limit is None or limit == c10d._get_default_timeout(c10d.Backend(backend)):
        return {"backend": backend}
    return {"backend": backend, "timeout": limit}


def limit_of(group: Any) -> timedelta | None:
    """Return the time limit of a group, as its backends tell it."""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
    except (AttributeError, RuntimeError) as error:
        pass_on(error)
        return None  # this torch, or a backend that is made later, does not tell
    options: list[Any] = [
        getattr(backend, "options", None) for backend in backends
    ]  # those of other packages may have none
    return max((each._timeout for each in options if hasattr(each, "_timeout")), default=None)
