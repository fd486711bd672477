"""What a device had not finished when the job broke off counts for nothing, and that comes before any group is aborted.

The device is an event that says what it is told: what matters is when it is asked.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.base.errors import Interrupted, LevelNotReached
from holdfast.base.events import Events
from holdfast.checkpoint.capture.copy_plan import batches
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.checkpoint.capture.paced_copy import PacedCopy
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.save import storage_saver
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors import step_snapshot, survivor_state
from holdfast.checkpoint.survivors.survivor_state import Survivor
from holdfast.core.model import Version
from holdfast.elastic.launch.agent import Agent
from holdfast.elastic.processes.worker_processes import WorkerSlot, WorkerStatus
from holdfast.elastic.worker import worker_main


class Imagined:
    """An accelerator that the process uses."""

    kind = "imagined"

    def random_state(self) -> None:
        """It has no generator."""

    def leave_captures_alone(self) -> None:
        """Nothing breaks one."""

    def capturing(self) -> bool:
        return False


class Mark:
    """An event, passed or not."""

    def __init__(self, passed: bool = False) -> None:
        self.has_passed = passed

    def query(self) -> bool:
        return self.has_passed


class Copy:
    """A copy on a device, as the fence sees it; it ends when it is told to."""

    num_bytes = 1
    sources = ()

    def __init__(self, passed: bool = False) -> None:
        self.event, self.stopped = threading.Event(), False
        if passed:
            self.event.set()

    def hold_current_streams(self) -> None:
        """The streams of this device hold by themselves."""

    def begun(self) -> bool:
        return True

    def passed(self) -> bool:
        return self.event.is_set()

    def wait(self, stopped: Callable[[], bool]) -> bool:
        while not self.event.wait(0.005):
            if stopped():
                return False
        return True

    def seconds(self) -> float:
        return 1.0

    def feed(self, expected_s: float | None) -> None:
        """Nothing is left to queue."""

    def stop(self) -> None:
        self.stopped = True


class Thing:
    """What is open in this process and hears that the job broke off."""

    def __init__(self, *calls: Callable[[], None]) -> None:
        self._calls = calls

    def void(self) -> None:
        for call in self._calls:
            call()

    def abandon(self) -> None:
        """Nothing to let go of."""

    interrupted = abandon


@pytest.fixture(autouse=True)
def used_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process uses a device, which is well."""
    monkeypatch.setattr(accelerator, "in_use", Imagined)
    monkeypatch.setattr(accelerator, "healthy", lambda _: True)
    yield
    open_checkpointers.begin()
    open_checkpointers.broken.stuck = ""


@pytest.fixture
def fence() -> Iterator[Fence]:
    made = Fence(timeout_s=5.0, events=Events())
    thing = Thing(made.void)
    open_checkpointers.register(thing)
    yield made
    made.close()


