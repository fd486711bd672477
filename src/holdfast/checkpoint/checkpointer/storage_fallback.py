"""Down to storage alone and up again, in the middle of training: what becomes of saves when memory cannot be had.

A keeper that nobody can start again, one that no other keeper hears any more (`checkpoint.job.lost_contact`), or a state that grew beyond
the memory allowed, would cost every save until the next restore, for a version is made of what all ranks save. So the ranks go on as a job does that never had memory
(`checkpoint.save.storage_saver`, with the meetings of `checkpoint.save.storage_only_schedule`), together and at one step (`core.scheduling.storage_fallback`); and come back when
every rank could have its slots again, which they tell each other at those meetings.

A healthy job pays nothing: only who cannot save, or sees no version captured for a while, looks at the board, which is
torch's store. Nothing raises into the training loop. Called with every finished step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from holdfast.base.config import Config
from holdfast.base.errors import HoldfastError
from holdfast.base.events import Events
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.checkpointer.session import Run
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.bootstrap import Job
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.checkpoint.job.lost_contact import LostContact
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.checkpoint.save.save_handle import SaveHandle
from holdfast.checkpoint.save.save_schedule import Schedule
from holdfast.checkpoint.save.storage_only_schedule import MeetingSchedule
from holdfast.checkpoint.save.storage_saver import DirectSaver
from holdfast.checkpoint.state.training_state import State
from holdfast.core.model import Level
from holdfast.core.scheduling.storage_fallback import Board, FallbackState, FallbackStep
from holdfast.tiers.storage.version_store import Storage

logger = logging.getLogger(__name__)

# No version captured for so long, although some were saved: somebody may be in trouble.
UNSURE_S = 2.0
# How long a rank waits at the step of the meeting for the others. All but pipelines are a moment apart.
ARRIVAL_S = 1.0
LOOK_EVERY_S = 0.005
CLOSING_EVERY_S = 0.05
# How often who waits for the others at the end looks whether the version is in storage meanwhile.
STORED_EVERY_S = 1.0
# Saves of which any may still become captured.
RECENT = 8
LATE = "some rank has not made it yet; if it still comes, the newest step that all have saved becomes durable"


class StoreBoard:
    """The board of a job: keys in the store of its process group."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def add(self, key: str) -> int:
        return int(self._store.add(key, 1))

    def first(self, key: str, text: str) -> str:
        return self._store.compare_set(key, "", text).decode()

    def least(self, key: str, number: int) -> None:
        stands = ""
        while (now := self._store.compare_set(key, stands, str(number)).decode()) != stands and int(now) > number:
            stands = now


def board_of(group: collectives.Ranks, job: str) -> Callable[[int], Board] | None:
    """The boards of a job and its incarnation, by number; None for one rank, which needs none."""
    if group.world_size == 1 or not dist.is_initialized():
        return None
    store: Store = dist.distributed_c10d._get_default_store()
    return lambda number: StoreBoard(PrefixStore(f"holdfast/lower/{job}/{number}", store))


