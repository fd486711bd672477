"""Signals' handlers that strike while their thread begins to wait or to save, and threads that close meanwhile."""

from __future__ import annotations

import itertools
import signal
import threading
import time
import typing
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import grad_mode
from torch.utils import _contextlib

from holdfast.base.errors import KeeperLost, LevelNotReached
from holdfast.base.events import Events
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.checkpoint.job.slot_reservation import Reservation
from holdfast.checkpoint.save.durable_tracker import JOIN_TIMEOUT_S, DurableTracker
from holdfast.checkpoint.save.save_handle import LOOK_S, SaveHandle, as_level, never
from holdfast.checkpoint.state.training_state import State
from holdfast.core.model import Level, Topology, Version
from holdfast.keeper.rpc.announcements import Announced
from holdfast.keeper.rpc.caller import _Waiting
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.messages import Progress
from holdfast.tiers.storage.read_limit import ReadLimit
from keeper.rig import eventually
from kit.checkpointers import Make, Trainee
from kit.strikes import Strike, called, exits, strikes
from sample_kit import MORE, sampled

DEADLINE_S = 60.0


def _job() -> LateCopyJob:
    return LateCopyJob([], None, lambda _: None)


class _Announcement:
    """A version that becomes durable, as a keeper announces it."""

    def __init__(self) -> None:
        self.done = self
        self._announced, self._version = Announced(0, lambda: True), Version(1, 3)

    def set(self) -> None:
        self._announced.take(Progress(version=self._version, reached=(Level.DURABLE,), reason="", abandoned=False))

    def wait(self, timeout_s: float) -> bool:
        with suppress(LevelNotReached):
            self._announced.wait(self._version, Level.DURABLE, timeout_s)
        return self._announced.level(self._version)[0] is Level.DURABLE


@pytest.mark.parametrize("make", [_Waiting, _job, _Announcement])
def test_a_handler_keeps_nothing_from_the_thread_that_it_waits_for(make: Callable[[], Any]) -> None:
    """At each moment of a wait: another thread tells that it is over, and the handler waits for that thread."""

    def handle() -> None:
        other = threading.Thread(target=done.set, daemon=True)
        other.start()
        other.join(1.0)
        struck.append(not other.is_alive())

    for moment, strike in enumerate(strikes(handle)):
        done, struck = make().done, list[bool]()
        with strike:
            done.wait(0.01)
        if strike.came:
            assert struck == [True], f"moment {moment}"
            assert done.wait(0.0)
    assert moment > 5


def test_what_a_handler_raises_while_storage_is_read_is_raised_as_it_is_and_at_once() -> None:
    """At each moment: not in the thread that reads, not as another error, and no lock that this one needs is kept."""
    # What a handler raises in these keeps locks of the standard library, or of this process.
    spared = {threading.Thread.start.__code__, threading.Condition.__enter__.__code__}
    for moment, strike in enumerate(strikes(exits, counts=lambda frame, _: frame.f_code not in spared)):
        read, began = list[None](), time.monotonic()
        limit = ReadLimit(DEADLINE_S, 0, "there")
        with suppress(SystemExit), strike:
            limit.run(lambda read=read: read.append(time.sleep(0.002)))  # type: ignore[misc]
        assert time.monotonic() - began < DEADLINE_S / 4, f"moment {moment}"
        count = len(read)
        time.sleep(0.005)
        assert strike.lost or len(read) == count, f"moment {moment}"
    assert moment > 50


def test_what_a_handler_raises_while_storage_says_nothing_waits_for_no_answer() -> None:
    """What is read there may yet come, and is nobody's then."""
    hangs, wrote, number = threading.Event(), list[bool](), threading.main_thread().ident
    assert number is not None

    def reads() -> None:
        signal.pthread_kill(number, signal.SIGUSR1)
        hangs.wait(DEADLINE_S)
        with limit.writing() as is_wanted:
            wrote.append(is_wanted)

    def handle(*_: object) -> None:
        raise TimeoutError("the script's")

    limit, before, began = ReadLimit(DEADLINE_S, 0, "there"), signal.signal(signal.SIGUSR1, handle), time.monotonic()
    try:
        with pytest.raises(TimeoutError, match="the script's"):
            limit.run(reads)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - began < DEADLINE_S / 4
    hangs.set()
    eventually(lambda: wrote == [False])


