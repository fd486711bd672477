"""Copies into host memory that no driver knows: through buffers that torch pins for the device, or in the call.

A copy straight into such memory makes the host wait in the driver: longer than any bound of ours if the device hangs, and
deaf to signals. So the device copies into a buffer that it can reach, the host waits for its event, with a limit, and
carries the bytes on, and puts them in order, while the device fills the other buffer. A device that pins no memory at all is waited for until it
has come to the copy, with the same limit; the copy itself then blocks.

What may be written late is only ever a buffer of ours, so a target may be given away as soon as the call has ended. Used
by `checkpoint.capture.side_stream_copy`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from holdfast.base.errors import LevelNotReached
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.device.accelerator import device_of
from holdfast.checkpoint.liveness import open_checkpointers

logger = logging.getLogger(__name__)

NUM_BUFFERS = 2
BUFFER_BYTES = 64 << 20
# Where a tensor begins in a buffer: for every dtype.
ALIGNMENT = 16
POLL_S = 1e-3


@dataclass(slots=True)
class _Buffer:
    """Memory that a device reaches; free once it has passed the event.

    Attributes:
        rows: what goes on from here: the target, and its bytes in the buffer.
        passed: behind the copies into it; None: nothing is queued.
    """

    memory: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor]]
    passed: torch.Event | None = None


class BounceBuffers:
    """The buffers of one device.

    Args:
        behind_s: how long the device may take to come to a copy; one that takes longer hangs.
    """

    def __init__(self, device: torch.device, *, behind_s: float, num_bytes: int = BUFFER_BYTES) -> None:
        self._device = device
        self._behind_s = behind_s
        self._num_bytes = num_bytes
        self._can_pin = True
        self._buffers: deque[_Buffer] = deque()

    def copy(self, stream: torch.Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies (target in host memory, source on the device) in order of `stream`; the bytes are there when it returns.

        Raises:
            LevelNotReached: the job broke off, or the device hangs or failed. Nothing is written to a target any more.
        """
        if not pairs:
            return
        if not self._pin():
            # It blocks in the driver: not before the device is known to have come so far.
            self._await(device_of(self._device.type).record(stream))
            torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])
            return
        try:
            with torch.no_grad():
                self._through(stream, [cut for to, of in pairs for cut in copy_plan.cut(to, of, self._num_bytes)])
        finally:
            for buffer in self._buffers:  # their targets may belong to somebody else by now
                buffer.rows.clear()

    def _through(self, stream: torch.Stream, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        at, buffer = 0, self._next()
        for target, source in pieces:
            if at + source.nbytes > self._num_bytes:
                buffer.passed = device_of(self._device.type).record(stream)
                at, buffer = 0, self._next()
            part = buffer.memory[at : at + source.nbytes].view(source.dtype).view(source.shape)
            part.copy_(_bare(source), non_blocking=True)
            buffer.rows.append((target, _as(source, part)))
            at += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        buffer.passed = device_of(self._device.type).record(stream)
        for _ in range(NUM_BUFFERS):
            self._next()

    def _next(self) -> _Buffer:
        """The buffer that was filled first, emptied into its targets; it is filled next."""
        buffer = self._buffers[0]
        if buffer.passed is not None:
            self._await(buffer.passed)
            buffer.passed = None
            for target, part in buffer.rows:
                target.copy_(part)
            buffer.rows.clear()
        self._buffers.rotate(-1)
        return buffer

    def _await(self, event: torch.Event) -> None:
        until = time.monotonic() + self._behind_s
        try:
            while not event.query():
                if open_checkpointers.broken.reason or time.monotonic() >= until:
                    raise LevelNotReached(
                        open_checkpointers.broken.reason or f"{self._device} does not come to the copy"
                    )
                time.sleep(POLL_S)
        except RuntimeError as error:
            pass_on(error)
            raise LevelNotReached(f"{self._device} failed before it had copied: {error}") from error

    def _pin(self) -> bool:
        """Return whether there are buffers that the device reaches; made once."""
        try:
            while self._can_pin and len(self._buffers) < NUM_BUFFERS:
                memory = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
                self._can_pin = memory.is_pinned()
                self._buffers.append(_Buffer(memory, []))
        except RuntimeError as error:
            pass_on(error)
            logger.info("%s pins no memory of the host: %s", self._device, error)
            self._can_pin = False
        return self._can_pin


def _bare(source: torch.Tensor) -> torch.Tensor:
    """The elements as they lie in memory: torch works conjugates and negatives out before a late copy has come."""
    plain = source.conj() if source.is_conj() else source
    return torch._neg_view(plain) if plain.is_neg() else plain


def _as(source: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns `part`, seen as `source` sees what lies in memory: worked out when the host reads it."""
    part = torch._neg_view(part) if source.is_neg() else part
    return part.conj() if source.is_conj() else part
