"""Gate and fence together, whatever waits come: every byte once, none after the step, one batch per wait that ends early.

Both are the real ones and the copier is their own thread. What is drawn: batches, what is expected of a wait and how long
it is, and whether a batch is under way as it ends. Time is a value that this thread and the copier advance. Nothing here
sleeps: where the story says that the copier came to rest, its conditions tell when it does; where it does not, both
threads run on as they like, and the same must hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.base.events import Events
from holdfast.checkpoint.capture import optimizer_fence as fences
from holdfast.checkpoint.capture.copy_plan import Batch
from holdfast.checkpoint.capture.optimizer_fence import FIRST_RATE_BYTES_PER_S, Fence, LateCopyJob
from holdfast.checkpoint.pipeline import copy_gate as gates
from holdfast.checkpoint.pipeline.copy_gate import Gate

LIMIT_S = 30.0  # nothing that is healthy needs longer
# A fence that gives up at once, whatever the copy is expected to take.
NO_PATIENCE_S = -1e12


@dataclass(frozen=True)
class Wait:
    """After so much computing: what is expected of the wait, how long it is, whether this thread lets the copier come to rest
    in it, and whether a batch is then under way as the wait ends.
    """

    after_s: float
    expected_s: float | None
    seconds: float
    rests: bool
    cut: bool


@dataclass(frozen=True)
class Step:
    """Expected seconds per batch, how many of them are copied beside the work, whether the slot must be asked for, and how
    many other threads wait for the copy, as `handle.wait` and `flush` do.
    """

    batches: Sequence[float]
    beside: int
    opens: bool
    waits: Sequence[Wait]
    cut_at_fence: bool
    waiters: int


SECONDS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 8.0])
WAITS = st.builds(Wait, SECONDS, st.none() | SECONDS, SECONDS, st.booleans(), st.booleans())
STEPS = st.builds(
    Step,
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=6),
    st.integers(0, 2),
    st.booleans(),
    st.lists(WAITS, max_size=4),
    st.booleans(),
    st.sampled_from([0, 0, 1, 2]),
)


class Told(threading.Condition):
    """A condition that tells when the copier sleeps at it, having looked at all that was said so far."""

    def __init__(self, story: Story, lock: Any) -> None:
        super().__init__(lock)
        self._story = story

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread() is not self._story.trainer:
            self._story.rest(True)
        return super().wait(timeout)

    def notify(self, n: int = 1) -> None:
        if self._waiters:  # type: ignore[attr-defined]
            self._story.rest(False)
        super().notify(n)


class Story:
    """One run of trainer and copier: the clock, what happened in which order, and the pace of the fence."""

    has_waits = True

    def __init__(self, *, timeout_s: float) -> None:
        self.trainer = threading.current_thread()
        self.now_s = 0.0
        self.log: list[tuple[str, int]] = []
        self._still = threading.Condition()
        self._resting = self._held = self._hold = False
        self._released = threading.Event()
        self.num_beside = 0
        self.gate, self.fence = Gate(), Fence(timeout_s=timeout_s, events=Events())
        self.gate._changed, self.fence._wake = Told(self, self.gate._lock), Told(self, self.fence._lock)
        self.fence.pace = self

    def tell(self, what: str, number: int = -1) -> None:
        self.log.append((what, number))

    def rest(self, does: bool) -> None:
        with self._still:
            self._resting = does
            self._still.notify_all()

    def wait_for_rest(self) -> None:
        """Until the copier can do nothing before something is said to it, or is held inside a batch."""
        with self._still:
            assert self._still.wait_for(lambda: self._resting or self._held, LIMIT_S), (
                "the copier neither works nor rests"
            )

    def advance(self, seconds: float) -> None:
        """Time passes; a copier that sleeps until some moment looks at the clock again."""
        self.now_s += seconds
        with self.gate._changed:
            self.gate._changed.notify_all()

    # --- the copier's side: `Pace`, and the copying

    def beside(self, batch_seconds: Sequence[float]) -> int:
        return min(self.num_beside, len(batch_seconds))

    def turn(self, seconds: float) -> bool:
        return self.gate.turn(seconds)

    def begin(self) -> None:
        self.gate.hurry(False)

    def hurry(self) -> None:
        self.tell("fence")
        self.gate.hurry(True)

    def copied(self, started_s: float, seconds: float, *, inside: bool) -> None:
        pass

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Adds instead of copying, so that what is copied twice shows."""
        (target,), (source,) = targets, sources
        number = target.storage_offset()
        self.tell("beside" if number < self.num_beside else "begin", number)
        with self._still:
            self._held = held = self._hold
            self._still.notify_all()
        if held:
            assert self._released.wait(LIMIT_S)
        target.add_(source)
        self.now_s += 1.0
        self.tell("end", number)

    # --- the trainer's side

    def hold(self) -> None:
        """The next batch that begins stays under way until `release`."""
        self._released.clear()
        self._hold = True

    def release(self) -> None:
        with self._still:
            self._hold = self._held = False
        self._released.set()

    def wait(self, wait: Wait) -> None:
        self.advance(wait.after_s)
        if wait.cut:
            self.hold()
        self.tell("open")
        self.gate.open(wait.expected_s)
        self.fence.nudge(wait.expected_s)
        if wait.rests:
            self.wait_for_rest()
        self.advance(wait.seconds)
        if wait.rests:
            self.wait_for_rest()
        self.gate.shut()
        self.tell("shut")
        if wait.cut:
            self.release()
        if wait.rests:
            self.wait_for_rest()

    def train(self, steps: Sequence[Step]) -> None:
        """Every step saves the state before it, takes its waits and updates; what came of each version is looked at."""
        length = max(len(step.batches) for step in steps)
        parameter = nn.Parameter(torch.arange(1.0, 1.0 + length))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        self.fence.guard([optimizer])
        for step in steps:
            parameter.grad = torch.ones(length)
            wanted, slot, ends = parameter.detach().clone(), torch.zeros(length), []
            self.log.clear()
            self.num_beside = step.beside
            self.fence.begin()
            self.fence.start(self.job(step, slot, parameter.detach(), ends))
            waiters = [threading.Thread(target=self.fence.settle, daemon=True) for _ in range(step.waiters)]
            for waiter in waiters:
                waiter.start()
            for wait in step.waits:
                self.wait(wait)
            if step.cut_at_fence and self.fence._timeout_s < 0:
                self.hold()  # nothing else ends the wait at a fence that has patience
            optimizer.step()
            self.tell("step")
            self.release()
            assert self.fence.idle(LIMIT_S)
            for waiter in waiters:
                waiter.join(LIMIT_S)
                assert not waiter.is_alive()
            self.judge(step, slot, wanted, ends)

    def job(self, step: Step, slot: torch.Tensor, source: torch.Tensor, ends: list[str]) -> LateCopyJob:
        batches = [
            Batch([slot[at : at + 1]], [source[at : at + 1]], int(seconds * FIRST_RATE_BYTES_PER_S))
            for at, seconds in enumerate(step.batches)
        ]

        def finish(reason: str) -> None:
            self.tell("finish")
            ends.append(reason)

        if step.opens:
            return LateCopyJob([], None, finish, opening=lambda: (batches, finish))
        return LateCopyJob(batches, None, finish)

    def judge(self, step: Step, slot: torch.Tensor, wanted: torch.Tensor, ends: list[str]) -> None:
        (reason,) = ends
        count = len(step.batches)
        assert self.log.index(("finish", -1)) > last(self.log, "end"), "the end is told after the last write"
        assert not torch.count_nonzero(slot[count:]), "nothing is written elsewhere"
        for end, seen in shut(self.log):
            most = 1 if end else 0  # none before the first wait
            assert len(seen) <= most, f"batches {seen} after the wait that ended at {end}: {self.log}"
        if reason:
            assert self.fence._timeout_s < 0, reason
            assert sum(what == "end" for what, _ in self.log[self.log.index(("step", -1)) :]) <= 1, "after it gave up"
            return
        assert torch.equal(slot[:count], wanted[:count]), f"every byte once, as it was before the step: {self.log}"
        assert last(self.log, "end") < self.log.index(("step", -1)), f"a version that is kept: {self.log}"


