"""What `close` makes durable, and what it says where that is not the last step; and who may end a checkpointer at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import forked
from holdfast.base.errors import LevelNotReached, UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.core.model import Version
from holdfast.tiers.storage.version_store import open_storage
from keepers_kit import wait_ended
from kit.checkpointers import Make, Trainee, kill_keeper
from kit.late_copies import Held, fill, trusted
from sample_kit import sampled


def stored(tmp_path: Path) -> list[Version]:
    return open_storage(tmp_path / "job", Events()).versions()


def load_best(trainee: Trainee) -> None:
    """Other weights for the last test, as early stopping has it."""
    trainee.model.load_state_dict({name: tensor * 0.5 for name, tensor in trainee.model.state_dict().items()})


def exchange(trainee: Trainee) -> None:
    """The model gets other parameters; the optimizers keep those that they stepped."""
    best = {name: tensor * 0.5 for name, tensor in trainee.model.state_dict().items()}
    trainee.model.load_state_dict(best, assign=True)


def halve(trainee: Trainee) -> None:
    trainee.model.half()


def step_again(trainee: Trainee) -> None:
    """What an accumulation left over, behind the loop."""
    trainee.train()


CHANGES = [load_best, fill, exchange, halve, step_again]


@pytest.mark.parametrize("change", sampled(CHANGES, load_best))
def test_what_came_after_the_last_step_is_not_saved_as_its_state(
    make: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Trainee], None],
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, every="2", durable_every="0")
    checkpointer.restore()
    states = {}
    for step in range(3):
        trainee.train()
        states[step] = trainee.fingerprint()
        checkpointer.step(step)
    last = checkpointer._run.last.version.step
    assert last < 2, "the last step was not due"
    change(trainee)
    checkpointer.close()

    assert stored(tmp_path)[-1].step == last, "the newest that was saved"
    assert f"step 2 is not saved: {'an optimizer made a step' if change is step_again else 'parameters'}" in caplog.text
    again = Trainee()
    following = make(again)
    assert following.restore() == last + 1
    assert again.fingerprint() == states[last]


def killed_behind_its_last_step(make: Make) -> Trainee:
    """A job whose last step is in memory alone, as when it is killed before or in `close`."""
    trainee = Trainee()
    checkpointer = make(trainee, every="1", durable_every="0", linger_s=20.0)
    checkpointer.restore()
    checkpointer.carry("best", 9.0)
    for step in range(3):
        trainee.train()
        checkpointer.step(step, best=float(step))
    checkpointer.save(2).wait("captured", 60)
    checkpointer.abandon()
    return trainee


def test_a_job_that_comes_back_to_its_end_makes_that_durable(make: Make, tmp_path: Path) -> None:
    """The same command again finds all steps made, and its keeper ends with it."""
    trainee, following = killed_behind_its_last_step(make), []
    for _ in range(2):  # from memory, then from storage
        following.append(Trainee())
        checkpointer = make(following[-1], every="1", durable_every="0", linger_s=20.0)
        assert checkpointer.restore() == 3
        assert checkpointer.carry("best", 9.0) == 2.0
        drawn = torch.rand(3)  # as who makes an iterator does
        checkpointer.close()
        assert stored(tmp_path) == [Version(2, 2)], "once, and not again where storage has it"
    assert [each.fingerprint() for each in following] == [trainee.fingerprint()] * 2
    assert [each.loader.position for each in following] == [trainee.loader.position] * 2
    checkpointer = make(Trainee())
    checkpointer.restore()
    assert torch.equal(torch.rand(3), drawn), "random numbers too are as they were behind the last step"


def test_a_state_that_came_back_from_memory_and_changed_is_no_end_in_silence(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that leaves before it reports its last step has done nothing wrong: it ends well the second time too."""
    trainee = killed_behind_its_last_step(make)
    other = Trainee()
    checkpointer = make(other, every="1", durable_every="0", linger_s=20.0)
    checkpointer.restore()
    other.train()
    checkpointer.close()
    assert "was restored from memory and is in no storage, and an optimizer made a step" in caplog.text
    assert stored(tmp_path) == []
    again = Trainee()
    checkpointer = make(again, every="1", durable_every="0", linger_s=1.0)
    assert checkpointer.restore() == 3
    assert again.fingerprint() == trainee.fingerprint()
    checkpointer.close()
    assert stored(tmp_path) == [Version(3, 2)]


