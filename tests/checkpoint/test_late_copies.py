"""Whoever writes parameters while a late copy runs: the version is the state at its call, or there is none.

The copying thread is held before its first batch, so that what races on a busy machine happens here every time.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import forked
from holdfast.base.errors import LevelNotReached
from holdfast.base.events import Events
from holdfast.checkpoint.capture import mutation_check
from holdfast.checkpoint.capture import optimizer_fence as fences
from holdfast.checkpoint.capture.mutation_check import NUM_PROOFS
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.checkpoint.capture.spot_check import SPOT_BYTES, Spots, has_spots
from holdfast.checkpoint.save import memory_saver
from holdfast.checkpoint.state import step_observer
from holdfast.checkpoint.state.step_observer import Steps
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors import step_snapshot
from holdfast.checkpoint.survivors.survivor_state import Survivor, remains
from holdfast.core.model import Version
from holdfast.core.versions import late_copy_rules as rules
from kit.checkpointers import Make, Trainee
from kit.late_copies import Held, fill, trusted
from sample_kit import sampled


def counted(trainee: Trainee) -> None:
    with torch.no_grad():
        for parameter in trainee.model.parameters():
            parameter[0] = 7.0  # one row, in the middle of the last parameters for all that spots see


def foreach(trainee: Trainee) -> None:
    torch._foreach_add_([p.data for p in trainee.model.parameters()], 1.0)


def moments(trainee: Trainee) -> None:
    for state in trainee.optimizers[0].state.values():
        state["exp_avg"].data.zero_()


def loaded(trainee: Trainee) -> None:
    trainee.model.load_state_dict({name: tensor + 1 for name, tensor in trainee.model.state_dict().items()})


def test_a_save_inside_an_evaluation_spoils_no_other(make: Make) -> None:
    """What is made in inference mode may not be written outside of it: views of slots, state that a restore makes."""
    trainee = Trainee()
    checkpointer = make(trainee)
    with torch.inference_mode():
        checkpointer.restore()
    for step in range(2 * NUM_PROOFS):
        trainee.train()
        with torch.inference_mode(step % 2 == 0):
            checkpointer.save(step).wait("captured", 60)
    expected = trainee.fingerprint()
    checkpointer.abandon()
    again = Trainee()
    checkpointer = make(again)
    with torch.inference_mode():
        assert checkpointer.restore() == 2 * NUM_PROOFS
    assert again.fingerprint() == expected
    again.train()
    checkpointer.save(2 * NUM_PROOFS).wait("captured", 60)


WRITES = [fill, counted, foreach, moments, loaded]


@pytest.mark.parametrize("write", sampled(WRITES, fill, moments))
def test_writes_during_a_late_copy_give_the_version_up(
    make: Make,
    held: Held,
    caplog: pytest.LogCaptureFixture,
    write: Callable[[Trainee], None],
) -> None:
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    held.gate.clear()
    handle = checkpointer.save(NUM_PROOFS + 1)
    write(trainee)
    held.gate.set()
    with pytest.raises(LevelNotReached, match="written while it was copied"):
        handle.wait("captured", 60)
    assert "settle()" in caplog.text
    expected = trainee.fingerprint()
    after = checkpointer.save(NUM_PROOFS + 2)
    write(trainee)  # what somebody else writes is copied in the call from now on
    after.wait("captured", 60)
    checkpointer.restore(after.version)
    assert trainee.fingerprint() == expected


def test_one_element_written_past_the_counts_is_found_by_the_stretch(make: Make, held: Held) -> None:
    """The stretch moves on at every save: after so many, every byte was compared once."""
    trainee = Trainee(width=8)
    checkpointer = trusted(make, trainee)
    weight = trainee.model[0].weight
    middle = weight.data.view(-1)[5:6]
    given_up = 0
    for step in range(NUM_PROOFS + 1, NUM_PROOFS + 12):
        held.gate.clear()
        handle = checkpointer.save(step)
        middle.add_(1.0)
        held.gate.set()
        checkpointer._run.saver.fence.idle(20.0)
        given_up += "model.0.weight" in handle.given_up
        trainee.train()
    assert given_up == 1, "once, and never late again"


def test_a_wait_in_another_thread_leaves_the_fence_shut(make: Make, held: Held) -> None:
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    expected = trainee.fingerprint()
    held.gate.clear()
    handle = checkpointer.save(NUM_PROOFS + 1)
    levels: list[Any] = []
    waits = [
        threading.Thread(target=lambda: levels.append(handle.wait("captured", 60)), daemon=True),
        threading.Thread(target=checkpointer.settle, daemon=True),
        threading.Thread(target=lambda: checkpointer.flush(60), daemon=True),
    ]
    for wait in waits:
        wait.start()
    threading.Timer(0.3, held.gate.set).start()  # the step below must still be waiting by then
    for optimizer in trainee.optimizers:
        optimizer.step()
    assert held.gate.is_set(), "the step did not wait for the copy"
    for wait in waits:
        wait.join(20)
    assert levels
    assert handle.given_up == ""
    checkpointer.restore(handle.version)
    assert trainee.fingerprint() == expected


def test_a_handler_may_save_while_the_step_waits(make: Make, held: Held) -> None:
    """As schedulers send SIGUSR1 before they preempt; it comes in the thread that waits for the copy."""
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    handles: list[Any] = []
    expected: list[bytes] = []

    def handle(*_: Any) -> None:
        expected.append(trainee.fingerprint())
        handles.append(checkpointer.save(NUM_PROOFS + 2))

    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident
    assert main is not None
    held.gate.clear()
    first = checkpointer.save(NUM_PROOFS + 1)

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGUSR1)
        held.gate.set()

    timer = threading.Timer(0.2, interrupt)
    timer.start()
    try:
        trainee.train()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert [handle.wait("captured", 60) for handle in (first, *handles)]
    assert len(handles) == 1
    checkpointer.restore(handles[0].version)
    assert [trainee.fingerprint()] == expected


def test_a_save_within_a_step_is_copied_in_the_call(make: Make, held: Held) -> None:
    """A closure is called in the middle of the step, whose rest passes no fence."""
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    late = checkpointer.events.counters()["late_copied_bytes"]
    held.gate.clear()
    taken: list[Any] = []

    def closure() -> float:
        taken.append((trainee.fingerprint(), checkpointer.save(NUM_PROOFS + 1)))
        return 0.0

    for parameter in trainee.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainee.optimizers[0].step(closure)
    held.gate.set()
    (expected, handle), *more = taken
    assert not more
    assert handle.wait("captured", 60)
    assert checkpointer.events.counters()["late_copied_bytes"] == late
    assert checkpointer._run.saver._trust._refused == set()
    checkpointer.restore(handle.version)
    assert trainee.fingerprint() == expected


class Slow(torch.optim.SGD):
    """Stops in the middle of a step until it is told to go on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        self.begun.set()
        assert self.go_on.wait(20.0)
        return super().step(closure)


