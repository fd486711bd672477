"""The end of a run, on one rank: which version is to be durable when the job has ended, and the wait for it.

That is the first of these that there is:

- the last step: saved already, or saved now because the objects still hold it
- the newest version that this rank saved and has not given up
- what was restored from memory, if no step was made since

The ranks tell each other what they have (`storage_fallback`): the last step is made again, straight to storage, where memory lost it;
and where some rank never makes it, the newest version that all ranks have takes its place. What fails while it is waited for is chosen
anew by the same order. A step that is not saved is named: in the log, or in the error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.base.errors import KeeperLost, LevelNotReached
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.checkpointer.session import Fleeting, Run
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.collectives import AT_END, Meeting
from holdfast.checkpoint.save.save_handle import SaveHandle
from holdfast.core.model import Level

logger = logging.getLogger(__name__)

REMEDY = "report a step behind the last optimizer step, and close before other weights are loaded"


class Closing:
    """Closes one run.

    Args:
        run: what exists since `restore`.
        save: saves the state after a step, due for storage; or returns the save that there is.
        make_due: makes a save due for storage, if it is not.
        timeout_s: after so long it is given up.
        patience_s: how long ranks that have not made the last step are waited for; None: `timeout_s`.
        linger_s: how long a keeper stays that has what storage has not.
    """

    def __init__(
        self,
        run: Run,
        *,
        save: Callable[[int], SaveHandle],
        make_due: Callable[[SaveHandle], SaveHandle],
        timeout_s: float,
        patience_s: float | None,
        linger_s: float,
    ) -> None:
        self._run = run
        self._save = save
        self._make_due = make_due
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._linger_s = linger_s

    def finish(self, broken_off: str = "") -> bool:
        """The last step is durable; if its state is not here any more, the newest version that was saved, aloud.

        Returns whether the keeper may end with this job. `broken_off`: why the last save was given up in the middle of it.

        Raises:
            LevelNotReached: nothing that was made since the restore is durable; or this rank gave up what it chose.
        """
        run = self._run
        run.durables.ending()
        run.lower.ends(max(run.state_step, run.start - 1))
        self._come_to_rest()
        changed = broken_off or self._why_changed()
        if changed:
            run.lower.stays_away(run)
            run.lower.ends_as_saved(run)
        last, why = self._own(changed)
        if last is None and changed and run.fleeting is not None:
            self._leave_restored(run.fleeting, changed)
            return False
        last = self._of_all(last, changed)
        why = run.lower.passed or why
        if last is not None:
            last, why = self._wait_for(last), why or last.durable[1]
        elif run.state_step >= 0 and not run.lower.passed:
            why = broken_off or f"step {run.state_step} was not due, and {changed} after it was reported"
            raise LevelNotReached(f"nothing of this run is durable: {why}", remedy=REMEDY)
        if last is not None and last.version.step < run.state_step:
            why = f"{changed} after it was reported; {REMEDY}" if changed and not broken_off else why
            logger.error("what is durable is step %d; step %d is not saved: %s", last.version.step, run.state_step, why)
        elif last is not None and run.saver.fence.num_steps != run.optimizer_steps:
            what = "what is durable is step %d; an optimizer made a step behind it that nobody reported, and that state is not saved: %s"
            logger.error(what, last.version.step, REMEDY)
        return True

    def secure(self) -> str:
        """Makes the newest version that was saved durable, and goes on. Returns why it is not; empty if it is."""
        run = self._run
        self._come_to_rest()
        whole = run.whole
        if whole is None or run.saver.memory is None:
            if whole is not None and whole.is_stored():
                return ""
            handle = whole or run.recent[-1]
            return f"{handle.version} is not durable: {handle.given_up or 'memory alone has it'}"
        try:
            self._wait_for(self._make_due(whole))
        except LevelNotReached as error:
            pass_on(error)
            return error.what
        return ""

    def _come_to_rest(self) -> None:
        """Waits until what is being copied is saved or given up, and for the keeper that follows one that died."""
        self._run.saver.settle()
        self._run.link.wait_mended(self._timeout_s)

    def _why_changed(self) -> str:
        """Return why this rank does not hold the last step any more, or another one where all save straight to storage, or none.

        Collective there, if the last step is not saved yet.
        """
        run = self._run
        changed, last = run.changed, run.last
        is_saved = last is not None and not last.given_up and last.version.step >= run.state_step
        if run.saver.memory is not None or is_saved or run.state_step < 0:
            return changed
        meeting = Meeting(run.job.group, AT_END, 0, run.job.assembly.root)
        try:
            told = enumerate(collectives.gather_json(meeting, changed))
        except BaseException as error:
            meeting.leave(error)
            raise
        return changed or next((f"rank {rank}: {why}" for rank, why in told if why), "")

    # Which version.

    def _whole(self) -> SaveHandle | None:
        """The newest version that this rank has saved and not given up, which becomes due for storage."""
        whole = self._run.whole
        return self._make_due(whole) if whole is not None else None

    def _own(self, changed: str) -> tuple[SaveHandle | None, str]:
        """Returns what this rank would make durable, and why it is not the last step."""
        run, last = self._run, self._run.last
        why = last.given_up if last is not None else ""
        comes_back = bool(last is not None and why and not changed and run.link.unannounced.take_back(last.version))
        if comes_back or (run.saver.memory is None and why and not changed):
            run.last = last = None
        run.saver.await_slots(self._timeout_s)
        is_unsaved = run.state_step > (last.version.step if last is not None else -1) and not changed
        if is_unsaved and run.lower.awaits_all(run, self._patience_s):
            last = self._save(run.state_step)
            if comes_back and (why := last.given_up):  # it was abandoned for good meanwhile
                last = self._whole() or last
        elif (whole := self._whole()) is not None:
            last = whole
        elif run.fleeting is not None and last is None and not changed:
            last = self._keep_restored(run.fleeting)
        return last, why

    def _of_all(self, last: SaveHandle | None, changed: str) -> SaveHandle | None:
        """Returns the save to wait for: the last one, made again where it has to be, or the newest one that all ranks make.

        None if that is in storage without this rank.

        Raises:
            LevelNotReached: there is none that all ranks made.
        """
        run = self._run
        if changed:
            run.lower.awaits_all(run, self._patience_s)
        elif run.lower.closing(run, self._patience_s):
            return self._save(run.state_step)
        if last is None or not run.lower.passed:
            return last
        run.lower.stays_away(run)
        run.lower.give_up_passed(run, self._patience_s)
        if (whole := self._whole()) is not None:
            return whole
        client = run.link.client
        if client is None or client.announced.captured is None:
            raise LevelNotReached(f"nothing of this run is durable: {run.lower.passed}")
        logger.error("step %d is not saved: %s", run.state_step, run.lower.passed)
        return None

    # The wait.

    def _wait_for(self, last: SaveHandle) -> SaveHandle:
        """Wait until a version is durable: the last one, or the next older one that is whole where another rank abandoned it.

        Raises:
            LevelNotReached: it is not. Where this rank gave it up, the next older one that is whole is durable all the same.
        """
        run, deadline = self._run, time.monotonic() + self._timeout_s
        while True:
            client = run.link.last_client
            try:
                last.wait(Level.DURABLE)
            except LevelNotReached as error:
                pass_on(error)
                is_gone = (client is None or not client.alive) and time.monotonic() < deadline
                if is_gone and (again := self._after_next_keeper(last)) is not None:
                    last = again
                    continue
                if last.is_stored():  # those that knew have ended
                    return last
                known = run.link.client.announced.known(last.version) if run.link.client is not None else None
                run.lower.stays_away(run)
                if last.given_up and (found := self._what_stays()):
                    raise LevelNotReached(f"{error.what}; {found}", where=error.where, remedy=error.remedy) from error
                if last.given_up or known is None or not known.abandoned:
                    raise
                last.give_up(error.what)
                if (whole := self._whole()) is None:
                    raise
                last = whole
            else:
                return last

    def _what_stays(self) -> str:
        """Makes the newest version that is whole durable; returns which that is, or what memory alone has. Empty if there is none."""
        if (whole := self._whole()) is not None:
            try:
                return f"what is durable is {self._wait_for(whole).version}"
            except LevelNotReached as lost:
                pass_on(lost)
                return lost.what
        if (restored := self._run.fleeting) is None:
            return ""
        again = f"start again within {self._linger_s:g} s to have it in storage"  # which takes no version of an earlier incarnation
        return f"{restored.version}, which was restored, is in memory alone: {again}"

    def _after_next_keeper(self, last: SaveHandle) -> SaveHandle | None:
        """The keeper died while `last` was waited for: the next one has it from our slots, or it is saved again.

        Returns what to wait for now; None if it was given up, or there is no next one.
        """
        run = self._run
        if run.saver.memory is None or last.given_up or not run.link.wait_mended(self._timeout_s):
            return None
        if not run.changed and run.lower.closing(run):
            return self._save(run.state_step)
        return last

    # What was restored.

    def _keep_restored(self, restored: Fleeting) -> SaveHandle:
        """No step was made since a restore from memory, which ends with the job: what was restored becomes durable."""
        self._run.at(restored.version.step)
        with restored.around(self._run.state):
            return self._save(restored.version.step)

    def _leave_restored(self, restored: Fleeting, changed: str) -> None:
        """Steps were made since a restore from memory, and none was reported: no fault of a script that is at its end."""
        version = self._run.job.version(restored.version.step)
        try:  # the others need not wait for it
            self._run.link.require().abandon(version, changed)
        except KeeperLost as error:
            self._run.link.unannounced.add(version)
            pass_on(error)
        logger.error(
            "%s was restored from memory and is in no storage, and %s since, which was not reported. Memory holds it for %g s: "
            "start again within that time to have it in storage, and report each step that is made",
            restored.version,
            changed,
            self._linger_s,
        )
