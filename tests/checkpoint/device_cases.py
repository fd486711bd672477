"""What is tried on the simulated device, each in a process of its own: `device_cases.py CASE[,CASE...] [BUG]`.

A case is a function that asserts. A bug is something of ours taken out before the case begins; the case must then fail.
Called by test_on_device.py, which tells which bug is found by which case. Ends without the interpreter's clean-up: a
device that hangs would hold it up.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.base.errors import DeviceError, LevelNotReached
from holdfast.base.events import Events
from holdfast.checkpoint.capture import (
    block_copies,
    bounce_buffers,
    copy_plan,
    late_copy_check,
    mutation_check,
    side_stream_copy,
)
from holdfast.checkpoint.capture.copy_plan import batches
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.checkpoint.capture.paced_copy import PacedCopy
from holdfast.checkpoint.capture.side_stream_copy import DeviceCopy, SideStreams
from holdfast.checkpoint.device import accelerator, chunk_staging, pinned_writes
from holdfast.checkpoint.device.device_spots import ROOM_BYTES, DeviceSpots
from holdfast.checkpoint.entries import carried_tensors, living_gradients
from holdfast.checkpoint.entries.gradients_part import GradientsPart
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.job.collectives import Alone, together
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.pipeline import timers
from holdfast.checkpoint.restore import tensor_fill
from holdfast.checkpoint.save import memory_saver
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors import step_snapshot, survivor_state
from holdfast.checkpoint.survivors.survivor_state import Survivor
from holdfast.core.model import Version
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.messages import NO_SLOT, Begin, Begun
from holdfast.testing import device as simulated
from holdfast.tiers.memory.slots import Slot
from holdfast.tiers.storage.read_limit import ReadLimit
from holdfast.tiers.storage.unread_chunks import UnreadChunks

MIB = 1 << 20
CASES: dict[str, Callable[[], None]] = {}
BUGS: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    """One of the cases, by its name."""
    CASES[function.__name__] = function
    return function


def bug(function: Callable[[], None]) -> Callable[[], None]:
    """One of the bugs, by its name."""
    BUGS[function.__name__] = function
    return function


def place(index: int = 0) -> torch.device:
    return torch.device(simulated.name(), index)


@contextmanager
def slot_of(num_bytes: int) -> Iterator[tuple[Slot, torch.Tensor]]:
    """A slot, and its memory as float32."""
    slot = Slot.create(num_bytes)
    memory = torch.frombuffer(slot.view, dtype=torch.float32)[: num_bytes // 4]
    yield slot, memory


def each_alone() -> None:
    """No small neighbours are set aside on the device, which takes them as they are at the call: a torn copy would be whole."""
    block_copies.FEWEST = 1 << 30


def never() -> bool:
    return False


# --- copies


@case
def a_copy_is_the_state_at_the_call_whatever_comes_behind_it() -> None:
    simulated.set_copy_rate(400 * MIB)
    streams, source = SideStreams(), torch.zeros(4 * MIB, device=place())
    with slot_of(source.nbytes) as (slot, target):
        streams.pin(slot, source.device)
        for value in range(4):
            source.fill_(value)
            copy = streams.queue([target], [source])
            copy.hold_current_streams()
            source.fill_(-1)  # the next optimizer step
            assert copy.wait(never)
            assert bool((target == value).all()), "torn"
        assert streams.unpin(20.0)


@bug
def streams_are_not_held() -> None:
    DeviceCopy.hold_current_streams = lambda _: None  # type: ignore[method-assign]


@bug
def the_side_stream_does_not_wait_for_what_is_queued() -> None:
    accelerator.Device.current_stream = lambda self, at: self.new_stream(at)  # type: ignore[method-assign]


@case
def work_before_the_call_is_in_the_copy() -> None:
    streams, source = SideStreams(), torch.zeros(MIB, device=place())
    with slot_of(source.nbytes) as (slot, target):
        streams.pin(slot, source.device)
        simulated.sleep(0.2)
        source.fill_(7)  # the step that is saved; the device has not come to it
        copy = streams.queue([target], [source])
        copy.hold_current_streams()
        assert copy.wait(never)
        assert bool((target == 7).all()), "the state before the step was copied"
        assert streams.unpin(20.0)


@case
def what_is_freed_while_it_is_copied_is_copied() -> None:
    streams = SideStreams()
    source = torch.full((4 * MIB,), 3.0, device=place())
    torch.accelerator.synchronize()
    simulated.set_copy_rate(100 * MIB)
    with slot_of(source.nbytes) as (slot, target):
        streams.pin(slot, source.device)
        copy = streams.queue([target], [source])
        del source
        gc.collect()
        other = torch.empty(4 * MIB, device=place()).fill_(-1)  # the allocator gives away what is free at once
        assert copy.wait(never)
        assert bool((target == 3).all()), "another tensor's memory was copied"
        assert float(other[0]) == -1
        assert streams.unpin(20.0)


SIZES = [(300, torch.float32)] * 60 + [(2 * MIB, torch.float32)] + [(700, torch.bfloat16)] * 60 + [(1, torch.int8)] * 3


@contextmanager
def neighbours() -> Iterator[tuple[Slot, list[torch.Tensor], list[torch.Tensor]]]:
    """Tensors side by side in a slot, one of them too large for a block; their sources, two not in order."""
    whole = sum(size * dtype.itemsize for size, dtype in SIZES)
    block_copies.BLOCK_BYTES = side_stream_copy.BLOCK_BYTES = 16 << 10  # type: ignore[attr-defined]
    with slot_of(whole) as (slot, _):
        memory, targets, at = torch.frombuffer(slot.view, dtype=torch.uint8), [], 0
        for size, dtype in SIZES:
            targets.append(memory[at : at + size * dtype.itemsize].view(dtype).view(1, size))
            at += size * dtype.itemsize
        sources = [torch.empty(1, size, dtype=dtype, device=place()) for size, dtype in SIZES]
        for index in (5, 90):
            targets[index] = targets[index].view(100, -1)
            sources[index] = torch.empty_strided(targets[index].shape, (1, 100), dtype=SIZES[index][1], device=place())
        yield slot, targets, sources


@case
def small_neighbours_go_in_few_copies() -> None:
    streams, kept = SideStreams(), {}
    with neighbours() as (slot, targets, sources):
        streams.pin(slot, place())
        for turn in range(3):
            for index, source in enumerate(sources):
                source.fill_((index + turn) % 100)
            torch.accelerator.synchronize()
            simulated.set_copy_rate(4 * MIB)
            before = simulated.counts()["late_copies"]
            copy = streams.queue(targets, sources, kept)
            assert simulated.counts()["late_copies"] - before < 20, "neighbours were sent one by one"
            copy.hold_current_streams()
            for source in sources:
                source.fill_(-1)
            assert copy.wait(never)
            simulated.set_copy_rate(0)
            for index, target in enumerate(targets):
                assert bool((target == (index + turn) % 100).all()), f"tensor {index} has other bytes"
        kept.clear()
        assert streams.unpin(20.0)


@bug
def a_block_is_filled_while_it_is_sent() -> None:
    def queue(self: block_copies.BlockCopies, sources: Any) -> None:
        other = accelerator.device_of(place().type).new_stream(place())
        for block in self._blocks:
            with other:
                block.fill(sources[block.first : block.last])
            torch.accelerator.current_stream().wait_stream(other)
            block.target.copy_(block.source, non_blocking=True)

    block_copies.BlockCopies.queue = queue  # type: ignore[method-assign]


@case
def a_full_device_has_no_memory_for_blocks() -> None:
    streams, kept = SideStreams(), {}
    with neighbours() as (slot, targets, sources):
        streams.pin(slot, place())
        with full_device() as asked:
            for turn in range(3):
                for source in sources:
                    source.fill_(turn)
                assert streams.queue(targets, sources, kept).wait(never)
                assert all(bool((target == turn).all()) for target in targets)
        assert len(asked) == 1, "a full device is asked at every save"
        assert streams.unpin(20.0)


# Of each type some bits that stand for no number, or that torch's one kernel for many tensors has no code for.
BITS = {
    torch.bfloat16: 0x7F81, torch.float16: 0x7C01, torch.float8_e5m2: 0x7D, torch.float8_e4m3fn: 0x7F, torch.float32: 0x7F800001,
    torch.float64: 0x7FF0000000000001, torch.uint16: 0xF001, torch.uint32: 0xF0000001, torch.uint64: 0xF000000000000001,
    torch.int64: -2, torch.int8: -3, torch.uint8: 200, torch.bool: 1,
}  # fmt: skip


@case
def every_bit_of_every_type_is_copied_in_a_block() -> None:
    """Weights of four bits are kept as bfloat16, for one, and make no numbers of it."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for dtype, bits in BITS.items():
        word = words[dtype.itemsize]
        values = (
            torch.tensor([bits], dtype=torch.uint64).view(torch.uint8)[: dtype.itemsize].view(word)
            if bits > 0
            else None
        )
        one = torch.tensor([bits], dtype=word) if values is None else values
        sources = [one.repeat(9 + i).view(dtype).to(place()) for i in range(6)]
        streams = SideStreams()
        with slot_of(4096) as (slot, memory):
            streams.pin(slot, place())
            whole, targets, at = memory.view(torch.uint8), [], 0
            for source in sources:
                targets.append(whole[at : at + source.nbytes].view(dtype))
                at += source.nbytes
            before = simulated.counts()["late_copies"]
            assert streams.queue(targets, sources, {}).wait(never)
            assert simulated.counts()["late_copies"] - before == 1, f"{dtype} goes alone"
            for target in targets:
                assert bool((target.view(word) == one).all()), f"{dtype} has other bits"
            assert streams.unpin(20.0)
            del whole, targets, target, memory


