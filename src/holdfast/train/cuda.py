"""Copies from GPUs: pinned slots, one side stream per device, events instead of waits.

A copy into memory that the driver has not pinned blocks the host and runs at a third of the speed, so slots are
registered with the driver when they are mapped and unregistered when they are given up. A side stream first waits for
the work already queued on the current stream, so it sees the state as the program order has it at the call.

Called by `train.checkpointer`. Nothing here is reached when no tensor lives on a GPU.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from holdfast.tiers.memory import Slot

logger = logging.getLogger(__name__)

# Events with timing, before and behind a copy on its side stream.
Span: TypeAlias = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """Copies that are queued, all of them: `feed` and `stop` are those of `train.device_pace`.

    Attributes:
        events: recorded behind the last one on each device.
        spans: of what was queued in one call, per device.
    """

    events: tuple[tuple[torch.device, torch.cuda.Event], ...]
    spans: tuple[Span, ...] = ()

    def feed(self, expected_s: float | None) -> None:
        """Nothing is left to queue."""

    def stop(self) -> None:
        """Nothing is left to queue."""

    def hold_current_streams(self) -> None:
        """What is queued on the current streams from here on waits for the copies; the host does not."""
        for device, event in self.events:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Returns when the bytes are in host memory; releases the interpreter's lock."""
        for _, event in self.events:
            event.synchronize()


class SideStreams:
    """The side streams of the devices in use and the slots that are pinned for them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[int, int] = {}

    def pin(self, slot: Slot) -> None:
        """Registers a slot's payload with the driver; once per slot. Without it copies still work, but block."""
        address = _address(slot)
        if not slot.num_bytes or self._pinned.get(address) == slot.num_bytes:
            return
        self._unpin(address)
        code = _driver().cudaHostRegister(address, slot.num_bytes, 0)
        if int(code) != 0:
            logger.warning("the driver did not pin a slot of %d bytes (%s); copies block", slot.num_bytes, code)
            return
        self._pinned[address] = slot.num_bytes

    def queue(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> DeviceCopy:
        """Queues the copies behind everything that the current streams hold now."""
        by_device: dict[torch.device, list[int]] = {}
        for index, source in enumerate(sources):
            by_device.setdefault(source.device, []).append(index)
        events, spans = [], []
        for device, members in by_device.items():
            stream = self._stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), torch.no_grad():
                began = _recorded(stream)
                torch._foreach_copy_([targets[i] for i in members], [sources[i] for i in members], non_blocking=True)
                ended = _recorded(stream)
            for i in members:
                # The allocator must not hand a freed tensor's memory to others before the side stream has read it.
                sources[i].record_stream(stream)
            events.append((device, ended))
            spans.append((began, ended))
        return DeviceCopy(tuple(events), tuple(spans))

    def follow(self, sources: Sequence[torch.Tensor]) -> None:
        """What is queued here from now on, by whatever thread, comes behind all that the current streams hold now."""
        for device in {source.device for source in sources}:
            self._stream(device).wait_stream(torch.cuda.current_stream(device))

    def drain(self) -> None:
        """Returns when nothing that was queued here writes to a slot any more."""
        for stream in self._streams.values():
            stream.synchronize()

    def unpin(self) -> None:
        """Unpins all slots, once nothing is copied into them. MUST come before one is unmapped."""
        self.drain()
        for address in tuple(self._pinned):
            self._unpin(address)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _unpin(self, address: int) -> None:
        if self._pinned.pop(address, None) is not None:
            _driver().cudaHostUnregister(address)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's classes of CUDA lack types
    event.record(stream)
    return event


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _address(slot: Slot) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot.view)) if slot.num_bytes else 0