@pytest.mark.parametrize(
    ("when", "late"),
    sampled(
        product(["before the call", "in the call"], [True, False]), ("before the call", False), ("in the call", True)
    ),
)
def test_a_step_of_another_thread_during_the_call_gives_it_up(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    late: bool,
) -> None:
    trainee = Trainee()
    checkpointer = trusted(make, trainee, overlap=late) if late else make(trainee, overlap=False)
    if not late:
        checkpointer.restore()
        trainee.train()
    slow = Slow([*trainee.model.parameters()])
    stepping = threading.Thread(target=slow.step)

    def begin() -> None:
        if not stepping.is_alive() and not slow.begun.is_set():
            stepping.start()
            assert slow.begun.wait(60)

    if when == "before the call":
        begin()
    gather = checkpointer._run.state.gather
    monkeypatch.setattr(checkpointer._run.state, "gather", lambda: (gather(), begin())[0])
    handle = checkpointer.save(NUM_PROOFS + 1)
    slow.go_on.set()
    stepping.join(20.0)
    with pytest.raises(LevelNotReached, match="stepped in another thread"):
        handle.wait("captured", 60)
    trainee.train()
    assert checkpointer.save(NUM_PROOFS + 2).wait("captured", 60)


def test_what_a_step_of_another_thread_wrote_is_not_taken_for_something_elses(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins once the state was looked at and copied, and writes before the next step compares the two."""
    trainee = Trainee()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    trainee.train()
    for parameter in trainee.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(trainee.model.parameters(), lr=1.0)
    stepping = threading.Thread(target=optimizer.step, name="averaging")
    saver = checkpointer._run.saver
    ending = saver._ending

    def steps(*args: Any) -> Any:
        stepping.start()
        stepping.join(60)
        return ending(*args)

    with monkeypatch.context() as patched:
        patched.setattr(saver, "_ending", steps)
        handle = checkpointer.save(0)
    assert handle.given_up == "an optimizer stepped in another thread (averaging) while the state was looked at"
    trainee.train()
    assert checkpointer.save(1).wait("captured", 60)
    assert "something other than an optimizer's step" not in caplog.text
    assert saver._trust._refused == set()


def test_a_step_that_begins_while_it_is_looked_who_steps_is_seen_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread was in no step yet when the stacks were read; another one, of which a step raised, gave cause to look."""
    slow = Slow([torch.nn.Parameter(torch.ones(2))])
    steps = step_observer.Steps([slow])
    stepping = threading.Thread(target=slow.step)
    steps._inside[threading.get_ident()] = 1
    read = sys._current_frames

    def frames() -> dict[int, Any]:
        found = read()
        stepping.start()
        assert slow.begun.wait(60)
        return found

    try:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "_current_frames", frames)
            assert not steps.under_way()
        assert steps.under_way() == {stepping.ident}
    finally:
        steps.close()
        slow.go_on.set()
        stepping.join(20.0)