@pytest.mark.parametrize(
    ("call", "moment", "error"),
    [
        pytest.param(
            lambda _, saved: saved.wait("durable", 6.0), Announced.wait, LevelNotReached("the script's own"), marks=MORE
        ),
        (lambda checkpointer, _: checkpointer.close(), Announced.wait, LevelNotReached("the script's own")),
        (lambda checkpointer, _: checkpointer.save(1, "durable"), KeeperClient.persist, KeeperLost("the script's own")),
        pytest.param(
            lambda checkpointer, _: checkpointer.save(2), KeeperClient.begin, KeeperLost("the script's own"), marks=MORE
        ),
    ],
    ids=["wait", "close", "persist", "begin"],
)
def test_an_error_of_ours_that_a_handler_raises_is_no_answer_to_who_waits(
    make: Make, call: Callable[[Any, SaveHandle], object], moment: Any, error: Exception
) -> None:
    """As one that asks for a version itself, for a short time: its error leaves the call that it came in."""

    def handle() -> None:
        raise error

    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    saved = checkpointer.save(1)
    with pytest.raises(type(error), match="the script's own"), Strike(handle, called(moment)):
        call(checkpointer, saved)


def test_what_a_handler_raises_while_slots_are_waited_for_is_raised_as_it_is_and_keeps_no_lock() -> None:
    for moment, strike in enumerate(strikes(exits)):
        client: Any = SimpleNamespace(alive=True)
        slots = Reservation(client, 1, 2, lambda _: None)
        with suppress(SystemExit), strike:
            slots.wait(1, 0.002)
        other = threading.Thread(target=slots._end, args=(LevelNotReached("none"),), daemon=True)
        other.start()
        other.join(5.0)
        assert not other.is_alive(), f"moment {moment}"
    assert moment > 10


def test_a_handler_that_asks_storage_while_its_thread_does_waits_for_nothing_of_its_own() -> None:
    """The look runs in another thread, and lasts until the handler has come."""
    took_s = list[float]()

    def looks(_: Version) -> bool:
        if not took_s:
            signal.raise_signal(signal.SIGUSR1)
            time.sleep(0.1)
        return False

    def handle(*_: object) -> None:
        took_s.append(began := time.monotonic())
        save.ask_again()
        took_s[0] = time.monotonic() - began

    link: Any = SimpleNamespace(client=None, last_client=None)
    facts: dict[str, Any] = {"settle": lambda _: None, "topology": Topology(("",), (0,)), "timeout_s": 1.0}
    save = SaveHandle(Version(1, 3), Level.DURABLE, link=link, in_storage=looks, **facts)
    link.client = SimpleNamespace(persist=lambda _: None)  # another keeper than the one that was asked
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        save.ask_again()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert took_s[0] < LOOK_S / 2


def test_who_closes_while_its_thread_holds_the_fence_waits_for_nothing() -> None:
    """As a handler does that strikes within a wait for the copying thread."""
    fence = Fence(timeout_s=1.0, events=Events())
    job = _job()
    fence.start(job)
    assert job.done.wait(DEADLINE_S)
    began = time.monotonic()
    with fence._wake:
        fence.close()
    assert time.monotonic() - began < 10.0


def test_a_copy_whose_thread_was_not_woken_for_what_a_handler_raised_holds_up_no_later_one() -> None:
    fence = Fence(timeout_s=1.0, events=Events())
    first, second, third = _job(), _job(), _job()
    fence.start(first)
    assert first.done.wait(DEADLINE_S)
    fence.release()
    assert fence.idle(DEADLINE_S)
    strike = Strike(exits, called(threading.Condition.notify))
    with suppress(SystemExit), strike:
        fence.start(second)
    assert strike.came
    second.stop("given up")
    fence.release()
    assert fence.idle(DEADLINE_S)
    fence.start(third)
    assert third.done.wait(DEADLINE_S)
    fence.close()


