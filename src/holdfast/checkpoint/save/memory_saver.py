"""One save of this rank: slot, copy, fence, and word to the keeper; whatever fails, training goes on.

Order of a save: settle the copy before it, gather, plan (cached), ask for a slot, copy what must be copied now, queue
the rest, tell the keeper when the last byte is in the slot. The snapshot is the state at the call, or there is none:
every way out that is not complete gives the version up, aloud. A step that another thread makes during the call is such
a way out; of a save within a step nothing is copied late.

Once what must be copied now is small, it is set aside and the call ends there: planning, the question for a slot (a
round trip to another process) and all copies are the copying thread's, behind the next forward and backward.

Owns the fence, the side streams and the views of slots. Called in the trainer's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.optim import Optimizer

from holdfast.base.config import Config
from holdfast.base.errors import HoldfastError, KeeperLost, LevelNotReached, MemoryRefused
from holdfast.base.events import Events
from holdfast.base.handler_errors import of_a_handler, pass_on
from holdfast.base.terminal import some_of
from holdfast.checkpoint.capture import copy_plan, paced_copy
from holdfast.checkpoint.capture.copy_plan import Batch, Copies, Plan, SlotView, Split, Structure
from holdfast.checkpoint.capture.late_copy_check import CopyCheck, DeviceCheck, LateCopyChecker, WriteCounts
from holdfast.checkpoint.capture.mutation_check import MutationHistory, can_digest, differing, digest
from holdfast.checkpoint.capture.optimizer_fence import BEHIND_S, Fence, LateCopyJob, Opened, Pace
from holdfast.checkpoint.capture.paced_copy import PacedCopy
from holdfast.checkpoint.capture.side_stream_copy import DeviceCopy, Pairs, SideStreams
from holdfast.checkpoint.capture.twin_comparison import Shared
from holdfast.checkpoint.capture.unchanged_images import Look, UnchangedImages, stands
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.device.device_spots import ROOM_BYTES
from holdfast.checkpoint.device.pinned_writes import PinnedWrites
from holdfast.checkpoint.entries.types import Gathered, LiveTensors
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.checkpoint.job.slot_reservation import Reservation, comes_after_restore
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.restore.tensor_fill import MAX_THREADS
from holdfast.checkpoint.save.left_out_saves import ASIDE_BYTES, LeftOutSaves, RepeatedReasons
from holdfast.checkpoint.save.save_completion import ImmediatePiece, LatePiece, SaveCompletion
from holdfast.checkpoint.save.save_handle import INTERRUPTED, SaveHandle
from holdfast.checkpoint.save.slot_patience import SlotPatience, Waits
from holdfast.core.model import Shard, Topology, Version
from holdfast.core.versions.late_copy_rules import counts, may_be_late
from holdfast.core.versions.node_ledger import MAX_BEGUN
from holdfast.keeper.rpc.client import SAY_S, Begun, KeeperClient, NoSlotYet, Slot
from holdfast.keeper.rpc.viewer import CALL_TIMEOUT_S
from holdfast.tiers.memory.slots import SPARE_BYTES, patience_s
from holdfast.tiers.memory.usable_cores import usable_cores

logger = logging.getLogger(__name__)

# How long the end waits for a device that still copies; after a collective was aborted that is a moment.
DRAIN_S = 3.0
MAKE_SLOTS = "huge pages make that quicker, and `holdfast doctor` says whether there are any"
BEHIND = "its device does not come to the end of what is queued"
# Of a late copy so many tensors are looked at if no step was seen behind it.
NUM_SMALLEST = 8
# The copying thread is at its end when it has told so; what is left of its last turn takes less.
IDLE_S = 0.05


@dataclass(frozen=True, slots=True)
class _Taken:
    """The state at the call of one save: of what may change, copies, if it was set aside.

    Attributes:
        split: what is copied in the call, and what late.
        check: what the late part was; None if nothing late is in host memory.
        spots: of what ranks of this node share.
        steps: how many optimizer steps had begun.
    """

    handle: SaveHandle
    client: KeeperClient
    gathered: Gathered
    structure: Structure
    split: Split
    check: CopyCheck | None
    spots: bytes
    steps: int
    durable: bool
    why: Waits


@dataclass(frozen=True, slots=True)
class _Late:
    """A late copy from a device: how many steps had been seen, and the smallest tensors with their copies."""

    handle: SaveHandle
    num_steps: int
    smallest: list[tuple[str, torch.Tensor, torch.Tensor]]


class Contents(Protocol):
    """Is what is saved: the objects of a Checkpointer (`checkpoint.state.training_state.State`), or what another door was handed."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those whose step is the fence of a late copy; without any, everything is copied at the call."""

    @property
    def stepped(self) -> Callable[..., None]:
        """Is told of every step that one of them has made; and, with `made=False`, of those that a `GradScaler` left out."""

    def gather(self) -> Gathered:
        """The state now."""

    def predict(self) -> dict[str, Shard] | None:
        """Shards of the state as it will be after the first optimizer step, or None if that is not known."""