def last(log: Sequence[tuple[str, int]], wanted: str) -> int:
    return max((at for at, (what, _) in enumerate(log) if what == wanted), default=-1)


def shut(log: Sequence[tuple[str, int]]) -> Iterator[tuple[int, set[int]]]:
    """Where the work went on, and which batches that need a turn were still copied, until the next wait or the fence."""
    for at, (what, _) in enumerate(log):
        if (at and what != "shut") or ("fence", -1) in log[:at]:  # somebody waits for the copy: nothing is held back
            continue
        begun, ended = ({number for what, number in log[:at] if what == wanted} for wanted in ("begin", "end"))
        seen = begun - ended
        for what, number in log[at:]:
            if what in ("open", "fence"):
                break
            if what == "begin":
                seen.add(number)
        yield at, seen


@contextmanager
def story(*, timeout_s: float) -> Iterator[Story]:
    """A story whose time is its own."""
    with pytest.MonkeyPatch.context() as patch:
        told = Story(timeout_s=timeout_s)
        clock: Callable[[], float] = lambda: told.now_s  # noqa: E731
        times: Any = SimpleNamespace(monotonic=clock, perf_counter=clock)
        patch.setattr(gates, "time", times)
        patch.setattr(fences, "time", times)
        patch.setattr(gates, "PATIENCE_S", 1e6)
        patch.setattr(fences.copy_plan, "copy", told.copy)
        try:
            yield told
        finally:
            told.release()
            told.fence.close()


@pytest.mark.parametrize("timeout_s", [LIMIT_S, NO_PATIENCE_S], ids=["patient", "gives up"])
@settings(max_examples=100)
@given(steps=st.lists(STEPS, min_size=1, max_size=3))
def test_every_byte_is_copied_once_and_before_the_step_whatever_the_waits(timeout_s: float, steps: list[Step]) -> None:
    with story(timeout_s=timeout_s) as told:
        told.train(steps)