def test_an_error_of_a_handler_that_strikes_while_a_step_is_noted_is_raised(make: Make) -> None:
    """One of the kind that torch raises where a device failed."""

    def fails() -> None:
        raise RuntimeError("a handler's own")

    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    trainee.train()
    strike = Strike(fails, called(State.storages))
    with suppress(RuntimeError), strike:
        checkpointer.step(0)
    assert strike.came
    trainee.train()
    checkpointer.step(1)


def test_who_closes_while_its_thread_holds_what_tells_of_durable_saves_hears_all_of_them() -> None:
    """As a handler does that strikes in `flush`."""
    told = list[Version]()
    durables = DurableTracker(lambda version, _: told.append(version), None, timeout_s=600.0)
    began = time.monotonic()
    with durables._changed:
        durables.add(never(3, Level.DURABLE, "no slot"))
        durables.close()
    assert time.monotonic() - began < JOIN_TIMEOUT_S / 2
    assert told == [Version(1, 3)]


@pytest.mark.parametrize("level", ["captured", "durable"])
def test_a_handler_that_saves_the_same_step_just_before_makes_the_one_save_of_it(make: Make, level: str) -> None:
    """The outer save has looked whether there is one, and is not known as one yet."""
    inner, made = list[SaveHandle](), list[str]()

    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    checkpointer.events.subscribe(lambda event: made.append(event.name) if event.name == "saved" else None)
    trainee.train()
    with Strike(lambda: inner.append(checkpointer.save(2)), called(SaveHandle.__init__)):
        outer = checkpointer.save(2, level)
    assert inner == [outer]
    assert made == ["saved"]
    assert outer.level is as_level(level)
    outer.wait()
    trainee.train()
    checkpointer.save(3).wait()
    checkpointer.close()


