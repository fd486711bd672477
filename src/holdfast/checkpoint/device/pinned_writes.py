"""Waits for what devices still write to host memory, before the host reads it.

`host.copy_(parameter, non_blocking=True)` returns before the bytes are there, and host memory has no stream that a later
read would come behind. Only pinned memory is written so: a copy to other host memory ends before its call returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from holdfast.checkpoint.device import accelerator


class LocalTensor(Protocol):
    """Lists what is asked of a tensor of the state: `checkpoint.entries.types.LiveTensor`."""

    @property
    def local(self) -> torch.Tensor:
        """Returns what this rank has of it."""

    @property
    def late(self) -> bool:
        """Return whether an optimizer owns it."""


class StateTensors(Protocol):
    """Lists what is asked of a state: `checkpoint.entries.types.Gathered`."""

    @property
    def tensors(self) -> Mapping[str, LocalTensor]:
        """Returns all of them, by name."""

    @property
    def storages(self) -> int:
        """Returns a number that rises when what optimizers own lies in other memory."""


class PinnedWrites:
    """Knows which states have pinned host memory. One for each reader; asks again when the state's memory changes."""

    def __init__(self) -> None:
        self._storages = -1
        self._owned_pinned = False

    def end(self, gathered: StateTensors, deadline_s: float) -> bool:
        """Waits at most so many seconds until devices have done what this thread queued, if the state has pinned memory.

        Returns whether all is written. A state without pinned memory is not waited for, nor is a process without a device.
        """
        device = accelerator.in_use()
        if device is None or not self._is_pinned(gathered):
            return True
        return accelerator.all_done(device.with_memory(), deadline_s)

    def _is_pinned(self, gathered: StateTensors) -> bool:
        if gathered.storages != self._storages:
            self._storages = gathered.storages
            self._owned_pinned = any(_is_pinned(live) for live in gathered.tensors.values() if live.late)
        # Other objects may give other tensors at every save.
        return self._owned_pinned or any(_is_pinned(live) for live in gathered.tensors.values() if not live.late)


def _is_pinned(live: LocalTensor) -> bool:
    return live.local.device.type == "cpu" and live.local.is_pinned()