class Ended:
    """How jobs ended."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def job(self, device: Any, batches: list[Any] | None = None) -> LateCopyJob:
        return LateCopyJob(batches or [], device, self.reasons.append)


class Held:
    """What a job holds on to."""

    def ended(self, reason: str) -> None:
        """It ended well or not."""


def held(fence: Fence, copy: Copy) -> weakref.ref[Held]:
    """Starts a copy that a step passes while it is under way, or once it is complete; what its job holds on to."""
    state = Held()
    job = LateCopyJob([], copy, state.ended)
    fence.start(job)
    if copy.passed():
        assert job.done.wait(60)
    fence.release()
    copy.event.set()
    assert job.done.wait(60)
    assert fence.idle(60)
    return weakref.ref(state)


def test_the_tensors_of_no_version_but_the_last_are_held(fence: Fence) -> None:
    """A step that passed its copy under way held it for later steps, and went on doing so when others were complete."""
    first = held(fence, Copy())
    assert first() is not None, "no step passed it under way: this shows nothing"
    held(fence, Copy(passed=True))
    assert first() is None


def test_the_copying_thread_holds_nothing_when_it_is_idle(fence: Fence) -> None:
    state = Held()
    fence.start(job := LateCopyJob([], None, state.ended))
    assert job.done.wait(60)
    fence.release()
    assert fence.idle(60)
    of_job = weakref.ref(state)
    del state, job
    assert of_job() is None


def test_a_copy_that_a_device_had_not_passed_is_void_although_it_passes_it_later(fence: Fence) -> None:
    ended, copy = Ended(), Copy()
    job = ended.job(copy)
    fence.start(job)
    open_checkpointers.void()
    copy.event.set()  # the collective in front of it was aborted
    assert job.done.wait(60)
    assert "broke off" in ended.reasons[0]
    assert copy.stopped, "nothing more of it is queued"


def test_a_copy_that_a_device_had_passed_counts(fence: Fence) -> None:
    ended, copy = Ended(), Copy(passed=True)
    job = ended.job(copy)
    alive_before = open_checkpointers.broken.reason
    fence.start(job)
    open_checkpointers.void()
    assert job.done.wait(60)
    assert (alive_before, ended.reasons) == ("", [""])


def test_copies_queued_after_a_break_are_void_until_rerun(fence: Fence) -> None:
    """The host runs on until it is interrupted: it may save a step whose collectives were aborted."""
    ended = Ended()
    open_checkpointers.void()
    fence.start(first := ended.job(Copy(passed=True)))
    assert first.done.wait(60)
    fence.release()
    assert fence.idle(20)
    open_checkpointers.begin()
    fence.start(second := ended.job(Copy(passed=True)))
    assert second.done.wait(60)
    assert [bool(reason) for reason in ended.reasons] == [True, False]


def test_a_save_gives_the_copy_before_it_the_time_that_its_device_should_take(fence: Fence) -> None:
    """The host is ahead: it comes to its next save when the device has only begun to copy."""
    ended, copy = Ended(), Copy()
    copy.num_bytes, fence._device_rate = 60, 1.0
    fence.start(ended.job(copy))
    passing = threading.Timer(0.2, copy.event.set)
    passing.start()
    assert fence.idle(0.0), "a version would be given up"
    passing.join()
    assert ended.reasons == [""]
    fence.release()
    fence.start(second := ended.job(Copy()))
    assert not fence.idle(0.0, behind_s=0.0), "who closes waits no longer than that"
    second.stop("the test is over")


def test_what_a_device_had_not_passed_when_an_error_ended_the_run_is_void(fence: Fence) -> None:
    """Without a launcher of ours nobody orders to leave: the block of a Checkpointer ends with the error of a collective."""
    ended, copy = Ended(), Copy()
    fence.start(job := ended.job(copy))
    fence.void()
    copy.event.set()
    assert job.done.wait(60)
    assert "an error ended the run" in ended.reasons[0]


def test_without_a_device_nothing_is_void(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo raises in whoever waits, and nothing runs on behind it: copies of host memory are what they were."""
    monkeypatch.setattr(accelerator, "in_use", lambda: None)
    ended, target = Ended(), torch.zeros(4)
    open_checkpointers.void()
    fence.start(job := ended.job(None, batches([target], [torch.ones(4)])))
    assert job.done.wait(60)
    assert (ended.reasons, target.sum()) == ([""], 4)


def test_a_copy_in_the_waits_of_a_pipeline_is_void_unless_all_of_it_had_passed() -> None:
    def paced() -> PacedCopy:
        stream = SimpleNamespace(queue=lambda *_: queued)
        whole = batches([torch.zeros(2, dtype=torch.uint8)], [torch.ones(2, dtype=torch.uint8)], most=1)
        return PacedCopy(stream, queued, whole, rate=1.0, beside=1, patience_s=60.0, told=lambda *_: None)

    queued = Copy(passed=True)
    queued.spans = ()  # type: ignore[attr-defined]  # nothing is measured here
    copy = paced()
    assert not copy.passed(), "a batch is not even queued"
    copy.hold_current_streams()
    assert copy.passed()
    queued.event.clear()
    assert not copy.passed()
    queued.event.set()
    given_up = paced()
    given_up.stop()
    assert not given_up.passed(), "what was given up never counts"