class _Struck(torch.optim.Optimizer):
    """A signal comes when one parameter of two is written."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1.0)
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(
    ("leaves", "step", "memory_budget"),
    sampled(
        product([False, True], [0, 1], ["1GiB", "1KiB"]), (False, 0, "1KiB"), (False, 1, "1GiB"), (True, 1, "1KiB")
    ),
)
def test_what_a_handler_saves_in_the_middle_of_an_optimizers_step_is_given_up(
    make: Make, caplog: pytest.LogCaptureFixture, memory_budget: str, step: int, leaves: bool
) -> None:
    """As the step that was reported last, or as the one that is being made: it is neither. Many `leaves` its place before it saves."""

    def handle(*_: object) -> None:
        if leaves:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        struck.append(checkpointer.save(step, "durable"))
        signal.signal(signal.SIGUSR1, handle)

    model = torch.nn.Linear(1, 1)
    optimizer = _Struck([*model.parameters()])
    struck = list[SaveHandle]()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        checkpointer: Any = make(model=model, optimizer=optimizer, memory_budget=memory_budget)
        checkpointer.restore()
        optimizer.step()
        checkpointer.step(0)
        signal.signal(signal.SIGUSR1, handle)
        optimizer.step()
        reason = "a signal's handler saves in the middle of an optimizer's step"
        assert [(each.version.step, each.given_up) for each in struck] == [(step, reason)] * 2
        assert reason in caplog.text
        with pytest.raises(LevelNotReached, match=reason):
            struck[0].wait()
        signal.raise_signal(signal.SIGUSR1)
        struck[2].wait("durable", DEADLINE_S)
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        checkpointer.abandon()
    finally:
        signal.signal(signal.SIGUSR1, before)
    model = torch.nn.Linear(1, 1)
    assert make(model=model, optimizer=_Struck([*model.parameters()])).restore() == step + 1
    assert all(map(torch.equal, model.parameters(), expected))


class _Both(torch.optim.Optimizer):
    """Steps two others in its own step; a signal comes where the fence stands before the second."""

    def __init__(self, inner: list[torch.optim.Optimizer], handler: Callable[[], Any]) -> None:
        super().__init__([group for each in inner for group in each.param_groups], {})
        self._inner, self._strike = inner, Strike(handler, called(Fence._before_step))

    def step(self, _: Any = None) -> None:
        self._inner[0].step()
        with self._strike:
            self._inner[1].step()


@pytest.mark.parametrize("reported", sampled([False, True], True))
def test_what_a_handler_saves_between_two_steps_within_one_is_given_up(make: Make, *, reported: bool) -> None:
    """What it reports is no step, and is reported by the script afterwards."""
    model = torch.nn.Linear(1, 1)
    struck = list[SaveHandle | None]()
    inner: list[torch.optim.Optimizer] = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    both = _Both(inner, lambda: struck.append((checkpointer.step if reported else checkpointer.save)(0)))
    checkpointer: Any = make(model=model, optimizer=both, every="1")
    checkpointer.restore()
    model(torch.ones(1)).backward()
    both.step()
    (handle,) = struck
    if handle is None:
        assert reported
    else:
        assert handle.given_up == "a signal's handler saves in the middle of an optimizer's step"
    whole = checkpointer.step(0)
    assert whole is not None
    whole.wait("captured", DEADLINE_S)
    checkpointer.abandon()


class _Held:
    """A save of another thread that has begun, and goes on when it is let."""

    def __init__(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainee, self.lost = Trainee(), list[str]()
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.checkpointer: Any = make(self.trainee)
        self.checkpointer.restore()
        self.trainee.train()
        self.checkpointer.save(0).wait()
        self.trainee.train()
        self.within: Callable[[], None] = lambda: None
        save = self.checkpointer._run.saver.save

        def held(*args: Any, **kwargs: Any) -> None:
            self.begun.set()
            assert self.goes_on.wait(DEADLINE_S)
            self.within()
            save(*args, **kwargs)

        monkeypatch.setattr(self.checkpointer._run.saver, "save", held)

    def saves(self) -> None:
        with suppress(LevelNotReached):
            self.checkpointer.save(1)

    def closes(self) -> None:
        try:
            self.checkpointer.close()
        except LevelNotReached as error:
            self.lost.append(error.what)


def _is_held(lock: Any) -> bool:
    if is_free := lock.acquire(blocking=False):
        lock.release()
    return not is_free


def test_who_closes_waits_for_a_save_that_another_thread_has_begun(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper has not heard of it, and would be told to store what it does not know."""
    held, told = _Held(make, monkeypatch), list[Version]()
    client = held.checkpointer._run.link.client
    persist = client.persist
    monkeypatch.setattr(client, "persist", lambda version: (told.append(version), persist(version)))
    saves, closes = threading.Thread(target=held.saves), threading.Thread(target=held.closes)
    saves.start()
    assert held.begun.wait(DEADLINE_S)
    last = held.checkpointer._run.last
    closes.start()
    eventually(lambda: _is_held(held.checkpointer._close_lock))
    closes.join(0.5)
    assert not told
    held.goes_on.set()
    for thread in (saves, closes):
        thread.join(DEADLINE_S)
    assert not held.lost
    assert last.reached is Level.DURABLE


