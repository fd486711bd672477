"""Copies from a device in the waits of a pipeline: what is queued when. The device is a list of what was queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.base.errors import LevelNotReached
from holdfast.base.events import Events
from holdfast.checkpoint.capture.copy_plan import batches
from holdfast.checkpoint.capture.late_copy_check import WriteCounts
from holdfast.checkpoint.capture.mutation_check import MutationHistory
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.checkpoint.capture.paced_copy import PacedCopy
from holdfast.checkpoint.capture.side_stream_copy import SideStreams
from holdfast.checkpoint.pipeline.bubbles import Bubbles
from holdfast.checkpoint.pipeline.timers import DeviceClock
from kit.device_times import Device as Times
from kit.schedules import nothing, schedule_of

RATE = 1000.0
BATCH = 10  # bytes: ten milliseconds


def never() -> bool:
    """Nobody gives the version up."""
    return False


class Queued:
    """What was queued in one call; the streams hold, and the host waits, for what has been queued by then."""

    def __init__(self, device: Device, spans: tuple[object, ...] = ()) -> None:
        self.device, self.spans, self.sources = device, spans, ()

    def hold_current_streams(self) -> None:
        self.device.said.append("held")

    def begun(self) -> bool:
        return True

    def passed(self) -> bool:
        return True

    def wait(self, stopped: Callable[[], bool]) -> bool:
        self.device.said.append("waited for")
        return True

    def seconds(self) -> float:
        return 0.0

    num_bytes = 0


class Device:
    """A device that copies at once what is queued."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.spans: tuple[object, ...] = ()

    def queue(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Queued:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        self.said.append("queued")
        return Queued(self, self.spans)

    @property
    def num_queued(self) -> int:
        return self.said.count("queued")


class Copying:
    """A version of so many batches, and what was told of them."""

    def __init__(self, count: int, *, beside: int = 0, patience_s: float = 60.0) -> None:
        self.device, self.told = Device(), []
        self.source, self.target = (
            torch.arange(count * BATCH, dtype=torch.uint8),
            torch.zeros(count * BATCH, dtype=torch.uint8),
        )
        whole = batches([self.target], [self.source], most=BATCH) if count else []
        self.copy = PacedCopy(
            self.device, Queued(self.device), whole, rate=RATE, beside=beside, patience_s=patience_s, told=self.tell
        )  # fmt: skip

    def tell(self, spans: Sequence[object], num_bytes: int, inside: bool) -> None:
        self.told.append(inside)


def test_a_wait_gets_what_it_holds_and_the_fence_what_is_left() -> None:
    job = Copying(10, beside=1)
    assert job.device.num_queued == 1
    job.copy.feed(0.036)  # three of ten milliseconds, and the guard
    assert job.device.num_queued == 4
    job.copy.feed(0.005)
    assert job.device.num_queued == 4, "none that would outlast the wait"
    job.copy.feed(None)
    assert job.device.num_queued == 5, "of a wait that nobody knows one is risked"
    job.copy.hold_current_streams()
    assert job.told == [False] + [True] * 4 + [False] * 5
    assert job.device.said[-11:] == ["held"] * 11, "what is queued from here on waits for all of it"
    assert torch.equal(job.target, job.source)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 12), st.lists(st.one_of(st.none(), st.floats(0, 0.2)), max_size=6), st.data())
def test_every_byte_is_queued_once_and_before_the_step(count, waits, data) -> None:
    job = Copying(count, beside=data.draw(st.integers(0, count)))
    for expected_s in waits:
        before = job.device.num_queued
        job.copy.feed(expected_s)
        assert (job.device.num_queued - before) * BATCH / RATE <= max(0.9 * (expected_s or 0.0), BATCH / RATE) + 1e-9
    job.copy.hold_current_streams()
    job.source.fill_(255)  # the step
    assert job.device.num_queued == count
    assert job.target.tolist() == list(range(count * BATCH))


def test_who_waits_for_the_bytes_waits_until_all_are_queued() -> None:
    job, done = Copying(3), threading.Event()
    thread = threading.Thread(target=lambda: (job.copy.wait(never), done.set()), daemon=True)
    thread.start()
    assert not done.wait(0.1)
    job.copy.hold_current_streams()
    assert done.wait(20)
    assert job.device.said.count("waited for") == 4


def test_a_loop_that_comes_to_no_fence_is_not_waited_for() -> None:
    job = Copying(3, patience_s=0.0)
    job.copy.wait(never)
    assert torch.equal(job.target, job.source)
    assert job.told == [], "the clock of the device is the trainer's"


def test_what_is_given_up_is_not_queued_any_more() -> None:
    job = Copying(3)
    job.copy.stop()
    job.copy.feed(None)
    job.copy.hold_current_streams()
    job.copy.wait(never)
    assert job.device.num_queued == 0