@pytest.mark.parametrize("change", sampled(CHANGES, step_again))
def test_where_nothing_can_be_made_durable_close_says_so(
    make: Make,
    tmp_path: Path,
    change: Callable[[Trainee], None],
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, every="60s", durable_every="0")
    checkpointer.restore()
    for step in range(3):
        trainee.train()
        checkpointer.step(step)
    change(trainee)
    with pytest.raises(LevelNotReached, match="nothing of this run is durable: step 2 was not due"):
        checkpointer.close()
    assert stored(tmp_path) == []


def test_the_last_step_is_saved_at_the_end_where_nothing_came_after_it(make: Make, tmp_path: Path) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, every="60s", durable_every="0")
    checkpointer.restore()
    for step in range(3):
        trainee.train()
        checkpointer.step(step)
    trainee.model.eval()
    with torch.no_grad():
        trainee.model(torch.randn(4, 16))
    expected = trainee.fingerprint()
    checkpointer.close()
    assert [version.step for version in stored(tmp_path)] == [2]
    again = Trainee()
    assert make(again).restore() == 3
    assert again.fingerprint() == expected


def test_a_keeper_that_died_at_the_last_save_costs_that_one_and_no_more(
    make: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, every="0")
    checkpointer.restore()
    for step in range(2):
        trainee.train()
        checkpointer.save(step).wait("captured", 60)
    expected = trainee.fingerprint()
    kill_keeper(checkpointer)
    trainee.train()
    assert checkpointer.save(2).given_up
    trainee.train()  # and the loop ends before this step is reported
    checkpointer.close()
    assert stored(tmp_path)[-1].step == 1
    assert "step 2 is not saved" in caplog.text
    again = Trainee()
    assert make(again).restore() == 2
    assert again.fingerprint() == expected


def test_after_an_exception_the_last_whole_version_is_stored_if_the_last_was_given_up(
    make: Make,
    held: Held,
    tmp_path: Path,
) -> None:
    trainee = Trainee()
    checkpointer = trusted(make, trainee)
    whole = checkpointer.save(10)
    whole.wait("captured", 60)
    trainee.train()
    keeper = psutil.Process(checkpointer.keeper_status()["pid"])
    held.gate.clear()
    torn = checkpointer.save(11)
    fill(trainee)
    held.gate.set()
    checkpointer._run.saver.fence.idle(20.0)
    assert torn.given_up
    failed = RuntimeError("the evaluation failed")
    checkpointer.__exit__(type(failed), failed, None)
    assert not wait_ended([keeper], 20.0), "it ends when all that was asked for is in storage"
    assert [version.step for version in stored(tmp_path)] == [10]


def test_where_the_last_save_is_given_up_the_one_before_is_durable_and_named(make: Make, tmp_path: Path) -> None:
    """Nothing would be left of it when the keeper has waited long enough for another start."""
    trainee, said = Trainee(), dict[str, object]()
    holder = SimpleNamespace(state_dict=lambda: dict(said), load_state_dict=lambda _: None)
    checkpointer = make(trainee, holder=holder, every="0", durable_every="0")
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0).wait("captured", 60)
    trainee.train()
    checkpointer.step(1)
    said["note"] = object()  # which nobody can store
    with pytest.raises(LevelNotReached, match=r"s0000000001 did not reach durable.*what is durable is .*s0000000000"):
        checkpointer.close()
    assert [version.step for version in stored(tmp_path)] == [0]


