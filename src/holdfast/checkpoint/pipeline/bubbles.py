"""Checkpoints inside the bubbles: the seams of a running pipeline schedule, what was measured there, and the copies' pace.

Attached to a schedule of `torch.distributed.pipelining` it sees every wait for a neighbour (`_wait_batch_p2p`) and every
forward and backward of a stage, in the trainer's thread, at the cost of two clock readings each (`checkpoint.pipeline.timers`: on a GPU
of two events, for there the waits are the device's and the host never stops). From the waits it learns
the windows of a step (`core.pipeline.wait_forecast`); the copying thread of `checkpoint.capture.optimizer_fence` keeps to them through the gate. From the
actions it knows what each costs, so that the event model (`core.pipeline.event_model`) can be held against what was measured.

It never reorders or delays the schedule's own work: its calls in the trainer's thread only read clocks and set values.
Correctness never depends on a prediction; the fence before the optimizer's step stands whatever was believed.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from holdfast.base.events import Events
from holdfast.checkpoint.capture.side_stream_copy import Span
from holdfast.checkpoint.pipeline.copy_gate import Gate
from holdfast.checkpoint.pipeline.schedule_actions import orders_of, stages_of
from holdfast.checkpoint.pipeline.timers import HostClock, clock_of
from holdfast.core.pipeline import bubble_placement
from holdfast.core.pipeline.copy_interference import Drag
from holdfast.core.pipeline.event_model import Kind
from holdfast.core.pipeline.wait_forecast import Waits
from holdfast.keeper.slots.idle_windows import WindowPage

# Durations of one action of one stage, and steps, that a mean is taken of.
MEMORY = 32
# Versions whose copies beside the work are remembered for the cadence: the newest, as with the waits.
VERSIONS = 8
# What copies from a device are expected to reach before one was measured: half of what its bus does.
FIRST_RATE_BYTES_PER_S = 10e9
# The first step infers shapes and makes connections; it is like no later one.
UNLIKE_STEPS = 1
# Spans of the newest steps that are kept for the trace; a bound.
MAX_SPANS = 20_000

_SEAM = "_wait_batch_p2p"
_attached: list[Bubbles] = []
_patching = threading.Lock()


@dataclass(frozen=True, slots=True)
class Seen:
    """One thing that happened on this rank: `what` is an action (`2F0`), `wait`, `copy` or `copy beside`."""

    what: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Says what a rank measured, for people and tests. Seconds.

    Attributes:
        costs: mean of each (stage, kind) of this rank, with what the schedule does around it.
        idle: mean of the waits of a step.
        period: mean from step to step.
        ending: mean from the last action to the next step.
        num_steps: steps that were seen.
        drag: seconds of work lost per second of copying beside it (`core.pipeline.copy_interference`); None: not known.
    """

    costs: dict[tuple[int, Kind], float]
    idle: float
    period: float
    ending: float
    num_steps: int
    drag: float | None = None


