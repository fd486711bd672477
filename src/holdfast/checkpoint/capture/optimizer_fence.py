"""The copy behind the next forward and backward, and the fence that the optimizer's step waits at.

One thread of ours copies a job batch by batch. The fence stands before every optimizer step that may write the state
(`checkpoint.state.step_observer`): the step waits until the job is done, but never longer than the copy should take plus a bound; then the
job is told to stop, its version is given up and the step goes on. The job's end is reported by the thread itself, after
its last write to the slot, so that no slot is given away that is still written to.

Any thread may wait for the job (`settle`); none of them opens the fence by that. The job stays in the fence until a step
has passed it, or the thread that saved puts the next one in its place.

A job may have to be opened first: asking the keeper for a slot is a round trip to another process, and not the step's.

In a pipeline the copy keeps to the waits of the schedule (`Pace`): batches that fit into none are copied at once, each
other one when it is given a turn, and what is left at the fence without waiting for turns.

Copies from a device are queued on a side stream, at the call or in the waits of a pipeline (`checkpoint.capture.paced_copy`); there
the fence makes the current stream wait for them, and the host does not wait at all. Where the host has to (what was copied
is compared), it waits in two parts: until the device has come as far as the copy, which is the device's time and not
ours, and then for the copy itself, as above.

When the job breaks off, what a device had not copied by then is void (`void`): behind a collective that was aborted
everything that is queued runs on, on gradients that nobody reduced.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from holdfast.base.errors import HoldfastError, LevelNotReached
from holdfast.base.events import Events
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.capture.copy_plan import Batch
from holdfast.checkpoint.capture.paced_copy import PacedCopy
from holdfast.checkpoint.capture.side_stream_copy import DeviceCopy, Span
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.state.step_observer import Steps, names_of
from holdfast.core.versions.late_copy_rules import Who, counts, is_void, opens
from holdfast.tiers.wire.latch import Latch
from holdfast.tiers.wire.lock_owner import is_mine

logger = logging.getLogger(__name__)

# What a copy is expected to reach before one was measured: half of what one core of an old machine does.
FIRST_RATE_BYTES_PER_S = 2e9
# How long a job of a pipeline may lie without a wait having begun.
UNTOLD_S = 1.0
# What asking a keeper for a slot is expected to take before it was measured.
FIRST_OPENING_S = 1e-3
# How far a device may be behind its host, by default.
BEHIND_S = 600.0
# How often it is looked whether a device has come as far as a copy that is waited for.
LOOK_S = 0.02
# How long `close` waits for the thread to end; it stops between two batches.
JOIN_TIMEOUT_S = 30.0


class Pace(Protocol):
    """Tells the copying thread when to go on."""

    @property
    def has_waits(self) -> bool:
        """Return whether a step has waits at all."""

    @property
    def device_rate(self) -> float:
        """Bytes per second that the device of this rank copies."""

    @property
    def patience_s(self) -> float:
        """Return how long nobody coming by with a turn means that nobody will."""

    def beside(self, batch_seconds: Sequence[float]) -> int:
        """Return how many of these batches are copied at once, beside the work: they fit into no wait."""

    def turn(self, seconds: float) -> bool:
        """Blocks until a batch of so many seconds may be copied; True if that is inside a wait."""

    def begin(self) -> None:
        """A version's copies begin: from now on turns are given in waits."""

    def hurry(self) -> None:
        """The step waits for the copy: turns are given at once."""

    def copied(self, started_s: float, seconds: float, *, inside: bool) -> None:
        """A batch was copied: when (`perf_counter`), how long, and whether it had a turn inside a wait."""

    def queued(self, spans: Sequence[Span], num_bytes: int, inside: bool) -> None:
        """A batch was queued on a device, inside a wait or not; called in the trainer's thread."""


# What opening a job's slot gives: its host copies, and what is called at their end as `LateCopyJob.finish` is.
Opened: TypeAlias = tuple[list[Batch], Callable[[str], None]]


