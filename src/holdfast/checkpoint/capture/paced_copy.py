"""Copies from an accelerator in the waits of a pipeline: queued wait by wait, behind the moment at which the device begins to wait.

On an accelerator the waits are the device's: the program that feeds it runs ahead and never stops in one. So nothing is held by a
gate. As the trainer queues a wait, it queues as many batches on the side stream as the wait should hold, behind all that
the current stream holds then; the device begins them where it begins to wait. What is left is queued at the fence, in
front of the step. A loop that comes to no fence for long is not waited for: the copying thread queues the rest itself.

The sources change at the optimizer's step only, which is queued behind the fence: whoever queues a copy, it reads the
state at the call. Made by `checkpoint.save.memory_saver`, fed by `checkpoint.capture.optimizer_fence`. Not reached when no tensor lives on a device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from holdfast.base.errors import LevelNotReached
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.capture.copy_plan import Batch
from holdfast.checkpoint.capture.side_stream_copy import DeviceCopy, Span
from holdfast.core.pipeline.bubble_placement import GUARD_SHARE

# A batch is one call for the host; it takes a device a millisecond.
BATCH_BYTES = 32 << 20


class Device(Protocol):
    """Queues copies; `SideStreams`."""

    def queue(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> DeviceCopy:
        """Queues the copies behind everything that the current streams hold now."""


class PacedCopy:
    """One version's late copies from the devices of a rank; what `DeviceCopy` is to the fence.

    Args:
        queued: copies of this version that are on the side streams already.
        batches: the rest, in order.
        rate: bytes per second that the devices copy.
        beside: how many of them fit into no wait and are queued now.
        patience_s: how long the copying thread waits for somebody to queue the rest.
        told: called in the trainer's thread with the spans of what was queued, its bytes, and whether it is in a wait.
    """

    def __init__(
        self,
        device: Device,
        queued: DeviceCopy,
        batches: Sequence[Batch],
        *,
        rate: float,
        beside: int,
        patience_s: float,
        told: Callable[[Sequence[Span], int, bool], None],
    ) -> None:
        self._device, self._rate, self._patience_s, self._told = device, rate, patience_s, told
        self._todo = deque(batches)
        self._stopped = False
        self._queued = [queued]
        self._lock = threading.RLock()
        self._is_queueing = False
        self._all = threading.Event()
        self._failed = ""
        for _ in range(beside):
            if self._todo:
                self._queue(self._todo.popleft(), inside=False)
        self._settle()

    def feed(self, expected_s: float | None) -> None:
        """The trainer queues a wait that should last so long; None: nobody knows, and one batch is risked."""
        with self._lock:
            if self._interrupts():
                return
            room = (expected_s or 0.0) * (1 - GUARD_SHARE)
            while self._todo and (expected_s is None or self._todo[0].num_bytes / self._rate <= room):
                room -= self._todo[0].num_bytes / self._rate
                self._queue(self._todo.popleft(), inside=True)
                if expected_s is None:
                    break
            self._settle()

    def hold_current_streams(self) -> None:
        """Queues the rest; what is queued on the current streams from here on waits for all of it."""
        self._rest(told=True)
        for copy in self._queued:
            copy.hold_current_streams()

    def begun(self) -> bool:
        """Returns whether all is queued, and the devices have come as far as the last of it."""
        return self._all.is_set() and self._queued[-1].begun()

    def passed(self) -> bool:
        """Returns whether all was queued and the bytes are in host memory. Does not wait."""
        return not self._stopped and self._all.is_set() and all(copy.passed() for copy in tuple(self._queued))

    def wait(self, stopped: Callable[[], bool]) -> bool:
        """Returns True when the bytes are in host memory, False as soon as `stopped` says so.

        Raises:
            LevelNotReached: a device failed.
        """
        if not self._all.wait(self._patience_s):
            self._rest(told=False)
        if self._failed:
            raise LevelNotReached(self._failed)
        return all(copy.wait(stopped) for copy in tuple(self._queued))

    def seconds(self) -> float:
        """Returns how long the devices copied."""
        return sum(copy.seconds() for copy in self._queued)

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._queued)

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        """Return what was queued of: as `DeviceCopy` has it."""
        return tuple(source for copy in tuple(self._queued) for source in copy.sources)

    def stop(self) -> None:
        """Queues nothing more: the version is given up."""
        with self._lock:
            self._stopped = self._stopped or bool(self._todo)
            self._todo.clear()
            self._settle()

    def _rest(self, *, told: bool) -> None:
        with self._lock:
            if self._interrupts():
                return
            while self._todo:
                self._queue(self._todo.popleft(), inside=False, told=told)
            self._settle()

    def _interrupts(self) -> bool:
        """Returns whether this thread queues a batch already: a signal's handler saves or steps. Gives the version up then."""
        if self._is_queueing:
            self._fail("a signal's handler came in between its copies")
            self._settle()
        return self._is_queueing

    def _fail(self, reason: str) -> None:
        self._failed = self._failed or reason
        self._stopped = True
        self._todo.clear()

    def _queue(self, batch: Batch, *, inside: bool, told: bool = True) -> None:
        self._is_queueing = True
        try:
            copy = self._device.queue(batch.targets, batch.sources)
        except (RuntimeError, LevelNotReached) as error:  # told by `wait`: here it would be raised into a step
            pass_on(error)
            self._fail(f"a device failed before it had copied: {error}")
            return
        finally:
            self._is_queueing = False
        self._queued.append(copy)
        if told:
            self._told(copy.spans, batch.num_bytes, inside)

    def _settle(self) -> None:
        if not self._todo:
            self._all.set()