class StorageFallback:
    """The levels of one rank, between two restores.

    Attributes:
        passed: why the last step of this rank never becomes whole: another rank does not save it; empty as far as is known.
    """

    def __init__(
        self,
        job: Job,
        *,
        state: State,
        link: KeeperLink,
        storage: Storage,
        config: Config,
        events: Events,
    ) -> None:
        self._job = job
        # Several Checkpointers of a script have the same incarnation, and each a path of its own.
        self._boards = board_of(job.group, f"{job.assembly.job_id}/{job.incarnation}")
        self.passed = ""
        self._passed_at: int | None = None  # the last step that such a rank saves; None: it is only late
        self._state = state
        self._link = link
        self._storage = storage
        self._config = config
        self._events = events
        self._contact = LostContact(link)
        self._memory: tuple[Saver, Schedule | MeetingSchedule] | None = (
            None  # what waits while storage alone is saved to
        )
        self._recent: deque[SaveHandle] = deque(maxlen=RECENT)
        self._since_s = 0.0
        self._number = 0
        self._descent = self._new_descent()

    def before(self, run: Run, step: int) -> None:
        """`step` is finished, and nothing is due yet: goes down or up if all do so here. Collective only then."""
        try:
            if self._memory is not None:
                if run.schedule.back:
                    self._up(run)
            elif (saver := run.saver.memory) is not None:
                is_unsure = self._is_unsure(run)
                trouble = self._trouble(saver, is_unsure=is_unsure)
                if (trouble or is_unsure) and self._all_go(step, trouble):
                    self._down(run, saver, trouble)
        except HoldfastError as error:
            logger.warning("the level of saving stays as it is: %s", error)
        except RuntimeError as error:  # of torch's store
            pass_on(error)
            logger.warning("who else can save is not known: %s", error)

    def ends(self, step: int) -> None:
        """This rank saves nothing behind `step`."""
        if self._boards is None:
            return
        try:
            self._boards(0).least("ends", step)
        except RuntimeError as error:  # of torch's store
            pass_on(error)
            logger.warning("the other ranks may wait for this one at their end: %s", error)

    def closing(self, run: Run, patience_s: float | None = None) -> bool:
        """Before the last save is waited for: whether it has to be made again, straight to storage, by all ranks.

        So it is where a rank cannot save to memory, or gave the last version up for whatever reason: that never becomes captured.
        It is not made again where storage has it, nor is one of a step that another rank never makes (`passed`).

        Args:
            run: that ends.
            patience_s: after so long a rank that has not saved the last step counts as one that never makes it.
        """
        saver, last = run.saver.memory, run.last
        if self.passed or saver is None or last is None or saver.fence.num_steps != run.optimizer_steps:
            return False
        began = time.monotonic()
        deadline = began + self._config.close_timeout_s
        try:
            while last.reached < Level.CAPTURED and time.monotonic() < deadline:
                if self._never_comes(last, patient=patience_s is None or time.monotonic() < began + patience_s):
                    return False
                self._link.wait_mended(CLOSING_EVERY_S)  # a keeper that dies or is stopped now is missed by nobody else
                trouble = self._trouble(saver, is_unsure=True)
                decided, why = last.durable
                lost = f"{last.version} is given up: {why}" if decided and why else ""
                if (trouble or lost) and last.is_stored():
                    break
                if (last_one := self._meeting(0)) is None:
                    return bool(trouble or lost) and self._down(run, saver, trouble or lost)
                if last_one.meets_at_the_end(trouble or lost):
                    return self._arrived(last_one, deadline, last) and self._down(
                        run, saver, trouble or last_one.reason
                    )
                time.sleep(CLOSING_EVERY_S)
        except (HoldfastError, RuntimeError) as error:
            pass_on(error)
            logger.warning("the last save stays in memory: %s", error)
        return False

    def awaits_all(self, run: Run, patience_s: float | None) -> bool:
        """Waits until all ranks have what this one has saved; whether none is known that makes fewer steps.

        Before the last save that waits for no longer than the save would: those versions hold its slots.
        """
        client, began = self._link.client, time.monotonic()
        try:
            while time.monotonic() < began + self._config.close_timeout_s:
                newest = run.whole
                is_gone = client is None or not client.alive or self._link.client is not client
                if newest is None or newest.durable[0] or newest.reached >= Level.CAPTURED:
                    break
                if is_gone or run.saver.memory is None:
                    break
                if self._never_comes(newest, patient=patience_s is None or time.monotonic() < began + patience_s):
                    return False
                self._link.wait_mended(CLOSING_EVERY_S)  # one that is stopped now is continued
                time.sleep(CLOSING_EVERY_S)
        except RuntimeError as error:  # of torch's store
            pass_on(error)
            logger.warning("the last save may wait for ranks that have ended: %s", error)
        return True

    def _never_comes(self, last: SaveHandle, *, patient: bool) -> bool:
        """Tell whether some rank never saves the last step of this rank, or is late."""
        told = self._boards(0).get("ends") if self._boards is not None else None
        if told is not None and int(told) < last.version.step:
            self._passed_at = int(told)
            self.passed = f"some rank saves no step after {told}" if int(told) >= 0 else "some rank saves no step"
        elif not patient:
            self._passed_at = None
            self.passed = self.passed or LATE
        else:
            return False
        return True

    def ends_as_saved(self, run: Run) -> None:
        """This rank saves nothing more: who has a newer version need not wait for it."""
        self.ends(run.whole.version.step if run.whole is not None else run.start - 1)

    def give_up_passed(self, run: Run, patience_s: float | None) -> None:
        """Gives up what is saved of steps that some rank never saves, until all ranks have the newest that is left.

        A rank that ends earlier may have saved a step that this one has not: it is told what this one has, as long as no rank is
        only late.
        """
        saver = run.saver.memory
        while saver is not None:
            for handle in tuple(run.recent):
                is_later = self._passed_at is None or handle.version.step > self._passed_at
                if is_later and not handle.given_up and handle.reached < Level.CAPTURED:
                    saver.give_up(handle, self.passed)
            if self._passed_at is not None:
                self.ends_as_saved(run)
            if self.awaits_all(run, patience_s):
                return

    def stays_away(self, run: Run) -> None:
        """This rank cannot make the last save again: the others must not wait for it when they do."""
        if (last_one := self._meeting(0)) is None or run.saver.memory is None:
            return
        try:
            last_one.give_up()
        except RuntimeError as error:  # of torch's store
            pass_on(error)
            logger.warning("the other ranks may wait for this one at their end: %s", error)

    def close(self) -> None:
        if self._memory is not None:
            self._memory[0].close()
            self._memory = None

    # Whether.

    def _trouble(self, saver: Saver, *, is_unsure: bool) -> str:
        """Return why this rank cannot save to memory, or does so in vain; empty if it can, or may soon."""
        if not is_unsure:
            self._contact.forget()
        return saver.refused or self._link.trouble or (self._contact.why if is_unsure else "")

    def _is_unsure(self, run: Run) -> bool:
        """Return whether versions are saved and none becomes captured."""
        recent, last = self._recent, run.last
        if last is not None and (not recent or recent[-1] is not last):
            self._since_s = self._since_s if recent else time.monotonic()
            recent.append(last)
        captured = [number for number, handle in enumerate(recent) if handle.reached >= Level.CAPTURED]
        if captured:
            for _ in range(captured[-1] + 1):
                recent.popleft()
            self._since_s = time.monotonic()
        return bool(recent) and time.monotonic() - self._since_s > UNSURE_S

    def _all_go(self, step: int, trouble: str) -> bool:
        if self._descent is None:
            return bool(trouble)
        move = self._descent.after(step, trouble)
        if move is FallbackStep.WAIT:
            return self._arrived(self._descent, time.monotonic() + ARRIVAL_S)
        return move is FallbackStep.GO

    def _arrived(self, descent: FallbackState, deadline: float, last: SaveHandle | None = None) -> bool:
        """Waits for the others; not once `last` is in storage, for who knows that does not come."""
        look_s = time.monotonic() + STORED_EVERY_S
        while (move := descent.outcome()) is FallbackStep.WAIT:
            now = time.monotonic()
            is_over = now > deadline
            if last is not None and now > look_s:
                is_over, look_s = is_over or last.is_stored(), now + STORED_EVERY_S
            if is_over:
                move = descent.give_up()
                break
            time.sleep(LOOK_EVERY_S)
        return move is FallbackStep.GO

    def _new_descent(self) -> FallbackState | None:
        self._number += 1
        return self._meeting(self._number)

    def _meeting(self, number: int) -> FallbackState | None:
        """The meeting of this number; 0 is that at the end. None for one rank, which needs none."""
        rank, size = self._job.group.rank, self._job.group.world_size
        return FallbackState(self._boards(number), rank=rank, world_size=size) if self._boards is not None else None

    # Down and up. Collective.

    def _down(self, run: Run, saver: Saver, trouble: str) -> bool:
        saver.settle()
        reason = trouble or (self._descent.reason if self._descent is not None else "")
        direct = DirectSaver(
            self._state, self._link, self._job, self._storage, reason=reason, config=self._config, events=self._events
        ).begin_together()
        self._withdraw(run, saver)
        direct.keeps_link, direct.may_stand = True, run.last.version if run.last is not None else None
        direct.restart(self._link.resumed.version if self._link.resumed is not None else None)
        self._memory = saver, run.schedule
        run.saver, run.last, run.optimizer_steps = direct, None, direct.fence.num_steps
        root = self._job.assembly.root
        run.schedule = MeetingSchedule(self._config, self._job.group, root, could=lambda: self._could(saver))
        self._recent.clear()
        return True

    def _withdraw(self, run: Run, saver: Saver) -> None:
        """Keepers wait no longer for versions that cannot become complete: their slots, and they themselves, are free."""
        for handle in (*self._recent, run.last):
            if handle is not None and not handle.given_up and handle.reached < Level.CAPTURED:
                saver.give_up(handle, "the ranks go on with storage alone")

    def _could(self, saver: Saver) -> bool:
        """Return whether this rank could save to memory again."""
        if self._link.client is None:
            self._link.mend()
            return False
        return not self._link.silent and saver.fits() and not self._contact.lasts()

    def _up(self, run: Run) -> None:
        assert self._memory is not None
        run.saver.close()
        (run.saver, run.schedule), self._memory = self._memory, None
        self._descent = self._new_descent()
        logger.warning("the memory level is back: all ranks have their slots again")
        self._events.emit("memory_level_back", rank=self._job.group.rank)