@dataclass(eq=False, slots=True, repr=False)
class LateCopyJob:
    """One version's late copies.

    Attributes:
        batches: host copies, in order.
        device: copies on side streams, queued or yet to be, or None.
        finish: called once, in the copying thread, with the reason why the copy is incomplete, or "" if it is complete;
            in the latter case no step goes on before it has returned, within the fence's bound. Must not raise.
        at_fence: called once the copy is done, in the thread that is about to step, or that saves again without a step
            in between; told which of the two it is.
        opening: makes the batches and the end of the job, in the copying thread; None: they are there.
        steps: how many optimizer steps had begun when the state was looked at; None: no state was.
        written: why what a device copies may not be the state at the call, as known when this is first called; empty: it is.
    """

    batches: list[Batch]
    device: DeviceCopy | PacedCopy | None
    finish: Callable[[str], None]
    at_fence: Callable[[bool], None] | None = None
    opening: Callable[[], Opened] | None = None
    steps: int | None = None
    written: Callable[[], str] = str
    copied_bytes: int = 0
    stop_reason: str = ""
    started_s: float = field(default_factory=time.monotonic)
    opened_s: float | None = None  # when its slot was there, or would not be
    done: Latch = field(default_factory=Latch)
    _complete: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)  # a signal's handler may be in between

    @property
    def num_bytes(self) -> int:
        """Bytes of the host copies."""
        return sum(batch.num_bytes for batch in self.batches)

    def stop(self, reason: str) -> bool:
        """Ends the copy before its next batch; False if it is complete already."""
        with self._lock:
            self.stop_reason = self.stop_reason or ("" if self._complete else reason)
            return not self._complete

    @property
    def stopped(self) -> bool:
        """Return whether the copy is to end before its next batch."""
        return bool(self.stop_reason)

    def complete(self) -> bool:
        """Notes that the last byte is copied, so that nothing stops the job any more; False if it was stopped."""
        with self._lock:
            self._complete = not self.stop_reason
            return self._complete