class Bubbles:
    """The waits of one schedule on this rank, and the pace of copies; `Pace` of `checkpoint.capture.optimizer_fence`.

    Args:
        schedule: a schedule of `torch.distributed.pipelining`, built; its step is what is watched.
        named: by the user, not found.

    Raises:
        UsageError: another kind of object.
    """

    def __init__(self, schedule: Any, events: Events, *, named: bool = False) -> None:
        self.named = named
        self.orders = orders_of(schedule)
        self._schedule = schedule
        self.stages = stages_of(schedule)
        self._events = events
        self._clock = clock_of(getattr(self.stages[0], "device", None))
        self._gate = Gate()
        self._waits = Waits()
        self._drag = Drag()
        self.thread: int | None = None  # the one that is inside a step
        self._restore: list[Callable[[], None]] = []
        self._costs: dict[tuple[int, Kind], deque[float]] = {}
        self._idle: deque[float] = deque(maxlen=MEMORY)
        self._periods: deque[float] = deque(maxlen=MEMORY)
        self._endings: deque[float] = deque(maxlen=MEMORY)
        self._idle_now = self._began = self._last = self._between = 0.0
        self._steps_since = 0  # that began since a version's copies did
        self._fenced = False
        self._beside_now: float | None = None  # of this version, if one was begun: seconds of copying beside the work
        self._beside: deque[float] = deque(maxlen=VERSIONS)  # the same of those before
        self._wait_number = 0  # of the step that is being made; on a GPU the host is ahead of what is told
        self.device_rate = FIRST_RATE_BYTES_PER_S  # of copies from the device
        # Called when a wait begins, in the trainer's thread, with the seconds that it should last, if that is known.
        self.on_wait: Callable[[float | None], None] | None = None
        # Called with where a version's copies are to go, and what they take in all, as they begin.
        self.on_placed: Callable[[bubble_placement.Placement, float], None] | None = None
        self.spans: deque[Seen] = deque(maxlen=MAX_SPANS)

    # --- the trainer's side

    def attach(self) -> None:
        """Begins to watch; a second call does nothing."""
        if self._restore:
            return
        # On a GPU the waits are the device's, and the host does not know when they begin.
        self._gate.page = WindowPage() if isinstance(self._clock, HostClock) else None
        self._wrap(self._schedule, "step", self._step)
        for stage in self.stages:
            self._wrap(stage, "forward_one_chunk", self._timed(stage.stage_index, _forward))
            self._wrap(stage, "backward_one_chunk", self._timed(stage.stage_index, _backward))
            self._wrap(stage, "backward_weight_one_chunk", self._timed(stage.stage_index, _weight))
        with _patching:
            if not _attached:
                _patch()
            _attached.append(self)

    def detach(self) -> None:
        """Puts everything back as it was, and lets a copy that waits for a turn go on.

        Called again it goes on where a signal's handler broke it off.
        """
        if self._restore:
            with _patching:
                if self in _attached:
                    _attached.remove(self)
                if not _attached:
                    _unpatch()
        while self._restore:
            self._restore[-1]()
            self._restore.pop()
        self._gate.hurry(True)
        if self._gate.page is not None:
            self._gate.page.close()
            self._gate.page = None

    def page_fds(self) -> tuple[int, ...]:
        """Descriptors of the page that shows the waits to the keeper; () where there is none."""
        return () if self._gate.page is None else self._gate.page.fds

    def profile(self) -> Profile:
        """Return what was measured so far."""
        return Profile(
            # Means: what a step takes is the sum of its parts, the slow ones included.
            {key: fmean(seen) for key, seen in self._costs.items()},
            idle=fmean(self._idle) if self._idle else 0.0,
            period=fmean(self._periods) if self._periods else 0.0,
            ending=fmean(self._endings) if self._endings else 0.0,
            num_steps=self._waits.num_steps,
            drag=self._drag.share,
        )

    def _wrap(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        inner = getattr(owner, name, None)
        if inner is None:  # a stage of another release may lack split backwards
            return
        had = name in vars(owner)
        setattr(owner, name, around(inner))
        self._restore.append(lambda: setattr(owner, name, inner) if had else vars(owner).pop(name, None))

    def _step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not getattr(self._schedule, "_has_backward", True):  # an evaluation: forward only, with other waits
                return inner(*args, **kwargs)
            self._begin_step()
            try:
                return inner(*args, **kwargs)
            finally:
                self.thread = None

        return step

    def _begin_step(self) -> None:
        self.thread = threading.get_ident()
        self._steps_since += 1
        self._wait_number = 0
        self._clock.tell(self._began_step, self._clock.mark())

    def _began_step(self, now: float) -> None:
        if self._waits.num_steps > UNLIKE_STEPS:
            self._idle.append(self._idle_now)
            self._periods.append(now - self._began)
            self._endings.append(now - self._last + self._between)
            self._gate.period_s = period = fmean(self._periods)
            if self._gate.page is not None:
                self._gate.page.step(period)
        self._between = 0.0
        self._idle_now, self._began, self._last = 0.0, now, now
        self._waits.begin_step()

    def _timed(
        self, stage: int, kind_of: Callable[[dict[str, Any]], Kind]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(inner: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(inner)
            def action(microbatch: int, *args: Any, **kwargs: Any) -> Any:
                began = self._clock.mark()
                try:
                    return inner(microbatch, *args, **kwargs)
                finally:
                    acted = functools.partial(self._acted, stage, kind_of(kwargs), microbatch)
                    self._clock.tell(acted, began, self._clock.mark())

            return action

        return around

    def _acted(self, stage: int, kind: Kind, microbatch: int, began: float, ended: float) -> None:
        seen = self._costs.get((stage, kind))
        if seen is None or self._waits.num_steps == UNLIKE_STEPS:
            seen = self._costs[stage, kind] = deque(maxlen=MEMORY)
        # What lies between the last action and this one and is no wait (loss, posting of messages) is work of this one.
        seen.append(ended - self._last + self._between)
        self._last, self._between = ended, 0.0
        self._drag.acted((stage, kind), began, ended)
        self.spans.append(Seen(f"{stage}{kind.value}{microbatch}", began, ended))

    def waited(self, inner: Callable[[Any], None], work: Any) -> None:
        """Around a wait of the trainer for its neighbours."""
        if not work:
            return
        began, expected_s = self._clock.mark(), self._waits.expected(self._wait_number)
        self._gate.open(expected_s)
        if self.on_wait is not None:
            self.on_wait(expected_s)
        try:
            inner(work)
        finally:
            self._wait_number += 1
            self._gate.shut()
            self._clock.tell(self._has_waited, began, self._clock.mark())

    def _has_waited(self, began: float, ended: float) -> None:
        self._waits.ended(ended - began)
        self._idle_now += ended - began
        self._between += began - self._last
        self._last = ended
        self.spans.append(Seen("wait", began, ended))

    # --- the copier's side

    @property
    def has_waits(self) -> bool:
        return self._waits.known

    def begin(self) -> None:
        """The copies of a version begin, in the trainer's thread. Waits that no step came by for since the last are no waits."""
        if not self._steps_since:
            self._waits.forget()
        if self._beside_now is not None:
            self._beside.append(self._beside_now)
        self._steps_since, self._fenced, self._beside_now = 0, False, 0.0
        self._gate.hurry(False)

    def beside(self, batch_seconds: Sequence[float]) -> int:
        """Return how many batches fit into no wait of a step and are copied at once."""
        placement = bubble_placement.place(batch_seconds, self._waits.windows())
        if self.on_placed is not None:
            self.on_placed(placement, sum(batch_seconds))
        return len(batch_seconds) - placement.left

    def turn(self, seconds: float) -> bool:
        return self._gate.turn(seconds)

    def hurry(self) -> None:
        """The step waits for the copy."""
        self._fenced = True
        self._gate.hurry(True)

    def copied(self, started_s: float, seconds: float, *, inside: bool) -> None:
        """A batch was copied."""
        self._drag.copied(started_s, started_s + seconds)
        self._events.count("copy_seconds", seconds)
        if inside:
            self._events.count("copy_seconds_in_waits", seconds)
        elif not self._fenced:  # else it is the fence that counts it
            self._beside_now = (self._beside_now or 0.0) + seconds
        self.spans.append(Seen("copy" if inside else "copy beside", started_s, started_s + seconds))

    def queued(self, spans: Sequence[Span], num_bytes: int, inside: bool) -> None:
        """A batch was queued on the device; how long it took is told when the device has passed it."""
        for began, ended in spans:
            self._clock.tell(functools.partial(self._device_copied, num_bytes / len(spans), inside), began, ended)

    def _device_copied(self, num_bytes: float, inside: bool, began: float, ended: float) -> None:
        self.device_rate = (self.device_rate + num_bytes / max(ended - began, 1e-6)) / 2
        self.copied(began, ended - began, inside=inside)

    @property
    def patience_s(self) -> float:
        return self._gate.patience_s

    @property
    def left_cost(self) -> float:
        """Seconds that a version's copies cost the work beside them, a mean of the last: all of them, until it is known better."""
        drag = self._drag.share
        return fmean(self._beside or (0.0,)) * (1.0 if drag is None else min(drag, 1.0))


def _forward(_: dict[str, Any]) -> Kind:
    return Kind.FORWARD


def _backward(kwargs: dict[str, Any]) -> Kind:
    return Kind.BACKWARD if kwargs.get("full_backward", True) else Kind.INPUT


def _weight(_: dict[str, Any]) -> Kind:
    return Kind.WEIGHT


def _seams() -> Any:
    # Only who has built a schedule pays for importing them.
    from torch.distributed.pipelining import schedules  # noqa: PLC0415

    return schedules


def _patch() -> None:
    schedules = _seams()
    inner = getattr(schedules, _SEAM)

    @functools.wraps(inner)
    def wait(work: Any) -> None:
        thread = threading.get_ident()
        for watcher in _attached:
            if watcher.thread == thread:
                watcher.waited(inner, work)
                return
        inner(work)

    wait.is_ours = True  # type: ignore[attr-defined]
    setattr(schedules, _SEAM, wait)


def _unpatch() -> None:
    schedules = _seams()
    if hasattr(seam := getattr(schedules, _SEAM), "is_ours"):
        setattr(schedules, _SEAM, seam.__wrapped__)