@bug
def a_block_is_filled_by_value() -> None:
    block_copies._EXACT.clear()


def turned() -> list[torch.Tensor]:
    real = torch.arange(MIB, dtype=torch.float32, device=place())
    return [torch.complex(real, real + i).conj() for i in range(5)] + [torch.complex(real, real).conj().imag]


def copies_of_turned(streams: SideStreams) -> None:
    """Conjugates and negatives, alone and in blocks, from a device that copies slowly."""
    simulated.set_copy_rate(400 * MIB)
    for size in (MIB, 100):
        sources = [source[:size] for source in turned()]
        with slot_of(sum(source.nbytes for source in sources)) as (slot, memory):
            streams.pin(slot, place())
            whole, targets, at = memory.view(torch.uint8), [], 0
            for source in sources:
                targets.append(whole[at : at + source.nbytes].view(source.dtype))
                at += source.nbytes
            for _ in range(2):
                whole.zero_()
                assert streams.queue(targets, sources, {}).wait(never)
                for target, source in zip(targets, sources, strict=True):
                    assert torch.equal(target, source.cpu()), "not what it stands for"
            assert streams.unpin(20.0)
            del whole, targets, target, memory


@case
def conjugates_and_negatives_are_copied_as_what_they_stand_for() -> None:
    copies_of_turned(SideStreams())


@case
def conjugates_go_through_buffers_as_what_they_stand_for() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator.Device, "register", lambda *_: False)
        copies_of_turned(SideStreams())


@bug
def buffers_take_what_torch_works_out() -> None:
    bounce_buffers._bare = lambda source: source  # type: ignore[assignment]
    bounce_buffers._as = lambda _, part: part  # type: ignore[assignment]


@case
def two_threads_never_fill_one_block() -> None:
    """Two that save at once share the memory for blocks; one comes while the other has filled and not sent it."""
    streams, kept, fill = SideStreams(), [{}, {}], block_copies.Block.fill
    found: list[threading.Thread] = []
    with slot_of(2 * 4 * 4096) as (slot, memory):
        streams.pin(slot, place())
        targets = [list(memory[:4096].split(1024)), list(memory[4096:].split(1024))]
        sources = [[torch.full((1024,), float(k), device=place()) for _ in range(4)] for k in (1, 2)]

        def filled(block: Any, given: Any) -> None:
            fill(block, given)
            if not found:
                found.append(threading.Thread(target=streams.queue, args=(targets[1], sources[1], kept[1])))
                found[0].start()
                found[0].join(0.5)

        block_copies.Block.fill = filled  # type: ignore[method-assign]
        try:
            copy = streams.queue(targets[0], sources[0], kept[0])
        finally:
            block_copies.Block.fill = fill  # type: ignore[method-assign]
        found[0].join(20.0)
        assert copy.wait(never)
        assert streams.drain(20.0)
        for number, mine in enumerate(targets):
            assert all(bool((target == number + 1).all()) for target in mine), "another thread's bytes"
        kept.clear()
        assert streams.unpin(20.0)
        del memory


@bug
def threads_queue_at_once() -> None:
    SideStreams.queue = lambda self, to, of, blocks=None: self._queue(to, of, blocks)  # type: ignore[method-assign]


@case
def what_was_queued_before_an_error_is_waited_for() -> None:
    """Its slot would be given away, and written to by the device."""
    streams, copy = SideStreams(), torch._foreach_copy_
    sources = [torch.full((MIB,), 3.0, device=place()) for _ in range(2)]

    def some(targets: Any, of: Any, **options: Any) -> None:
        copy(targets[:1], of[:1], **options)
        raise RuntimeError("planted")

    with slot_of(2 * sources[0].nbytes) as (slot, memory):
        streams.pin(slot, place())
        simulated.sleep(0.5)
        torch._foreach_copy_ = some
        try:
            with pytest.raises(RuntimeError, match="planted"):
                streams.queue(list(memory.split(MIB)), sources)
        finally:
            torch._foreach_copy_ = copy
        del sources
        other = torch.full((MIB,), -1.0, device=place())
        assert not streams.drain(0.0), "the slot is given away while the device may still write to it"
        assert streams.drain(20.0)
        assert bool((memory[:MIB] == 3).all()), "another tensor's memory was copied"
        assert streams.unpin(20.0)
        del other