class Fence:
    """Owns the copying thread and the hooks.

    Args:
        timeout_s: how long a step may wait beyond the expected time of the copy.
        behind_s: how far a device may be behind its host when the host has to wait for a copy from it; a device that is
            further behind hangs, and the version is given up.
    """

    def __init__(self, *, timeout_s: float, events: Events, behind_s: float = BEHIND_S) -> None:
        self._timeout_s = timeout_s
        self._behind_s = behind_s
        self._events = events
        self._rate = self._device_rate = FIRST_RATE_BYTES_PER_S
        self._steps = Steps(())
        # One step after the other: the second must not write what the first compares. A signal's handler may save while
        # its thread waits here.
        self._passing = threading.RLock()
        self._thread: threading.Thread | None = None
        # It is taken in one step of the interpreter; a condition's own `with` may keep it where a signal's handler raises.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._queue: LateCopyJob | None = None
        self._closed = self._has_ended = False
        self._opening_s = FIRST_OPENING_S
        self._free_s: deque[float] = deque(maxlen=2)
        self._slot_waits_s = 0.0
        self._last_bytes = 0
        self.pace: Pace | None = None
        self._open: LateCopyJob | None = None  # no step has passed it yet
        self._behind: LateCopyJob | None = None  # a step has passed it, a device may not have: later steps come behind

    @property
    def num_steps(self) -> int:
        """Optimizer steps that have begun, of all that may write the state."""
        return self._steps.begun

    @property
    def captured(self) -> bool:
        """Return whether a step was recorded into a graph of a device: what that replays passes no fence."""
        return self._steps.captured

    @property
    def is_held(self) -> bool:
        """Return whether this thread is in the middle of a call here: a signal's handler interrupted it."""
        return is_mine(threading.Condition(self._passing)) or is_mine(self._wake)

    def under_way(self) -> set[int]:
        """Returns the identifiers of the threads that are within a step that may write the state."""
        return self._steps.under_way()

    def stepped(self) -> str:
        """Returns why a state may be a mixture (`is_void`); names the threads that step, or the one that did last, where that is another."""
        me, (newest, name) = threading.get_ident(), self._steps.newest
        names = names_of(self.under_way() - {me}) or (name if newest != me else "")
        who = f" ({names})" if names else ""
        return f"an optimizer stepped in another thread{who} while the state was looked at"

    @property
    def is_interrupted(self) -> bool:
        """Return whether a signal's handler calls this in the middle of an optimizer's step of its thread."""
        return self._steps.is_interrupted()

    def is_void(self, steps: int, *, others_within: bool = False) -> bool:
        """Returns whether a state that was looked at when so many steps had begun may be a mixture."""
        return is_void(others_within=others_within, steps_before=steps, steps_now=self._steps.begun)

    def guard(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        stepped: Callable[..., None] = lambda _, **__: None,
    ) -> None:
        """Puts the fence before every step that may write a parameter of these optimizers; behind it `stepped` is told.

        Also, with `made=False`, behind a step that a `GradScaler` left out.
        """
        self._steps.close()
        self._steps = Steps(
            optimizers,
            before=self._before_step,
            after=stepped,
            skipped=functools.partial(stepped, made=False),
            recorded=self._recorded,
            warn=True,
        )

    @property
    def free_s(self) -> float:
        """Return how many seconds passed between a save and the step behind it, the shorter of the last two."""
        return min(self._free_s) if len(self._free_s) == 2 else 0.0

    def take_slot_waits(self) -> float:
        """Returns for how many seconds steps waited here for a slot since the last call."""
        waited_s, self._slot_waits_s = self._slot_waits_s, 0.0
        return waited_s

    def begin(self) -> None:
        """A version is about to be copied."""
        if self.pace is not None:
            self.pace.begin()

    def start(self, job: LateCopyJob) -> None:
        """Copies `job` in the background. The one before must have passed `release`, and this one `begin`."""
        assert self._open is None, "the former copy was not released"
        self._open = job
        if self._behind is not None and self._behind.done.is_set():
            self._behind = None  # it would hold the tensors of its step until a step comes before its copy is complete
        if job.steps is not None and self.is_void(job.steps):  # whoever begins from now on waits
            job.stop(self.stepped())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-capture", daemon=True)
            self._thread.start()
        with self._lock:
            # The host was not stopped yet, and the device runs on something else by now.
            if not counts(broke_off=bool(open_checkpointers.broken.reason), passed_by_then=False):
                job.stop(open_checkpointers.broken.reason)
            self._queue = job
            # Woken now, the thread would take processor and interpreter from a step that is about to begin.
            if self.pace is None or not self.pace.has_waits:
                self._wake.notify()

    def run(self, call: Callable[[], object], timeout_s: float) -> bool:
        """Runs `call` in the copying thread, and waits for it for so long; whether it has ended. Copies wait behind it.

        Raises:
            LevelNotReached: it failed, and why.
        """

        def opened() -> Opened:
            call()
            return [], _nothing

        job = LateCopyJob([], None, _nothing, opening=opened)
        self.start(job)
        self._hurry()
        ended = job.done.wait(timeout_s)
        self._open = None
        if ended and job.stop_reason:
            raise LevelNotReached(job.stop_reason)
        return ended

    def nudge(self, expected_s: float | None) -> None:
        """A wait begins that should last so long: the thread may look for work. Called by the pace, in the trainer's thread."""
        if self._open is not None and self._open.device is not None:
            self._open.device.feed(expected_s)
        if self._queue is not None:
            with self._lock:
                self._wake.notify_all()

    def watch(self, at_fence: Callable[[bool], None], steps: int) -> None:
        """Nothing is left to copy, but something to compare at the fence; `steps`: as `LateCopyJob` has it."""
        assert self._open is None, "the former copy was not released"
        job = self._open = LateCopyJob([], None, _nothing, at_fence, steps=steps)
        if self.is_void(steps):  # what that step wrote would be taken for something else's
            job.stop(self.stepped())
        job.done.set()

    def settle(self, timeout_s: float = BEHIND_S) -> None:
        """Waits for the copy, at most as long as a step would. Any thread may call it, as often as it likes.

        Args:
            timeout_s: a device that is further behind is not waited for; its copy goes on.
        """
        job = self._open
        if job is not None:
            self._wait(job, timeout_s, ends=timeout_s >= self._behind_s)
            if opens(Who.WAIT, ended=True):
                self._open = None

    def release(self, *, expected: bool = False, behind_s: float = BEHIND_S) -> None:
        """Waits for the copy and ends its watch; for the thread that saves.

        Args:
            expected: what is compared at a fence is about to change, and somebody said so: nothing is compared, and the host
                itself waits for copies of devices, of which it else knows only that the current streams wait.
            behind_s: a device that is further behind than this, too, is not waited for.
        """
        self._pass(Who.SETTLE if expected else Who.SAVE, compare=not expected, behind_s=behind_s)
        job = self._queue
        if expected and job is not None and job.device is not None:  # whoever writes next may do so on any stream
            self._wait(job, behind_s, whole=True)

    def void(self) -> None:
        """No copy counts any more that a device has not passed by now: the job broke off, or an error may have spoiled it.

        From any thread; does not wait.
        """
        reason = open_checkpointers.broken.reason or "an error ended the run before the device had finished it"
        with self._lock:
            jobs = {id(job): job for job in (self._queue, self._open) if job is not None}
        for job in jobs.values():
            device = job.device
            if device is not None and not counts(broke_off=True, passed_by_then=device.passed()) and job.stop(reason):
                device.stop()

    def idle(self, timeout_s: float, *, behind_s: float = BEHIND_S) -> bool:
        """Waits until nothing is written to any slot any more, given-up copies included.

        Args:
            timeout_s: so long, and beyond it what a device should take for its copies once it has begun them: its streams
                wait for them as well, so a host that is ahead holds nothing up.
            behind_s: a device that is further behind than this is not waited for.
        """
        job = self._queue
        if job is not None:
            self._await_device(job, behind_s)
            if job.device is not None and behind_s and job.device.begun():
                timeout_s += job.device.num_bytes / self._device_rate
        with self._lock:
            self._wake.notify_all()  # what a signal's handler raised may have come between a copy and its word to the thread
            return self._wake.wait_for(lambda: self._queue is None, timeout_s)

    def close(self) -> None:
        """Removes the hooks, stops the thread between two batches and joins it."""
        self._steps.close()
        if self.pace is not None:
            self.pace.hurry()
        with self._lock:
            self._closed = True
            if self._queue is not None:
                self._queue.stop("the checkpointer was closed")
                if self._queue.device is not None:
                    self._queue.device.stop()
            self._wake.notify_all()
            # A signal's handler may close while its thread holds this, and the copying thread needs it to end.
            thread = self._thread
            self._wake.wait_for(lambda: thread is None or self._has_ended or not thread.is_alive(), JOIN_TIMEOUT_S)
        if thread is not None and self._has_ended:
            thread.join(JOIN_TIMEOUT_S)
        self._thread = None  # at the end: what a handler raises meanwhile leaves the wait to the next call

    def _before_step(self) -> None:
        if self._open is not None:
            self._pass(Who.STEP, compare=True)
        elif (job := self._behind) is not None:  # another optimizer, whose stream was not the current one before
            self._hold(job)

    def _hold(self, job: LateCopyJob) -> bool:
        """Lets the current streams wait for the copies of a device, as long as those are under way; False: it failed."""
        self._behind = None
        if job.device is None or job.done.is_set() or job.stop_reason:
            return True
        try:
            job.device.hold_current_streams()
        except RuntimeError as error:  # the script is told by its own next call
            pass_on(error)
            job.stop(f"a device failed before it had copied: {error}")
            return False
        self._behind = job
        return True

    def _recorded(self) -> None:
        """A graph records the step; when it is replayed no fence is passed. Nothing is waited for, or the capture fails."""
        job = self._open
        if job is not None and job.stop("an optimizer's step is recorded into a graph, which passes no fence"):
            logger.info("a late copy is given up: %s", job.stop_reason)

    def _pass(self, who: Who, *, compare: bool, behind_s: float = BEHIND_S) -> None:
        with self._passing:
            while (job := self._open) is not None:
                if who is Who.STEP:
                    self._free_s.append(time.monotonic() - job.started_s)
                self._wait(job, behind_s)
                if self._open is not job:  # a signal's handler passed it meanwhile, and saved again
                    continue
                if not opens(who, ended=True):
                    return
                self._look(job)
                self._open = None
                if compare and job.done.is_set() and not job.stop_reason and job.at_fence is not None:
                    self._compare(job, job.at_fence, who, min(behind_s, self._behind_s))

    @staticmethod
    def _look(job: LateCopyJob) -> None:
        """Gives the copy up if somebody wrote what a device may not have read yet. Before a step's own writes."""
        if not job.stop_reason and (reason := job.written()):
            job.stop(reason)

    def _compare(self, job: LateCopyJob, at_fence: Callable[[bool], None], who: Who, behind_s: float) -> None:
        """Compare what was read behind all that is queued, and a device may hang there: then it is not compared."""
        began = time.monotonic()
        has_come = accelerator.caught_up(job.device.sources if job.device is not None else (), behind_s)
        self._events.count("fence_wait_seconds", time.monotonic() - began)
        if has_come:
            at_fence(who is Who.STEP)

    def _wait(self, job: LateCopyJob, behind_s: float = BEHIND_S, *, ends: bool = True, whole: bool = False) -> None:
        """Waits for the job; `ends`: it is given up where the device has not begun it in time; `whole`: the host waits also
        for what the streams alone could wait for.
        """
        if job.done.is_set() or job.stop_reason:
            return
        if not self._hold(job):
            return
        if not whole and not job.batches and job.at_fence is None and job.opening is None:
            return
        self._hurry()
        started, opens_here = time.monotonic(), job.opening is not None
        if not self._await_device(job, behind_s) and not ends:
            return
        left_bytes = (job.num_bytes or self._last_bytes) - job.copied_bytes
        expected_s = left_bytes / self._rate + (self._opening_s if job.opening is not None else 0.0)
        expected_s += job.device.num_bytes / self._device_rate if job.device is not None else 0.0
        limit_s, left_s = max(0.0, expected_s) + self._timeout_s, behind_s - (time.monotonic() - started)
        if not ends and left_s < limit_s:  # who waits less than a step would ends no copy
            job.done.wait(max(0.0, left_s))
        elif not job.done.wait(limit_s) and not job.stop(
            f"the copy took longer than expected and {self._timeout_s:g} s more; the step goes on"
        ):
            job.done.wait(self._timeout_s)  # it is being checked, against tensors that the step would write
        now = time.monotonic()
        waited = now - started
        if opens_here:
            self._slot_waits_s += max(0.0, (job.opened_s or now) - started)
        self._events.count("fence_wait_seconds", waited)
        self._events.emit("fence", seconds=waited, stopped=job.stop_reason)

    def _await_device(self, job: LateCopyJob, behind_s: float) -> bool:
        """Waits until the device has come as far as the job's copies, or the job needs nobody to wait any more.

        Returns whether it has come so far in time.
        """
        until = time.monotonic() + min(behind_s, self._behind_s)
        while job.device is not None and not job.stopped and not job.device.begun():
            if time.monotonic() >= until:
                return False
            if job.done.wait(LOOK_S):
                break
        return True

    def _hurry(self) -> None:
        """Somebody waits for the copying thread: it waits for no turn any more."""
        if self.pace is not None:
            self.pace.hurry()
            with self._lock:
                self._wake.notify_all()

    def _run(self) -> None:
        accelerator.leave_captures_alone()
        while True:
            with self._lock:
                # A job that no wait woke us for is begun all the same: perhaps the loop has none for a while.
                untold_s = UNTOLD_S if self.pace is not None else None
                self._wake.wait_for(lambda: self._queue is not None or self._closed, untold_s)
                job = self._queue
                if job is None and self._closed:
                    self._has_ended = True
                    self._wake.notify_all()
                    return
            if job is None:
                continue
            try:
                self._copy(job)
            except HoldfastError as error:  # no slot
                job.stop(str(error))
            except Exception as error:  # the top of the thread: the version is given up, training goes on
                logger.exception("the background copy failed")
                job.stop(f"the background copy failed: {error}")
            self._look(job)
            job.finish("" if job.complete() else job.stop_reason)
            job.done.set()
            with self._lock:
                self._queue = job = None  # whoever finds the thread idle knows that it holds no tensor of the state
                self._wake.notify_all()

    def _open_slot(self, job: LateCopyJob) -> None:
        """Makes the batches, in a turn of its own: most of it waits for another process, the rest is ours."""
        if job.opening is None:
            return
        if self.pace is not None and self.pace.has_waits:
            self.pace.turn(self._opening_s)
        if job.stop_reason:
            return
        began = time.perf_counter()
        try:
            batches, job.finish = job.opening()
        finally:
            job.opened_s = time.monotonic()
        self._opening_s = (self._opening_s + time.perf_counter() - began) / 2
        job.batches, job.opening = batches, None
        self._last_bytes = job.num_bytes

    def _copy(self, job: LateCopyJob) -> None:
        self._open_slot(job)
        pace, rate = self.pace, self._rate
        seconds_of = [batch.num_bytes / rate for batch in job.batches]
        beside = pace.beside(seconds_of) if pace and seconds_of else len(seconds_of)
        started, spent = time.perf_counter(), 0.0
        for index, batch in enumerate(job.batches):
            inside = index >= beside and pace is not None and pace.turn(batch.num_bytes / rate)
            if job.stop_reason:
                return
            began = time.perf_counter()
            copy_plan.copy(batch.targets, batch.sources)
            seconds = time.perf_counter() - began
            spent += seconds
            job.copied_bytes += batch.num_bytes
            if pace is not None:
                pace.copied(began, seconds, inside=inside)
        if job.batches:
            # The newest measurement counts as much as all before: a machine that became busy is believed at once.
            self._rate = (self._rate + job.num_bytes / max(spent, 1e-6)) / 2
            if pace is None:
                self._events.emit("copied", seconds=time.perf_counter() - started, size_bytes=job.num_bytes)
        if job.device is not None and job.device.wait(lambda: job.stopped):
            seconds = job.device.seconds()
            if job.device.num_bytes and seconds:
                self._device_rate = (self._device_rate + job.device.num_bytes / seconds) / 2


def _nothing(reason: str) -> None:
    """The end of a job without copies."""
