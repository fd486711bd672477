"""The one object in a training loop: restore, step, save, close.

    checkpointer = holdfast.Checkpointer("ckpts/run1", model=model, optimizer=optimizer, loader=loader)
    start = checkpointer.restore()
    for step in range(start, steps):
        train_one_step(...)
        checkpointer.step(step)
    checkpointer.close()

This file holds the order of things and nothing else: restore in `assembly` and `restore`, saves in `saver`, cadence and
stop in `schedule`. Rules: nothing is saved before `restore` returned; a fault of the memory level never raises into the
training loop; `close` says what is missing or the last save is durable; after an exception nothing is saved. With
HOLDFAST_DISABLE=1 the object does nothing: the script trains from the start as if its lines were not there.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

import holdfast
from holdfast.base import config as settings
from holdfast.base.config import Config
from holdfast.base.errors import HoldfastError, KeeperLost, LevelNotReached, UsageError
from holdfast.base.events import Events
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.checkpointer import apart_notice
from holdfast.checkpoint.checkpointer.accumulation_notice import AccumulationNotice
from holdfast.checkpoint.checkpointer.closing import Closing
from holdfast.checkpoint.checkpointer.leaving import Leaving
from holdfast.checkpoint.checkpointer.save_mode import AnySaver, holder_of, reserved, schedule_of
from holdfast.checkpoint.checkpointer.session import Fleeting, Run
from holdfast.checkpoint.checkpointer.stop_signal import StopSignal
from holdfast.checkpoint.checkpointer.storage_fallback import StorageFallback
from holdfast.checkpoint.checkpointer.unclosed_notice import UnclosedNotice
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.entries.sharding import as_patterns
from holdfast.checkpoint.job import collectives, redundancy_warning
from holdfast.checkpoint.job.bootstrap import Job, RestoreRequest, assemble, whole_number
from holdfast.checkpoint.job.keeper_link import KeeperLink, Origin
from holdfast.checkpoint.liveness import heartbeat, open_checkpointers
from holdfast.checkpoint.liveness.open_checkpointers import NO_WISH
from holdfast.checkpoint.pipeline import schedule_discovery
from holdfast.checkpoint.pipeline.bubbles import Bubbles
from holdfast.checkpoint.pipeline.step_trace import Recorder
from holdfast.checkpoint.restore.restorer import Restorer, RestoreReport
from holdfast.checkpoint.save.durable_tracker import JOIN_TIMEOUT_S, DurableTracker, OnDurable
from holdfast.checkpoint.save.extra_places import ExtraPlaces
from holdfast.checkpoint.save.save_handle import SaveHandle, as_level, as_seconds, as_version, never
from holdfast.checkpoint.save.save_schedule import Schedule, parse_cadence
from holdfast.checkpoint.save.slot_patience import Waits
from holdfast.checkpoint.state.dataloader import is_plain
from holdfast.checkpoint.state.stateful import Keys
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors.survivor_state import Survivor
from holdfast.checkpoint.usage.loop_observer import Observer
from holdfast.checkpoint.usage.loop_snapshot import Early, look_early
from holdfast.checkpoint.usage.self_check import Proof
from holdfast.core.elastic.worker_facts import Phase
from holdfast.core.model import Level, Shard, Version
from holdfast.core.scheduling.step_agreement import Appointment, Proposal
from holdfast.core.versions import step_numbers
from holdfast.keeper.rpc.paths import absolute_root, place_of
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.read_limit import ReadLimit
from holdfast.tiers.storage.version_store import Storage, open_storage
from holdfast.tiers.wire.lock_owner import is_mine

logger = logging.getLogger(__name__)
T = TypeVar("T")

# How long a restore that has loaded waits for memory for the first saves; after one from storage those saves wait instead,
# for a step may be made meanwhile. That of most jobs is there long before; where it takes minutes training does not wait.
SLOTS_S = 5.0
# How long `close` waits for copies to further places, however long the last save took.
MIN_COPY_S = 10.0


class Checkpointer:
    """Keeps the training state of this rank alive. Every rank builds one, with the same arguments.

    Args:
        path: directory of the checkpoints, the same on every rank; a path or `file://` URL.
        model: one, a list or a dict of them.
        optimizer: one, a list or a dict of them.
        schedule: of a pipeline (`torch.distributed.pipelining`), for copies in its waits. Default: what `restore` finds.
        scheduler: of learning rates; anything with `state_dict` and `load_state_dict`.
        scaler: of gradients; the same.
        loader: of data, as torchdata's `StatefulDataLoader`; the same.
        replicated: a glob pattern, or several, of names whose plain tensors all ranks hold alike (what DDP or a DTensor says is known).
        exclude: a glob pattern, or several, of names of parameters and buffers that are not saved (`model.base`), alike on all ranks. They
            stay as the script makes them, so no optimizer may step them; `last_restore.left_out` names them.
        every: cadence of saves in memory, `10` (steps) or `"30s"`; default: the settings.
        durable_every: cadence of saves to storage, in the same form.
        overlap: copy behind the next forward and backward, once it is proven safe; see `settle`.
        verify_capture: prove every byte of a late copy with a digest taken at the call.
        on_durable: called in a thread as `on_durable(version, error)`, once for every save at the durable level: with None
            when it is durable, with an error when it was given up or `close_timeout_s` passed. A version that was given up
            before `close` may be saved again there, which is one more save.
        prove: make the first steps a second time, in a child that nobody sees, as a restart would make them; `step` raises if
            anything that a version holds, or that lives on in names of the loop, differs. Of one rank on a CPU with one thread of
            computation; elsewhere, and where the steps write files, the log says that nothing was proven.
        config: the settings; default: file and environment.
        objects: more objects with `state_dict` and `load_state_dict`, by name (at a restore their tensors take memory twice).

    With HOLDFAST_DISABLE=1 in the environment it does nothing. With GROUP_INFO_FILE every rank writes, before its first
    step, whose slices can replace its own.

    Attributes:
        last_restore: what the last `restore` did; None before.
        events: what happens here, for observers and tests.
        bubbles: what is known of the waits of the pipeline; None where there is none.
        patience_s: how long `close` waits for ranks that have not made the last step; None: `close_timeout_s`.
    """

    def __init__(  # noqa: PLR0913 - the public door: every argument is optional and named
        self,
        path: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        schedule: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        replicated: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        every: int | str | None = None,
        durable_every: int | str | None = None,
        overlap: bool | None = None,
        verify_capture: bool | None = None,
        on_durable: OnDurable | None = None,
        prove: bool = False,
        config: Config | None = None,
        **objects: Any,
    ) -> None:
        self._root = absolute_root(os.fspath(path))  # now: the script may go to another directory before it restores
        overrides = {
            "every": every, "durable_every": durable_every, "overlap": overlap, "verify_capture": verify_capture
        }  # fmt: skip
        self._config = settings.overridden(config, overrides)
        encryption = KeySource.of(self._config)
        for name in ("every", "durable_every", "keep_every"):
            parse_cadence(name, getattr(self._config, name))
        known = {
            "model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "loader": loader, **objects
        }  # fmt: skip
        self._objects = {name: value for name, value in known.items() if value is not None}
        self._replicated, self._exclude = as_patterns(replicated), as_patterns(exclude)
        self._on_durable = on_durable
        self._signal = StopSignal(self._config.stop_file)
        self._pid = os.getpid()
        self._ranks = collectives.ranks  # all of the process group; one door is a job of one rank
        self._run: Run | None = None
        self._closed = False
        self._close_lock = threading.RLock()
        self._close_failed = ""
        self._leaving = Leaving()
        self._copies_until_s = 0.0
        self.patience_s: float | None = None
        self._saving = 0  # the thread that saves now
        self._wished: tuple[Version | None, Sequence[str], dict[str, Any]] = (None, (), {})  # of the newest save
        self._saves = threading.RLock()  # another thread's save waits for it; a signal's handler may save within one
        self._began: dict[str, Keys] = {}  # of dicts, at the first restore
        self._overwritten: set[str] = set()  # by a restore that was not finished
        self._has_failed = False  # a restore has
        self._early = Early()
        self._prove = prove
        self._proof: Proof | None = None
        self.events = Events()
        self.last_restore: RestoreReport | None = None
        self.bubbles = Bubbles(schedule, self.events, named=True) if schedule is not None else None
        self._recorder: Recorder | None = None
        limit = ReadLimit(self._config.close_timeout_s, 0, self._root)
        self._storage = limit.run(lambda: open_storage(self._root, self.events, encryption=encryption))
        open_checkpointers.register(self)
        self._unclosed = UnclosedNotice(self, _run_of(weakref.ref(self)), linger_s=self._config.linger_s)

    @property
    def off(self) -> bool:
        """Return whether HOLDFAST_DISABLE switched everything off."""
        return settings.disabled()

    @heartbeat.phase(Phase.LOADING)
    def restore(
        self,
        version: Version | str | None = None,
        *,
        fresh: bool = False,
        strict: bool | None = None,
        required: bool | None = None,
    ) -> int:
        """Loads the newest version that is complete everywhere into the objects; returns the step to go on with.

        Collective: every rank calls it, after the process group exists. 0 on a fresh start, and with HOLDFAST_DISABLE=1.
        Call it before training, and again to go back to a version in the middle of it. All ranks raise the same class.
        After CorruptError or StorageError objects may be filled in part.

        Args:
            version: only this one, as `ls` names it.
            fresh: start a new lineage although versions exist; the newest of them stay until they are removed by hand.
            strict: False loads what fits and reports the rest in `last_restore`; None: the setting.
            required: there is something to go on from, so an empty path is an error and no fresh start (it may not be
                mounted); None: the setting `expect_checkpoint`.

        Raises:
            VersionNotFound, CorruptError: versions exist, and none can be used; or one was required, and there is none.
            MismatchError: other objects.
            MemoryRefused, KeeperNotStarted: the memory level cannot be had, and `require_memory` is set.
            InUse: another job works on the path, or another process is this rank.
            StorageError: the path refuses, or a durable version cannot be read and an older one would have to be taken.
        """
        if self.off:
            logger.warning("%s is set: nothing is restored and nothing is saved", settings.DISABLE_VARIABLE)
            return self._without_restore(0, f"{settings.DISABLE_VARIABLE} is set")
        self._require_own()
        if self._run is None:
            self._early = look_early(sys._getframe(1), self._objects)
            self._begin_proof()
            if self._again is not None:
                return self._without_restore(self._again.resume(), "the first steps are made again")
        asked = self._asked(as_version(version), fresh=fresh, strict=strict, required=required)
        with torch.inference_mode(False):  # what is made there takes no step, and may not be written outside of it
            return self._restore(asked)

    def _restore(self, asked: RestoreRequest) -> int:
        self._leaving.go_on()  # of an earlier one that failed, and was interrupted then
        group = self._ranks()
        run = self._run
        if run is not None:
            run.lower.close()
            run.survivor.moved()
            run.state.carried.begin()
            run.saver.settle(release=True)
            run.link.wait_mended(self._config.close_timeout_s)
        collectives.same(group, "exclude", list(self._exclude))
        state = run.state if run else self._new_state(group)
        link = run.link if run else self._new_link(group)
        of_run = (run.survivor.close, run.durables.close, run.saver.close) if run is not None else ()
        of_link = functools.partial(link.close, finished=False)
        leaving = Leaving(*of_run, of_link, self._storage.run_lock.release, self._let_bubbles_go)
        try:
            back = self._come_back(run, state, link, asked, leaving)
            self._run = self._new_run(group, state, link, back, leaving)
            return self._begun(self._run, back)
        except BaseException:
            # The objects may hold a mixture now; nothing of it must ever be saved, whatever interrupts this.
            self._leaving, self._run, self._has_failed = leaving, None, True
            leaving.go_on()
            raise

    def _begun(self, run: Run, back: tuple[Job, AnySaver, Restorer, RestoreReport]) -> int:
        """The objects are loaded: saves may be made from here on. Returns the step to go on with."""
        _, saver, restorer, report = back
        state, link, rank = run.state, run.link, run.job.group.rank
        self._signal.install()
        run.recorder.watch(self.bubbles)
        schedule_discovery.keep_to_waits(self.bubbles, saver.fence, link, came_back=report.version is not None)
        self.last_restore = dataclasses.replace(report, info=state.info.restored)
        if (fleeting := restorer.fleeting) is not None:
            run.fleeting = Fleeting(fleeting, self.last_restore.info, ProcessRandomness().state_dict())
        open_checkpointers.wish.restored(last := -1 if report.version is None else report.version.step, report.source)
        heartbeat.at_step(last)  # shown when it is told, not before
        start = self._begin(run, report.version, restorer.recorded)
        if rank == 0 and state.optimizers:
            apart_notice.tell(self._root, start, self._others())
        return start

    def carry(self, name: str, value: T) -> T:
        """Returns what a value of the loop was at the step that was restored; `value` on a fresh start. Behind `restore`.

        For what lives from one step to the next in names of the script: a batch that was fetched already, a best loss.

            batch = checkpointer.carry("batch", next(batches))
            for step in range(start, steps):
                ...
                checkpointer.step(step, batch=batch)

        Args:
            name: as which `step` is given it.
            value: what it is on a fresh start: numbers, strings, tensors, and lists, tuples and dicts of these. Tensors come
                back on the devices of its own.

        Raises:
            UsageError: before `restore`, the name was asked for already, or a value that cannot be saved.
        """
        if self.off:
            return value
        carried = self._again.carried if self._again is not None else self._running().state.carried
        taken: T = carried.take(name, value)
        return taken

    def step(self, step: int, **carry: Any) -> SaveHandle | None:
        """`step` is finished: saves if a cadence says so; stops with exit code 0 if SIGTERM was agreed on.

        Args:
            step: its number; the first one is what `restore` returned.
            carry: the values that `carry` was asked for, as the next step will find them; each rank its own.

        Raises:
            UsageError: before `restore`, no whole number, not later than the step before, or before the one that `restore` returned; other
            values than those that `carry` was asked for; `prove` found what differs after a restart. SystemExit: after a SIGTERM, once the last save is durable.
        """
        if self.off:
            return None
        if self._again is not None:
            self._again.again(step, carry, sys._getframe(1))
            return None
        run, step, frame = self._running(), whole_number(step), sys._getframe(1)
        if run.saver.fence.is_interrupted:
            logger.warning(
                "step %d is not finished: a signal's handler reports it in the middle of an optimizer's step", step
            )
            return None
        one_more = run.observer.at(step, frame) if run.observer is not None else False
        reason = step_numbers.why_not(step, newest=run.step, start=run.start, one_more=one_more)
        if reason is not None:
            raise UsageError(reason.what, remedy=reason.remedy)
        run.state.carried.give(step, carry)
        run.state.gradients.note(functools.partial(run.turns.at, frame))
        run.accumulation.look(step, lambda: run.state.gradients.why_told, run.saver.fence.num_steps, frame)
        if self._proof is not None:
            self._proof.made(step, frame)
        del frame  # what it holds is the script's to free
        with torch.inference_mode(False):  # an evaluation may be around it
            return self._made(run, step)

    def _made(self, run: Run, step: int) -> SaveHandle | None:
        run.step = step
        run.lower.before(run, step)
        run.recorder.step(step)
        run.at(step)
        run.link.went_on(run.job.version(step))
        heartbeat.at_step(step)
        self._hear_due(run)
        self._make_up(run)
        due = run.schedule.after(step, stop_wanted=self._signal.wanted)
        self._propose(run, due.propose)
        for missed in due.missed:
            self._missed(missed)
        handle = None
        if due.save:
            why = Waits.LAST if due.stop else Waits.DUE
            with self._saves:
                handle = self._save(run, step, Level.DURABLE if due.durable else Level.CAPTURED, why=why)
            run.owed = handle if due.durable else run.owed
        if due.stop and handle is not None:
            self._stop(handle)
        return handle

    def save(
        self,
        step: int,
        level: Level | str = "captured",
        *,
        also_to: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        info: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Saves the state as it is now as the state after `step`. Every rank calls it, at the same step.

        Returns when everything that may change is copied; `handle.wait()` blocks until `level` is reached.
        In a signal's handler that strikes in the middle of an optimizer's step nothing is saved, and the log says so.

        Args:
            step: the step that is finished, from 0; restore() of this version returns the one after it.
            level: `"captured"`, `"replicated"` or `"durable"`; durable makes the version due for storage.
            also_to: one more place or several, paths or URLs, that it is copied to once it is durable, which this makes the level.
                Rank 0 copies to the places that it is given, each in a thread of its own; its `flush` and `on_durable` speak of all.
                Retention leaves the version alone until then. At most 8 versions wait for a place; the oldest gives way.
            info: values of the caller's own to keep beside the state (numbers, strings, bytes, lists, tuples, dicts), as they
                are at the call, each rank its own; `holdfast inspect` shows them, `last_restore.info` has them. No tensors.

        Raises:
            UsageError: before `restore`, an unknown level, a step that is no whole number, a step before the last one saved, that one again after an
                optimizer's step, info that cannot be kept, or values are carried and `step` was not told them before.
        """
        places = _places(also_to)
        return self._save_now(step, Level.DURABLE if places else as_level(level), places, info)

    def save_last(self, step: int) -> SaveHandle:
        """Saves the state behind the last step of a training as durable; when it returns, other weights may be loaded.

        It waits for a free slot as long as `close` would, for it holds no step up, and its state is about to go. Where the step
        is reported too, this comes before `step`, or soon behind it: what `step` finds no slot for is abandoned seconds later.

        Raises:
            UsageError: as `save` does.
        """
        try:
            return self._save_now(step, Level.DURABLE, why=Waits.LAST)
        finally:
            self.settle()

    @staticmethod
    def _hear_due(run: Run) -> None:
        """Another rank's clock was first: what it made due for storage counts here too, and nothing more is due now."""
        client = run.link.client
        newest = client.announced.newest_due if client is not None else None
        if newest is None or newest[0].incarnation != run.job.incarnation or newest[0] == run.due:
            return
        run.due = newest[0]
        if isinstance(run.schedule, Schedule):
            run.schedule.stored()
        for handle in run.recent:
            if handle.version == run.due and handle.level is not Level.DURABLE and not handle.given_up:
                handle.level = Level.DURABLE
                run.durables.add(handle, asked=False)

    @staticmethod
    def _make_up(run: Run) -> None:
        """The newest version that memory has is written instead of one that was due by the cadence and found no slot.

        One rank says so. What is being written comes first, for another one would take one more slot.
        """
        client = run.link.client
        if run.owed is None or client is None or run.saver.memory is None or run.job.group.rank != 0:
            return
        decided, why = run.owed.durable
        newest, due = client.announced.captured, client.announced.newest_due
        if not decided or (due is not None and due[1].is_written):
            return
        run.owed = None
        if (
            why
            and newest is not None
            and (due is None or newest > due[0])
            and newest.incarnation == run.job.incarnation
        ):
            try:
                client.persist(newest)
            except KeeperLost as error:
                pass_on(error)
                logger.info("%s is not written instead of what was due: %s", newest, error)

    def _save_now(
        self,
        step: int,
        wanted: Level,
        places: Sequence[str] = (),
        info: Mapping[str, Any] | None = None,
        *,
        why: Waits = Waits.ASKED,
    ) -> SaveHandle:
        """Saves as `save` does, with its arguments looked through."""
        if self.off:
            return never(step, wanted, f"{settings.DISABLE_VARIABLE} is set")
        if self._again is not None:
            return never(step, wanted, "the first steps are made again")
        run, step = self._running(), whole_number(step)
        run.state.carried.require(step, run.start)
        if run.saver.fence.is_interrupted:
            handle = never(
                step, wanted, "a signal's handler saves in the middle of an optimizer's step", run.job.incarnation
            )
            logger.warning("%s is given up: %s, which has written a part", handle.version, handle.given_up)
            return handle
        # A handler that comes as torch enters or leaves `no_grad` would leave gradients off.
        with self._saves, torch.set_grad_enabled(torch.is_grad_enabled()):
            if run.last is not None and step < run.last.version.step:
                raise UsageError(f"step {step} cannot be saved after step {run.last.version.step}")
            if run.last is not None and step == run.last.version.step and run.saver.fence.num_steps != run.saved_steps:
                raise UsageError(
                    f"step {step} is saved already, and an optimizer made a step since",
                    remedy="number saves by a count that grows with every optimizer step, not by epochs",
                )
            if (step, run.saver.fence.num_steps) != (run.state_step, run.optimizer_steps):
                # Else what lived was noted when it was reported. By now the next backward pass may be under way, also in another thread.
                run.state.gradients.note()
            run.at(step)
            with run.state.info.beside(info, saved=run.last is not None and run.last.version.step == step):
                return self._save(run, step, wanted, places, why=why)

    @heartbeat.phase(Phase.SAVING)
    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything that was saved at the durable level is durable, at all places. Training may go on.

        Args:
            timeout_s: seconds; the setting `close_timeout_s` by default.

        Raises:
            LevelNotReached: names every version that is not, since the last call, with the reason. One that only the cadence
                asked for is named no more once a later one is durable.
        """
        if self.off or self._again is not None:
            return
        run, began = self._running(), time.monotonic()
        timeout_s = self._config.close_timeout_s if timeout_s is None else as_seconds(timeout_s)
        run.saver.settle(timeout_s)
        if run.saver.memory is not None:
            run.link.wait_mended(max(0.0, timeout_s - (time.monotonic() - began)))

        def meanwhile() -> None:
            if run.saver.memory is not None:
                run.link.mend()  # a keeper that died is missed by nobody else

        run.durables.flush(max(0.0, timeout_s - (time.monotonic() - began)), meanwhile)

    def settle(self) -> None:
        """Waits until the copy of the last save is complete, or given up; after that parameters may be written at will.

        A save may be copied behind the next forward and backward, for only an optimizer's step changes what it copies.
        Code that writes parameters or optimizer state in another way (averaged weights that are swapped in for an
        evaluation, a codebook that is reset) calls this before. Waits no longer than a step would. Any thread may call
        it; where nothing is being copied it returns at once.
        """
        if self._run is not None and not self._is_forked:
            self._run.saver.settle(release=True)
            self._run.survivor.moved()  # the state is about to be written

    def pin(self, version: Version | str) -> None:
        """Keeps a version from ever being removed by retention; it may become durable later. Any rank may call it.

        Raises:
            UsageError: no such name. StorageError: the path refuses.
        """
        named = as_version(version)
        assert named is not None
        self._storage.pin(named)

    def unpin(self, version: Version | str) -> None:
        """Takes a pin away; the next commit may remove the version."""
        named = as_version(version)
        assert named is not None
        self._storage.marks.unpin(named)

    def keeper_status(self) -> dict[str, Any]:
        """Return what the keeper of this node says about itself, as `holdfast status --json` shows it.

        Raises:
            KeeperLost: there is none now. UsageError: before `restore`.
        """
        return self._running().link.require().status()

    @heartbeat.phase(Phase.SAVING)
    def close(self) -> None:
        """Makes the last step durable and leaves. Every rank calls it. Calling it again does nothing.

        What a signal's handler raises while it leaves breaks it off there. The next call, or `abandon`, then goes on, and a next call
        of `close` raises what the first one could not tell.

        A last step that was due is stored as it was. One that was not is saved here, and what no optimizer owns (random numbers,
        positions in the data, running means) is then what it is at this call; `save_last` behind the step leaves no time between.

        If an optimizer made a step after the last one that was reported, or somebody wrote other weights, its state is not
        here any more. Then the newest version that was saved is made durable, and the log says at level ERROR what that leaves out.
        If no step was made since a restore from memory, what was restored is made durable; if one was made and none was reported,
        the log says at level ERROR that storage has not what was restored, and the keeper stays.
        If another rank closes behind an earlier step, the newest version that all ranks have is made durable, and the log says so.
        If this rank gives up the last save, the whole version before it is made durable, and the error names it. If that is the
        version that was restored, and memory alone has it, it stays there with the keeper, and the error says for how long.
        A save in whose middle a signal's handler closes is given up; the log names it at level ERROR if an older one is durable.

        Copies to further places (`also_to`) are waited for until `close_timeout_s` is over (10 s after a SIGTERM or a stop file),
        and the log says how far they are.
        What does not arrive is told to the log and to `on_durable`; nothing is raised, for the version is durable at its own place.

        Raises:
            LevelNotReached: that is not durable, or nothing was saved; says which level it has, and why. The keeper then
                stays and keeps what it holds. Also in threads that waited while another one closed, and at once in a handler
                that interrupted what that one needs (a save, a flush, an optimizer's step).
        """
        is_again = self._closed
        if self._is_forked or (is_again and not self._leaving.left):
            return
        # A callback does not wait: the thread that closes may be waiting for it.
        waits = self._run is None or not self._run.durables.is_telling
        is_within = self._is_within  # a signal's handler, which another thread that closes waits for
        if self._close_lock.acquire(blocking=waits and not is_within):
            try:
                if not self._closed and not self._close_failed:
                    self._close_once()
                    return
                if self._closed:
                    self._leaving.go_on()
                else:  # it was interrupted before it left
                    self._leave(finished=False)
                if self._close_failed:
                    whose = "close has failed before" if is_again else "another thread closed"
                    raise LevelNotReached(f"{whose}: {self._close_failed}")
            finally:
                self._close_lock.release()
        elif is_within and self._run is not None:
            why = self._break_off(self._run) or "this one is in the middle of a save, a flush or an optimizer's step"
            raise LevelNotReached(f"another thread closes: {why}")

    @property
    def _is_within(self) -> bool:
        """Return whether this thread is in the middle of a save, or holds what a thread that closes needs."""
        if is_mine(threading.Condition(self._saves)):
            return True
        run = self._run
        return run is not None and (run.durables.is_held or run.saver.fence.is_held)

    def _close_once(self) -> None:
        finished, began, broken_by = False, time.monotonic(), "an exception"
        try:
            if self._run is not None:
                # The keeper has not heard of a save of another thread that goes on.
                if self._saves.acquire(timeout=self._config.close_timeout_s):
                    self._saves.release()
                finished = self._finish(self._run)
            else:
                finished = True
            broken_by = ""
        except BaseException as error:
            self._close_failed = broken_by  # until its text is there
            # An error of ours says itself what is not durable.
            broken_by = "" if isinstance(error, HoldfastError) else type(error).__name__
            self._close_failed = str(error) or broken_by
            raise
        finally:
            if finished:  # who was told to stop may be killed soon
                left_s = 0.0 if self._signal.wanted else self._config.close_timeout_s - (time.monotonic() - began)
                self._copies_until_s = time.monotonic() + max(MIN_COPY_S, left_s)
            self._leave(finished=finished, broken_by=broken_by)

    def void(self) -> None:
        """The job broke off: what a device has not finished by now counts neither as saved nor as live. From any thread."""
        run = self._run
        if run is not None:
            run.survivor.void()
            run.saver.void()

    def abandon(self) -> None:
        """Leaves without saving, so that another one of this process can take the rank. Calling it again does nothing.

        Where a signal's handler broke it off, or `close` while that left, the next call goes on.
        """
        if self._is_forked:
            return
        if self._closed:
            self._copies_until_s = 0.0
            self._leaving.go_on()
            return
        if self._run is not None:
            self._run.survivor.leave()
        self._leave(finished=False)

    def interrupted(self) -> None:
        """The job broke off and this process stays: what was saved counts, the next call is `restore`."""
        run, steps = self._run, self._leaving.left
        if run is not None:
            of_run = functools.partial(self._leave_run, run, finished=False, join_s=1.0)
            watch = functools.partial(run.recorder.watch, None)
            steps = (*steps, run.survivor.leave, of_run, watch, self._storage.run_lock.release)
        leaving = Leaving(*steps, self._let_bubbles_go)
        self._leaving, self._run = leaving, None  # no call between: a handler finds both or none
        leaving.go_on()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes. After an exception nothing is copied, for the objects may hold half a step; but the last version that
        was saved, which is whole, is sent to storage, and the keeper stays to finish that. In a forked child, which
        leaves the block as well, nothing is done.
        """
        if self._is_forked:
            return
        if kind is None:
            self.close()
            return
        run = None if self._closed else self._run
        if run is not None:
            if isinstance(error, RuntimeError):  # of a collective or a device, which may run on behind it
                run.saver.void()
            run.saver.settle()
            if (whole := run.whole) is not None:
                self._raise_level(run, whole, Level.DURABLE)
        self.abandon()

    # Inside.

    def _asked(
        self, version: Version | None, *, fresh: bool, strict: bool | None, required: bool | None
    ) -> RestoreRequest:
        """Return what the caller, the settings and the operator want of a restore, the stronger first."""
        if fresh and required:
            raise UsageError("a fresh start is asked for, and a checkpoint is required", remedy="leave one of them out")
        wish = open_checkpointers.wish.take_version()
        if (version is not None or fresh) and wish not in ("", NO_WISH):
            logger.warning("--from-version %s is not obeyed: the script names what it restores itself", wish)
        strict = self._config.strict if strict is None else strict
        required = self._config.expect_checkpoint if required is None else required
        return RestoreRequest(version, fresh, strict, required, "" if version is not None or fresh else wish)

    def _come_back(
        self, run: Run | None, state: State, link: KeeperLink, asked: RestoreRequest, leaving: Leaving
    ) -> tuple[Job, AnySaver, Restorer, RestoreReport]:
        """The job comes together and loads. What has to end where that fails is added to `leaving`.

        If a keeper dies meanwhile it begins anew, on all ranks: the next keeper gets the slots of those that have saved before,
        so what they captured is found again.
        """
        older = asked.version is None and not asked.fresh and open_checkpointers.wish.take_older()
        load = functools.partial(self._load, run, state, link, asked, leaving, older=older)
        try:
            return load(live=not older)
        except KeeperLost as error:
            # One that only other nodes cannot reach was waited for long enough.
            if collectives.unanimous(self._ranks(), run is None and link.client is not None):
                raise
            logger.warning("the restore begins anew, with the next keeper: %s", error)
            return load(live=False)

    def _new_run(
        self,
        group: collectives.Ranks,
        state: State,
        link: KeeperLink,
        back: tuple[Job, AnySaver, Restorer, RestoreReport],
        leaving: Leaving,
    ) -> Run:
        """Returns all that exists from a restore to the next: made anew, or taken over from the run before."""
        before, (job, saver, restorer, report) = self._run, back
        link.resumed = Origin(job.incarnation, restorer.recorded, restorer.table)
        saver.expect_slots(SLOTS_S, at_saves=not report.bytes.keys().isdisjoint({"storage", "cache"}))
        saver.restart(restorer.recorded)
        self.bubbles = self.bubbles or schedule_discovery.bubbles_of(state.modules, self.events)
        schedule = schedule_of(
            saver, self._config, job, missed=self._missed, events=self.events, bubbles=self.bubbles, link=link
        )
        recorder = self._recorder = self._recorder or Recorder(self._config.trace_dir, group.rank, self.events)
        report.tell(self.events)  # behind the recorder, which draws it
        durables = before.durables if before else self._new_durables(job)
        leaving.first(durables.close)
        durables.restarted(job.incarnation)
        survivor = (
            before.survivor
            if before
            else Survivor(state, job=job.assembly.job_id, rank=group.rank, world_size=group.world_size)
        )
        leaving.first(survivor.close)
        lower = StorageFallback(
            job, state=state, link=link, storage=self._storage, config=self._config, events=self.events
        )
        leaving.first(lower.close)
        steps = saver.fence.num_steps
        start = 0 if report.version is None else report.version.step + 1
        run = Run(
            state, link, saver, job, schedule, recorder, durables, survivor, lower, start=start, optimizer_steps=steps
        )
        run.observer = self._observer(run, says=group.rank == 0)
        run.accumulation = AccumulationNotice(steps)
        return run

    def _load(
        self,
        run: Run | None,
        state: State,
        link: KeeperLink,
        asked: RestoreRequest,
        leaving: Leaving,
        *,
        older: bool,
        live: bool,
    ) -> tuple[Job, AnySaver, Restorer, RestoreReport]:
        """One attempt. Collective: what fails, fails on all ranks."""
        group, before = self._ranks(), run.saver if run else None
        saver = before
        try:
            job = assemble(group, self._root, self._config, storage=self._storage, link=link, asked=asked)
            saver = reserved(
                saver, state=state, link=link, job=job, storage=self._storage, config=self._config, events=self.events
            )
            leaving.first(saver.close)
            self._laid_out(job, collectives.together(group, state.trained))
            holder = holder_of(saver, link, job, self._storage)
            timeout_s = self._config.close_timeout_s
            restorer = Restorer(
                job,
                holder,
                state=state,
                storage=self._storage,
                asked=asked,
                timeout_s=timeout_s,
                node_directory=place_of(self._root, self._config).directory,
            )
            if older and job.wish.version is None:
                restorer.decisions.pass_over_newest()
            return job, saver, restorer, restorer.run(live=live)
        except BaseException:
            if saver is not None and saver is not before:
                saver.close()
            raise

    @property
    def _is_forked(self) -> bool:
        """Return whether this process was forked from the trainer: what the checkpointer has is its parent's."""
        return os.getpid() != self._pid

    def _without_restore(self, start: int, reason: str) -> int:
        self.last_restore = RestoreReport(Version(1, start - 1) if start else None, reason)
        return start

    def _require_own(self) -> None:
        if self._is_forked:
            raise UsageError(
                "this process was forked from the one that the checkpointer belongs to",
                remedy="save in the parent; a child reads what it needs by a Checkpointer or a reader of its own",
            )
        if self._closed:
            raise UsageError("the checkpointer is closed", remedy="build a new one")

    def _running(self) -> Run:
        self._require_own()
        if self._run is None and self._has_failed:
            raise UsageError("the last restore() failed", remedy="call it again: objects may be filled in part")
        if self._run is None:
            raise UsageError("restore() has not been called", remedy="call it once before training, also on a new run")
        return self._run

    def _others(self) -> Iterator[tuple[str, int]]:
        """Others of this process that train, were restored and have reported no step since: path and step to go on with."""
        for each in open_checkpointers.opened():
            if isinstance(each, Checkpointer) and each is not self and not each._closed:
                run = each._run
                if run is not None and run.step < 0 and run.state.optimizers:
                    yield each._root, run.start

    def _new_state(self, group: collectives.Ranks) -> State:
        """A look at the objects whose layout all ranks agree on. Collective."""

        def look() -> State:
            state = self._gatherer(group)
            state.gather()
            return state

        state = collectives.together(group, look)
        state.agree_on_frozen(functools.partial(collectives.gather_json, group))
        return state

    def _gatherer(self, group: collectives.Ranks) -> State:
        rank, size = group.rank, group.world_size
        state = State(
            self._objects,
            rank=rank,
            world_size=size,
            replicated=self._replicated,
            exclude=self._exclude,
            began=self._began,
        )
        self._began = state.began
        state.overwritten = self._overwritten
        return state

    def _new_link(self, group: collectives.Ranks) -> KeeperLink:
        return KeeperLink(self._root, self._config, rank=group.rank, events=self.events, on_appointment=self._appointed)

    def _begin(self, run: Run, version: Version | None, saved: Version | None) -> int:
        """The step to go on with, after `version`."""
        if version is None:
            return 0
        if version == saved:
            run.survivor.note(run.job.version(version.step))
        else:  # live state that nobody has saved, and the next failure may take the last twin
            run.at(version.step)
            self._save(run, version.step, Level.DURABLE)
        return version.step + 1

    @property
    def _again(self) -> Proof | None:
        """The proof, in the child that makes the first steps again."""
        return self._proof if self._proof is not None and self._proof.is_child else None

    def _begin_proof(self) -> None:
        """The first steps are made twice from here on, if that was asked for."""
        if self._prove and self._proof is None:
            group = self._ranks()
            gathered = functools.partial(self._gatherer, group)
            state = lambda: self._run.state if self._run is not None else gathered()  # noqa: E731
            self._proof = Proof(self._objects, state, says=group.rank == 0)

    def _observer(self, run: Run, *, says: bool) -> Observer:
        """Return who looks at the names of the script's loop."""
        fence, carried = run.saver.fence, run.state.carried
        early, self._early = self._early, Early()
        return Observer(self._objects, carried, start=run.start, count=lambda: fence.num_steps, early=early, says=says)

    def _new_durables(self, job: Job) -> DurableTracker:
        """Rank 0 copies to further places; the others only wait for what they saved."""

        def open_place(place: str) -> Storage:
            return open_storage(place, self.events, encryption=KeySource.of(self._config))

        further = ExtraPlaces(self._storage, open_place, job.incarnation) if job.group.rank == 0 else None
        return DurableTracker(self._on_durable, further, timeout_s=self._config.close_timeout_s)

    def _laid_out(self, job: Job, shards: Sequence[Shard]) -> None:
        """Tell who holds the same, of what this rank will train. Collective.

        A group information file that cannot be written is an error on every rank: it was asked for, and nothing is trained.
        """
        redundancy_warning.warn(job.group, job.topology, shards, self.events)
        if path := settings.group_info_file():
            rank, num_ranks = job.group.rank, job.group.world_size
            write = holdfast.write_group_info_of_shards  # of the adapter, which nobody else loads
            collectives.together(job.group, lambda: write(path, shards, rank, num_ranks))

    @heartbeat.phase(Phase.SAVING)
    def _save(
        self, run: Run, step: int, level: Level, also_to: Sequence[str] = (), *, why: Waits = Waits.ASKED
    ) -> SaveHandle:
        durable = level is Level.DURABLE
        nested, newest = self._saving == threading.get_ident(), run.last
        last = newest if not nested and newest is not None and newest.version.step == step else None
        if last is not None and last.given_up and not run.changed and run.link.unannounced.take_back(last.version):
            last = None  # it found no slot, and nobody was told
        if last is not None:
            return self._raise_level(run, last, level, also_to)
        handle = SaveHandle(
            run.job.version(step),
            level,
            link=run.link,
            in_storage=lambda version: self._storage.is_durable(version, by_name=True),
            settle=run.saver.settle,
            topology=run.job.topology,
            timeout_s=self._config.close_timeout_s,
        )
        if nested:  # a signal's handler, or state_dict() of an object: whatever the first save holds, it holds still
            handle.give_up("it was asked for in the middle of another save, by the same thread")
            logger.warning("%s is given up: %s", handle.version, handle.given_up)
            if run.last is None or run.last.version != handle.version:
                run.link.unannounced.add(handle.version)
            return handle
        is_kept = durable or run.saver.memory is not None  # which refuses all else
        before, thread, steps = self._saving, threading.get_ident(), run.saver.fence.num_steps
        try:
            self._saving = thread  # no call from here on to `last`: a signal's handler that closes finds both, or none
            is_first = run.last is newest  # else a signal's handler has saved since the look
            if is_first and is_kept:
                self._wished = handle.version, also_to, run.state.info.value
                run.last, run.saved_steps = handle, steps
                run.saves(handle)
            if is_first:
                run.saver.save(handle, durable=durable, why=why)
        except BaseException as error:
            if run.last is handle:
                run.saver.broken_off(handle, error)
                if durable and handle.reached is Level.DURABLE:
                    run.durables.add(handle, also_to, asked=why is not Waits.DUE)
            raise
        finally:
            self._saving = before
        if not is_first:
            return self._save(run, step, level, also_to, why=why)
        self._unclosed.saved(run)
        run.survivor.let_go()
        if durable:
            run.durables.add(handle, also_to, asked=why is not Waits.DUE)
        run.schedule.saved(step, durable=durable)
        return handle

    def _raise_level(self, run: Run, handle: SaveHandle, level: Level, also_to: Sequence[str] = ()) -> SaveHandle:
        """The version exists already: it is not copied twice, only made due for storage if that is new."""
        if level is Level.DURABLE and handle.level is not Level.DURABLE and not handle.given_up:
            run.saver.settle()  # the keeper must have heard of it
            try:
                run.link.require().persist(handle.version)
            except KeeperLost as error:
                pass_on(error)
                logger.warning("%s cannot be made durable now: %s", handle.version, error)
            run.schedule.saved(handle.version.step, durable=True)
            run.durables.add(handle, also_to)
        elif also_to:
            run.durables.add(handle, also_to)
        handle.level = max(handle.level, level)
        return handle

    def _stop(self, handle: SaveHandle) -> None:
        """All ranks saved this step, or they go on together and agree on another one."""
        try:
            handle.wait(Level.CAPTURED)
        except LevelNotReached as error:
            pass_on(error)
            logger.warning("not stopping after step %d: %s", handle.version.step, error)
            return
        logger.info("stopping after step %d, as SIGTERM asked for", handle.version.step)
        try:
            self.close()
        finally:
            others = [other for other in open_checkpointers.opened() if isinstance(other, Checkpointer)]
            lost = [why for other in others if (why := other._secure())]
        if lost:
            raise LevelNotReached("; ".join(lost), remedy="start again: memory may still hold it")
        raise SystemExit(0)

    def _secure(self) -> str:
        """Another Checkpointer ends the script, which may not come to close this one: the newest version becomes durable.

        Returns why it did not; empty if it did, or nothing was saved.
        """
        run = None if self._closed or self._is_forked else self._run
        if run is None or not run.recent or not (why := self._closing(run).secure()):
            return ""
        logger.error("%s: %s", self._root, why)
        return f"{self._root}: {why}"

    def _finish(self, run: Run) -> bool:
        return self._closing(run).finish(self._break_off(run))

    def _break_off(self, run: Run) -> str:
        """Gives up the save that this thread is in the middle of, which cannot go on while a signal's handler closes. Returns why."""
        last = run.last
        if self._saving != threading.get_ident() or last is None or last.reached is not Level.NONE:
            return ""
        if run.saver.memory is None and run.saver.has_stored(last):
            return ""
        why = "close was called in the middle of its save, by the same thread"
        if run.saver.memory is not None:
            run.saver.memory.give_up(last, why)
        last.give_up(why)
        return last.given_up

    def _closing(self, run: Run) -> Closing:
        return Closing(
            run,
            save=functools.partial(self._save_at_end, run),
            make_due=lambda handle: self._raise_level(run, handle, Level.DURABLE),
            timeout_s=self._config.close_timeout_s,
            patience_s=self.patience_s,
            linger_s=self._config.linger_s,
        )

    def _save_at_end(self, run: Run, step: int) -> SaveHandle:
        """Saves as a save of this step was asked for that was not made, if one was."""
        version, places, info = self._wished
        if version != run.job.version(step):
            places, info = (), {}
        with run.state.info.beside(info or run.state.info.value, saved=False):
            return self._save(run, step, Level.DURABLE, places, why=Waits.LAST)

    def _leave(self, *, finished: bool, broken_by: str = "") -> None:
        run, steps = self._run, self._leaving.left
        if broken_by:
            steps = (*steps, functools.partial(self._unclosed.broken_off, broken_by))
        steps = (*steps, self._unclosed.end)
        if self._proof is not None:
            steps = (*steps, self._proof.end)
        steps = (*steps, self._signal.remove)
        if self.bubbles is not None:
            steps = (*steps, self.bubbles.detach)
        if run is not None:
            of_run = functools.partial(self._leave_run, run, finished=finished, join_s=JOIN_TIMEOUT_S)
            steps = (*steps, run.survivor.close, of_run, run.recorder.close)
        leaving = Leaving(*steps, self._storage.run_lock.release, self._drop_loaders)
        self._leaving, self._closed = leaving, True  # no call between: a handler finds both or none
        leaving.go_on()

    def _leave_run(self, run: Run, *, finished: bool, join_s: float) -> None:
        run.lower.close()
        quiet = run.saver.close()
        run.durables.close(max(0.0, self._copies_until_s - time.monotonic()), join_s=join_s)
        if quiet:  # else the keeper must not give our slots away before this process has ended
            run.link.close(finished=finished)

    def _drop_loaders(self) -> None:
        """Held by the loop alone, the workers of a loader end with it and not with the garbage collector."""
        for name in [name for name, value in self._objects.items() if is_plain(value)]:
            del self._objects[name]

    def _let_bubbles_go(self) -> None:
        self.bubbles = schedule_discovery.let_go(self.bubbles)

    def _propose(self, run: Run, proposals: Sequence[Proposal]) -> None:
        try:
            for proposal in proposals:
                run.link.require().propose(proposal)
        except KeeperLost as error:
            pass_on(error)
            logger.info("nothing was proposed, and is again later: %s", error)

    def _appointed(self, appointment: Appointment) -> None:
        """The coordinator named a step; called in the keeper's reader thread."""
        if self._run is not None:
            self._run.schedule.take(appointment)

    def _missed(self, step: int) -> None:
        """The others save `step`, this rank is past it: they must not wait."""
        run = self._run
        if run is None or (run.last is not None and run.last.version.step == step):
            return
        version = run.job.version(step)
        try:
            run.link.require().abandon(version, "this rank was past the step when it was appointed")
        except KeeperLost as error:
            run.link.unannounced.add(version)
            pass_on(error)


def _run_of(owner: weakref.ref[Checkpointer]) -> Callable[[], Run | None]:
    """Return a function that tells what a Checkpointer has now, and does not keep it alive."""

    def run() -> Run | None:
        checkpointer = owner()
        return checkpointer._run if checkpointer is not None else None

    return run


def _places(also_to: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return further places as they are meant now: the script may go to another directory before they are written."""
    given = (also_to,) if isinstance(also_to, str | os.PathLike) else also_to
    return tuple(absolute_root(os.fspath(place)) for place in given)
