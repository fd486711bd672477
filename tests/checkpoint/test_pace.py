"""The pace of copies in a pipeline: what fits where, who is woken when, what it costs, and what is learnt of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

from holdfast.base.events import Events
from holdfast.checkpoint.capture.copy_plan import Batch
from holdfast.checkpoint.capture.optimizer_fence import FIRST_RATE_BYTES_PER_S, Fence, LateCopyJob
from holdfast.checkpoint.job.collectives import Alone
from holdfast.checkpoint.pipeline import schedule_actions
from holdfast.checkpoint.pipeline.bubbles import VERSIONS, Bubbles
from holdfast.checkpoint.pipeline.step_trace import Recorder
from holdfast.checkpoint.save.overhead_budget import Budget
from holdfast.cli.timeline import read
from holdfast.core.pipeline.bubble_placement import UNLIKE_STEPS
from holdfast.core.pipeline.event_model import Kind


def nothing(*_: object, **__: object) -> None:
    pass


def watched() -> Bubbles:
    """The first of two ranks of a pipeline whose stages compute nothing."""
    inner = dict.fromkeys(("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"), nothing)
    stage = SimpleNamespace(**{**vars(schedule_actions._stage(0, 2, 1)), **inner})
    watcher = Bubbles(schedules.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss), Events())
    watcher.attach()
    return watcher


@pytest.fixture
def bubbles() -> Iterator[Bubbles]:
    made = watched()
    yield made
    made.detach()


def learn(bubbles: Bubbles, *waits: float) -> None:
    """Some steps whose waits take so long."""
    for _ in range(4):
        bubbles._waits.begin_step()
        for seconds in waits:
            bubbles._waits.ended(seconds)


# --- the schedule


def test_gradients_of_inputs_and_of_weights_are_told_apart(bubbles: Bubbles) -> None:
    stage = bubbles.stages[0]
    bubbles._begin_step()
    stage.forward_one_chunk(2)
    stage.backward_one_chunk(2, full_backward=False)
    stage.backward_one_chunk(3, full_backward=True)
    stage.backward_weight_one_chunk(2)
    assert [seen.what for seen in bubbles.spans] == ["0F2", "0I2", "0B3", "0W2"]
    assert set(bubbles.profile().costs) == {(0, kind) for kind in Kind}


def test_what_fits_into_no_wait_is_copied_at_once_and_counted(bubbles: Bubbles) -> None:
    told: list[tuple[str, float]] = []
    bubbles.on_placed = lambda placement, seconds: told.append((placement.reason, seconds))
    learn(bubbles, 0.05)
    assert bubbles.beside([0.01] * 3) == 0
    assert bubbles.beside([0.01] * 7) == 3
    assert ["4 of 7 chunks fit" in reason for reason, _ in told] == [False, True]
    assert [seconds for _, seconds in told] == pytest.approx([0.03, 0.07]), "all of the copy, wherever it goes"
    bubbles.begin()
    bubbles.copied(1.00, 0.01, inside=False)  # no wait holds it
    bubbles.copied(1.01, 0.02, inside=True)
    bubbles.copied(1.03, 0.04, inside=False)  # nobody steered the gate any more
    bubbles.hurry()
    bubbles.copied(1.07, 0.08, inside=False)  # the step waited for it: what the fence counts
    for number in range(1, VERSIONS + 1):
        learn(bubbles, 0.05)
        bubbles.begin()
        assert bubbles.left_cost == pytest.approx(0.05 / number), "of versions that were, none of before the first"
    bubbles.begin()
    assert bubbles.left_cost == 0.0, "the versions since cost nothing"


def test_only_the_waits_of_the_own_step_count(bubbles: Bubbles) -> None:
    other = watched()
    try:
        bubbles._begin_step()
        schedules._wait_batch_p2p([Work()])
        stranger = threading.Thread(target=schedules._wait_batch_p2p, args=([Work()],))
        stranger.start()
        stranger.join(30)
        bubbles.thread = None
        schedules._wait_batch_p2p([Work()])  # an evaluation, with no step of this schedule around it
        other._begin_step()
        schedules._wait_batch_p2p([Work()])
        assert [seen.what for seen in bubbles.spans] == ["wait"]
        assert [seen.what for seen in other.spans] == ["wait"]
    finally:
        other.detach()


class Work:
    def __init__(self, during: Callable[[], object] = nothing) -> None:
        self.during = during

    def wait(self) -> None:
        self.during()


def test_the_copier_is_woken_as_a_wait_begins_and_the_gate_is_shut_as_it_ends(bubbles: Bubbles) -> None:
    said: list[str] = []
    bubbles.on_wait = lambda _: said.append("woken")
    gate = bubbles._gate
    bubbles._begin_step()
    schedules._wait_batch_p2p([Work(lambda: said.append(f"waits, gate open {gate._is_open}"))])
    assert said == ["woken", "waits, gate open True"]
    assert not gate._is_open


def test_the_speed_of_copies_is_learnt() -> None:
    """What a batch is expected to take comes from the copies before."""
    fence, told = Fence(timeout_s=5.0, events=Events()), Told()
    fence.pace = told
    source = torch.ones(1 << 20)
    try:
        for _ in range(8):
            fence.start(LateCopyJob([Batch([torch.zeros(1 << 20)], [source], source.nbytes)], None, nothing))
            fence.release()
            assert fence.idle(10)
    finally:
        fence.close()
    rate = FIRST_RATE_BYTES_PER_S
    for expected, took in zip(told.expected, told.took, strict=True):
        assert expected == pytest.approx(source.nbytes / rate)
        rate = (rate + source.nbytes / took) / 2  # the newest measurement counts as much as all before it


class Told:
    """A pace without waits that notes what it is told."""

    has_waits = False

    def __init__(self) -> None:
        self.expected: list[float] = []
        self.took: list[float] = []

    def beside(self, batch_seconds: Sequence[float]) -> int:
        self.expected += batch_seconds
        return len(batch_seconds)

    def turn(self, seconds: float) -> bool:
        return False

    def begin(self) -> None:
        pass

    def hurry(self) -> None:
        pass

    def copied(self, started_s: float, seconds: float, *, inside: bool) -> None:
        self.took.append(seconds)


def test_the_step_waits_for_what_found_no_turn() -> None:
    """All of a copy before the optimizer changes its source, whatever was hoped of the waits."""
    parameter = nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    fence, ends, target = Fence(timeout_s=20.0, events=Events()), [], torch.zeros(1000)
    fence.guard([optimizer])
    fence.pace = Shut()
    try:
        fence.start(LateCopyJob([Batch([target], [parameter.detach()], target.nbytes)], None, ends.append))
        optimizer.step()
        assert ends == [""]
        assert torch.equal(target, torch.ones(1000)), "the state before the step"
    finally:
        fence.close()


class Shut:
    """A pace whose waits never come: a turn is given in a hurry only."""

    has_waits = True

    def __init__(self) -> None:
        self.hurried = threading.Event()

    def beside(self, batch_seconds: Sequence[float]) -> int:
        return 0

    def turn(self, seconds: float) -> bool:
        assert self.hurried.wait(30)
        return False

    def begin(self) -> None:
        self.hurried.clear()

    def hurry(self) -> None:
        self.hurried.set()

    def copied(self, started_s: float, seconds: float, *, inside: bool) -> None:
        assert not inside


# --- what it costs


def test_copies_beside_the_work_cost_what_they_were_seen_to_cost(bubbles: Bubbles) -> None:
    for _ in range(VERSIONS):
        bubbles.copied(0.0, 0.03, inside=False)
        bubbles.begin()
    assert bubbles.left_cost == pytest.approx(0.03), "all of it, until it is known better"
    for step in range(16):
        slow = 0.002 if step >= 8 else 0.0
        if slow:
            bubbles.copied(step + 0.001, 0.004, inside=False)
        bubbles._drag.acted("0F", step, step + 0.010 + slow)
    bubbles._drag.acted("end", 99.0, 99.0)
    assert bubbles.profile().drag == pytest.approx(0.5)
    assert bubbles.left_cost == pytest.approx(0.015)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_budget_counts_the_call_the_fence_and_what_is_left_of_a_step_without_them() -> None:
    """Steps of 100 ms; a save stops them for 0.6 ms in the call and 0.4 ms at the fence, and leaves 0.9 ms to copy."""
    clock, events, told = Clock(), Events(), []
    left = SimpleNamespace(left_cost=0.0009)
    budget = Budget("0.5%", group=Alone(), events=events, bubbles=left, tell=told.append, clock=clock)
    for step in range(1, 17):
        clock.now_s += 0.1 if step > UNLIKE_STEPS else 7.0  # the first steps are like no later one
        if step % 2:
            clock.now_s += 0.001
            events.count("save_seconds", 0.0006)
            events.count("fence_wait_seconds", 0.0004)
            budget.saved()
        found = budget.after_step()
    assert found == 4, "1.9 ms of 100 ms: under half a percent"
    (reason,) = told
    assert reason.startswith("a save costs 1.90% of a step on rank 0; every 4 steps it is 0.4")


# --- the timeline


def test_the_track_of_a_rank_holds_its_steps_and_what_its_pipeline_saw(tmp_path: Path, bubbles: Bubbles) -> None:
    events = Events()
    recorder = Recorder(str(tmp_path), 3, events)
    recorder.watch(bubbles)
    for step in range(2):
        now = time.perf_counter()
        bubbles.copied(now, 0.001, inside=bool(step))
        recorder.step(step)
        assert not bubbles.spans, "what is written is not kept"
    events.emit("saved", seconds=0.001)
    bubbles.copied(time.perf_counter(), 0.001, inside=True)
    recorder.close()
    (track,) = read([tmp_path])
    assert track.name == "rank 3"
    assert sorted(span.what for span in track.spans) == ["copy", "copy", "copy beside", "saved", "step", "step"]
    assert not bubbles.spans, "what is written is not kept"
