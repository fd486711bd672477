"""Copies from accelerators: registered slots, one side stream per device, events instead of waits.

A copy into memory that the driver does not know makes the host wait and runs at a third of the speed, so slots are
registered when they are mapped, and let go of before they are unmapped. What no driver registers is copied in the call
(`checkpoint.capture.bounce_buffers`). A side stream first waits for the work already
queued on the current stream, so it sees the state as the program order has it at the call.

What is read is held until the device has passed the copy, so no allocator gives its memory to others before. Nothing here
waits for a device without an end: who waits looks at events, and may be told to stop. After that, memory that a device
may still write to is neither unregistered nor given away (`drain`).

Nothing here is reached when no tensor lives on a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TypeAlias

import torch

from holdfast.base.errors import LevelNotReached
from holdfast.base.handler_errors import forgive, pass_on
from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.capture.block_copies import BLOCK_BYTES, BlockCopies, is_plain, send_in_order
from holdfast.checkpoint.capture.bounce_buffers import BounceBuffers
from holdfast.checkpoint.capture.one_at_a_time import OneAtATime
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.device.accelerator import device_of
from holdfast.checkpoint.device.device_spots import ROOM_BYTES, Turn
from holdfast.tiers.memory.slots import Slot

logger = logging.getLogger(__name__)

# Events with times, before and behind a copy on its side stream.
Span: TypeAlias = tuple[torch.Event, torch.Event]
# Targets in host memory, each with its source on a device.
Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]

_device, _num_bytes = attrgetter("device"), attrgetter("nbytes")
# How far a device may be behind its host, by default.
BEHIND_S = 600.0
# How often events are looked at that the copying thread waits for: at first, and at most.
FIRST_POLL_S, MOST_POLL_S = 5e-4, 5e-3


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """Copies that are queued, all of them: `feed` and `stop` are those of `checkpoint.capture.paced_copy`.

    Attributes:
        spans: events before and behind what was queued in one call, per device.
        sources: what is read; held as long as this lives.
    """

    spans: tuple[Span, ...] = ()
    sources: tuple[torch.Tensor, ...] = ()
    num_bytes: int = 0

    def __add__(self, other: DeviceCopy) -> DeviceCopy:
        return DeviceCopy(self.spans + other.spans, self.sources + other.sources, self.num_bytes + other.num_bytes)

    def feed(self, expected_s: float | None) -> None:
        """Nothing is left to queue."""

    def stop(self) -> None:
        """Nothing is left to queue."""

    def hold_current_streams(self) -> None:
        """Let what is queued on the current streams from here on wait for the copies; the host does not."""
        for _, ended in self.spans:
            device_of(ended.device.type).current_stream(ended.device).wait_event(ended)

    def begun(self) -> bool:
        """Returns whether the devices have come as far as the copies. Does not wait."""
        return all(accelerator.passed(began) for began, _ in self.spans)

    def passed(self) -> bool:
        """Returns whether the bytes are in host memory. Does not wait."""
        return all(accelerator.passed(ended) for _, ended in self.spans)

    def wait(self, stopped: Callable[[], bool]) -> bool:
        """Returns True when the bytes are in host memory, False as soon as `stopped` says so.

        Raises:
            LevelNotReached: a device failed.
        """
        pause_s = FIRST_POLL_S
        while not self._queried():
            if stopped():
                return False
            time.sleep(pause_s)
            pause_s = min(MOST_POLL_S, 1.5 * pause_s)
        return True

    def seconds(self) -> float:
        """Returns how long the devices copied, once all have passed: the longest of them."""
        by_device: dict[torch.device, float] = {}
        for began, ended in self.spans:
            spent = began.elapsed_time(ended) / 1e3
            by_device[ended.device] = by_device.get(ended.device, 0.0) + spent
        return max(by_device.values(), default=0.0)

    def _queried(self) -> bool:
        try:
            return all(ended.query() for _, ended in self.spans)
        except RuntimeError as error:
            pass_on(error)
            raise LevelNotReached(f"a device failed before it had copied: {error}") from error


@dataclass(eq=False, slots=True)
class _Writing:
    """Copies that may still be written to a slot: known before anything is queued, for an interruption may come at any line.

    Attributes:
        sources: what is read, if nobody else holds it.
        queueing: more may be queued.
        ended: behind all of it; None: not recorded yet.
    """

    stream: torch.Stream
    sources: tuple[torch.Tensor, ...]
    queueing: bool = True
    ended: torch.Event | None = None

    def passed(self) -> bool:
        """Return whether the device has done all of it. A device that failed never has. Does not wait."""
        with forgive(RuntimeError):
            if self.ended is None and self.queueing:
                return False
            if self.ended is None:  # interrupted
                self.ended = device_of(self.stream.device.type).record(self.stream)
            return self.ended.query()
        return False


class SideStreams:
    """The side streams of the devices in use and the slots that are registered for them.

    Args:
        behind_s: how far a device may be behind its host where a copy cannot be queued and the host waits for it.
    """

    def __init__(self, *, behind_s: float = BEHIND_S) -> None:
        self._behind_s = behind_s
        self._bounces: dict[torch.device, BounceBuffers] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._full: set[torch.device] = set()
        self._turns = OneAtATime()
        self._block_memory: dict[torch.device, torch.Tensor | None] = {}
        self._spot_memory: dict[torch.device, torch.Tensor | None] = {}
        self._registered: dict[int, tuple[int, torch.device]] = {}
        self._unfinished: deque[_Writing] = deque()

    def pin(self, slot: Slot, device: torch.device) -> None:
        """Makes a slot's payload known to the driver of a device; once per slot. Without it copies work, in the call."""
        address = _address(slot)
        known = self._registered.get(address)
        if not slot.num_bytes or (known is not None and known[0] == slot.num_bytes):
            return
        self._unpin(address)
        if device_of(device.type).register(device, address, slot.num_bytes):
            self._registered[address] = slot.num_bytes, device
        else:
            logger.warning(
                "%s does not register a slot of %d bytes; saves wait for their copies", device, slot.num_bytes
            )

    def is_late(self, target: torch.Tensor) -> bool:
        """Return whether a copy there may be queued: memory that the driver does not know is written before the call
        returns.
        """
        at = target.data_ptr()
        known = any(address <= at < address + length for address, (length, _) in self._registered.items())
        return known or target.is_pinned()

    def look(self, spots: Turn, target: torch.Tensor) -> Pairs | None:
        """Queues on the current streams what brings spots together, in memory of their devices.

        Args:
            spots: which.
            target: where they go, as bytes.

        Returns:
            what is still to be copied there, for `queue`; None: a device has no memory left for it, or cannot.
        """
        pairs = []
        targets = torch.split(target, list(spots.sizes.values())) if len(spots.sizes) > 1 else (target,)
        for (device, views), place in zip(spots.views.items(), targets, strict=True):
            memory = self._memory_for_spots(device)
            if memory is None:
                return None
            together = spots.together.get(device)
            if together is None:
                together = spots.together[device] = memory[: spots.sizes[device]]
            try:
                with torch.no_grad():
                    torch.cat(views, out=together)
            except RuntimeError as error:  # if the device failed, what is queued next tells
                pass_on(error)
                logger.warning("%s does not bring elements together, and waits for its copies: %s", device, error)
                self._spot_memory[device] = None
                return None
            pairs.append((place, together))
        return pairs

    def queue(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        blocks: dict[torch.device, BlockCopies] | None = None,
    ) -> DeviceCopy:
        """Queues the copies behind everything that the current streams hold now. Into memory that no driver knows they are
        made before it returns (`checkpoint.capture.bounce_buffers`).

        Args:
            targets: in host memory, in a slot.
            sources: on devices, of the same shapes.
            blocks: what was planned for these very targets before, by device; kept here. None: each goes alone.

        Raises:
            LevelNotReached: those, and a device hangs or failed, or the job broke off. Or this thread queues already: it
                was interrupted, and memory of the device is half filled.
        """
        # What is filled, on the device and in pinned memory, is one thread's until it is sent.
        return self._turns.run(partial(self._queue, targets, sources, blocks))

    def _queue(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        blocks: dict[torch.device, BlockCopies] | None,
    ) -> DeviceCopy:
        devices = list(map(_device, sources))
        by_device = {device: [i for i, other in enumerate(devices) if other == device] for device in set(devices)}
        spans, all_of_it = [], []
        held = tuple(sources)
        for device, members in by_device.items():
            interface, stream = device_of(device.type), self._stream(device)
            stream.wait_stream(interface.current_stream(device))
            writing = _Writing(stream, held)
            try:
                self._unfinished.append(writing)
                with stream, torch.no_grad():
                    began = interface.record(stream)
                    todo, is_queued = members, self.is_late(targets[members[0]])
                    if is_queued and blocks is not None and len(by_device) == 1:
                        if device not in blocks:
                            blocks[device] = BlockCopies(targets, partial(self._memory, device))
                        blocks[device].queue(sources)
                        todo = blocks[device].others
                    pairs = [(targets[i], sources[i]) for i in todo]
                    left = self._left(device, pairs) if is_queued else pairs
                    self._bounce(device).copy(stream, [copy_plan.as_in_memory(to, of) for to, of in left])
                    writing.ended = ended = interface.record(stream)
            finally:
                writing.queueing = False
            spans.append((began, ended))
            all_of_it.append(writing)
        copy = DeviceCopy(tuple(spans), held, sum(map(_num_bytes, targets)))
        for writing in all_of_it:
            writing.sources = ()
        for writing in tuple(self._unfinished):  # the copying thread may be here as well
            if not writing.passed():
                break
            with contextlib.suppress(ValueError):
                self._unfinished.remove(writing)
        return copy

    def follow(self, sources: Sequence[torch.Tensor]) -> None:
        """Queue what comes here from now on, by whatever thread, behind all that the current streams hold now."""
        for device in {source.device for source in sources}:
            self._stream(device).wait_stream(device_of(device.type).current_stream(device))

    def drain(self, timeout_s: float) -> bool:
        """Returns whether nothing that was queued here writes to a slot any more, after so many seconds at most."""
        until = time.monotonic() + timeout_s
        while not all(writing.passed() for writing in tuple(self._unfinished)):
            if time.monotonic() >= until:
                return False
            time.sleep(accelerator.POLL_S)
        return True

    def unpin(self, timeout_s: float) -> bool:
        """Lets go of all slots, once nothing is copied into them; returns whether that was so within so many seconds.

        MUST be True before a slot is unmapped, or given to somebody else.
        """
        if not self.drain(timeout_s):
            return False
        for address in tuple(self._registered):
            self._unpin(address)
        return True

    def _left(self, device: torch.device, pairs: Pairs) -> Pairs:
        """Queues the copies; returns those that the host has to put in order, for a device that is full."""
        plain = [pair for pair in pairs if is_plain(pair[1])]
        if plain:
            torch._foreach_copy_([to for to, _ in plain], [of for _, of in plain], non_blocking=True)
        if len(plain) == len(pairs):
            return ()
        turned = [pair for pair in pairs if not is_plain(pair[1])]
        memory = self._memory(device)
        if memory is None:
            say = logger.info if device in self._full else logger.warning
            say("%s has no memory left to put tensors in order; the host does, and saves wait for their copies", device)
            self._full.add(device)
            return turned
        send_in_order([cut for to, of in turned for cut in copy_plan.cut(to, of, memory.nbytes)], memory)
        return ()

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:  # what fills a block is short, and the step's kernels fill the device
            self._streams[device] = device_of(device.type).new_stream(device, priority=-1)
        return self._streams[device]

    def _memory(self, device: torch.device) -> torch.Tensor | None:
        """The memory of a device for blocks and for what is put in order, asked for once; None: it has none left. Only its side stream may use it."""
        if device not in self._block_memory:
            self._block_memory[device] = None
            with contextlib.suppress(torch.OutOfMemoryError):
                self._block_memory[device] = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device)
        return self._block_memory[device]

    def _memory_for_spots(self, device: torch.device) -> torch.Tensor | None:
        """The memory of a device for spots; None: it has none left. It stays: what fills it may lie on any stream, and comes before
        the side stream's copy of it, behind which no other one is read.
        """
        if device not in self._spot_memory:
            self._spot_memory[device] = None
            try:
                self._spot_memory[device] = torch.empty(ROOM_BYTES, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                logger.warning("%s has no memory left for %d bytes, and waits for its copies", device, ROOM_BYTES)
        return self._spot_memory[device]

    def _bounce(self, device: torch.device) -> BounceBuffers:
        if device not in self._bounces:
            self._bounces[device] = BounceBuffers(device, behind_s=self._behind_s)
        return self._bounces[device]

    def _unpin(self, address: int) -> None:
        known = self._registered.pop(address, None)
        if known is not None:
            device_of(known[1].type).unregister(known[1], address)


def _address(slot: Slot) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot.view)) if slot.num_bytes else 0