def test_what_was_restored_from_memory_alone_is_named_where_the_last_save_is_given_up(
    make: Make, tmp_path: Path
) -> None:
    """Storage takes nothing of an earlier incarnation."""
    killed_behind_its_last_step(make)
    trainee = Trainee()
    checkpointer = make(trainee, every="0", durable_every="0", linger_s=20.0)
    assert checkpointer.restore() == 3
    trainee.train()
    checkpointer.step(3)
    trainee.loader.state_dict = lambda: {"position": object()}  # type: ignore[assignment,method-assign,dict-item,return-value]
    with pytest.raises(LevelNotReached, match=r"i000001-s0000000002, which was restored, is in memory alone.* 20 s"):
        checkpointer.close()
    again = make(Trainee(), linger_s=1.0)
    assert again.restore() == 3
    again.close()
    assert stored(tmp_path) == [Version(3, 2)]


def test_a_step_number_is_saved_once(make: Make) -> None:
    """Epochs as step numbers: the second state would not be saved, though it was said to be."""
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    first = checkpointer.save(0)
    assert checkpointer.save(0, level="durable").version == first.version, "the same state again is no error"
    trainee.train()
    with pytest.raises(UsageError, match="step 0 is saved already, and an optimizer made a step since"):
        checkpointer.save(0)
    assert checkpointer.save(1).wait("captured", 60)


CHILD_ENDS: dict[str, Callable[[Any, Any], None]] = {
    "leaves the block": lambda checkpointer, _: checkpointer.__exit__(None, None, None),
    "fails in the block": lambda checkpointer, _: checkpointer.__exit__(RuntimeError, RuntimeError("x"), None),
    "closes": lambda checkpointer, _: checkpointer.close(),
    "abandons": lambda checkpointer, _: checkpointer.abandon(),
    "settles": lambda checkpointer, _: checkpointer.settle(),
}
CHILD_VERBS: dict[str, Callable[[Any, Any], object]] = {
    "saves": lambda checkpointer, _: checkpointer.save(99),
    "steps": lambda checkpointer, _: checkpointer.step(99),
    "flushes": lambda checkpointer, _: checkpointer.flush(),
    "waits": lambda _, handle: handle.wait("captured", 60),
    "asks": lambda checkpointer, _: checkpointer.keeper_status(),
    "restores": lambda checkpointer, _: checkpointer.restore(),
}


@pytest.mark.parametrize("what", sampled([*CHILD_ENDS, *CHILD_VERBS], "closes", "saves"))
def test_a_forked_child_ends_nothing_of_its_parent(make: Make, what: str) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    handle = checkpointer.save(0)
    handle.wait("captured", 60)
    keeper = checkpointer.keeper_status()["pid"]

    child = os.fork()
    if child == 0:
        code = 9
        try:
            if what in CHILD_ENDS:
                CHILD_ENDS[what](checkpointer, handle)
                code = 0
            else:
                CHILD_VERBS[what](checkpointer, handle)
        except UsageError as error:
            code = 0 if "forked" in str(error) else 8
        finally:
            os._exit(code)
    assert psutil.Process(child).wait(timeout=20) == 0
    trainee.train()
    assert checkpointer.save(1, level="durable").wait(timeout_s=60)
    assert checkpointer.keeper_status()["pid"] == keeper


class Alarm(Exception):
    """The user's own guard against steps that hang."""


