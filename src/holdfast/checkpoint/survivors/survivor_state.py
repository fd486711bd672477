"""Holds what this process keeps of the state when the job breaks off, so that nothing need be lost: the live state of
one step.

At every step the rank's own small state is noted (`checkpoint.survivors.step_snapshot`). When the job is interrupted, no optimizer step has
begun since (`checkpoint.survivors.update_window`), and nobody else has written parameters or optimizer state (`checkpoint.survivors.unchanged_state`), this process still
holds those of that step: they are copied to host memory, until the next restore has used or refused them. For that long
the state lies in memory twice.

On a device the host's order says little: the device may be steps behind, and when the job breaks off what is queued runs on
behind collectives that were aborted. So every note records an event, and a state is live only if the device had passed it
by then (`void`).

Must never: call a state live of which a part may have moved. A write past torch's counts of part of a tensor may not be
seen.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.device.pinned_writes import PinnedWrites
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors import step_snapshot
from holdfast.checkpoint.survivors.step_snapshot import SnapshotWriter, StepSnapshot
from holdfast.checkpoint.survivors.unchanged_state import UnchangedStateCheck
from holdfast.checkpoint.survivors.update_window import Window
from holdfast.core.model import Version
from holdfast.core.recovery.survivor_vote import Offer
from holdfast.core.versions.late_copy_rules import counts

logger = logging.getLogger(__name__)

# How long a device may take to come to the end of what is queued, so that its memory can be read. The process ends without
# that: `worker_main.PROBE_S`.
CATCH_UP_S = 3.0
# Of what optimizers own so many tensors are compared where a step was reported and nobody saw an optimizer's: the smallest, up to
# so many bytes each.
NUM_SMALLEST, SMALL_BYTES = 8, 64 << 10


@dataclass(slots=True)
class InterruptedState:
    """Holds the remains of one process, from an interruption to the next restore.

    Attributes:
        job: whose state it is; empty: there is none.
        version: the step.
        late: what optimizers own, by entry name; copies on the host.
        why: why nothing is live.
    """

    job: str = ""
    version: Version | None = None
    late: Mapping[str, torch.Tensor] = field(default_factory=dict)
    why: str = ""

    def forget(self) -> None:
        """Lets go of the memory."""
        self.job, self.version, self.late, self.why = "", None, {}, ""

    def offer(self, job: str, found: Mapping[Version, StepSnapshot]) -> Offer:
        """Return what this rank can offer to `job`, of which it `found` these notes."""
        if self.job != job:
            return Offer(None, tuple(sorted(found)), "its process is new")
        return Offer(self.version, tuple(sorted(found)), self.why)


remains = InterruptedState()


def notes_of(job: str, rank: int, world_size: int) -> dict[Version, StepSnapshot]:
    """The notes that this worker slot has of this rank of the job."""
    page = step_snapshot.page()
    found = page.read() if page is not None else {}
    return {v: note for v, note in found.items() if (note.job, note.rank, note.world_size) == (job, rank, world_size)}


class Survivor:
    """Notes every step and knows at any moment whether the process still holds the state of the last one."""

    def __init__(self, state: State, *, job: str, rank: int, world_size: int) -> None:
        self._state = state
        self._job = job
        page = step_snapshot.page()
        self._window = Window(state.optimizers if page is not None else ())
        self._noter = SnapshotWriter(page, job=job, rank=rank, world_size=world_size) if page is not None else None
        # The newest note, and events behind all that makes up its state; one value, as `void` comes from another thread.
        self._noted: tuple[Version | None, tuple[torch.Event, ...]] = (None, ())
        self._is_void = self._is_over = False
        self._passed: Version | None = None  # what the devices had finished when the job broke off
        self._begun = 0
        self._unseen = False  # steps may have been made between the last two notes that nobody saw
        self._smallest: dict[
            str, torch.Tensor
        ] = {}  # copies of what is small, where no step was seen before the last note
        self._still = UnchangedStateCheck(state)
        self._pinned_writes = PinnedWrites()

    def note(self, version: Version) -> None:
        """The state is that of `version` now. Outside of an optimizer's step. On a device that failed, or is full, nothing is noted."""
        try:
            is_lost = self._noted[0] is not None and self._begun == self._window.begun and bool(self._still.why_not())
            self._still.note(version.step)
            is_noted = self._is_noted(version)
        except RuntimeError as error:
            pass_on(error)
            logger.info(
                "a failed rank cannot be filled from a twin's live state: %s cannot be noted: %s", version, error
            )
            is_noted, is_lost = False, True
        if not is_noted and is_lost:
            self._noted = (None, ())  # the memory is not that of the note before any more

    def _is_noted(self, version: Version) -> bool:
        noter = self._noter
        if noter is None or self._is_void or not noter.affordable():
            return False
        if not self._state.gradients.fits(step_snapshot.GRADIENT_BYTES):
            return False  # no note can have them; the one before may be of the same parameters
        gathered = self._state.glance()
        if not self._pinned_writes.end(gathered, CATCH_UP_S):
            return False
        if not noter.write(version, gathered, passing=self._state.gradients.num_bytes):
            logger.info("a failed rank cannot be filled from a twin's live state: %s", noter.refused)
            return False
        before, is_quiet = self._noted[0], self._window.begun == self._begun
        self._smallest = self._copies() if is_quiet else {}
        # Within an accumulation; or by graphs that were captured before anybody could see it. Of those no step was ever seen.
        if before is None or before.step != version.step:  # else it is noted again, by a save of it
            is_known = bool(self._smallest) and self._window.has_seen(self._state.optimizers)
            self._unseen = before is not None and is_quiet and not is_known
        self._noted, self._begun = (version, self._events()), self._window.begun
        return True

    def let_go(self) -> None:
        """Lets go of tensors that are not the state any more, as a save has seen."""
        self._still.let_go()

    def why_changed(self) -> str:
        """Returns why the state is not that of the last step that was noted; empty if it is, as far as can be seen."""
        return self._still.why_not()

    def moved(self) -> None:
        """The tensors are about to be written by a restore: nothing is live until the next note."""
        self._noted = (None, ())

    def void(self) -> None:
        """The job broke off: what the devices have not passed by now is no step's state. From any thread; does not wait."""
        version, events = self._noted
        if not self._is_void:
            self._passed = version if all(map(accelerator.passed, events)) else None
            self._is_void = True

    def leave(self) -> None:
        """The job broke off: what is live is copied.

        The memory itself is not safe until the restore: whoever wraps the model before it (DDP sends its first rank's
        parameters to all) writes into it.
        """
        if self._noter is None or self._is_over:
            return
        why, late = self._why_not(), {}
        if not why and not accelerator.caught_up(self._still.owned.values(), CATCH_UP_S):
            why = f"its device does not come to the end of what is queued within {CATCH_UP_S:g} s"
        if not why:
            try:
                if self._is_replayed():
                    why = f"optimizer steps were made after {self._noted[0]} that nobody saw: a graph replays them"
                else:
                    late = {name: live.detach().to("cpu", copy=True) for name, live in self._still.owned.items()}
            except RuntimeError as error:  # a device that failed, or no memory
                pass_on(error)
                why = f"the state cannot be copied: {error}"
        remains.job, remains.version = self._job, None if why else self._noted[0]
        remains.late, remains.why = {} if why else late, why
        self._is_over = (
            True  # no call between: of what is closed nothing is told any more, also if a handler breaks it off
        )
        self.close()

    def close(self) -> None:
        """Removes the hooks and lets go of the tensors."""
        self._window.close()
        self._still.forget()
        self._smallest = {}

    def _why_not(self) -> str:
        version = self._noted[0]
        if version is None:
            return self._noter.refused if self._noter and self._noter.refused else "no step was noted"
        if not counts(broke_off=self._is_void, passed_by_then=version == self._passed):
            return f"the device had not finished {version} when the job broke off"
        if self._window.captured or self._unseen:
            return f"optimizer steps may have been made after {version} that nobody saw: a graph replays them"
        if self._window.open:
            return f"interrupted inside the optimizer step after {version}"
        if self._window.begun != self._begun:
            return f"the optimizer went on after {version}"
        why = self._still.why_not()
        return f"{why}, after {version}" if why else ""

    def _copies(self) -> dict[str, torch.Tensor]:
        owned = {name: tensor for name, tensor in self._still.owned.items() if tensor.nbytes <= SMALL_BYTES}
        smallest = heapq.nsmallest(NUM_SMALLEST, owned, lambda name: owned[name].nbytes)
        return {name: owned[name].detach().clone() for name in smallest}

    def _is_replayed(self) -> bool:
        """Return whether something made a step past everybody since the last note: what was copied then is not so any more."""
        owned = self._still.owned
        return not all(name in owned and torch.equal(owned[name], copy) for name, copy in self._smallest.items())

    def _events(self) -> tuple[torch.Event, ...]:
        """Behind all that is queued now, one for each device that has a part of the state."""
        return tuple(accelerator.record(accelerator.devices_of(self._still.owned.values())).values())