@case
def a_copy_that_is_interrupted_at_any_line_is_waited_for() -> None:
    """The launcher interrupts a run in the middle of whatever it does."""
    streams, source, left = SideStreams(), torch.full((MIB // 4,), 3.0, device=place()), 0

    class Interruption(BaseException):
        pass

    def lines(frame: Any, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != side_stream_copy.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Interruption
        return lines

    def is_interrupted(line: int) -> bool:
        nonlocal left
        left = line
        sys.settrace(lines)
        try:
            streams.queue([memory], [source])
        except Interruption:
            return True
        finally:
            sys.settrace(None)
        return False

    with slot_of(MIB) as (slot, memory):
        streams.pin(slot, source.device)
        line = 1
        simulated.hang()
        while is_interrupted(line):
            memory.zero_()
            quiet = streams.drain(0.0)
            simulated.free()
            assert streams.drain(20.0), f"an interruption at line {line} holds a slot for ever"
            torch.accelerator.synchronize()
            assert not quiet or not memory.any(), f"the slot is given away at line {line}, and written to later"
            simulated.hang()
            line += 1
        simulated.free()
        assert line > 20
        assert streams.unpin(20.0)


@bug
def a_copy_is_known_once_it_is_queued() -> None:
    side_stream_copy._Writing.passed = lambda self: self.ended is None or accelerator.passed(self.ended)  # type: ignore[method-assign]


@bug
def sources_are_not_held() -> None:
    def without(spans: Any = (), sources: Any = (), num_bytes: int = 0) -> DeviceCopy:
        return DeviceCopy(spans, (), num_bytes)

    side_stream_copy.DeviceCopy = without  # type: ignore[assignment,misc]


@case
def the_call_does_not_wait_for_a_copy() -> None:
    simulated.set_copy_rate(64 * MIB)
    streams, source = SideStreams(), torch.ones(8 * MIB, device=place())
    with slot_of(source.nbytes) as (slot, target):
        streams.pin(slot, source.device)
        torch.accelerator.synchronize()
        began = time.perf_counter()
        copy = streams.queue([target], [source])
        seconds = time.perf_counter() - began
        assert seconds < 0.25, f"the call took {seconds:.2f} s, the copy half a second"
        assert copy.wait(never)
        assert 0.4 < copy.seconds() < 5, copy.seconds()
        assert streams.unpin(20.0)


@bug
def slots_are_not_registered() -> None:
    accelerator.Device.register = lambda *_: False  # type: ignore[method-assign]


@case
def memory_that_is_not_registered_gets_the_right_bytes() -> None:
    simulated.set_copy_rate(200 * MIB)
    accelerator.Device.register = lambda *_: False  # type: ignore[method-assign]
    streams, source = SideStreams(), torch.ones(2 * MIB, device=place())
    with slot_of(source.nbytes) as (slot, target):
        streams.pin(slot, source.device)
        copy = streams.queue([target], [source])
        copy.hold_current_streams()
        source.fill_(-1)
        assert copy.wait(never)
        assert bool((target == 1).all())
        assert streams.unpin(20.0)


@case
def what_no_driver_registers_goes_through_buffers() -> None:
    simulated.set_copy_rate(200 * MIB)
    through = bounce_buffers.BounceBuffers(place(), behind_s=20.0, num_bytes=MIB)
    values = torch.arange(5 * MIB, dtype=torch.int32, device=place())
    sources = [values, values[:7].to(torch.uint8), values[: MIB // 2].view(512, -1).t(), values[:3].to(torch.bfloat16)]
    targets = [torch.empty_like(source, device="cpu") for source in sources]
    stream, before = accelerator.device_of(simulated.name()).new_stream(place()), simulated.counts()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        through.copy(stream, list(zip(targets, sources, strict=True)))
    after = simulated.counts()
    assert after["blocking_copies"] == before["blocking_copies"]
    assert all(torch.equal(target, source.cpu()) for target, source in zip(targets, sources, strict=True)), "torn"


@bug
def a_bounce_is_not_awaited() -> None:
    bounce_buffers.BounceBuffers._await = lambda *_: None  # type: ignore[method-assign]


@case
def a_copy_through_buffers_leaves_a_device_that_hangs() -> None:
    through = bounce_buffers.BounceBuffers(place(), behind_s=0.3, num_bytes=MIB)
    source, target = torch.ones(4 * MIB, device=place()), torch.zeros(4 * MIB)
    stream = torch.accelerator.current_stream()
    simulated.hang(0)
    with pytest.raises(LevelNotReached, match="does not come to the copy"):
        through.copy(stream, [(target, source)])
    simulated.free(0)
    torch.accelerator.synchronize()
    through.copy(stream, [(torch.zeros(4), source[:4] + 1)])
    assert not target.any(), "a target was written after it was given away"


@case
def a_slot_that_is_registered_already_fails_softly() -> None:
    streams, others = SideStreams(), SideStreams()
    source = torch.ones(MIB, device=place())
    with slot_of(source.nbytes) as (slot, target):
        streams.pin(slot, source.device)
        others.pin(slot, source.device)  # another checkpointer of this process
        assert float((source + 1)[0]) == 2, "the user's next launch raises nothing"
        assert others.queue([target], [source]).wait(never)
        assert others.unpin(20.0)
        assert simulated.counts()["registered"] >= 1, "it took away what it had not registered"
        assert streams.unpin(20.0)


@case
def a_model_on_the_second_device_starts_nothing_on_the_first() -> None:
    torch.accelerator.set_device_index(1)
    source = torch.ones(MIB, device=place(1))
    torch.accelerator.set_device_index(0)
    assert not simulated.is_started(0)
    streams = SideStreams()
    with slot_of(source.nbytes) as (slot, target):
        streams.pin(slot, source.device)
        copy = streams.queue([target], [source])
        copy.hold_current_streams()
        assert copy.wait(never)
        assert accelerator.device_of(simulated.name()).current() == place(0), "the current device is the user's"
        assert bool((target == 1).all())
        assert streams.unpin(20.0)
    assert accelerator.healthy(20.0)
    assert not simulated.is_started(0), "a context was made on a device that belongs to another rank"


@bug
def no_device_is_made_the_current_one() -> None:
    @contextmanager
    def nothing(*_: object) -> Iterator[None]:
        yield

    accelerator.Device.guard = nothing  # type: ignore[method-assign,assignment]


@case
def copies_go_in_the_waits_of_a_pipeline() -> None:
    simulated.set_copy_rate(400 * MIB)
    streams, source = SideStreams(), torch.ones(8 * MIB, device=place())
    with slot_of(source.nbytes) as (slot, target):
        streams.pin(slot, source.device)
        for value in range(3):
            source.fill_(value)
            streams.follow([source])
            told: list[bool] = []
            copy = PacedCopy(
                streams, streams.queue([], []), batches([target], [source], most=source.nbytes // 8), rate=1e9, beside=1,
                patience_s=1.0, told=lambda _spans, _bytes, inside, told=told: told.append(inside),
            )  # fmt: skip
            copy.feed(None)
            copy.hold_current_streams()
            source.fill_(-1)
            assert copy.wait(never)
            assert copy.passed()
            assert bool((target == value).all()), "torn"
            assert told == [False, True, *[False] * 6]
        assert streams.unpin(20.0)


@bug
def a_paced_copy_does_not_follow() -> None:
    def rest(self: PacedCopy) -> None:
        for copy in self._queued:
            copy.hold_current_streams()

    PacedCopy.hold_current_streams = rest  # type: ignore[method-assign]


@case
def moments_are_those_of_the_device() -> None:
    simulated.sleep(0.3)  # the host is ahead
    reader = timers.clock_of(place())
    spans: list[float] = []
    began = reader.mark()
    simulated.sleep(0.2)
    ended = reader.mark()
    reader.tell(lambda first, last: spans.append(last - first), began, ended)
    torch.accelerator.synchronize()
    mark = reader.mark()
    torch.accelerator.synchronize()
    reader.tell(lambda *_: None, mark)
    assert spans
    assert 0.15 < spans[0] < 5.0, spans


@bug
def moments_are_those_of_the_host() -> None:
    timers.clock_of = lambda _: timers.HostClock()


# --- a checkpointer


class Job1:
    """One rank that trains on the device and saves at every step."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)).to(
            place()
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.data = torch.randn(16, 256, generator=torch.Generator().manual_seed(5)).to(place())
        self.sums: dict[int, float] = {}
        self.events: list[str] = []
        self.checkpointer = holdfast.Checkpointer(
            directory, model=self.model, optimizer=self.optimizer, config=holdfast.Config(every="1", linger_s=1.0)
        )
        self.handles: list[Any] = []

    def step(self, number: int, *, save: bool = True) -> None:
        self.forward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if save:
            self.handles.append(self.checkpointer.step(number))

    def forward(self, number: int) -> None:
        self.model(self.data * (1 + number / 100)).square().mean().backward()

    def sum(self) -> float:
        return sum(float(parameter.detach().double().sum()) for parameter in self.model.parameters())

    def given_up(self) -> list[str]:
        return [handle.given_up for handle in self.handles if handle is not None and handle.given_up]


@contextmanager
def directory() -> Iterator[Path]:
    yield Path(os.environ["CASE_DIRECTORY"])


@case
def a_state_comes_back_bit_for_bit_with_late_copies() -> None:
    simulated.set_kernel_time(0.001)
    simulated.set_copy_rate(200 * MIB)
    with directory() as root:
        job = Job1(root, foreach=True)
        assert job.checkpointer.restore() == 0
        for number in range(10):
            job.step(number)
        expected = job.sum()
        job.checkpointer.close()
        assert not job.given_up(), job.given_up()
        again = Job1(root, foreach=True)
        with torch.no_grad():
            for parameter in again.model.parameters():
                parameter.fill_(9)
        assert again.checkpointer.restore() == 10
        assert again.sum() == expected
        for both in (job, again):
            for number in range(10, 13):
                both.step(number, save=False)
        assert again.sum() == job.sum()
        again.checkpointer.close()


@case
def gradients_that_live_come_back_on_their_device() -> None:
    """The next backward pass adds to them while the version is still being copied."""
    simulated.set_kernel_time(0.001)
    simulated.set_copy_rate(200 * MIB)

    def train(job: Job1, begin: int, end: int) -> float:
        for number in range(begin, end):
            job.forward(number)
            if number % 4 == 3:
                job.optimizer.step()
                job.optimizer.zero_grad()
            job.handles.append(job.checkpointer.step(number) if number < 11 else None)
        return job.sum()

    with directory() as root:
        job = Job1(root / "whole")
        job.checkpointer.restore()
        expected = train(job, 0, 12)
        job.checkpointer.close()
        for begin, end in ((0, 6), (6, 12)):
            job = Job1(root / "job")
            assert job.checkpointer.restore() == begin
            assert all((p.grad is None) == (begin == 0) for p in job.model.parameters())
            ended = train(job, begin, end)
            job.checkpointer.close()
            assert not job.given_up(), job.given_up()
        assert ended == expected


@case
def what_lives_comes_back_on_another_device_of_its_node() -> None:
    """Gradients, and values that a loop carries of which nothing stands in its line at a new start."""
    for index, begin, end in ((0, 0, 6), (1, 6, 9)):
        torch.accelerator.set_device_index(index)
        model = torch.nn.Linear(8, 8, device=place(index))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpointer = holdfast.Checkpointer(
            os.environ["CASE_DIRECTORY"], model=model, optimizer=optimizer, config=holdfast.Config(linger_s=1.0)
        )
        assert checkpointer.restore() == begin
        hidden, past = checkpointer.carry("hidden", None), checkpointer.carry("past", [])
        if begin:
            told = [hidden[0], *past, *(p.grad for p in model.parameters())]
            assert [t.device for t in told] == [place(1)] * 3 + [torch.device("cpu")] + [place(1)] * 2, told
            assert torch.equal(hidden[0].cpu(), torch.full((4, 8), 5.0))
        for number in range(begin, end):
            hidden = (torch.full((4, 8), float(number), device=place(index)), number)
            past = [*past[-1:], hidden[0], hidden[0] + 1, torch.ones(1)][-3:]
            model(hidden[0]).sum().backward()
            checkpointer.step(number, hidden=hidden, past=past)
        checkpointer.close()


@case
def gradients_of_offloaded_shards_come_back_to_host_memory() -> None:
    backends = f"cpu:gloo,{simulated.name()}:simccl"
    torch.distributed.init_process_group(backends, store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(simulated.name(), (1,))
    model = torch.nn.Linear(8, 8, device=place())
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    model(torch.ones(2, 8, device=place())).sum().backward()
    parameters = list(model.parameters())
    saved = living_gradients.as_saved({str(number): p for number, p in enumerate(parameters)}, copied=True)
    expected = [p.grad.to_local().clone() for p in parameters if isinstance(p.grad, DTensor)]
    for parameter in parameters:
        parameter.grad = None
    living_gradients.put(parameters, saved)
    there = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
    assert len(there) == 2
    assert all(map(torch.equal, there, expected))
    assert all(grad.is_cpu for grad in there), there
    torch.distributed.destroy_process_group()


@bug
def devices_have_their_numbers() -> None:
    carried_tensors.name_of = accelerator.name_of = str  # type: ignore[assignment,attr-defined]


@bug
def gradients_go_where_they_were() -> None:
    unpacked = carried_tensors.unpacked
    carried_tensors.unpacked = lambda value, **_: unpacked(value)  # type: ignore[assignment]
    carried_tensors.name_of = str  # type: ignore[assignment,attr-defined]


@case
def a_script_whose_default_device_is_the_accelerator_comes_back() -> None:
    torch.set_default_device(place())
    with directory() as root:
        for begins in (0, 3):
            generator = torch.Generator(device=place()).manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
            optimizer = torch.optim.AdamW(model.parameters())
            more = {"drawn": generator, "kept": {"x": torch.zeros(3, device="cpu")}}
            checkpointer = holdfast.Checkpointer(
                root / "job", model=model, optimizer=optimizer, **more, config=holdfast.Config(linger_s=5.0)
            )
            assert checkpointer.restore() == begins
            for number in range(begins, begins + 3):
                model(torch.randn(4, 8, generator=generator)).square().mean().backward()
                optimizer.step()
                checkpointer.step(number)
            checkpointer.close()


@case
def host_memory_that_a_device_still_writes_is_saved_as_it_will_be() -> None:
    """Weights of the last step on the host: copied in the script's own stream, and nobody waits for the copy."""
    simulated.set_copy_rate(20 * MIB)
    with directory() as root:
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 256).to(place())
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        host = {name: torch.zeros(p.shape).pin_memory() for name, p in model.named_parameters()}
        config = holdfast.Config(linger_s=5.0)
        checkpointer = holdfast.Checkpointer(root / "job", model=model, optimizer=optimizer, host=host, config=config)
        checkpointer.restore()
        for number in range(3):
            model(torch.ones(1, 256, device=place())).sum().backward()
            optimizer.step()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    host[name].copy_(parameter, non_blocking=True)
            checkpointer.step(number)
        torch.accelerator.synchronize()
        expected = {name: value.clone() for name, value in host.items()}
        checkpointer.close()
        for value in host.values():
            value.zero_()
        again = holdfast.Checkpointer(root / "job", model=model, optimizer=optimizer, host=host, config=config)
        simulated.sleep(2.0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                host[name].copy_(parameter * 0, non_blocking=True)  # queued before the restore
        assert again.restore() == 3
        torch.accelerator.synchronize()
        assert all(torch.equal(host[name], value) for name, value in expected.items()), "of another step"
        again.close()


@case
def a_note_has_what_a_device_writes_to_host_memory() -> None:
    step_snapshot.attach(step_snapshot.make_page())
    simulated.set_copy_rate(MIB)
    model = torch.nn.Linear(256, 256, bias=False).to(place())
    with torch.no_grad():
        model.weight.fill_(7.0)
    host = {"last": torch.zeros(256, 256).pin_memory()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State({"model": model, "optimizer": optimizer, "host": host}, rank=0, world_size=1)
    survivor = Survivor(state, job="j", rank=0, world_size=1)
    host["last"].copy_(model.weight.detach(), non_blocking=True)
    survivor.note(Version(1, 0))
    (note,) = survivor_state.notes_of("j", 0, 1).values()
    (data,) = (data for name, data in note.small.items() if name.endswith("last"))
    assert set(torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()) == {7.0}, "of another step"


class TwoNets:
    """Two networks whose optimizers step on streams of their own, or weights that are swapped on one; copies are slow."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        self.nets = [torch.nn.Linear(256, 256).to(place()) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in self.nets]
        self.streams = [torch.Stream(device=place()) for _ in range(2)]
        parts = {f"net{i}": net for i, net in enumerate(self.nets)} | {
            f"by{i}": o for i, o in enumerate(self.optimizers)
        }
        config = holdfast.Config(
            linger_s=5.0, fence_timeout_s=30.0, begin_timeout_s=30.0
        )  # a machine at work copies slowly as well
        self.checkpointer = holdfast.Checkpointer(root / "job", **parts, config=config)

    def step(self, number: int, *, save: bool = True) -> None:
        x = torch.ones(8, 256, device=place())
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)  # what lives behind a step would be copied on the main stream
        (self.nets[1](self.nets[0](x)) * (number + 1)).square().mean().backward()
        main = torch.accelerator.current_stream()
        for stream, optimizer in zip(self.streams, self.optimizers, strict=True):
            stream.wait_stream(main)
            with stream:
                optimizer.step()
        for stream in self.streams:
            main.wait_stream(stream)
        if save:
            self.checkpointer.step(number)

    def weights(self) -> list[torch.Tensor]:
        torch.accelerator.synchronize()
        return [parameter.detach().cpu() for net in self.nets for parameter in net.parameters()]


def a_version_is_that_of_its_step(beside: Callable[[TwoNets], None]) -> None:
    """Trains seven steps and does something behind the last save; what comes back is that step's."""
    each_alone()
    with directory() as root:
        job = TwoNets(root)
        job.checkpointer.restore()
        for number in range(6):
            job.step(number)
        job.step(6, save=False)
        expected = job.weights()
        simulated.set_copy_rate(2 * MIB)
        job.checkpointer.step(6)
        beside(job)
        simulated.set_copy_rate(0)
        torch.accelerator.synchronize()
        job.checkpointer._run.saver.fence.idle(20.0)  # type: ignore[union-attr]
        job.checkpointer.abandon()
        again = TwoNets(root)
        assert again.checkpointer.restore() == 7
        assert all(map(torch.equal, again.weights(), expected)), "torn"
        again.checkpointer.close()


@case
def an_optimizer_on_a_stream_of_its_own_comes_behind_the_copy() -> None:
    a_version_is_that_of_its_step(lambda job: job.step(7, save=False))


@case
def what_is_settled_may_be_written_on_any_stream() -> None:
    def swap(job: TwoNets) -> None:
        stream = torch.Stream(device=place())
        stream.wait_stream(torch.accelerator.current_stream())
        job.checkpointer.settle()
        with stream, torch.no_grad():
            for net in job.nets:
                for parameter in net.parameters():
                    parameter.zero_()
        stream.synchronize()

    a_version_is_that_of_its_step(swap)


@case
def weights_that_are_written_beside_a_copy_give_the_version_up() -> None:
    """By another thread, on a stream that waits for nothing; trained on afterwards, as behind an evaluation."""
    with directory() as root:
        job = TwoNets(root)
        job.checkpointer.restore()
        for number in range(6):
            job.step(number)
        expected = job.weights()
        job.step(6, save=False)
        simulated.set_copy_rate(2 * MIB)
        handle = job.checkpointer.step(6)

        def clamp() -> None:
            with torch.Stream(device=place()), torch.no_grad():
                for parameter in job.nets[0].parameters():
                    parameter.clamp_(-1e-3, 1e-3)

        writer = threading.Thread(target=clamp)
        writer.start()
        writer.join()
        job.step(7, save=False)
        simulated.set_copy_rate(0)
        torch.accelerator.synchronize()
        job.checkpointer._run.saver.fence.idle(20.0)  # type: ignore[union-attr]
        assert handle is not None
        assert handle.given_up == "written while it was copied: net0.bias, net0.weight"
        job.checkpointer.abandon()
        again = TwoNets(root)
        assert again.checkpointer.restore() == 6
        assert all(map(torch.equal, again.weights(), expected))
        again.checkpointer.close()


def written_past_counts(write: Callable[[TwoNets], object], name: str, *, is_found: bool = True) -> None:
    """Trains seven steps and writes by `.data` for the first time behind the last save: that is given up, or it is the state at its call."""

    def state(job: TwoNets) -> list[torch.Tensor]:
        kept = [entry["momentum_buffer"].cpu() for o in job.optimizers for entry in o.state.values()]
        return job.weights() + kept

    with directory() as root:
        job = TwoNets(root / name)
        job.checkpointer.restore()
        for number in range(6):
            job.step(number)
        job.step(6, save=False)
        expected, rate = state(job), 2 * MIB
        simulated.set_copy_rate(rate)
        handle = job.checkpointer.step(6)
        assert handle is not None
        write(job)
        job.step(7, save=False)
        simulated.set_copy_rate(0)
        torch.accelerator.synchronize()
        job.checkpointer._run.saver.fence.idle(20.0)  # type: ignore[union-attr]
        assert is_found or not handle.given_up, handle.given_up
        if not handle.given_up:
            job.checkpointer.restore(handle.version)
            assert all(map(torch.equal, state(job), expected)), f"torn: {name}"
        else:
            assert handle.given_up.startswith("written while it was copied: "), handle.given_up
            late = job.checkpointer._run.saver._trust  # type: ignore[union-attr]
            assert late._refused, "it is copied late again"
            expected = state(job)
            handle = job.checkpointer.step(7)
            assert handle is not None
            handle.wait("captured")
            job.step(8, save=False)
            job.checkpointer.restore(handle.version)
            assert all(map(torch.equal, state(job), expected))
        job.checkpointer.abandon()


def clamp_all(job: TwoNets) -> None:
    for net in job.nets:
        for parameter in net.parameters():
            parameter.data.clamp_(-1e-3, 1e-3)


def beside(job: TwoNets, work: Callable[[], object]) -> None:
    """Writes on a stream that waits for nothing, in another thread, once the device has come to the copies of the last save.

    A busy machine may run that stream before the one of the call; then the device has what was written at the call.
    """
    late = job.checkpointer._run.saver.fence._open  # type: ignore[union-attr]
    assert late is not None
    assert isinstance(late.device, DeviceCopy)
    began, _ = late.device.spans[0]

    def in_thread() -> None:
        while not accelerator.passed(began):
            time.sleep(0.0005)
        with torch.Stream(device=place()):
            work()

    writer = threading.Thread(target=in_thread)
    writer.start()
    writer.join()


@case
def weights_that_are_written_past_torchs_counts_give_the_version_up() -> None:
    each_alone()
    written_past_counts(clamp_all, "all")


@case
def a_weight_or_all_of_another_stream_that_are_written_past_torchs_counts_give_the_version_up() -> None:
    each_alone()
    written_past_counts(lambda job: job.nets[1].weight.data.mul_(2), "one")  # type: ignore[operator]
    written_past_counts(lambda job: beside(job, lambda: clamp_all(job)), "beside")


@case
def an_optimizers_state_that_is_written_past_torchs_counts_gives_the_version_up() -> None:
    each_alone()

    def decay(job: TwoNets) -> None:
        for entry in job.optimizers[1].state.values():
            entry["momentum_buffer"].data.zero_()

    written_past_counts(decay, "state")


@case
def what_is_copied_in_the_call_is_looked_at_too() -> None:
    """The current streams wait for it. A stream that waits for nothing wrote it once, and does so again."""
    each_alone()
    with directory() as root:
        job = TwoNets(root)
        job.checkpointer.restore()

        def write() -> None:
            for net in job.nets:
                for parameter in net.parameters():
                    parameter.data.neg_()

        for number in range(9):
            job.step(number, save=False)
            torch.accelerator.synchronize()
            simulated.set_copy_rate(MIB // 2 if number > 5 else 0)
            handle = job.checkpointer.step(number)
            if number > 5:
                beside(job, write)
            torch.accelerator.synchronize()
            job.checkpointer._run.saver.fence.idle(20.0)  # type: ignore[union-attr]
            assert handle is not None
            told = "written while it was copied: net" if number > 5 else ""
            assert handle.given_up.startswith(told), f"torn: {number}"
            assert told or not handle.given_up, handle.given_up
        assert job.checkpointer._run.saver._trust._refused  # type: ignore[union-attr]
        job.checkpointer.abandon()


@bug
def only_late_copies_are_looked_at() -> None:
    mutation_check.MutationHistory.seen = lambda *_: (set(), set())  # type: ignore[method-assign]


class Waits:
    """The pace of a pipeline that has waits, of which none comes."""

    has_waits, device_rate, patience_s = True, 2.0 * MIB, 0.2

    def beside(self, _: Any) -> int:
        return 0

    def begin(self, *_: Any, **__: Any) -> bool:
        return False

    turn = hurry = copied = queued = begin


@case
def weights_are_looked_at_in_the_waits_of_a_pipeline() -> None:
    each_alone()
    save = memory_saver.Saver._save

    def paced(self: Any, *words: Any, **options: Any) -> None:
        self.fence.pace = Waits()
        save(self, *words, **options)

    memory_saver.Saver._save = paced  # type: ignore[method-assign]
    written_past_counts(lambda _: None, "nothing", is_found=False)
    written_past_counts(clamp_all, "all")


@case
def a_full_device_holds_its_streams_until_all_is_copied() -> None:
    """It has no memory to look at what is written, which comes behind the copy instead."""
    each_alone()
    with full_device():
        written_past_counts(clamp_all, "full", is_found=False)


@case
def values_that_grow_leave_room_for_spots() -> None:
    """In the last kilobytes of a slot; without room the streams would wait for every copy from then on."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(20))).to(place())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = holdfast.Config(every="1", linger_s=1.0)
    values, looks = {"log": ""}, []
    look = memory_saver.Saver._spots_of

    def looked(self: memory_saver.Saver, *given: Any) -> Any:
        check, pairs = look(self, *given)
        looks.append(None if pairs is None else len(pairs))
        return check, pairs

    memory_saver.Saver._spots_of = looked  # type: ignore[method-assign]
    with directory() as root:
        checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer, values=values, config=config)
        checkpointer.restore()
        for number in range(10):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            if number == 5:
                view = next(iter(checkpointer._run.saver._views.values()))  # type: ignore[union-attr]
                values["log"] = "." * (view.slot.num_bytes - view.plan.num_bytes - 5000)
            checkpointer.step(number)
            checkpointer.flush()
        checkpointer.abandon()
    assert looks[3:5] == [1, 1], looks
    assert None not in looks, "a slot has no room for them"
    assert looks[-1] == 1, looks


@bug
def values_may_fill_a_slot() -> None:
    memory_saver.ROOM_BYTES = 0  # type: ignore[attr-defined]


@case
def spots_are_those_at_the_call_on_every_device() -> None:
    """Before what is queued behind it on the current stream, of tensors of all layouts; compared with what lies in the slot."""
    simulated.set_copy_rate(MIB)
    streams = SideStreams()
    base = torch.arange(16 * 1024.0)
    sources = [
        layout.to(place(index))
        for index in (0, 1, 0)
        for layout in (
            base.view(2, 8, 32, 32).contiguous(memory_format=torch.channels_last),
            base.bfloat16()[1:],
            base[:3].bool(),
        )
    ]
    starts = [0, *itertools.accumulate(-(-source.nbytes // 16) * 16 for source in sources)]
    end = starts.pop()
    with slot_of(end + ROOM_BYTES) as (slot, _):
        streams.pin(slot, place())
        payload = torch.frombuffer(slot.view, dtype=torch.uint8)
        targets = [
            payload[start : start + source.nbytes].view(source.dtype).view(source.shape)
            for start, source in zip(starts, sources, strict=True)
        ]
        spots = DeviceSpots(sources, starts)
        for written in (False, True):
            simulated.sleep(0.05)
            sources[0].mul_(3)
            turn = spots.next()
            pairs = streams.look(turn, payload[end : end + turn.num_bytes])
            assert pairs is not None
            copy = streams.queue([to for to, _ in pairs], [of for _, of in pairs]) + streams.queue(targets, sources)
            if written:
                sources[-3].data.add_(1)
            else:
                copy.hold_current_streams()
                for source in sources[:-3]:
                    source.data.copy_(source * 2)
            assert copy.wait(never)
            differing = turn.differing(payload.numpy(), end)
            assert differing == ({6} if written else set()), f"other spots: {differing}"
        assert streams.unpin(20.0)
        del payload, targets


@bug
def spots_are_taken_beside_what_is_queued() -> None:
    look = SideStreams.look

    def later(self: SideStreams, spots: Any, target: torch.Tensor) -> Any:
        with self._stream(place()):
            return look(self, spots, target)

    SideStreams.look = later  # type: ignore[method-assign]


@bug
def nobody_looks_at_devices() -> None:
    late_copy_check.DeviceCheck.torn = lambda *_: set()  # type: ignore[method-assign]


@bug
def nobody_counts_writes() -> None:
    late_copy_check.WriteCounts.written = lambda _: ""  # type: ignore[method-assign]


@bug
def only_the_first_step_comes_behind_a_copy() -> None:
    hold = Fence._hold

    def once(self: Fence, job: LateCopyJob) -> bool:
        held = hold(self, job)
        self._behind = None
        return held

    Fence._hold = once  # type: ignore[method-assign]
    nobody_looks_at_devices()


@bug
def a_settled_copy_is_awaited_by_streams_alone() -> None:
    wait = Fence._wait

    def by_streams(self: Fence, job: LateCopyJob, *words: float, whole: bool = False, **options: bool) -> None:
        if not whole:
            wait(self, job, *words, **options)

    Fence._wait = by_streams  # type: ignore[method-assign, assignment]
    nobody_looks_at_devices()


class HostMomentum(torch.optim.SGD):
    """Keeps its momentum in host memory."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("momentum", torch.zeros(parameter.shape)).add_(parameter.grad.cpu())
            parameter.data.sub_(state["momentum"].to(parameter.device), alpha=0.1)


@case
def state_on_the_host_of_parameters_on_a_device_comes_back_there() -> None:
    with directory() as root:
        ends = []
        for begins, steps in ((0, 3), (3, 3), (0, 6)):
            torch.manual_seed(0)
            model = torch.nn.Linear(8, 8).to(place())
            optimizer = HostMomentum(model.parameters(), lr=0.1)
            path = root / ("whole" if steps == 6 else "job")
            checkpointer = holdfast.Checkpointer(
                path, model=model, optimizer=optimizer, config=holdfast.Config(linger_s=5.0)
            )
            assert checkpointer.restore() == begins
            for number in range(begins, begins + steps):
                model.zero_grad()
                (model(torch.ones(1, 8, device=place())) * number).square().sum().backward()
                optimizer.step()
                checkpointer.step(number)
            assert optimizer.state[model.weight]["momentum"].device.type == "cpu"
            ends.append(model.weight.detach().cpu())
            checkpointer.close()
        assert torch.equal(ends[1], ends[2])


@bug
def nobody_waits_for_pinned_memory() -> None:
    pinned_writes.PinnedWrites.end = lambda *_: True  # type: ignore[method-assign]


@bug
def notes_do_not_wait_for_pinned_memory() -> None:
    nobody_waits_for_pinned_memory()


@case
def a_device_far_behind_its_host_gives_no_version_up() -> None:
    with directory() as root:
        job = Job1(root, foreach=True)
        job.checkpointer.restore()
        job.forward(0)  # the first one takes seconds of the host
        job.optimizer.zero_grad()
        for number in range(4):
            simulated.sleep(2.5)  # the proofs wait for the device, which is behind by more than any bound of ours
            job.step(number)
        waits = job.checkpointer.events.counters()["fence_wait_seconds"]
        for number in range(4, 9):
            simulated.sleep(0.2)
            job.step(number)
        assert waits > 4.0
        assert job.checkpointer.events.counters()["fence_wait_seconds"] - waits < 0.5, "what is trusted holds no host"
        split = job.checkpointer._run.saver._split  # type: ignore[union-attr]
        assert len(split.late) >= 4, "nothing was proven"
        job.checkpointer.close()
        assert not job.given_up(), job.given_up()


@case
def a_save_is_not_given_up_for_want_of_a_slot_before_its_device_came_to_it() -> None:
    """What other ranks hold becomes free when their devices have come that far, and those go with ours."""
    call = KeeperClient._call
    finals: list[bool] = []  # whether the device had done what was queued, when there was no more time

    def asked(self: Any, request: Any, *rest: Any) -> Any:
        if isinstance(request, Begin):
            if not request.final:
                time.sleep(0.05)
                return Begun(slot_id=NO_SLOT, reason="others hold theirs"), []
            finals.append(bool(event.query()))
        return call(self, request, *rest)

    with directory() as root:
        job = Job1(root, foreach=True)
        job.checkpointer.restore()
        KeeperClient._call = asked  # type: ignore[method-assign]
        for number in range(3):
            simulated.sleep(0.3)
            event = torch.Event(place())
            event.record()
            job.step(number)
        job.checkpointer.close()
        assert finals == [True] * 3, finals
        assert not job.given_up(), job.given_up()


@bug
def a_device_is_given_no_time() -> None:
    Fence._await_device = lambda *_: None  # type: ignore[method-assign]


def a_host_ahead(seconds: float, kernel_s: float) -> None:
    """A device so far behind its host gives no version up, is not held up itself, and what was proven stays so."""
    simulated.set_kernel_time(kernel_s)
    simulated.set_copy_rate(20 * MIB)  # 40 ms for a version
    with directory() as root:
        job = Job1(root, fused=True)
        job.checkpointer.restore()
        for number in range(4):
            job.step(number)  # they are proven, and the host waits
        job.checkpointer.settle()
        waited = job.checkpointer.events.counters()["fence_wait_seconds"]
        simulated.sleep(seconds)
        began = time.perf_counter()
        job.step(4)
        job.forward(5)
        job.optimizer.step()
        host_s = time.perf_counter() - began
        torch.accelerator.synchronize()

        def waits(numbers: range, *, save: bool) -> list[int]:
            before = simulated.counts()
            for number in numbers:
                job.step(number, save=save)
            torch.accelerator.synchronize()
            after = simulated.counts()
            return [after[kind] - before[kind] for kind in ("waited", "blocking_copies")]

        plain, saving = waits(range(6, 9), save=False), waits(range(9, 12), save=True)
        split = job.checkpointer._run.saver._split  # type: ignore[union-attr]
        job.checkpointer.close()
        assert not job.given_up(), job.given_up()
        assert host_s < 0.9 * seconds, f"a save and a step held the host for {host_s:.2f} s"
        assert job.checkpointer.events.counters()["fence_wait_seconds"] - waited < 0.5 * seconds, (
            "the host waited at a fence"
        )
        assert len(split.late) >= 4, "what was proven is copied in the call again"
        assert saving == plain, f"the host waits for kernels and copies of a save: {saving}, not {plain}"


@case
def a_host_ahead_of_its_device_is_not_held_up() -> None:
    a_host_ahead(1.0, 0.005)


@case
def a_host_five_seconds_ahead_of_its_device_is_not_held_up() -> None:
    a_host_ahead(5.0, 0.03)


@bug
def copies_are_not_late() -> None:
    mutation_check.MutationHistory.late = lambda *_: set()  # type: ignore[method-assign,assignment]


@case
def a_device_that_hangs_is_waited_for_no_longer_than_the_bounds() -> None:
    memory_saver.DRAIN_S = 0.5
    with directory() as root:
        job = Job1(root, foreach=True)
        job.checkpointer.restore()
        for number in range(6):
            job.step(number)
        job.checkpointer.settle()
        simulated.hang(0)
        job.step(6)
        began = time.monotonic()
        job.checkpointer.abandon()
        seconds = time.monotonic() - began
        assert seconds < 10, f"abandon took {seconds:.1f} s"
        assert open_checkpointers.broken.stuck, "this process must end, for a device may still write to its slots"
        assert not accelerator.healthy(0.3)
        simulated.free(0)


@bug
def a_slot_is_given_away_while_a_device_writes_to_it() -> None:
    SideStreams.drain = lambda *_: True  # type: ignore[method-assign]


@case
def a_proof_takes_no_memory_of_the_device_to_speak_of() -> None:
    source = torch.ones(16 * MIB, device=place())
    copy = torch.ones(16 * MIB)
    module: Any = torch.get_device_module(simulated.name())
    torch.accelerator.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    assert mutation_check.same_bits(source.view(1, -1), copy.view(1, -1))
    copy[-1] = 2
    assert not mutation_check.same_bits(source.view(1, -1), copy.view(1, -1))
    more = module.max_memory_allocated() - before
    assert more <= 40 * MIB, f"{more >> 20} MiB of a tensor of 64"


@bug
def a_proof_takes_the_tensor_whole() -> None:
    mutation_check.BLOCK_BYTES = 1 << 40


def memory_taken(work: Callable[[], object]) -> int:
    """The most bytes of the device that were in tensors while `work` ran, beyond those that were before."""
    module: Any = torch.get_device_module(simulated.name())
    torch.accelerator.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    work()
    torch.accelerator.synchronize()
    return int(module.max_memory_allocated() - before)


def out_of_order() -> Iterator[torch.Tensor]:
    """Tensors of 48 MiB that do not lie in memory as they are saved."""
    values = torch.arange(12 * MIB, dtype=torch.float32, device=place())
    yield values.view(1024, 64, 8, 24).permute(0, 3, 1, 2)  # channels last
    yield values.view(3, 4 * MIB).t()
    yield values.view(4 * MIB, 3).t()[None]  # rows that are large


@case
def what_is_not_in_order_is_copied_in_blocks() -> None:
    """A device puts it in order first, in the memory for blocks; so it does for what it has to work out."""
    real = torch.arange(6 * MIB, dtype=torch.float32, device=place())
    for source in [*out_of_order(), torch.complex(real, real).conj(), torch.complex(real, real).conj().imag]:
        streams = SideStreams()
        with slot_of(source.nbytes) as (slot, memory):
            streams.pin(slot, source.device)
            target = memory.view(source.dtype).view(source.shape)

            def copied(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                assert streams.queue([target], [source]).wait(never)  # noqa: B023

            more = memory_taken(copied)
            assert torch.equal(target, source.cpu())
            assert more <= block_copies.BLOCK_BYTES, f"{more >> 20} MiB for a tensor of {source.nbytes >> 20}"
            assert streams.unpin(20.0)
            del target, copied, memory


@contextmanager
def full_device() -> Iterator[list[Any]]:
    """Whoever asks for memory of the device does so in vain, and is noted."""
    empty, asked = torch.empty, list[Any]()

    def full(*size: Any, **options: Any) -> torch.Tensor:
        if torch.device(options.get("device") or "cpu").type != "cpu":
            asked.append(size)
            raise torch.OutOfMemoryError("full")
        return empty(*size, **options)

    torch.empty = full
    try:
        yield asked
    finally:
        torch.empty = empty


@case
def a_full_device_puts_nothing_in_order() -> None:
    """The host does: every version is saved, and no memory of the device is taken."""
    streams = SideStreams()
    for source in out_of_order():
        with slot_of(source.nbytes) as (slot, memory):
            streams.pin(slot, source.device)
            target = memory.view(source.shape)
            with full_device():
                more = memory_taken(partial(streams.queue, [target], [source]))
            assert torch.equal(target, source.cpu())
            assert more < MIB, f"{more} bytes of a full device for a tensor of 48 MiB"
            assert streams.unpin(20.0)
            del target, memory


@bug
def a_tensor_is_put_in_order_whole() -> None:
    side_stream_copy.is_plain = lambda _: True  # type: ignore[attr-defined]


@case
def saves_take_no_memory_of_the_device_to_speak_of() -> None:
    """From the proofs on; the training is one that takes no memory beyond its state."""
    weight = torch.nn.Parameter(next(out_of_order()).contiguous(memory_format=torch.channels_last))
    bias = torch.nn.Parameter(torch.zeros(4 * MIB, device=place()))
    model = torch.nn.ParameterDict({"weight": weight, "bias": bias})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)

    with directory() as root:
        checkpointer = holdfast.Checkpointer(
            root, model=model, optimizer=optimizer, config=holdfast.Config(every="1", durable_every="0", linger_s=1.0)
        )
        optimizer.step()
        checkpointer.restore()
        plain = memory_taken(optimizer.step)

        def saving() -> None:
            for number in range(6):
                optimizer.step()
                checkpointer.step(number)

        more = memory_taken(saving) - plain
        split = checkpointer._run.saver._split  # type: ignore[union-attr]
        assert len(split.late) >= 6, "nothing was proven"
        assert more < 48 * MIB, f"{more >> 20} MiB for a state of {(48 + 16) * 3}"
        checkpointer.abandon()


@case
def proofs_and_blocks_together_take_no_memory_to_speak_of() -> None:
    """What CUDA takes: a mask for what is compared, and segments of 20 MiB for less than 10."""
    proof = 3 * mutation_check.BLOCK_BYTES
    assert proof <= 20 * MIB, "a proof needs another segment"
    assert block_copies.BLOCK_BYTES + proof <= 48 * MIB
    assert side_stream_copy.BLOCK_BYTES == block_copies.BLOCK_BYTES


@case
def a_tensor_that_cannot_be_compared_keeps_no_other_from_being_proven() -> None:
    """One element with a stride, and a conjugate: nothing was proven beside these, for ever."""
    real = torch.ones(40, device=place())
    tensors = {
        "one": torch.arange(2.0, device=place())[::2],
        "turned": torch.complex(real, real).conj(),
        "plain": real * 2,
    }
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with directory() as root:
        config = holdfast.Config(every="1", durable_every="0", linger_s=5.0)
        checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer, config=config)
        checkpointer.restore()
        for number in range(6):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            checkpointer.step(number)
        expected = {name: parameter.detach().cpu().resolve_conj() for name, parameter in model.items()}
        saver: Any = checkpointer._run.saver  # type: ignore[union-attr]
        late = {saver._structure.pieces[index][0] for index in saver._split.late}
        assert late == {"model.one", "model.plain"}, late
        saver.fence.idle(20.0)
        checkpointer.abandon()
        for parameter in model.values():
            parameter.data = parameter.data.clone().conj() if parameter.is_conj() else torch.zeros_like(parameter)
        checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer, config=config)
        assert checkpointer.restore() == 6
        assert all(torch.equal(model[name].detach().cpu().resolve_conj(), tensor) for name, tensor in expected.items())
        checkpointer.abandon()


@case
def what_a_script_replaces_is_kept_once_at_most() -> None:
    """Not by each slot, nor by the note of a step: a script may give its parameters other memory at every step."""
    weight = torch.nn.Parameter(torch.zeros(8 * MIB, device=place()))
    model = torch.nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module: Any = torch.get_device_module(simulated.name())
    with directory() as root:
        config = holdfast.Config(every="1", durable_every="0", linger_s=1.0, num_slots=3)
        checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer, config=config)
        checkpointer.restore()
        before = module.memory_allocated() - weight.nbytes
        for number in range(8):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            optimizer.zero_grad()
            weight.data = weight.data + 1
            torch.accelerator.synchronize()
            kept = (module.memory_allocated() - before) / weight.nbytes - 1
            assert kept <= 1.1, f"{kept:.1f} former states lie on the device at step {number}"
            checkpointer.step(number)
        checkpointer.abandon()


@bug
def each_slot_keeps_its_tensors() -> None:
    copy_plan.SlotView.forget = lambda _: None  # type: ignore[method-assign]


@bug
def a_note_keeps_its_tensors() -> None:
    Survivor.let_go = lambda _: None  # type: ignore[method-assign]


# --- void before abort


class Hung:
    """A step whose collective hangs; what is queued behind it would run on garbage."""

    def __init__(self) -> None:
        self.source = torch.ones(MIB, device=place())

    def break_off(self) -> None:
        """The order of leaving a run."""
        open_checkpointers.void()
        simulated.free(0)  # the abort
        torch.accelerator.synchronize()


@case
def what_is_queued_behind_a_hung_collective_is_void() -> None:
    hung, reasons = Hung(), []
    streams, gate = SideStreams(), Fence(timeout_s=5.0, events=Events())
    open_checkpointers.register(thing := SimpleThing(gate.void))
    with slot_of(hung.source.nbytes) as (slot, target):
        streams.pin(slot, hung.source.device)
        gate.start(first := LateCopyJob([], streams.queue([target], [hung.source]), reasons.append))
        assert first.done.wait(60)
        gate.release()
        simulated.hang(0)
        hung.source.fill_(float("nan"))  # unreduced gradients, and the optimizer's step
        gate.start(second := LateCopyJob([], streams.queue([target], [hung.source]), reasons.append))
        hung.break_off()
        assert second.done.wait(60)
        gate.release()
        assert reasons[0] == ""
        assert "broke off" in reasons[1], "a version of garbage is told as complete"
        gate.start(third := LateCopyJob([], streams.queue([target], [hung.source]), reasons.append))
        assert third.done.wait(60)
        assert reasons[2], "the host ran on after the abort, and saved"
        gate.close()
        assert streams.unpin(20.0)
    assert thing is not None


class SimpleThing:
    """What is open in this process."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def void(self) -> None:
        self._call()


@case
def what_the_host_copies_after_the_job_broke_off_is_void() -> None:
    """State that is offloaded: no event of a device is behind its copies, but what a device left lies in it."""
    with directory() as root:
        torch.ones(1, device=place())
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer = holdfast.Checkpointer(
            root, model=model, optimizer=optimizer, config=holdfast.Config(every="1", linger_s=1.0)
        )
        checkpointer.restore()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        checkpointer.step(0).wait("captured")
        open_checkpointers.void()
        model.weight.grad.fill_(float("nan"))  # they came from a collective that was aborted
        optimizer.step()
        handle = checkpointer.step(1)
        checkpointer.settle()
        assert "broke off" in handle.given_up, "what was left of an aborted collective is told as complete"
        checkpointer.abandon()


@bug
def host_copies_are_not_asked() -> None:
    memory_saver.Saver._why_void = lambda *_: ""  # type: ignore[method-assign]


@bug
def nothing_is_void() -> None:
    open_checkpointers.void = lambda: None


@bug
def what_a_device_passes_later_counts() -> None:
    Fence.void = lambda _: None  # type: ignore[method-assign]
    Survivor.void = lambda _: None  # type: ignore[method-assign]


@bug
def what_is_queued_later_counts() -> None:
    start = Fence.start

    def begin(self: Fence, job: LateCopyJob) -> None:
        open_checkpointers.broken.reason = ""
        start(self, job)

    Fence.start = begin  # type: ignore[method-assign]


def noted_job() -> tuple[torch.nn.Linear, torch.optim.AdamW, State, Survivor]:
    """A small job on the device whose steps are noted."""
    step_snapshot.attach(step_snapshot.make_page())
    model = torch.nn.Linear(64, 64).to(place())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    state = State({"model": model, "optimizer": optimizer}, rank=0, world_size=1)
    return model, optimizer, state, Survivor(state, job="j", rank=0, world_size=1)


@case
def a_step_behind_a_hung_collective_is_not_live() -> None:
    model, optimizer, _, survivor = noted_job()
    open_checkpointers.register(thing := SimpleThing(survivor.void))

    def step(number: int) -> None:
        model(torch.ones(1, 64, device=place())).sum().backward()
        optimizer.step()
        survivor.note(Version(1, number))

    step(0)
    step(1)
    simulated.hang(0)
    model.weight.grad.fill_(float("nan"))
    optimizer.step()
    survivor.note(Version(1, 2))
    open_checkpointers.void()
    simulated.free(0)
    survivor.leave()
    assert survivor_state.remains.version is None, "NaN is offered as the live state of a step"
    assert "had not finished" in survivor_state.remains.why, survivor_state.remains.why
    assert thing is not None


@case
def a_step_that_the_device_finished_is_live() -> None:
    model, optimizer, _, survivor = noted_job()
    open_checkpointers.register(thing := SimpleThing(survivor.void))
    for number in range(2):
        model(torch.ones(1, 64, device=place())).sum().backward()
        optimizer.step()
        survivor.note(Version(1, number))
    torch.accelerator.synchronize()
    expected = model.weight.detach().cpu().clone()
    simulated.hang(0)
    model(torch.ones(1, 64, device=place())).sum().backward()  # the next step's forward hangs in a collective
    open_checkpointers.void()
    simulated.free(0)
    survivor.leave()
    assert survivor_state.remains.version == Version(1, 1), survivor_state.remains.why
    assert any(torch.equal(value, expected) for value in survivor_state.remains.late.values())
    assert thing is not None


@case
def gradients_that_live_on_a_device_leave_the_step_before_live() -> None:
    """No note can have them, and the next one behind an optimizer's step is made all the same."""
    model, optimizer, state, survivor = noted_job()
    for number in range(7):
        model(torch.ones(1, 64, device=place())).sum().backward()
        if number % 3 == 2:
            optimizer.step()
            state.stepped(optimizer)
            optimizer.zero_grad()
        state.gradients.note()
        survivor.note(Version(1, number))
    torch.accelerator.synchronize()
    survivor.void()
    survivor.leave()
    assert survivor_state.remains.version == Version(1, 5), survivor_state.remains.why


@bug
def gradients_are_noted_wherever_they_are() -> None:
    GradientsPart.fits = lambda self, _: not self.why_lost  # type: ignore[method-assign]


# --- health


@case
def a_device_that_works_is_told_from_one_that_does_not() -> None:
    torch.ones(1, device=place())
    assert accelerator.healthy(20.0)
    simulated.hang(0)
    began = time.monotonic()
    assert not accelerator.healthy(0.3)
    assert time.monotonic() - began < 5
    simulated.free(0)
    assert accelerator.healthy(20.0)
    second = torch.ones(1, device=place(1))
    assert accelerator.healthy(20.0)
    simulated.hang(1)
    assert not accelerator.healthy(0.3), "a process that uses two devices needs both"
    simulated.free(1)
    assert accelerator.healthy(20.0)
    del second
    assert not simulated.is_started(2), "a device was begun to ask it"
    simulated.fault(0, now=True)
    assert not accelerator.healthy(20.0)


@bug
def nobody_asks_the_device() -> None:
    accelerator.healthy = lambda _: True


@case
def a_device_that_fails_a_restore_is_named_with_a_remedy() -> None:
    with pytest.raises(DeviceError, match=r"no memory left.*free memory of the device") as caught:
        together(Alone(), lambda: torch.ones(1 << 50, device=place()))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    with directory() as root:
        job = Job1(root, foreach=True)
        job.checkpointer.restore()
        job.step(0)
        job.handles[0].wait("captured", 60)
        simulated.fault(now=True)
        with pytest.raises(DeviceError, match=r"a device failed.*end this process"):
            job.checkpointer.restore()
        job.checkpointer.abandon()


@case
def a_faulted_device_gives_versions_up_and_raises_nothing_of_ours() -> None:
    memory_saver.DRAIN_S = 0.5
    with directory() as root:
        job = Job1(root, foreach=True)
        job.checkpointer.restore()
        for number in range(2):
            job.step(number)
        job.checkpointer.settle()
        simulated.fault(0, now=True)
        handle = job.checkpointer.save(2)
        assert handle.given_up
        began = time.monotonic()
        job.checkpointer.abandon()
        assert time.monotonic() - began < 10


# --- generators


@case
def a_rank_goes_on_with_its_sequence_on_another_device() -> None:
    module: Any = torch.get_device_module(simulated.name())
    torch.accelerator.set_device_index(1)
    torch.ones(1, device=place(1))
    module.manual_seed(77)
    torch.rand(3, device=place(1))
    saved = ProcessRandomness().state_dict()
    expected = torch.rand(4, device=place(1)).cpu()
    module.manual_seed(5)
    torch.accelerator.set_device_index(0)
    torch.ones(1, device=place(0))
    module.manual_seed(6)
    ProcessRandomness().load_state_dict(saved)
    assert torch.equal(torch.rand(4, device=place(0)).cpu(), expected)


@case
def every_device_of_a_process_goes_on_with_its_sequence() -> None:
    module: Any = torch.get_device_module(simulated.name())
    kept = [torch.ones(1, device=place(index)) for index in range(2)]
    module.manual_seed_all(7)
    torch.rand(3, device=place(1))
    torch.accelerator.set_device_index(1)
    saved = ProcessRandomness().state_dict()
    expected = [torch.rand(4, device=tensor.device).cpu() for tensor in kept]
    module.manual_seed_all(8)
    torch.accelerator.set_device_index(0)  # which is the current one then has no say
    ProcessRandomness().load_state_dict(saved)
    assert all(map(torch.equal, [torch.rand(4, device=tensor.device).cpu() for tensor in kept], expected)), "drawn anew"


@case
def a_device_that_is_used_behind_its_restore_goes_on_with_its_sequence() -> None:
    """A model in host memory, and noise drawn on devices that hold nothing when a step is saved or restored."""
    torch.manual_seed(3)
    fresh = ProcessRandomness().state_dict()
    assert "device" not in fresh, "a save begins no device"
    torch.get_device_module(simulated.name()).manual_seed_all(7)
    for _ in range(2):
        noise = [torch.rand(3, device=place(index)).cpu() for index in (0, 2)]
    saved = ProcessRandomness().state_dict()
    noise = [torch.rand(3, device=place(index)).cpu() for index in (0, 2)]
    script = (
        "import pickle, sys, torch\n"
        "from holdfast.checkpoint.entries.rng import ProcessRandomness\n"
        "from holdfast.testing import device\n"
        "device.load()\n"
        "torch.manual_seed(3)\n"
        "ProcessRandomness().load_state_dict(pickle.loads(sys.stdin.buffer.read()))\n"
        "noise = [torch.rand(3, device=torch.device(device.name(), index)).cpu() for index in (0, 2)]\n"
        "sys.stdout.buffer.write(pickle.dumps(noise))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(saved), capture_output=True, check=True)
    assert all(map(torch.equal, pickle.loads(done.stdout), noise)), f"drawn anew {done.stderr.decode()}"


@bug
def devices_draw_nothing() -> None:
    accelerator.Device._has_drawn = lambda *_: False  # type: ignore[method-assign]


@bug
def one_device_of_a_process_is_saved() -> None:
    accelerator.Device.used = lambda self: [self.current()]  # type: ignore[method-assign]


@bug
def generators_are_saved_by_the_number_of_their_device() -> None:
    current = accelerator.Device.current
    accelerator.Device.random_state = lambda self: self._module().get_rng_state(0)  # type: ignore[method-assign]
    assert current is not None


# --- graphs


@case
def a_step_in_a_graph_is_captured_and_never_copied_late() -> None:
    each_alone()
    with directory() as root:
        job = Job1(root, foreach=True, capturable=True)
        job.checkpointer.restore()
        for number in range(5):
            job.step(number)
        job.checkpointer.settle()
        torch.accelerator.empty_host_cache = lambda: None  # torch has none for a device of another backend
        graph = torch.accelerator.Graph()
        job.forward(5)
        with graph:
            job.optimizer.step()
        simulated.set_copy_rate(20 * MIB)
        sums = {}
        for number in range(5, 9):
            graph.replay()
            job.handles.append(job.checkpointer.save(number))
            sums[number] = job.sum()
        graph.replay()
        job.checkpointer.abandon()
        assert len(job.given_up()) <= 1, job.given_up()  # the one that was being copied when the graph was captured
        simulated.set_copy_rate(0)
        again = Job1(root, foreach=True, capturable=True)
        first = again.checkpointer.restore()
        assert first in (8, 9), first
        assert again.sum() == sums[first - 1], "torn by a replay"
        again.checkpointer.close()


@bug
def nobody_looks_for_graphs() -> None:
    accelerator.Device.capturing = lambda _: False  # type: ignore[method-assign]
    memory_saver.Saver._look_for_graphs = lambda _: None  # type: ignore[method-assign]
    nobody_looks_at_devices()


# --- restore


@case
def a_restore_queues_its_chunks_and_is_proven() -> None:
    simulated.set_copy_rate(400 * MIB)
    with directory() as root:
        job = Job1(root, foreach=True)
        job.checkpointer.restore()
        job.step(0)
        expected = job.sum()
        job.checkpointer.close()
        before = simulated.counts()
        again = Job1(root, foreach=True)
        blocking = simulated.counts()["blocking_copies"]
        known, tensor_fill.is_known = tensor_fill.is_known, lambda _: False  # type: ignore[attr-defined]
        again.checkpointer.restore()
        tensor_fill.is_known = known  # type: ignore[attr-defined]
        after = simulated.counts()
        assert after["late_copies"] > before["late_copies"]
        assert after["blocking_copies"] - blocking <= 4, "pieces were copied one by one, each waited for"
        assert again.sum() == expected
        again.checkpointer.close()


@case
def what_is_read_from_storage_goes_straight_to_the_device() -> None:
    simulated.set_copy_rate(400 * MIB)
    config = holdfast.Config(every="1000", memory_budget="100KB", linger_s=1.0)

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(1024, 1500 + i) for i in range(5))).to(place())

    with directory() as root:
        saved = model()
        with holdfast.Checkpointer(root, model=saved, config=config) as checkpointer:
            checkpointer.restore()
            checkpointer.save(1, "durable")
        read = []
        copied = tensor_fill._Work._read_and_copy

        def count(self: tensor_fill._Work, left: UnreadChunks, chunk: tensor_fill._Chunk, limit: ReadLimit) -> int:
            read.append(chunk.goes_to_device)
            return copied(self, left, chunk, limit)

        tensor_fill._Work._read_and_copy = count  # type: ignore[method-assign]
        other = model()
        with holdfast.Checkpointer(root, model=other, config=config) as checkpointer:
            assert checkpointer.restore() == 2
        assert read.count(True) >= 2, read
        for name, tensor in saved.state_dict().items():
            assert torch.equal(other.state_dict()[name].cpu(), tensor.cpu()), name


@case
def a_slot_that_the_driver_knows_needs_no_buffer() -> None:
    def refuse(self: chunk_staging.Staging) -> torch.Tensor:
        raise AssertionError(f"a buffer of {self._num_bytes} bytes was taken")

    with directory() as root:
        job = Job1(root, foreach=True)
        job.checkpointer.restore()
        job.step(0)
        job.checkpointer.save(0).wait("captured")
        expected = job.sum()
        made, chunk_staging.Staging._new = chunk_staging.Staging._new, refuse  # type: ignore[method-assign]
        try:
            for _ in range(2):
                with torch.no_grad():
                    for parameter in job.model.parameters():
                        parameter.zero_()
                torch.accelerator.synchronize()
                simulated.set_copy_rate(50 * MIB)
                before = simulated.counts()
                assert job.checkpointer.restore() == 1
                after = simulated.counts()
                simulated.set_copy_rate(0)
                assert after["late_copies"] > before["late_copies"]
                assert after["blocking_copies"] - before["blocking_copies"] <= 4, "pieces were copied one by one"
                assert job.sum() == expected, "read before it was there"
        finally:
            chunk_staging.Staging._new = made  # type: ignore[method-assign]
        job.checkpointer.close()


@bug
def no_slot_is_known_to_the_driver() -> None:
    tensor_fill.is_known = lambda _: False  # type: ignore[attr-defined]


@bug
def nobody_waits_for_what_is_sent_in_place() -> None:
    def send(self: chunk_staging.Staging, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._queue(targets, sources, is_pinned=True)

    chunk_staging.Staging.send_in_place = send  # type: ignore[method-assign]


@bug
def a_restore_comes_from_ordinary_memory() -> None:
    def ordinary(self: chunk_staging.Staging) -> torch.Tensor:
        self._is_pinned = False
        return torch.empty(self._num_bytes, dtype=torch.uint8)

    chunk_staging.Staging._new = ordinary  # type: ignore[method-assign]


@case
def a_restore_waits_for_what_is_queued_for_its_tensors() -> None:
    target = torch.zeros(MIB, device=place())
    simulated.sleep(0.3)
    target.fill_(9)  # the script's initialisation; the device has not come to it
    sender = chunk_staging.Staging(chunk_staging.Starts([target]), target.nbytes)
    for value in range(4):
        buffer = sender.take(target.nbytes)
        buffer.view(torch.float32).fill_(value)
        sender.send(buffer, [target], [chunk_staging.placed(buffer, buffer.data_ptr(), buffer).view(torch.float32)])
    sender.close()
    torch.accelerator.synchronize()
    assert bool((target.cpu() == 3).all()), "what was queued before came after the restore"


@case
def a_buffer_is_used_again_when_the_device_has_read_it() -> None:
    simulated.set_copy_rate(50 * MIB)
    targets = [torch.zeros(MIB // 2, device=place()) for _ in range(5)]
    with torch.inference_mode():
        targets.append(torch.zeros(MIB // 2, device=place()))
    sender = chunk_staging.Staging(chunk_staging.Starts(targets), targets[0].nbytes)
    for value, target in enumerate(targets):
        buffer = sender.take(target.nbytes)
        buffer.view(torch.float32).fill_(value)
        sender.send(buffer, [target], [buffer.view(torch.float32)])
    sender.close()
    assert [float(target.cpu().unique()) for target in targets] == list(range(6)), "overwritten on its way"


@bug
def a_buffer_is_used_again_at_once() -> None:
    chunk_staging._await = lambda _: None


@bug
def a_restore_does_not_wait_for_the_stream() -> None:
    def stream(self: chunk_staging.Staging, at: torch.device) -> torch.Stream:
        if at not in self._streams:
            self._streams[at] = accelerator.device_of(at.type).new_stream(at)
        return self._streams[at]

    chunk_staging.Staging._stream = stream  # type: ignore[method-assign]


def main(name: str, planted: str = "") -> int:
    faulthandler.dump_traceback_later(100, exit=True)
    simulated.load()
    if planted:
        BUGS[planted]()
    for one in name.split(","):
        simulated.set_copy_rate(0)
        simulated.set_kernel_time(0)
        torch.accelerator.set_device_index(0)
        try:
            CASES[one]()
        except BaseException:  # noqa: BLE001 - whatever it is, the case failed
            traceback.print_exc()
            sys.stderr.write(f"{one} failed\n")
            return 1
    assert threading.main_thread() is threading.current_thread()
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
