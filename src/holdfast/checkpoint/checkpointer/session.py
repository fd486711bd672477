"""Holds what a checkpointer has between `restore` and `close`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.checkpointer.accumulation_notice import AccumulationNotice
from holdfast.checkpoint.checkpointer.save_mode import AnySaver
from holdfast.checkpoint.checkpointer.turn_gradients import TurnGradients
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.job.bootstrap import Job
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.checkpoint.pipeline.step_trace import Recorder
from holdfast.checkpoint.save.durable_tracker import DurableTracker
from holdfast.checkpoint.save.save_handle import SaveHandle
from holdfast.checkpoint.save.save_schedule import Schedule
from holdfast.checkpoint.save.storage_only_schedule import MeetingSchedule
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors.survivor_state import Survivor
from holdfast.checkpoint.usage.loop_observer import Observer
from holdfast.core.model import Version


class Levels(Protocol):
    """Goes down to storage alone where memory cannot be had, and up again (`checkpoint.checkpointer.storage_fallback`)."""

    def before(self, run: Run, step: int) -> None:
        """`step` is finished, and nothing is due yet."""

    passed: str

    def ends(self, step: int) -> None:
        """This rank makes no step behind `step`."""

    def awaits_all(self, run: Run, patience_s: float | None) -> bool:
        """Waits until all ranks have what this one has saved; whether none is known that makes fewer steps."""

    def ends_as_saved(self, run: Run) -> None:
        """This rank saves nothing more."""

    def give_up_passed(self, run: Run, patience_s: float | None) -> None:
        """Gives up what is saved of steps that some rank never saves, until all ranks have the newest that is left."""

    def closing(self, run: Run, patience_s: float | None = None) -> bool:
        """Return whether the last save has to be made again before it is waited for; `passed`: why it never becomes whole."""

    def stays_away(self, run: Run) -> None:
        """This rank cannot make the last save again."""

    def close(self) -> None:
        """Lets go of what waits."""


@dataclass(frozen=True, slots=True)
class Fleeting:
    """A version that `restore` loaded and that memory alone holds: a keeper that ends takes it along.

    Attributes:
        info: what its caller wrote beside it.
        randomness: the random numbers of the process, as `restore` left them.
    """

    version: Version
    info: Mapping[str, Any]
    randomness: dict[str, Any]

    @contextmanager
    def around(self, state: State) -> Iterator[None]:
        """A save within has what the version had beside the objects: random numbers, carried values and info."""
        process = ProcessRandomness()
        now = process.state_dict()
        process.load_state_dict(self.randomness)
        state.carried.keep()
        try:
            with state.info.beside(self.info, saved=False):
                yield
        finally:
            process.load_state_dict(now)


@dataclass(slots=True)
class Run:
    """Holds what exists between `restore` and `close`."""

    state: State
    link: KeeperLink
    saver: AnySaver
    job: Job
    schedule: Schedule | MeetingSchedule
    recorder: Recorder
    durables: DurableTracker
    survivor: Survivor
    lower: Levels
    start: int = 0  # what `restore` returned
    step: int = -1  # the newest that was reported
    state_step: int = -1  # the newest step whose state we were given, by `step` or `save`
    optimizer_steps: int = 0  # made until then
    last: SaveHandle | None = None
    due: Version | None = None  # the newest that was ordered into storage, as far as was heard
    owed: SaveHandle | None = None  # was due for storage by the cadence, and is not known to be there
    saved_steps: int = 0  # optimizer steps made until `last`
    observer: Observer | None = None
    turns: TurnGradients = field(default_factory=TurnGradients)
    accumulation: AccumulationNotice = field(default_factory=lambda: AccumulationNotice(0))
    fleeting: Fleeting | None = None  # what `restore` loaded, if memory alone holds it
    recent: deque[SaveHandle] = field(default_factory=lambda: deque(maxlen=4))  # saves; those given up go with the next

    def saves(self, handle: SaveHandle) -> None:
        """Note a save that begins."""
        kept = [each for each in self.recent if not each.given_up]
        self.recent = deque((*kept, handle), maxlen=self.recent.maxlen)  # at once, for a signal's handler may look

    @property
    def whole(self) -> SaveHandle | None:
        """The newest save that this rank has not given up."""
        return next((handle for handle in reversed(self.recent) if not handle.given_up), None)

    @property
    def changed(self) -> str:
        """Return why the objects do not hold the state of the last reported step any more; empty if they do, as far as
        is seen.
        """
        if self.saver.fence.num_steps != self.optimizer_steps:
            return "an optimizer made a step"
        if why := self.survivor.why_changed() or self.state.carried.why_changed():
            return why
        memory, version = self.saver.memory, self.job.version(max(0, self.state_step))
        if memory is not None and memory.left_out.as_it_was(version) is not None:
            return memory.left_out.why_changed(version)
        if self.last is None or self.last.given_up or self.last.version < version:  # it would have to be gathered
            try:
                self.state.gather()
            except Exception as error:  # noqa: BLE001 - of the user's objects; what was saved before is whole
                pass_on(error)
                return f"parameters or objects are not those of its state any more ({error})"
        return ""

    def at(self, step: int) -> None:
        """The objects hold the state after `step` now."""
        self.state_step, self.optimizer_steps = step, self.saver.fence.num_steps
        self.survivor.note(self.job.version(step))