class Saver:
    """Saves to memory on one rank.

    Attributes:
        begun: the newest save that came here.
        left_out: saves that found no slot in time.
    """

    def __init__(
        self, state: Contents, link: KeeperLink, topology: Topology, *, rank: int, config: Config, events: Events
    ) -> None:
        self._state = state
        self._link = link
        self._topology = topology
        self._config = config
        self._events = events
        self._rank = rank
        # Ranks of one node save at the same moment and share its cores.
        here = topology.ranks_on(topology.node_of[rank])
        self._num_threads = min(MAX_THREADS, max(1, usable_cores() // len(here)))
        self._unchanged = UnchangedImages(self._num_threads)
        self._shared = Shared(set(here) - {rank})
        optimizers = state.optimizers
        self._trust = MutationHistory(overlap=config.overlap and bool(optimizers))
        self.fence = Fence(timeout_s=config.fence_timeout_s, behind_s=config.close_timeout_s, events=events)
        self.fence.guard(optimizers, state.stepped)
        self._streams = SideStreams(behind_s=config.close_timeout_s)
        self._structure: Structure | None = None
        self._structure_key = self._storages = -1  # of the last save
        self._views: dict[int, SlotView] = {}
        self._reserved = 0
        self._reservation: Reservation | None = None
        self._slots_until_s = 0.0
        self._patience = SlotPatience(config.begin_timeout_s, config.close_timeout_s)
        self._patience_s = config.begin_timeout_s  # of the save that runs
        self.begun: SaveHandle | None = None
        self.left_out = LeftOutSaves()
        self._reasons = RepeatedReasons()
        self._widened: Reservation | None = None
        self._growing = False  # the copying thread asks for larger slots
        self.refused = ""  # the words of the keeper that has too little memory
        self._split_key: object = None
        self._split: Split | None = None
        self._watched: tuple[int, ...] = ()
        self._pledged: tuple[int, ...] = ()
        self._checks = LateCopyChecker()
        self._pinned_writes = PinnedWrites()
        self._last_late: _Late | None = None
        self._owed: list[tuple[SaveHandle, str]] = []
        self._aside_key: object = None
        self._aside: tuple[str, ...] | None = None

    @property
    def memory(self) -> Saver:
        return self

    def reserve(self) -> None:
        """Before training: memory for saves of this state, optimizer state to come included, and all that is planned.

        So the first save costs what a later one does. The memory is granted here and made in the background (`await_slots`).
        Called again after a new incarnation, it only repeats what the keeper has to know.

        Raises:
            MemoryRefused: it does not fit; with numbers. UsageError: a value that cannot be saved; names it.
        """
        client = self._link.require()
        # A save that was given up may still wait for its slot; what is planned here is planned there too.
        self.fence.idle(2 * self._config.begin_timeout_s)
        self._structure_key = -1
        if self._structure is None:
            gathered = self._state.gather()
            shards = self._state.predict()
            self._structure = self._plan(gathered, shards.values() if shards is not None else None)
            plan = self._structure.plan(self._structure.encode(gathered))
            put_off = comes_after_restore()
            self._ask_for_slots(client, plan, plan.num_bytes + SPARE_BYTES, gathered, put_off=put_off)
            self._register(client, self._structure)
            if self._structure.fits(gathered):  # what is planned is what is there: the first save need not compare it
                self._structure_key = gathered.structure
        else:
            self._register(client, self._structure)
            self._link.hand_over(client)  # the keeper may have died between the last save and now
            self._ask_again(client)

    def await_slots(self, timeout_s: float | None) -> bool:
        """Waits until all slots are there or will not be, at most so long; None: as long as so much memory may need.

        Returns whether they are there. What is not there in time comes behind training; saves before the first are given up.
        A keeper that is known to be frozen is not waited for.
        """
        reservation = self._reservation
        if reservation is None:
            return True
        reservation.begin(self._link.behind)
        if timeout_s is None:
            timeout_s = patience_s(reservation.num_bytes * self._config.num_slots)
        there = reservation.wait_all(timeout_s, hopeless=lambda: self._link.trouble)
        if reservation.fault is not None and not there:
            self._note_fault(reservation)
        return there

    def expect_slots(self, timeout_s: float, *, at_saves: bool) -> None:
        """Waits for the slots as `await_slots` does; `at_saves`: not here, but in saves that come within this time."""
        if not at_saves:
            self.await_slots(timeout_s)
        elif self._reservation is not None:
            self._slots_until_s = time.monotonic() + timeout_s
            self._reservation.begin(self._link.behind)

    def _ask_for_slots(
        self, client: KeeperClient, plan: Plan, num_bytes: int, gathered: Gathered, *, put_off: bool = False
    ) -> Reservation:
        """All that is planned, from the budget now, and in the background from the kernel; `put_off`: once it is waited for."""
        on = _device_in(gathered)

        def came(slot: Slot) -> None:
            if on is not None:
                self._streams.pin(slot, on)
            self._views[id(slot)] = SlotView(slot, plan)

        client.prepare(num_bytes, self._config.num_slots, num_ready=0, put_off=put_off)
        # Values that grew into the room for spots would have the streams of a device wait for every copy from then on.
        self._reserved = num_bytes - (ROOM_BYTES if on is not None else 0)
        self._reservation = Reservation(client, num_bytes, self._config.num_slots, came)
        if not put_off:
            self._reservation.begin(self._link.behind)
        return self._reservation

    def _ask_again(self, client: KeeperClient) -> None:
        """The keeper that made slots for us died before all were there: the next one makes the rest."""
        reservation = self._reservation
        if reservation is None or not reservation.is_dead or reservation.client is client:
            return
        try:
            client.prepare(
                reservation.num_bytes, self._config.num_slots, num_ready=0, timeout_s=self._config.begin_timeout_s
            )
        except MemoryRefused as error:
            self.refused = str(error)
            raise
        self._reservation = reservation.again(client)
        self._reservation.begin(self._link.behind)

    def _need_slot(self, client: KeeperClient) -> None:
        """Waits for the first slot as long as a save may wait for one.

        Raises:
            LevelNotReached: it is not there yet, or will not be.
        """
        self._ask_again(client)
        reservation = self._reservation
        if reservation is None:
            return
        reservation.begin(self._link.behind)
        patience_s = self._slot_patience_s
        if reservation.wait(1, min(patience_s, SAY_S)):
            return
        if patience_s > SAY_S and reservation.fault is None:
            what = "a save has waited for memory of its slots for %.0f s (%d bytes each are being made); %s"
            logger.warning(what, SAY_S, reservation.num_bytes, MAKE_SLOTS)
            if reservation.wait(1, patience_s - SAY_S):
                return
        if reservation.fault is not None:
            self._note_fault(reservation)
            raise LevelNotReached(f"there is no memory for it: {reservation.fault}")
        size = reservation.num_bytes
        raise NoSlotYet(f"its memory is still being made: {size} bytes, for {reservation.seconds:.0f} s by now")

    @property
    def _slot_patience_s(self) -> float:
        """Return how long a save that begins now waits for a slot."""
        reservation = self._reservation
        if reservation is None or reservation.is_complete:
            return self._patience_s
        return max(self._patience_s, self._slots_until_s - time.monotonic())

    def _widen(self) -> None:
        """Saves find no slot: there may be one more, if that was not asked for before."""
        reservation = self._reservation
        if self.left_out.num and reservation is not None and reservation.may_widen and self._widened is not reservation:
            self._widened = reservation
            self._link.behind(reservation.widen, "holdfast slot")

    @property
    def _least_s(self) -> float:
        """Return how long the save that runs waits for an answer that no other rank has a part in."""
        return max(self._config.begin_timeout_s, self._patience_s)

    def _note_fault(self, reservation: Reservation) -> None:
        """Memory that was granted is not to be had: the ranks go on with storage alone (`checkpoint.checkpointer.storage_fallback`).

        If its keeper is lost the next one is asked.
        """
        if reservation.client.alive:
            self.refused = str(reservation.fault)

    def fits(self) -> bool:
        """Return whether the keeper has slots for the state as it is now; reserves them."""
        try:
            client, gathered = self._link.require(), self._state.gather()
            structure = self._structure_of(gathered, client)
            plan = structure.plan(structure.encode(gathered))
            reservation = self._reservation
            if plan.num_bytes > self._reserved:
                self._grow(client, plan, gathered)
            elif reservation is not None and not reservation.is_complete:
                if reservation.is_dead:
                    self._ask_for_slots(client, plan, reservation.num_bytes, gathered)
                return False
        except HoldfastError as error:
            logger.info("no level in memory yet: %s", error)
            return False
        self.refused = ""
        return True

    def restart(self, _: Version | None) -> None:
        """The tensors were written by a restore: whatever was proven before is forgotten."""
        self._trust.forget()
        for view in self._views.values():  # and slots may have been, by the keeper
            view.record = None
        self.fence.release(expected=True)

    def save(self, handle: SaveHandle, *, durable: bool, why: Waits = Waits.ASKED) -> None:
        """Saves the state as it is now as `handle.version`; if that fails, the handle says why.

        `why` says how long it may wait for a slot. The last one of a training is copied in the call.
        """
        started = time.perf_counter()
        try:
            self.begun = handle
            self._patience.spend(self.fence.take_slot_waits())
            self._widen()
            self._patience_s = self._patience.seconds(why)
            with torch.inference_mode(False):  # what is made there for later saves may not be written outside of it
                self._save(handle, durable=durable, why=why)
        except Exception as error:  # noqa: BLE001 - see there
            handle.give_up(INTERRUPTED)  # at once: one more signal may come
            if of_a_handler(error) is not None:
                self.give_up(handle, INTERRUPTED)
                pass_on(error)
            self._failed(handle, error)
        except BaseException:
            self.give_up(handle, INTERRUPTED)
            raise
        seconds = time.perf_counter() - started
        self._events.count("save_seconds", seconds)
        self._events.emit("saved", version=str(handle.version), seconds=seconds, given_up=handle.given_up)

    def broken_off(self, handle: SaveHandle, error: BaseException) -> None:  # noqa: ARG002 - as the saver without memory
        """Gives a save up that a signal's handler broke off before it had begun here."""
        if self.begun is not handle:
            self.give_up(handle, INTERRUPTED)

    def _failed(self, handle: SaveHandle, error: Exception) -> None:
        """A save was not made: a fault of ours or of the device must not end the training."""
        if isinstance(error, NoSlotYet):
            self._leave_out(handle, str(error))
        elif isinstance(error, KeeperLost):
            if (client := self._link.client) is not None:
                self._link.heard_nothing(client)  # whatever was asked of it: no later save waits for that again
            self.give_up(handle, f"the keeper is lost: {error.what}")
            self._link.mend()
        elif isinstance(error, HoldfastError):
            self.give_up(handle, str(error))
        else:
            logger.error("saving %s failed", handle.version, exc_info=error)
            self.give_up(handle, f"{type(error).__name__}: {error}")

    def settle(self, timeout_s: float = BEHIND_S, *, release: bool = False) -> None:
        """Waits until the copy of the last save is complete or given up; with `release`, the tensors may then be written.

        A device that is further behind than `timeout_s` is not waited for; with `release` that ends its copy.
        """
        if release:
            self.fence.release(expected=True, behind_s=timeout_s)
        else:
            self.fence.settle(timeout_s)

    def void(self) -> None:
        """The job broke off: what a device has not copied by now is given up. From any thread; does not wait."""
        self.fence.void()

    def close(self) -> bool:
        """Ends the copying thread, removes the hooks, lets go of the slots; returns whether nothing writes to them any more."""
        self.fence.release(behind_s=DRAIN_S)
        self.fence.idle(DRAIN_S, behind_s=0.0)
        self.fence.close()
        if self._reservation is not None:
            self._reservation.close(DRAIN_S)
        quiet = self._streams.unpin(DRAIN_S)
        if not quiet:
            open_checkpointers.broken.stuck = "a device does not finish what it writes to the memory of a save"
            logger.error("%s; this process must end before that memory is used again", open_checkpointers.broken.stuck)
        self._last_late = None
        self._checks.forget()
        for view in self._views.values():
            view.forget()
        self._views.clear()
        return quiet

    def _save(self, handle: SaveHandle, *, durable: bool, why: Waits) -> None:
        began = time.monotonic()
        self.fence.release()
        client = self._link.client
        if client is None:
            raise KeeperLost("a new one is being started")
        self._require_answers()
        last = why is Waits.LAST
        patience_s = self._patience_s - (0.0 if last else time.monotonic() - began)
        if not self.fence.idle(0.0 if self._growing and not last else max(patience_s, IDLE_S)):
            what = "larger slots are still being made" if self._growing else "the copy of an earlier version runs"
            raise LevelNotReached(what)
        self._require_answers()  # which that copy may have waited for in vain
        self._growing = False
        self._pay()
        self._look_for_graphs()
        steps = self.fence.num_steps
        within = self.fence.under_way()
        if self.fence.is_void(steps, others_within=bool(within - {threading.get_ident()})):
            raise LevelNotReached(self.fence.stepped())
        gathered = self.left_out.as_it_was(handle.version) or self._state.gather()
        if not self._pinned_writes.end(gathered, self._config.close_timeout_s):
            raise LevelNotReached(BEHIND)
        try:
            with self._held_up(why):
                self._need_slot(client)
        except NoSlotYet:
            self.left_out.keep(handle.version, gathered)
            raise
        self.fence.begin()
        structure = self._structure_of(gathered, client)
        spots = self._shared.words(handle.version.step)
        if last or not may_be_late(within_step=bool(within)):  # all is copied before the step goes on
            everything = Split(_all(structure), ())
            taken = _Taken(handle, client, gathered, structure, everything, None, spots, steps, durable, why)
            self._copy(taken, self._open_now(taken), watch=False)
            return
        split = self._split_of(structure, gathered)
        key = (self._structure_key, self._storages, self._trust.generation)
        check = self._checks.look(key, structure, split.late, gathered.tensors, turn=handle.version.step)
        taken = _Taken(handle, client, gathered, structure, split, check, spots, steps, durable, why)
        aside = self._set_aside(gathered)
        if aside is None:
            self._copy(taken, self._open_now(taken))
        else:
            self._copy_late(replace(taken, gathered=aside))

    def _require_answers(self) -> None:
        """Refuses to go on with a keeper that is known not to answer: neither this nor the step behind waits for it again."""
        if self._link.silent:
            raise LevelNotReached("the keeper of this node does not answer")

    def _look_for_graphs(self) -> None:
        """Nothing may be copied late if steps are made that pass no fence: those that a graph of a device replays.

        That one records a step is seen. One that was recorded before is found by what it does: the smallest tensors of a
        late copy (counts of steps, for one) changed, and no step was seen. That version may be torn.
        """
        last = self._last_late
        if self.fence.captured:  # and what was copied then was given up, or complete
            self._last_late = None
            self._trust.stop("an optimizer's step is replayed by a graph, which passes no fence")
            return
        if last is None or last.num_steps != self.fence.num_steps or last.handle.given_up:
            self._last_late = None
            return
        if not accelerator.caught_up([live for _, live, _ in last.smallest], self._config.close_timeout_s):
            raise LevelNotReached(BEHIND)
        self._last_late = None
        changed = differing(last.smallest)
        if changed:
            self._trust.stop(f"{some_of(sorted(changed))} changed, and no step of an optimizer was seen")
            self.give_up(last.handle, "steps were made that passed no fence while it was copied")

    def _open_now(self, taken: _Taken) -> SlotView:
        """A slot for the version while the step waits."""
        with self._held_up(taken.why):
            return self._open(taken, self._grow, self._slot_patience_s)

    @contextmanager
    def _held_up(self, why: Waits) -> Iterator[None]:
        """Count what is waited for within, where the cadence asked for the save: it holds the step up."""
        began = time.monotonic()
        try:
            yield
        finally:
            if why is Waits.DUE:
                self._patience.spend(time.monotonic() - began)

    def _open(
        self,
        taken: _Taken,
        grow: Callable[[KeeperClient, Plan, Gathered], object],
        timeout_s: float,
        *,
        anew: bool = False,
    ) -> SlotView:
        """A slot for the version, with everything in it that is not a tensor; `grow` gets larger slots if need be.

        Nothing is written of images that may stay as they are, unless all is to be copied `anew`.
        """
        client, structure = taken.client, taken.structure
        values = structure.encode(taken.gathered)
        plan = structure.plan(values)
        if plan.num_bytes > self._reserved:
            grow(client, plan, taken.gathered)
        version, told = taken.handle.version, list[Begun]()
        try:
            self._link.unannounced.announce(client)
            slot = client.begin(
                version, plan.num_bytes, durable=taken.durable, timeout_s=timeout_s, ask_again=self._behind(),
                told=told.append, comes_back=taken.why is Waits.DUE,
            )  # fmt: skip
        except NoSlotYet:
            self.left_out.keep(version, taken.gathered)
            raise
        except KeeperLost:
            self._link.heard_nothing(client)
            raise
        self.left_out.found()
        if structure.layout not in self._link.begun[-1:]:
            self._link.begun = (*self._link.begun, structure.layout)[-MAX_BEGUN:]
        view = self._view(slot, plan)
        known = stands(view, client, told[-1])
        view.known = {} if anew else known
        view.write_frames(values, but=view.known)
        return view

    def _behind(self) -> Callable[[], bool] | None:
        """Return a question: whether it is too early to give a version up for want of a slot. None without a device: it never is.

        What other ranks hold becomes free when *their* devices have copied, and those are behind their hosts as ours is.
        Collectives keep devices together: once ours has come to this save, others have come to the one before. Only then
        does the time of a host count.
        """
        if accelerator.in_use() is None:
            return None
        behind, until = accelerator.Behind(), time.monotonic() + self._config.close_timeout_s
        return lambda: not open_checkpointers.broken.reason and time.monotonic() < until and behind()

    def _set_aside(self, gathered: Gathered) -> Gathered | None:
        """The state with copies of all that may change at any time; None if that is too much, or not in host memory."""
        key = (self._structure_key, self._trust.generation)
        if key != self._aside_key:
            self._aside_key, self._aside = key, self._small(gathered)
        if self._aside is None:
            return None
        tensors = LiveTensors.of(gathered.tensors)
        rest = ((name, tensors[name]) for name in self._aside)
        copies = {name: replace(live, local=live.local.detach().clone()) for name, live in rest}
        return replace(gathered, tensors=LiveTensors(tensors.lasting, {**tensors.fresh, **copies}))

    def _small(self, gathered: Gathered) -> tuple[str, ...] | None:
        """Names of what is copied in the call, if it is small and nothing has to be compared."""
        tensors = gathered.tensors
        late = self._trust.late(tensors)
        if not late or self._trust.watched(tensors) or self._config.verify_capture:
            return None  # nothing is proven
        rest = tuple(name for name in tensors if name not in late)
        on_host = all(live.local.is_cpu for live in tensors.values())
        is_small = sum(tensors[name].local.nbytes for name in rest) <= ASIDE_BYTES
        return rest if on_host and is_small else None

    def _copy_late(self, taken: _Taken) -> None:
        """Everything but the state itself is left to the copying thread. There a wait for a slot holds up nothing at first."""
        handle, timeout_s = taken.handle, self._slot_patience_s
        if taken.why is Waits.DUE and not self._patience.in_debt:
            timeout_s = max(timeout_s, min(self._config.begin_timeout_s, timeout_s + self.fence.free_s))

        def opened() -> Opened:
            try:
                view = self._open(taken, self._prepare, timeout_s, anew=True)
            except NoSlotYet:
                job.finish = lambda reason: self._leave_out(handle, reason)
                raise
            except KeeperLost as error:
                pass_on(error)
                raise LevelNotReached(f"the keeper is lost: {error.what}") from error
            now, late = view.assign(taken.gathered.tensors, taken.split)
            copy_plan.copy(now.targets, now.sources)
            self._events.count("late_copied_bytes", late.num_bytes)
            ending = self._ending(taken, view)
            job.at_fence = ending.at_fence
            return self._batches(late), ending.copied

        job = LateCopyJob([], None, lambda reason: self.give_up(handle, reason), opening=opened, steps=taken.steps)
        self.fence.start(job)

    def _copy(self, taken: _Taken, view: SlotView, *, watch: bool = True) -> None:
        """Copies in the call what may change, and what has to be compared, which `watch` asks for; queues the rest."""
        unchanged = self._unchanged.look(view, taken.gathered.tensors, taken.split)
        for image in unchanged.changed:
            view.write_header(image)
        now, late = view.assign(taken.gathered.tensors, unchanged.split)
        parts, sources, targets = view.plan.parts, view.plan.sources.tensors, view.targets
        pledged = [LatePiece(parts[i].name, digest(sources[i]), targets[i]) for i in self._pledged if watch]
        names = [parts[i].name for i in late.device_parts]
        counts = WriteCounts(names, list(late.device_sources), self._trust)
        check, spots = self._spots_of(taken, view, now, late) if watch else (None, ())
        device = self._queue(now, late, spots) if now.device_targets or late.device_targets else None
        copy_plan.copy_at_once(now, self._num_threads)
        watched = [ImmediatePiece(parts[i].name, sources[i], targets[i]) for i in self._watched if watch]
        ending = replace(self._ending(taken, view, unchanged), watched=watched, pledged=pledged, on_devices=check)
        at_fence = ending.at_fence if ending.needs_fence else None
        if late.targets or device is not None:
            job = LateCopyJob(self._batches(late), device, ending.copied, at_fence, steps=taken.steps)
            job.written = counts.written
            self._events.count("late_copied_bytes", job.num_bytes)
            if late.device_targets:
                places = late.smallest(NUM_SMALLEST)
                smallest = [(names[i], late.device_sources[i], late.device_targets[i]) for i in places]
                self._last_late = _Late(taken.handle, self.fence.num_steps, smallest)
            self.fence.start(job)
            return
        ending.copied(self._why_void(taken.steps))
        if at_fence is not None:
            self.fence.watch(at_fence, taken.steps)

    def _why_void(self, steps: int) -> str:
        """Returns why what was copied in the call may not be a state; empty if it is one. Asked when the last byte was read.

        What a device had spoiled may lie in host memory by now, whose copies no event of a device is behind.
        """
        if not counts(broke_off=bool(open_checkpointers.broken.reason), passed_by_then=False):
            return open_checkpointers.broken.reason
        return self.fence.stepped() if self.fence.is_void(steps) else ""

    def _ending(self, taken: _Taken, view: SlotView, unchanged: Look | None = None) -> SaveCompletion:
        lengths = {image.ref.bundle_id: image.plan.length for image in view.plan.images}
        kept = sum(lengths[bundle_id] for bundle_id in unchanged.kept) if unchanged is not None else 0
        self._events.count("slot_kept_bytes", kept)
        self._events.count("slot_copied_bytes", sum(lengths.values()) - kept)
        handle, client, check, spots = taken.handle, taken.client, taken.check, taken.spots
        return SaveCompletion(
            handle, client, view, self._trust, self.give_up, check=check, spots=spots, unchanged=unchanged
        )

    def _batches(self, late: Copies) -> list[Batch]:
        most = copy_plan.PACED_BATCH_BYTES if self.fence.pace else copy_plan.BATCH_BYTES
        return late.batches(most)

    def _spots_of(
        self, taken: _Taken, view: SlotView, now: Copies, late: Copies
    ) -> tuple[DeviceCheck | None, Pairs | None]:
        """Queues a look at parts on devices: how they are compared later, and copies for that, None if nobody can look."""
        targets = late.device_targets or now.device_targets
        if not targets or not self._streams.is_late(targets[0]):
            return None, ()  # what no driver registers is copied in the call
        check = self._checks.on_devices(
            taken.split, view.plan, now, late, lambda: self._trust.seen(taken.gathered.tensors)
        )
        if not check.spots.num_bytes:
            return None, ()
        place = view.behind_images(check.spots.num_bytes)
        pairs = self._streams.look(check.spots, place) if place is not None else None
        return (check, pairs) if pairs is not None else (None, None)

    def _queue(self, now: Copies, late: Copies, spots: Pairs | None) -> DeviceCopy | PacedCopy | None:
        """Copies from devices. The current streams wait for what may change at any time; for the rest only the fence.

        They wait for all if there are no `spots`, so that what is queued on them from here on cannot tear it.
        """
        first = self._streams.queue(now.device_targets, now.device_sources, now.blocks)
        first.hold_current_streams()
        first += self._streams.queue([to for to, _ in spots or ()], [of for _, of in spots or ()])
        pace = self.fence.pace
        if pace is not None and pace.has_waits and self._config.overlap and spots is not None:
            return self._paced(first, late, pace)
        both = first + self._streams.queue(late.device_targets, late.device_sources, late.blocks)
        if spots is None:
            both.hold_current_streams()
        if self._config.overlap:
            return both
        until = time.monotonic() + self._config.close_timeout_s
        if not both.wait(
            lambda: bool(open_checkpointers.broken.reason) or (time.monotonic() > until and not both.begun())
        ):
            raise LevelNotReached(open_checkpointers.broken.reason or BEHIND)
        return None

    def _paced(self, first: DeviceCopy, late: Copies, pace: Pace) -> PacedCopy:
        """The same in the waits of a pipeline."""
        self._streams.follow(late.device_sources)
        rate = pace.device_rate
        batches = copy_plan.batches(late.device_targets, late.device_sources, most=paced_copy.BATCH_BYTES)
        beside = pace.beside([batch.num_bytes / rate for batch in batches])
        patience_s, told = pace.patience_s, pace.queued
        return PacedCopy(self._streams, first, batches, rate=rate, beside=beside, patience_s=patience_s, told=told)

    def _structure_of(self, gathered: Gathered, client: KeeperClient) -> Structure:
        if gathered.storages != self._storages:
            self._storages = gathered.storages
            self._trust.forget()
            self._checks.forget()
            for view in self._views.values():  # each would keep what was replaced until its slot has its turn
                view.forget()
        self._shared.look_at((gathered.structure, gathered.storages), gathered.tensors)
        structure = self._structure
        renamed = self._link.shared != self._shared.names
        if structure is None or renamed or gathered.structure != self._structure_key:
            if structure is None or not structure.fits(gathered):
                structure = self._structure = self._plan(gathered, None)
            self._register(client, structure, timeout_s=self._least_s)
            self._structure_key = gathered.structure
            self._split_key = None
        return structure

    def _register(self, client: KeeperClient, structure: Structure, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        if (self._link.layout, self._link.shared) != (structure.layout, self._shared.names):
            client.register(structure.layout, self._shared.names, timeout_s=timeout_s)
            self._link.layout, self._link.shared = structure.layout, self._shared.names

    def _plan(self, gathered: Gathered, shards: Iterable[Shard] | None) -> Structure:
        """The structure of this state, or of the `shards` that it will have."""
        if shards is None:
            shards = [live.shard for live in gathered.tensors.values()]
        return Structure(shards, gathered.values, rank=self._rank, topology=self._topology, still=gathered.still)

    def _split_of(self, structure: Structure, gathered: Gathered) -> Split:
        """The cached split of every plan of the structure; made anew when structure or trust changed."""
        key = (self._structure_key, self._trust.generation)
        if self._split is None or key != self._split_key:
            late, watched = self._trust.late(gathered.tensors), self._trust.watched(gathered.tensors)
            on_host = {name for name in late if gathered.tensors[name].local.device.type == "cpu"}
            if on_host != late and sum(gathered.tensors[name].local.nbytes for name in on_host) <= ASIDE_BYTES:
                late -= on_host  # counts of steps: a host that waits for them at the fence waits for the device as well
            if self._config.verify_capture:
                # What cannot be digested where it lies is copied at once, and so cannot go wrong.
                late = {name for name in late if can_digest(gathered.tensors[name].local)}
            names = [name for name, _ in structure.pieces] if late or watched else []
            self._split = Split(
                tuple(i for i, name in enumerate(names) if name not in late) if late else _all(structure),
                tuple(i for i, name in enumerate(names) if name in late) if late else (),
            )
            self._watched = tuple(i for i, name in enumerate(names) if name in watched) if watched else ()
            self._pledged = self._split.late if self._config.verify_capture else ()
            self._split_key = key
        return self._split

    def _view(self, slot: Slot, plan: Plan) -> SlotView:
        view = self._views.get(id(slot))
        if view is None or view.slot is not slot or view.plan is not plan:
            view = self._views[id(slot)] = SlotView(slot, plan)
        return view

    def _grow(self, client: KeeperClient, plan: Plan, gathered: Gathered) -> None:
        """Larger slots in the middle of training: a keeper that takes long, or is frozen, holds a step up for a moment.

        Raises:
            LevelNotReached: they are not there yet; the copying thread goes on asking for them. Or they are refused.
        """
        self.fence.release()
        timeout_s = self._least_s
        if not self.fence.run(lambda: self._prepare(client, plan, gathered), timeout_s):
            self._growing = True
            raise LevelNotReached(f"the state outgrew its slots, and larger ones take longer than {timeout_s:g} s")

    def _prepare(self, client: KeeperClient, plan: Plan, gathered: Gathered) -> None:
        self._last_late = None
        if self._reservation is not None:
            self._reservation.close(DRAIN_S)
            self._reservation = None
        self._views.clear()
        if not self._streams.unpin(DRAIN_S):
            raise LevelNotReached("a device does not finish what it writes to the former slots")
        try:
            made = self._ask_for_slots(client, plan, plan.num_bytes + SPARE_BYTES, gathered, put_off=True)
            made.begin(lambda work, _: work())
            if made.fault is not None:
                raise made.fault
        except MemoryRefused as error:
            self.refused = str(error)
            raise
        self.refused = ""

    def _leave_out(self, handle: SaveHandle, reason: str) -> None:
        """No slot became free in time for what was due. Nobody is told yet: at the end the step may be saved after all."""
        self.left_out.add(handle.version, reason)
        self._events.count("saves_left_out")
        handle.give_up(reason)
        self._link.unannounced.add(handle.version, reason)

    def give_up(self, handle: SaveHandle, reason: str) -> None:
        """The version is not complete and never will be: said in the log, to the handle, and to the keeper."""
        handle.give_up(reason)  # first: one more signal may come
        logger.log(self._reasons.level(reason), "%s is given up: %s", handle.version, reason)
        if not self._streams.drain(self._config.fence_timeout_s):
            # The keeper gives the slot away as soon as it hears, and a device may still write to it.
            self._owed.append((handle, reason))
            return
        self._abandon(handle, reason)

    def _pay(self) -> None:
        """Tells the keeper of versions that were given up while a device still wrote to their slots."""
        while self._owed and self._streams.drain(0.0):
            self._abandon(*self._owed.pop(0))

    def _abandon(self, handle: SaveHandle, reason: str) -> None:
        client = self._link.client
        try:
            if client is None or self._link.silent:
                self._link.unannounced.add(handle.version)
            else:
                client.abandon(handle.version, reason)
        except KeeperLost as error:
            self._link.unannounced.add(handle.version)
            pass_on(error)


def _all(structure: Structure) -> tuple[int, ...]:
    return tuple(range(len(structure.pieces)))


def _device_in(gathered: Gathered) -> torch.device | None:
    """A device that holds some of the state; None if all is in host memory."""
    return next((live.local.device for live in gathered.tensors.values() if live.local.device.type != "cpu"), None)