@pytest.fixture
def survivor(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Survivor, list[Mark]]]:
    """One rank whose device passes what it is told, and the events that its notes record."""
    step_snapshot.attach(step_snapshot.make_page())
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = State({"model": model, "optimizer": optimizer}, rank=0, world_size=1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    marks: list[Mark] = []
    made = Survivor(state, job="job", rank=0, world_size=1)

    def events() -> tuple[Mark, ...]:
        marks.append(Mark())
        return (marks[-1],)

    monkeypatch.setattr(made, "_events", events)
    yield made, marks
    step_snapshot.attach(-1)
    survivor_state.remains.forget()


def test_a_step_that_a_device_had_not_finished_is_not_live(survivor: tuple[Survivor, list[Mark]]) -> None:
    made, marks = survivor
    made.note(Version(1, 4))
    made.void()
    marks[0].has_passed = True  # with gradients that nobody reduced
    made.leave()
    assert survivor_state.remains.version is None
    assert "had not finished" in survivor_state.remains.why


def test_a_step_that_a_device_had_finished_is_live(survivor: tuple[Survivor, list[Mark]]) -> None:
    made, marks = survivor
    made.note(Version(1, 4))
    marks[0].has_passed = True
    made.void()
    made.leave()
    assert survivor_state.remains.version == Version(1, 4)


def test_a_step_that_is_noted_after_the_job_broke_off_is_not_live(survivor: tuple[Survivor, list[Mark]]) -> None:
    made, marks = survivor
    made.note(Version(1, 4))
    marks[0].has_passed = True
    made.void()
    made.note(Version(1, 5))
    made.leave()
    assert survivor_state.remains.version in (None, Version(1, 4))
    assert len(marks) == 1, "nor is there a note of it"


def test_a_note_that_was_under_way_when_the_job_broke_off_is_not_live(
    survivor: tuple[Survivor, list[Mark]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, marks = survivor
    recorded = made._events

    def events() -> tuple[Any, ...]:
        made.void()  # the other thread, in the middle of a note
        return recorded()

    monkeypatch.setattr(made, "_events", events)
    made.note(Version(1, 4))
    marks[0].has_passed = True
    made.leave()
    assert survivor_state.remains.version is None


def test_what_storage_is_given_was_read_before_the_job_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without memory of keepers writes live tensors to storage: bytes that were read behind an abort are not."""
    written: list[object] = []
    saver = SimpleNamespace(
        _storage=SimpleNamespace(bundles=SimpleNamespace(write=lambda *args, **_: written.append(args)))
    )
    image = SimpleNamespace(plan=SimpleNamespace(length=8), ref=SimpleNamespace(bundle_id="b"))
    plan: Any = SimpleNamespace(images=[image])
    monkeypatch.setattr(storage_saver, "_fill", lambda *_: open_checkpointers.void())
    with pytest.raises(LevelNotReached, match="broke off"):
        list(storage_saver.DirectSaver._write_images(saver, Version(1, 1), plan, {}, None))  # type: ignore[arg-type]
    assert not written


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to leave a run, in order."""
    done: list[str] = []
    monkeypatch.setattr(open_checkpointers, "void", lambda: done.append("void"))
    monkeypatch.setattr(worker_main.group_teardown.GroupSockets, "cut", lambda *_: done.append("cut"))
    monkeypatch.setattr(worker_main.group_teardown.Aborts, "begin", lambda *_: done.append("abort"))
    return done


class Line:
    """The agent: silent, and hears everything."""

    lost = False

    def __init__(self) -> None:
        self.said: list[str] = []

    def send(self, op: str, *_: object, **__: object) -> None:
        self.said.append(op)


def rank(line: Line) -> worker_main.Runner:
    """A worker of which only what leaves a run is used."""
    made = worker_main.Runner.__new__(worker_main.Runner)
    made._line, made._changed = line, threading.Condition()  # type: ignore[assignment]
    made._sockets, made._aborts = worker_main.group_teardown.GroupSockets(), worker_main.group_teardown.Aborts()
    made._order = made._running = None
    made._verdict, made._pid = "fail", os.getpid()
    return made


def test_a_run_that_is_over_is_void_before_it_is_cut_and_aborted(steps: list[str]) -> None:
    order: Any = SimpleNamespace(number=1, environment={})
    made = rank(Line())
    made._running, made._order = order, SimpleNamespace(number=2)  # type: ignore[assignment]
    assert made.is_over(order, RuntimeError("whatever"))
    assert steps == ["void", "cut", "abort"]


def test_a_broken_group_is_void_before_it_is_cut_and_aborted_and_before_anybody_is_told(steps: list[str]) -> None:
    line = Line()
    order: Any = SimpleNamespace(number=1, environment={})
    assert not rank(line).is_over(order, RuntimeError("NCCL communicator was aborted"))
    assert (steps, line.said) == (["void", "cut", "abort"], ["raised"])


def test_a_device_that_runs_no_kernel_ends_the_process_and_the_agent_is_told(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, ended = Line(), []
    monkeypatch.setattr(accelerator, "healthy", lambda _: False)
    monkeypatch.setattr(worker_main, "_end_now", lambda: ended.append(1))
    order: Any = SimpleNamespace(number=1, environment={})
    made = rank(line)
    made._running, made._order = order, SimpleNamespace(number=2)  # type: ignore[assignment]
    made.is_over(order, RuntimeError("whatever"))
    assert (line.said[:1], ended) == (["unfit"], [1])


@pytest.mark.parametrize(("status", "died"), [(WorkerStatus.LEAVES, True), (WorkerStatus.RUNS, False)])
def test_a_process_that_ends_well_without_having_begun_its_order_ends_a_void_run(
    status: WorkerStatus, died: bool
) -> None:
    proc: Any = SimpleNamespace(poll=lambda: 0)
    worker_slot = WorkerSlot(0, proc, None, -1, status, order=3)  # type: ignore[arg-type]
    agent: Any = SimpleNamespace(_serial=3, _hear=lambda _: None)
    assert Agent._died(agent, worker_slot) is died
    assert (worker_slot.status is WorkerStatus.FINISHED) is not died


def test_a_process_whose_device_failed_is_replaced_and_not_counted() -> None:
    """It says that it is unfit, which is no failure, and gives no reason that would hold for the processes of others."""
    worker = SimpleNamespace(local_rank=0, global_rank=4)
    worker_slot: Any = SimpleNamespace(
        status=WorkerStatus.RUNS,
        local_rank=0,
        order=2,
        silent=False,
        began=True,
        again=False,
        error="",
        departs=False,
        left=False,
    )
    worker_slot.set_status = lambda status: setattr(worker_slot, "status", status)
    worker_slot.line = SimpleNamespace(
        receive=lambda wait: [{"op": "unfit", "number": 1, "why": ""}] if not wait else None, flush=lambda: None
    )
    worker_slot.proc = SimpleNamespace(poll=lambda: -9)
    workers = SimpleNamespace(workers=[worker])
    agent: Any = SimpleNamespace(_round=SimpleNamespace(), _unfit="", _serial=2, _worker_group=workers)
    agent._run_anew = lambda why, worker_slot: Agent._run_anew(agent, why, worker_slot)
    agent._hear = lambda worker_slot: Agent._hear(agent, worker_slot)
    agent._rank_of = lambda worker_slot: Agent._rank_of(agent, worker_slot)
    agent._note_state = lambda *_: None
    assert not Agent._died(agent, worker_slot), "it is judged as a failure"
    assert (worker_slot.status, agent._unfit) == (WorkerStatus.UNFIT, "")


@pytest.mark.usefixtures("survivor")
def test_a_state_in_memory_that_is_new_at_every_step_is_not_live() -> None:
    """The note saw the memory of the step before, and the save behind it that of this step."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State({"model": model, "optimizer": optimizer}, rank=0, world_size=1)
    renewed = Survivor(state, job="job", rank=0, world_size=1)
    for number in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.data = parameter.detach().clone()
        renewed.note(Version(1, number))
        state.gather()  # as a save does
    renewed.leave()
    assert survivor_state.remains.version is None, "the state of the step before is offered as that of this one"
    assert "other tensors" in survivor_state.remains.why, survivor_state.remains.why


def test_what_ranks_told_each_other_through_a_device_is_void_once_the_job_broke_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collective was aborted and left zeros, which would say that no rank failed."""
    for name, value in (("get_rank", 0), ("get_world_size", 2), ("get_backend_config", "cpu:gloo")):
        monkeypatch.setattr(collectives.dist, name, lambda value=value: value)
    monkeypatch.setattr(collectives.dist, "all_gather", lambda _, __: open_checkpointers.void())
    monkeypatch.setattr(collectives.dist, "recv", lambda _, __: open_checkpointers.void())
    ranks = collectives.Group()
    with pytest.raises(Interrupted, match="broke off"):
        collectives.together(ranks, lambda: "done")
    open_checkpointers.begin()
    with pytest.raises(Interrupted, match="broke off"):
        ranks.receive(4, 1)