@pytest.fixture
def bubbles() -> Bubbles:
    made = Bubbles(schedule_of(nn.Identity()), Events())
    made.attach()
    yield made
    made.detach()


def test_each_wait_of_a_schedule_feeds_the_copy_and_the_step_gets_the_rest(bubbles: Bubbles) -> None:
    """The host is a whole step ahead of the device: which wait it queues is counted where it queues them."""
    times = Times()
    bubbles._clock = DeviceClock(torch.device("cuda"), event=times.event)
    for _ in range(3):
        bubbles._begin_step()
        for seconds in (0.015, 0.036):
            bubbles.waited(lambda _, ms=1e3 * seconds: setattr(times, "queued_ms", times.queued_ms + ms), [object()])
    times.now_ms = times.queued_ms
    bubbles._begin_step()
    fence = Fence(timeout_s=5.0, events=Events())
    fence.pace, bubbles.on_wait = bubbles, fence.nudge
    job = Copying(6)
    try:
        fence.begin()
        fence.start(LateCopyJob([], job.copy, nothing))
        counts = []
        for _ in range(2):
            bubbles.waited(nothing, [object()])
            counts.append(job.device.num_queued)
        assert counts == [1, 4], "one of ten milliseconds in the first wait, three in the second"
        fence._before_step()
        assert (job.device.num_queued, job.device.said[-1]) == (6, "held")
    finally:
        fence.close()


def test_the_speed_of_a_device_and_the_spans_of_its_copies_come_from_its_own_clock(bubbles: Bubbles) -> None:
    times = Times()
    bubbles._clock = DeviceClock(torch.device("cuda"), event=times.event)
    bubbles.device_rate = 3000.0
    bubbles._clock.mark()
    began = times.event()
    times.queued_ms += 20.0
    bubbles.queued([(began, times.event())], 20, True)
    assert not bubbles.spans, "the device has not come that far"
    times.now_ms = 100.0
    bubbles._begin_step()
    (copied,) = bubbles.spans
    assert (copied.what, round(copied.end - copied.start, 6)) == ("copy", 0.02)
    assert bubbles.device_rate == pytest.approx((3000.0 + 1000.0) / 2)


@pytest.mark.gpu
def test_a_gpu_is_read_wait_by_wait_as_it_was_at_the_call(card: str) -> None:
    streams, source = SideStreams(), torch.ones(8 << 20, device=card)
    target, told = torch.zeros(8 << 20).pin_memory(), []
    for value in range(5):
        source.fill_(value)
        streams.follow([source])
        whole = batches([target], [source], most=source.nbytes // 8)
        copy = PacedCopy(
            streams, streams.queue([], []), whole, rate=1e9, beside=1, patience_s=60.0,
            told=lambda spans, num_bytes, inside: told.append((spans, num_bytes, inside)),
        )  # fmt: skip
        copy.feed(None)
        copy.hold_current_streams()
        source.fill_(-1)  # the next optimizer step
        copy.wait(never)
        assert bool((target == value).all())
    assert [inside for *_, inside in told] == [False, True, *[False] * 6] * 5
    assert all(began.elapsed_time(ended) > 0 for spans, *_ in told for began, ended in spans)


class InterruptedDevice(Device):
    """While it queues its first batch, a signal's handler comes to the fence."""

    copy: PacedCopy | None = None

    def queue(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Queued:
        found = super().queue(targets, sources)
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.feed(None)
            copy.hold_current_streams()
            assert not copy.passed()
        return found


def test_a_signals_handler_that_comes_to_the_fence_between_copies_gives_the_version_up() -> None:
    source = torch.arange(40, dtype=torch.uint8)
    device, target = InterruptedDevice(), torch.zeros(40, dtype=torch.uint8)
    todo = batches([target], [source], most=BATCH)
    copy = PacedCopy(device, Queued(device), todo, rate=RATE, beside=0, patience_s=60.0, told=lambda *_: None)  # type: ignore[arg-type]
    device.copy = copy
    done = threading.Thread(target=copy.hold_current_streams, daemon=True)
    done.start()
    done.join(20.0)
    assert not done.is_alive(), "the thread waits for itself"
    with pytest.raises(LevelNotReached, match="signal's handler"):
        copy.wait(never)
    assert not copy.passed()


def test_a_signals_handler_may_come_while_writes_are_counted() -> None:
    class Counted:
        """A tensor at whose second look a handler comes to the fence."""

        looks = 0

        @property
        def _version(self) -> int:
            self.looks += 1
            if self.looks == 2:
                found.append(counts.written())
            return self.looks > 1

    found: list[str] = []
    counts = WriteCounts(["weight"], [Counted()], MutationHistory(overlap=True))  # type: ignore[list-item]
    asking = threading.Thread(target=lambda: found.append(counts.written()), daemon=True)
    asking.start()
    asking.join(20.0)
    assert found == ["written while it was copied: weight"] * 2, "the thread waits for itself"