def test_a_handler_that_closes_within_a_save_waits_for_no_other_thread_that_closes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one waits for this save, and makes the last step durable itself."""
    held, why = _Held(make, monkeypatch), list[str]()
    closes = threading.Thread(target=held.closes)

    def within() -> None:
        try:
            held.checkpointer.close()
        except LevelNotReached as error:
            why.append(error.what)
            raise

    held.within = within
    saves = threading.Thread(target=held.saves)
    saves.start()
    assert held.begun.wait(DEADLINE_S)
    closes.start()
    eventually(lambda: _is_held(held.checkpointer._close_lock))
    began = time.monotonic()
    held.goes_on.set()
    for thread in (saves, closes):
        thread.join(DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S / 2
    assert why == ["another thread closes: close was called in the middle of its save, by the same thread"]
    assert not held.lost
    expected = held.trainee.fingerprint()
    again = make(other := Trainee())
    assert again.restore() == 2
    assert other.fingerprint() == expected


@pytest.mark.parametrize("is_due", [True, False])
def test_a_handler_that_closes_at_the_edge_of_a_save_waits_for_no_other_thread_that_closes(
    make: Make, monkeypatch: pytest.MonkeyPatch, *, is_due: bool
) -> None:
    """Nothing of the save is known yet, or all is: that one waits for its end all the same, up to `close_timeout_s`."""
    trainee, lost = Trainee(), list[str]()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0).wait()
    trainee.train()

    def closes() -> None:
        try:
            checkpointer.close()
        except LevelNotReached as error:
            lost.append(error.what)

    other = threading.Thread(target=closes, daemon=True)

    def strikes(*_: object) -> None:
        monkeypatch.undo()
        other.start()
        eventually(lambda: _is_held(checkpointer._close_lock))
        closes()

    edge = (checkpointer._run.survivor, "let_go") if is_due else (checkpointer._run.state.gradients, "note")
    monkeypatch.setattr(*edge, strikes)
    saves = threading.Thread(target=checkpointer.save, args=(1, "durable"), daemon=True)
    saves.start()
    saves.join(DEADLINE_S / 4)
    assert len(lost) == 1
    assert lost[0].startswith("another thread closes: this one is in the middle of a save")
    other.join(DEADLINE_S)
    assert len(lost) == 1
    assert checkpointer._run.last.version.step == 1
    assert checkpointer._run.last.reached is Level.DURABLE


@pytest.mark.parametrize("of", sampled(["flush", "step", "wait"], "flush", "step"))
def test_a_handler_that_closes_where_its_thread_holds_what_another_one_needs_to_close_does_not_wait(
    make: Make, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """As one that strikes within a flush, or while an optimizer's step waits for a late copy."""
    trainee, lost = Trainee(), list[str]()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0)
    run, begun, goes_on, finish = checkpointer._run, threading.Event(), threading.Event(), checkpointer._finish

    def held(run: Any) -> bool:
        begun.set()
        assert goes_on.wait(DEADLINE_S)
        return bool(finish(run))

    def closes() -> None:
        try:
            checkpointer.close()
        except LevelNotReached as error:
            lost.append(error.what)

    monkeypatch.setattr(checkpointer, "_finish", held)
    other = threading.Thread(target=closes, daemon=True)

    def strikes() -> None:
        with {"flush": run.durables._changed, "step": run.saver.fence._passing, "wait": run.saver.fence._wake}[of]:
            other.start()
            assert begun.wait(DEADLINE_S)
            closes()

    struck = threading.Thread(target=strikes, daemon=True)
    struck.start()
    struck.join(DEADLINE_S / 4)
    assert lost == ["another thread closes: this one is in the middle of a save, a flush or an optimizer's step"]
    goes_on.set()
    other.join(DEADLINE_S)
    assert len(lost) == 1
    assert run.last.reached is Level.DURABLE


def test_a_handler_that_closes_within_a_second_restore_waits_in_vain_for_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job came together anew, and what was saved before is committed no more. Memory keeps it, and that is told."""
    trainee, why = Trainee(), list[str]()
    checkpointer: Any = make(trainee)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0).wait()

    def closes(*_: object) -> None:
        began = time.monotonic()
        with pytest.raises(LevelNotReached) as lost:
            checkpointer.close()
        why.append(lost.value.what)
        assert time.monotonic() - began < DEADLINE_S / 2
        raise SystemExit(0)

    monkeypatch.setattr(checkpointer, "_laid_out", closes)
    with pytest.raises(SystemExit):
        checkpointer.restore()
    assert "is captured, not durable: a later restore took its place: incarnation 2 runs now" in why[0]
    monkeypatch.undo()
    expected = trainee.fingerprint()
    again = make(other := Trainee())
    assert again.restore() == 1
    assert other.fingerprint() == expected


@pytest.mark.parametrize("own", [True, False])
def test_close_takes_no_handler_away_that_the_script_has_set_meanwhile(make: Make, own: bool) -> None:
    def handle(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        checkpointer = make(trainee := Trainee())
        checkpointer.restore()
        if own:
            signal.signal(signal.SIGTERM, handle)
        trainee.train()
        checkpointer.step(0)
        checkpointer.close()
        assert signal.getsignal(signal.SIGTERM) == (handle if own else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("closed", sampled(["first", "second", ""], "second"))
def test_whichever_checkpointer_makes_steps_hears_sigterm(make: Make, tmp_path: Path, closed: str) -> None:
    """Though another one was made before or behind it, and whether or not that one has closed."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        made: dict[str, Any] = {name: make(Trainee(), path=tmp_path / name) for name in ("first", "second")}
        for each in made.values():
            each.restore()
        if closed:
            made.pop(closed).abandon()
        name, other = ("second", None) if closed == "first" else ("first", made.get("second"))
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)
        if not closed:
            made[name].step(0)  # another one, which is newer, may end the script meanwhile
        with pytest.raises(SystemExit) as left:
            made[name].step(1)
        assert left.value.code == 0
        assert signal.getsignal(signal.SIGTERM) == (signal.SIG_IGN if other is None else other._signal._handle)
        if other is not None:
            other.abandon()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_who_was_closed_in_another_thread_keeps_no_sigterm_from_the_script(make: Make) -> None:
    """Only the main thread may take a handler away."""
    heard = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        checkpointer = make(Trainee())
        checkpointer.restore()
        thread = threading.Thread(target=checkpointer.abandon)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


