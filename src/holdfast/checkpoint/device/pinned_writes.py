"""Waits for what devices still write to host memory, before the host reads it.

`host.copy_(parameter, non_blocking=True)` returns before the bytes are there, and host memory has no stream that a later
read would come behind. Only pinned memory is written so: a copy to other host memory ends before its call returns.
"""

from __future__ import annotations

import torch

from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.entries.types import Gathered, LiveTensor


class PinnedWrites:
    """Knows which states have pinned host memory. One for each reader; asks again when the state's memory changes."""

    def __init__(self) -> None:
        self._storages = -1
        self._owned_pinned = False

    def end(self, gathered: Gathered, deadline_s: float) -> bool:
        """Waits at most so many seconds until devices have done what this thread queued, if the state has pinned memory.

        Returns whether all is written. A state without pinned memory is not waited for, nor is a process without a device.
        """
        device = accelerator.in_use()
        if device is None or not self._is_pinned(gathered):
            return True
        try:
            events = tuple(device.record(device.current_stream(used)) for used in device.used())
        except RuntimeError:  # a device in error
            return False
        return accelerator.wait(events, deadline_s)

    def _is_pinned(self, gathered: Gathered) -> bool:
        if gathered.storages != self._storages:
            self._storages = gathered.storages
            self._owned_pinned = any(_is_pinned(live) for live in gathered.tensors.values() if live.late)
        # Other objects may give other tensors at every save.
        return self._owned_pinned or any(_is_pinned(live) for live in gathered.tensors.values() if not live.late)


def _is_pinned(live: LiveTensor) -> bool:
    tensor: torch.Tensor = live.local
    return tensor.device.type == "cpu" and tensor.is_pinned()