@pytest.mark.parametrize("leaves", [False, True])
def test_what_a_signals_handler_raises_at_the_fence_reaches_the_script(leaves: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    fence = Fence(timeout_s=30.0, events=Events())
    fence.guard([optimizer])

    class Guard:
        def __call__(self, *_: object) -> None:
            if leaves:
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
            raise Alarm

    release = threading.Event()
    before = signal.signal(signal.SIGALRM, Guard())

    def opening() -> Any:
        os.kill(os.getpid(), signal.SIGALRM)  # while the step waits for this
        release.wait(30.0)
        return [], lambda _: None

    try:
        fence.start(LateCopyJob([], None, lambda _: None, opening=opening))
        with pytest.raises(Alarm):
            optimizer.step()
        assert bool((parameter.detach() == 1).all()), "the step was not made"
    finally:
        release.set()
        fence.close()
        signal.signal(signal.SIGALRM, before)


def ended(tmp_path: Path, how: str) -> tuple[list[forked.Popen], list[tuple[str, str]]]:
    """Two ranks of `last_save_worker.py`, and what each of them said on its standard output and in its log."""
    worker = str(Path(__file__).with_name("last_save_worker.py"))
    ranks = [
        forked.Popen(
            [sys.executable, worker, str(rank), str(tmp_path / "store"), str(tmp_path / "job"), how],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=90) for rank in ranks]
    return ranks, said


@pytest.mark.parametrize("how", sampled(["close", "last", "told"], "last"))
def test_the_last_save_waits_for_its_slot_longer_than_others(make: Make, tmp_path: Path, how: str) -> None:
    """Nothing is held up by it, and its state is gone afterwards: another rank may be seconds behind."""
    ranks, said = ended(tmp_path, how)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "is given up" not in "".join(err for _, err in said)
    newest = stored(tmp_path)[-1]
    assert newest.step >= 2 if how == "told" else newest.step == 2
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert make(model=model, optimizer=optimizer).restore() == newest.step + 1
    assert bool(model.weight.any()), "not what was written behind the last step"


@pytest.mark.parametrize("how", sampled(["stepped", "loaded"], "loaded"))
def test_where_another_rank_left_the_last_step_out_the_one_before_is_durable(
    make: Make, tmp_path: Path, how: str
) -> None:
    """It found no slot, and its state is gone when it closes. No error of who has the step: the log says what is missing."""
    _, said = ended(tmp_path, how)
    assert [out.strip() for out, _ in said] == ['{"said": ""}'] * 2, said
    assert "is left out" in said[1][1]
    assert stored(tmp_path)[-1].step == 1
    assert all("what is durable is step 1; step 2 is not saved" in err for _, err in said)
    model = torch.nn.Linear(64, 64)
    assert make(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).restore() == 2


@pytest.mark.parametrize(
    "how",
    sampled(
        ["shorter", "shorter and waits", "shorter and loaded", "shorter and seldom", "shorter, seldom and loaded"],
        "shorter and waits",
        "shorter, seldom and loaded",
    ),
)
def test_a_rank_that_makes_fewer_steps_keeps_nobody_waiting_at_the_end(tmp_path: Path, how: str) -> None:
    """As with uneven inputs under `Join`. The second one waits for what the first does behind its loop, and so does not come to its end."""
    began = time.monotonic()
    ranks, said = ended(tmp_path, how)
    assert time.monotonic() - began < 60, "not `close_timeout_s`"
    assert [(rank.returncode, out.strip()) for rank, (out, _) in zip(ranks, said, strict=True)] == [
        (0, '{"said": ""}')
    ] * 2, said
    assert f"step 5 is not saved: {'parameters' if 'loaded' in how else 'some rank'}" in said[0][1], said
    assert stored(tmp_path)[-1].step == (0 if "seldom" in how else 1)
    assert "seldom" not in how or "step 1 is not saved: " in said[1][1], said


def test_who_waits_no_longer_for_a_late_rank_does_not_say_that_its_step_is_lost(tmp_path: Path) -> None:
    ranks, said = ended(tmp_path, "late")
    assert [(rank.returncode, out.strip()) for rank, (out, _) in zip(ranks, said, strict=True)] == [
        (0, '{"said": ""}')
    ] * 2, said
    assert (
        "step 1 is not saved: some rank has not made it yet; if it still comes, the newest step that all" in said[0][1]
    )
    assert "is not saved" not in said[1][1]
    assert stored(tmp_path)[-1].step == 1


def test_straight_to_storage_all_ranks_save_the_last_step_or_none(tmp_path: Path) -> None:
    """One of them has loaded other weights: the others do not wait for it, and no collective of the script meets one of ours."""
    ranks, said = ended(tmp_path, "storage alone")
    assert [(rank.returncode, out.strip()) for rank, (out, _) in zip(ranks, said, strict=True)] == [
        (0, '{"said": ""}')
    ] * 2
    assert "step 1 is not saved: rank 1: parameters" in said[0][1]
    assert [version.step for version in stored(tmp_path)] == [0]
