"""The process group backend `simccl`: collectives that run on the simulated device, carried by gloo.

`torch.distributed.init_process_group()` chooses it by itself for the simulated device, beside gloo for the CPU.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

BACKEND = "simccl"


def register(native: Any) -> None:
    """Make the backend known to torch.distributed for the devices of the native part."""
    if not dist.is_available() or hasattr(dist.Backend, BACKEND.upper()):
        return

    def make(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
        carrier = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        return native.wrap(carrier, store, timeout.total_seconds())

    dist.Backend.register_backend(BACKEND, make, devices=[native.name()])