def test_a_save_of_another_thread_waits_for_the_one_before(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    expected = trainee.fingerprint()
    handles: list[Any] = []
    other = threading.Thread(target=lambda: handles.append(checkpointer.save(NUM_PROOFS + 2)))
    gather = checkpointer._run.state.gather

    def in_the_middle() -> Any:
        monkeypatch.setattr(checkpointer._run.state, "gather", gather)
        other.start()
        other.join(1.0)  # it is given the time to be wrong
        assert not handles
        return gather()

    monkeypatch.setattr(checkpointer._run.state, "gather", in_the_middle)
    handles.append(checkpointer.save(NUM_PROOFS + 1))
    other.join(60)
    for handle in handles:
        assert handle.wait("captured", 60)
        checkpointer.restore(handle.version)
        assert trainee.fingerprint() == expected


def test_a_save_in_the_middle_of_a_save_is_given_up_by_name(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal's handler that saves, and it comes in a save; or a state_dict() that saves."""
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    inner: list[Any] = []
    loader, state_dict = trainee.loader, trainee.loader.state_dict

    def saves() -> dict[str, int]:
        inner.append(checkpointer.save(NUM_PROOFS + 2))
        return state_dict()

    expected = trainee.fingerprint()
    monkeypatch.setattr(loader, "state_dict", saves)
    outer = checkpointer.save(NUM_PROOFS + 1)
    monkeypatch.undo()
    assert inner
    assert all("in the middle of another save" in handle.given_up for handle in inner)
    assert outer.wait("captured", 60)
    trainee.train()
    assert checkpointer.save(NUM_PROOFS + 3).wait("captured", 60)
    checkpointer.restore(outer.version)
    assert trainee.fingerprint() == expected


def test_a_step_that_raised_is_not_under_way() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("of the script")

    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Fails([parameter], lr=1.0)
    steps = Steps([optimizer])
    with pytest.raises(ValueError, match="of the script"):
        optimizer.step()
    assert steps.under_way() == set()
    slow = Slow([parameter])
    thread = threading.Thread(target=slow.step)
    thread.start()
    assert slow.begun.wait(60)
    assert steps.under_way() == {thread.ident}
    slow.go_on.set()
    thread.join(20.0)
    assert steps.under_way() == set()
    steps.close()


@pytest.mark.parametrize("who", sampled(["another", "successor"], "successor"))
def test_steps_of_an_optimizer_that_was_not_given_wait_too(
    make: Make,
    held: Held,
    caplog: pytest.LogCaptureFixture,
    who: str,
) -> None:
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    for parameter in trainee.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    other = torch.optim.Adagrad(list(trainee.model.parameters())[::-1], lr=1.0)
    if who == "successor":
        trainee.optimizers.clear()
    held.gate.clear()
    handle = checkpointer.save(NUM_PROOFS + 1)
    threading.Timer(0.3, held.gate.set).start()
    other.step()
    assert held.gate.is_set(), "the step did not wait for the copy"
    assert handle.wait("captured", 60)
    assert caplog.text.count("Adagrad steps parameters") == 1


def test_an_optimizer_of_other_parameters_waits_for_nothing(make: Make, held: Held) -> None:
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    stranger = torch.nn.Parameter(torch.ones(3))
    stranger.grad = torch.ones(3)
    held.gate.clear()
    handle = checkpointer.save(NUM_PROOFS + 1)
    torch.optim.SGD([stranger], lr=1.0).step()
    assert not checkpointer._run.saver.fence.idle(0.0), "the copy still waits"
    held.gate.set()
    assert handle.wait("captured", 60)


def test_after_settle_weights_may_be_swapped(make: Make, held: Held, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is given up, nobody is warned, and saves stay late."""
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    for step in range(NUM_PROOFS + 1, NUM_PROOFS + 4):
        expected = trainee.fingerprint()
        held.gate.clear()
        handle = checkpointer.save(step)
        threading.Timer(0.1, held.gate.set).start()
        checkpointer.settle()
        assert checkpointer._run.saver.fence.idle(0.0), "the copy has ended"
        kept = [p.detach().clone() for p in trainee.model.parameters()]
        fill(trainee)
        for parameter, before in zip(trainee.model.parameters(), kept, strict=True):
            parameter.data.copy_(before)
        trainee.train()
        assert handle.wait("captured", 60)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert checkpointer._run.saver._trust._refused == set()
    checkpointer.restore(handle.version)
    assert trainee.fingerprint() == expected


def test_steps_that_pass_no_fence_end_late_copies_with_one_warning(
    make: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a replayed CUDA graph steps: the parameters move and no hook is called."""
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    for step in range(NUM_PROOFS + 1, NUM_PROOFS + 4):
        expected = trainee.fingerprint()
        handle = checkpointer.save(step)
        checkpointer._run.saver.fence.idle(20.0)
        foreach(trainee)
    handle.wait("captured", 60)
    assert len([r for r in caplog.records if "copied in the call from now on" in r.getMessage()]) == 1
    before = checkpointer.events.counters()["late_copied_bytes"]
    assert checkpointer.restore(handle.version) == NUM_PROOFS + 4
    assert trainee.fingerprint() == expected
    trainee.train()
    checkpointer.save(NUM_PROOFS + 5)
    assert checkpointer.events.counters()["late_copied_bytes"] == before


@pytest.mark.parametrize("when", sampled(["watched", "late"], "late"))
def test_no_fault_of_a_comparison_reaches_the_step(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    when: str,
) -> None:
    trainee = Trainee()
    if when == "late":
        checkpointer: Any = trusted(make, trainee)
        step = NUM_PROOFS + 1
    else:
        checkpointer, step = make(trainee), 0
        checkpointer.restore()
        trainee.train()

    def refuses(*_: Any) -> bool:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(mutation_check, "same_bits", refuses)
    monkeypatch.setattr(Spots, "differing", refuses)
    handle = checkpointer.save(step)
    checkpointer._run.saver.fence.idle(20.0)
    trainee.train()
    if when == "late":
        assert "was not checked" in handle.given_up, "what was not checked does not count"
    else:
        assert handle.wait("captured", 60)
        assert checkpointer._run.saver._trust._proofs == {}
    assert "a hook of ours failed" not in caplog.text, "that is the second line"


def test_hooks_do_nothing_in_a_forked_child() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    fence = Fence(timeout_s=30.0, events=Events())
    fence.guard([optimizer])
    gate = threading.Event()

    def opening() -> Any:
        gate.wait(30.0)
        return [], lambda _: None

    try:
        fence.start(LateCopyJob([], None, lambda _: None, opening=opening))
        child = os.fork()
        if child == 0:  # the copying thread is not here: nothing would ever end the wait
            try:
                optimizer.step()
                os._exit(0 if not parameter.detach().any() else 1)
            finally:
                os._exit(2)
        assert psutil.Process(child).wait(timeout=20) == 0
        assert bool((parameter.detach() == 1).all())
    finally:
        gate.set()
        fence.close()


def test_an_exception_in_a_hook_does_not_leave_the_step(caplog: pytest.LogCaptureFixture) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=1.0)

    def fails(*_: Any) -> None:
        raise RuntimeError("ours")

    steps = Steps([optimizer], before=fails, after=fails)
    optimizer.step()
    steps.close()
    assert not parameter.detach().any()
    assert caplog.text.count("the step goes on") == 2


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_compiled_step_passes_the_fence_and_proves_as_a_plain_one(make: Make) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpointer: Any = make(model=model, optimizer=optimizer)
    checkpointer.restore()
    step = torch.compile(optimizer.step, backend="eager", fullgraph=False)
    for number in range(NUM_PROOFS + 2):
        model(torch.randn(2, 8)).sum().backward()
        step()
        assert checkpointer._run.saver.fence.num_steps == number + 1
        expected = model.weight.detach().clone()
        handle = checkpointer.save(number)
    assert handle.wait("captured", 60)
    assert checkpointer.events.counters()["late_copied_bytes"] > 0
    checkpointer.restore(handle.version)
    assert torch.equal(model.weight, expected)


def test_a_frozen_keeper_holds_a_save_that_outgrew_its_slots_for_its_bound(make: Make) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, begin_timeout_s=0.5)
    checkpointer.restore()
    for step in range(2):  # not yet trusted: the call itself needs the slot
        trainee.train()
        checkpointer.save(step).wait("captured", 60)
    keeper = psutil.Process(checkpointer.keeper_status()["pid"])
    returned = threading.Event()
    keeper.suspend()
    thawed = threading.Timer(30.0, keeper.resume)
    thawed.start()
    try:
        trainee.train()
        handle = checkpointer.save(2, info={"note": "x" * 3_000_000})
        returned.set()
        assert keeper.status() == psutil.STATUS_STOPPED, "the save waited until the keeper was woken"
        assert "outgrew" in handle.given_up
        again = checkpointer.save(3, info={"note": "x" * 3_000_000})
        assert "larger slots are still being made" in again.given_up
    finally:
        thawed.cancel()
        keeper.resume()
    run: Any = checkpointer._run
    assert run.saver.fence.idle(30.0)
    trainee.train()
    assert checkpointer.save(4, info={"note": "x" * 3_000_000}).wait("captured", 60)


@pytest.mark.parametrize("write", [fill, foreach, counted, moments])
def test_state_written_outside_a_step_is_not_offered_as_live(write: Callable[[Trainee], None]) -> None:
    step_snapshot.attach(step_snapshot.make_page())
    try:
        trainee = Trainee()
        state = State(trainee.objects(), rank=0, world_size=1)
        survivor = Survivor(state, job="j", rank=0, world_size=1)
        trainee.train()
        survivor.note(Version(1, 1))
        write(trainee)
        survivor.leave()
        assert remains.version is None
        assert "written outside of an optimizer step" in remains.why
    finally:
        remains.forget()
        step_snapshot.attach(-1)


def test_spots_are_the_same_elements_in_any_memory_layout() -> None:
    torch.manual_seed(0)
    odd = [torch.randn(8, 6).t(), torch.randn(3, 4, 5)[:, ::2], torch.randn(()), torch.randn(7).to(torch.bfloat16)]
    odd += [torch.arange(9, dtype=torch.uint8), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    assert all(map(has_spots, odd))
    names = [f"t{number}" for number in range(len(odd))]
    one, other = Spots(odd, names), Spots([t.clone(memory_format=torch.contiguous_format) for t in odd], names)
    for turn in range(50):
        assert one.differing(one.read(turn), other.read(turn)) == []
    for number, tensor in enumerate(odd):
        tensor[(-1,) * tensor.dim()] += 1  # the last element is always among them
        assert one.differing(one.read(3), other.read(3)) == list(range(number + 1))
        assert (one.folded(one.read(3)) != other.folded(other.read(3))).sum() == number + 1
    assert not has_spots(torch.randn(3, dtype=torch.complex64).conj())
    assert not has_spots(torch.empty(0))


MOVING = """
import sys, torch, holdfast
import torch.multiprocessing as mp

def reader(queue, done):
    while (state := queue.get()) is not None:
        done.put(sum(float(tensor.sum()) for tensor in state.values()))

def take_away(model):
    for parameter in model.parameters():
        kept, size = parameter.detach().clone(), parameter.untyped_storage().nbytes()
        parameter.untyped_storage().resize_(0)
        parameter.untyped_storage().resize_(size)
        parameter.data.copy_(kept)

def main(how):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    checkpointer = holdfast.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, every=0, durable_every=0)
    checkpointer.restore()
    context = mp.get_context("fork")
    queue, done = context.Queue(), context.Queue()
    process = context.Process(target=reader, args=(queue, done))
    process.start()
    for step in range(9):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        states = [parameter.detach().clone() for parameter in model.parameters()]
        handle = checkpointer.save(step)
        if step == 5:
            handle._settle(60.0)
            if how == "share":
                model.share_memory()
            elif how == "send":
                queue.put(model.state_dict())
                done.get()
            else:
                take_away(model)
        else:
            handle.wait("captured", 60)
    queue.put(None)
    process.join()
    handle.wait("captured", 60)
    checkpointer.restore(handle.version)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), states))
    checkpointer.close()
    print("went on")

if __name__ == "__main__":
    main(sys.argv[2])
"""


@pytest.mark.parametrize("how", sampled(["share", "send", "take away"], "take away"))
@pytest.mark.usefixtures("runtime_dir")
def test_memory_that_torch_moves_in_place_ends_no_training(tmp_path: Path, how: str) -> None:
    """Spots are read by addresses: of memory that is not there any more the kernel makes a SIGSEGV."""
    script = tmp_path / "moving.py"
    script.write_text(MOVING)
    command = [sys.executable, str(script), str(tmp_path / "job"), how]
    done = forked.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "went on" in done.stdout


def test_an_inner_part_of_a_large_tensor_that_is_written_and_put_back_is_found(make: Make, held: Held) -> None:
    """The copy took half of it as it never was; nothing tells that but elements within."""
    trainee = Trainee(width=1 << 17)
    large = max(trainee.model.parameters(), key=torch.numel)
    assert large.nbytes >= 8 * SPOT_BYTES
    checkpointer = trusted(make, trainee, memory_budget="2GiB")
    rows = len(large) // 4
    inner, kept = large.data[rows : 3 * rows], large.data[rows : 3 * rows].clone()
    held.gate.clear()
    handle = checkpointer.save(20)
    inner.zero_()
    held.gate.set()
    assert checkpointer._run.saver.fence.idle(20.0)
    inner.copy_(kept)
    with pytest.raises(LevelNotReached, match="written while it was copied"):
        handle.wait("captured", 60)


def test_training_runs_the_rules_that_the_model_checks() -> None:
    used: list[Any] = [fences.opens, fences.is_void, memory_saver.may_be_late]
    assert used == [rules.opens, rules.is_void, rules.may_be_late]