class Alarm(TimeoutError):
    """What scripts raise in a handler: an error as any, and one as a connection raises it."""


@pytest.mark.parametrize("every", [97, pytest.param(11, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", sampled([{}, {"memory_budget": "1KB"}], {"memory_budget": "1KB"}), ids=["memory", "storage"]
)
def test_an_error_that_a_handler_raises_within_a_save_leaves_it_as_it_is(
    make: Make, options: dict[str, Any], every: int
) -> None:
    """At drawn moments: not taken for a fault of the save's, which is given up. The next one is made."""
    # Threads and locks of the standard library may keep what is raised there, msgspec what is raised where it asks for a type; torch
    # may stay in the mode that it was about to leave.
    spared = (threading.__file__, weakref.__file__, typing.__file__, grad_mode.__file__, _contextlib.__file__)

    def counts(frame: FrameType, event: str) -> bool:  # no handler runs where a lock is taken, which is a call of C
        return event in ("call", "return") and frame.f_code.co_filename not in spared

    def handle() -> None:
        raise Alarm

    trainee = Trainee()
    checkpointer = make(trainee, every="0", **options)
    checkpointer.restore()
    numbers = itertools.count(1)
    # What was written is listed, and counts too: no end is reached.
    for strike in itertools.islice(strikes(handle, counts=counts, every=every), 4000 // every):
        trainee.train()
        with suppress(Alarm), strike:
            checkpointer.save(number := next(numbers), level="durable")
    assert number > 5
    checkpointer.save(next(numbers), level="durable").wait("durable")
    checkpointer.close()


RAISED = (ValueError, TimeoutError, RuntimeError, SystemExit)
CALLS: dict[str, Callable[[Any, Any], object]] = {
    "save": lambda checkpointer, last: checkpointer.save(last.version.step + 1, "durable"),
    "wait": lambda _, last: last.wait("durable"),
    "flush": lambda checkpointer, _: checkpointer.flush(),
    "close": lambda checkpointer, _: checkpointer.close(),
    "restore": lambda checkpointer, _: checkpointer.restore(),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_what_handlers_raise_in_a_call_leaves_it_as_it_is_and_later_saves_and_restores_are_right(
    make: Make, call: str
) -> None:
    """Errors of several classes in turn, at drawn moments; then one more version, bit for bit."""
    errors = itertools.cycle(RAISED)
    spared = (threading.__file__, weakref.__file__, typing.__file__, grad_mode.__file__, _contextlib.__file__)

    def counts(frame: FrameType, event: str) -> bool:
        return event in ("call", "return") and frame.f_code.co_filename not in spared

    def handle() -> None:
        raise next(errors)

    def begun() -> tuple[Trainee, Any, int]:
        trainee = Trainee()
        checkpointer = make(trainee)
        return trainee, checkpointer, checkpointer.restore()

    for number, strike in enumerate(itertools.islice(strikes(handle, counts=counts, every=61), 40)):
        trainee, checkpointer, start = begun()
        trainee.train()
        last = checkpointer.save(start, "durable")
        with suppress(*RAISED), strike:
            CALLS[call](checkpointer, last)
        checkpointer.abandon()
        trainee, checkpointer, start = begun()
        trainee.train()
        checkpointer.save(start, "durable").wait("durable")
        checkpointer.abandon()
        again, checkpointer, then = begun()
        assert then == start + 1, number
        assert again.fingerprint() == trainee.fingerprint(), number
        checkpointer.abandon()
    assert number > 0
