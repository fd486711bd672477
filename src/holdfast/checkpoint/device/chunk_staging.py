"""Chunks on their way to devices: from memory that the driver knows, without waiting.

A slot of this process is registered (`checkpoint.capture.side_stream_copy`): its chunks are queued from where they lie. Other
memory of keepers no driver has registered, so a copy from there would wait for the device, piece by piece. Each thread that
fills copies such a chunk into a buffer of its own instead, proves it there, queues the pieces on a stream of its own, and goes
on with its other buffer. A buffer is used again when the device has passed the event behind its pieces; `close` waits for all.

A device that has no such memory for us is filled from an ordinary buffer, which blocks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import torch

from holdfast.base.errors import LevelNotReached
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.device.accelerator import device_of, devices_of, record

logger = logging.getLogger(__name__)

NUM_BUFFERS = 2
# A device that does not take a chunk for so long hangs; the restore fails, as it would with storage that is silent.
TAKE_S = 600.0


class Starts:
    """Events behind all that was queued for the tensors until now: nobody may fill them before. Made in the caller's thread."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.events = record(devices_of(tensors))


class Staging:
    """The buffers and streams of one thread.

    Args:
        num_bytes: of the largest chunk.
    """

    def __init__(self, starts: Starts, num_bytes: int) -> None:
        self._starts = starts
        self._num_bytes = num_bytes
        self._is_pinned = True
        self._streams: dict[torch.device, torch.Stream] = {}
        self._buffers: deque[tuple[torch.Tensor, tuple[torch.Event, ...]]] = deque()
        self._in_place: set[torch.device] = set()

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns a buffer of so many bytes that no device reads any more.

        Raises:
            LevelNotReached: a device took nothing for long.
        """
        if len(self._buffers) < NUM_BUFFERS:
            return self._new()[:num_bytes]
        buffer, events = self._buffers.popleft()
        _await(events)
        return buffer[:num_bytes]

    def send(self, buffer: torch.Tensor, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queues the copies from `buffer`, which `take` gave, to the targets."""
        devices = self._queue(targets, sources, is_pinned=self._is_pinned)
        events = tuple(device_of(device.type).record(self._streams[device]) for device in devices)
        whole = buffer.new_empty(0).set_(buffer.untyped_storage())
        self._buffers.append((whole, events))

    def send_in_place(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queues the copies from memory that the driver knows (`is_known`), which stays as it is until `close`."""
        self._in_place |= self._queue(targets, sources, is_pinned=True)

    def close(self) -> None:
        """Waits until the devices have all that was sent.

        Raises:
            LevelNotReached: a device took nothing for long.
        """
        _await(tuple(device_of(device.type).record(self._streams[device]) for device in self._in_place))
        while self._buffers:
            _await(self._buffers.popleft()[1])

    def _queue(self, targets: list[torch.Tensor], sources: list[torch.Tensor], *, is_pinned: bool) -> set[torch.device]:
        """Queues copies; returns the devices whose streams have them. Parts of host memory are copied when it returns."""
        by_device: dict[torch.device, list[int]] = {}
        for index, target in enumerate(targets):
            by_device.setdefault(target.device, []).append(index)
        with torch.inference_mode():  # what a script made in there may be written in there alone
            for index in by_device.pop(torch.device("cpu"), ()):
                targets[index].copy_(sources[index])
            for device, members in by_device.items():
                stream = self._stream(device)
                if not is_pinned:  # a copy that blocks has no limit: not before the device has come to it
                    _await((device_of(device.type).record(stream),))
                with stream:
                    for index in members:
                        targets[index].copy_(sources[index], non_blocking=is_pinned)
        return set(by_device)

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            stream = self._streams[device] = device_of(device.type).new_stream(device)
            stream.wait_event(self._starts.events[device])
        return self._streams[device]

    def _new(self) -> torch.Tensor:
        try:
            return torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as error:
            pass_on(error)
            logger.info("devices are filled from ordinary memory: %s", error)
            self._is_pinned = False
            return torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu")


def _await(events: tuple[torch.Event, ...]) -> None:
    if not accelerator.wait(events, TAKE_S):
        raise LevelNotReached("a device does not take what is restored to it")


def is_known(source: torch.Tensor) -> bool:
    """Return whether the driver knows this host memory, so that a copy from it is queued and nobody waits."""
    return source.is_pinned()


def placed(source: torch.Tensor, address: int, buffer: torch.Tensor) -> torch.Tensor:
    """Returns what `source` is of memory at `address`, seen in a buffer with the same bytes."""
    at = source.data_ptr() - address
    flat = buffer[at:] if at % source.element_size() == 0 else buffer[at:].clone()
    whole = flat[: len(flat) // source.element_size() * source.element_size()].view(source.dtype)
    return whole.as_strided(source.shape, source.stride(), whole.storage_offset())
