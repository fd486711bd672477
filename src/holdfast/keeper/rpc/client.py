"""The trainer's door to a keeper: the only way a rank talks to it. What a viewer may ask too is `keeper.rpc.viewer`.

When the keeper is gone the slots stay mapped, and are handed to the next keeper with `adopt`.

Order of calls of a trainer: connect, assemble, register, prepare, [adopt], [inventory, obtain], resume, then per save
begin, copied or abandon; goodbye and close at the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from holdfast.base.errors import KeeperError, KeeperLost, LevelNotReached
from holdfast.core.model import BundleRef, RankLayout, Seal, Version
from holdfast.core.pipeline.idle_stats import Idle
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.core.scheduling.step_agreement import Proposal
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.messages import Assembly, Begun, ImageSpan, Inventory
from holdfast.keeper.rpc.viewer import CALL_TIMEOUT_S, KeeperViewer
from holdfast.tiers.memory import slots as slot_memory
from holdfast.tiers.memory.slots import Slot
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.unread_chunks import UnreadChunks
from holdfast.tiers.wire import frames
from holdfast.tiers.wire.latch import Changes

logger = logging.getLogger(__name__)

__all__ = ["Assembly", "Begun", "ImageSpan", "Inventory", "KeeperClient", "Located", "Slot"]

# What a keeper may need beyond the wait that was asked for.
GRACE_S = 5.0
# A save waits for it; a keeper that is frozen answers no sooner than one that is dead.
BEGIN_GRACE_S = 0.5
# A keeper that is busy has at least so long to answer who does not wait for a slot.
LEAST_ANSWER_S = 1.0
# A save that waits for a slot for so long says so.
SAY_S = 3.0


@dataclass(frozen=True, slots=True)
class Located:
    """A bundle's image, mapped and readable here.

    Attributes:
        view: the image, read-only. Valid until `KeeperClient.release`, the next `begin`, or `close`.
        source: where it was, cheapest first: own slot, another slot of this node, another node, storage.
        seconds: what the keeper spent to make it present; 0 if it was.
        chunks: `view` is only this run (first, end) of its chunks; None: the whole image.
        unread: reads what is not in `view` yet, of which the header and the values are; None: all of it is.
    """

    ref: BundleRef
    seal: Seal
    view: memoryview
    source: Source
    seconds: float
    chunks: tuple[int, int] | None = None
    unread: UnreadChunks | None = None


class NoSlotYet(LevelNotReached):
    """No slot is there in time for a version, and the rank may come back to it: nobody was told that it is given up."""


class _BrokenOffError(LevelNotReached):
    """A slot is mapped by nobody: the thread that was at it was interrupted, or could not."""


class KeeperClient(KeeperViewer):
    """One connection of a rank to the keeper of its node. Use `connect`; safe to call from several threads.

    Attributes:
        begun: by slot, the newest version that got it.
    """

    def __init__(self, rank: int | None) -> None:
        super().__init__(rank)
        self.begun: dict[int, Version] = {}
        self._slots: dict[int, Slot] = {}
        self._coming: dict[int, int] = {}  # slots that a thread maps, with its number
        self._mapping = threading.RLock()  # guards both; several threads map them
        self._mapped = Changes()
        self._is_detached = False
        self._left_over: tuple[Slot, ...] = ()  # to be unmapped
        self._preparing = threading.Lock()

    # --- coming together

    def assemble(self, assembly: Assembly, encryption: KeySource | None = None) -> None:
        """Tells the keeper who belongs to the job, and with which key it writes. Idempotent; every local rank calls it.

        Raises:
            Fenced: a higher incarnation was assembled before. KeeperError: ranks of one incarnation disagree.
        """
        request = messages.Assemble(assembly=assembly)
        if encryption is not None:
            setting, required, expected = encryption.setting, encryption.required, encryption.expected
            request = messages.Assemble(assembly=assembly, key=setting, key_required=required, key_id=expected)
        self._ask(request, messages.Ok)
        self.announced.assembled(assembly.incarnation)

    def resume(
        self, incarnation: int, version: Version | None, table: Sequence[BundleRef] = (), *, read_bytes: int = 0
    ) -> None:
        """All ranks loaded `version` (None: a fresh start) and that is recorded; from here on `begin` is allowed.

        Args:
            incarnation: which one.
            version: what was loaded.
            table: every bundle of the job at `version`, where it is known.
            read_bytes: of images, what this rank read from storage itself.
        """
        request = messages.Resume(incarnation=incarnation, version=version, table=tuple(table), read_bytes=read_bytes)
        self._ask(request, messages.Ok)

    def register(self, layout: RankLayout, shared: Sequence[str] = (), *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """The rank's bundles, and the names of what it shares with ranks of its node; at every change of structure."""
        self._ask(messages.Register(layout=layout, shared=tuple(shared)), messages.Ok, timeout_s)

    def prepare(
        self,
        num_bytes: int,
        num_slots: int,
        *,
        num_ready: int | None = None,
        put_off: bool = False,
        spare: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[Slot, ...]:
        """Slots with room for `num_bytes` each, allocated by the keeper, populated here. Growth: call it again.

        A trainer that was restarted gets the slots of its predecessor, with what they hold.

        Args:
            num_bytes: room needed for the images of one version.
            num_slots: how many there will be; the budget is asked for all of them at once.
            num_ready: returns as soon as so many are there; None: all of them. 0: at once, none.
            put_off: with 0, makes none before the next call, or before something is restored into one.
            spare: what is missing is refused where it would leave less than twice as much of the budget.
            timeout_s: seconds; None: as many as so much memory may need.

        Raises:
            MemoryRefused: names what is needed, what is allowed, and what to change. KeeperLost: the keeper is gone.
        """
        request = messages.Prepare(
            num_bytes=num_bytes, num_slots=num_slots, num_ready=num_ready, put_off=put_off, spare=spare
        )
        limit_s = slot_memory.patience_s(num_bytes * num_slots) if timeout_s is None else timeout_s
        if num_ready == 0:
            frames.close_fds(self._call(request, messages.Slots, limit_s)[1])
            return ()
        with self._preparing:
            slots: list[Slot] | None = None
            while slots is None:
                request = msgspec.structs.replace(request, mapped=self._have())
                reply, fds = self._call(request, messages.Slots, limit_s)
                self._map(reply.sent, fds)
                with suppress(_BrokenOffError):  # it is sent again
                    slots = [self._slot(number, limit_s) for number in reply.slot_ids]
            with self._mapping:
                # Outgrown, and no longer needed. What came since we asked is of a later answer, and stays.
                for number in set(self._slots).intersection(request.mapped).difference(reply.slot_ids):
                    self._slots.pop(number).close()
        return tuple(slot for slot in slots if slot.num_bytes >= num_bytes)

    def adopt(self, slots: Sequence[Slot]) -> None:
        """Hands the slots of a dead keeper to this one, which verifies each before it counts it as sealed.

        The slots stay valid and may be passed to `begin`'s result as before. Call after `assemble` and `register`.
        """
        fds = [slot.fd for slot in slots]
        limit_s = slot_memory.patience_s(sum(slot.total_bytes for slot in slots))
        reply, got = self._call(messages.Adopt(num_slots=len(fds)), messages.Slots, limit_s, fds)
        frames.close_fds(got)
        if len(reply.slot_ids) != len(slots):
            raise KeeperError("the keeper adopted another number of slots than it was given")
        with self._mapping:
            for slot, number in zip(slots, reply.slot_ids, strict=True):
                slot.slot_id = number
                self._slots[number] = slot

    # --- saving

    def begin(
        self,
        version: Version,
        num_bytes: int,
        *,
        durable: bool,
        timeout_s: float,
        ask_again: Callable[[], bool] | None = None,
        comes_back: bool = False,
        told: Callable[[Begun], object] = lambda _: None,
    ) -> Slot:
        """A slot to write `version` into; its header is already invalid. The overwrite guard chooses.

        Args:
            version: of the incarnation that was assembled, later than the last one begun.
            num_bytes: room needed for the images.
            durable: whether this version is due for storage.
            timeout_s: how long to wait for a slot to become free.
            ask_again: asked at the end of that time: whether it is too early to abandon the version. Then as much time begins.
            comes_back: if none becomes free the rank may begin the same version once more, soon.
            told: called with the keeper's words about the slot.

        Raises:
            LevelNotReached: no slot became free, with the reason; the version is then abandoned for this rank.
            NoSlotYet: the same for who comes back; it is not abandoned yet.
            KeeperLost: the keeper is gone.
        """
        waited_s, left_s, is_said = 0.0, timeout_s, False
        while True:
            asked_s = left_s if is_said else min(left_s, SAY_S)
            left_s -= asked_s
            request = messages.Begin(
                version=version, num_bytes=num_bytes, durable=durable, timeout_s=asked_s,
                final=ask_again is None and left_s <= 0, comes_back=comes_back, waited_s=waited_s,
                mapped=self._have(),
            )  # fmt: skip
            reply, fds = self._call(request, messages.Begun, max(asked_s, LEAST_ANSWER_S) + BEGIN_GRACE_S)
            if reply.slot_id != messages.NO_SLOT:
                break
            waited_s += asked_s
            if request.final:
                raise NoSlotYet(reply.reason, remedy=messages.FREE_SLOTS)
            if waited_s >= SAY_S and not is_said:
                is_said = True
                what = "the save of %s has waited for a free slot for %.0f s: %s; %s"
                logger.warning(what, version, waited_s, reply.reason, messages.FREE_SLOTS)
            if left_s <= 0:
                ask_again, left_s = ask_again if ask_again is not None and ask_again() else None, timeout_s
        self.begun[reply.slot_id] = version
        self._map((reply.slot_id,) if fds else (), fds)
        told(reply)
        return self._slot(reply.slot_id, timeout_s + BEGIN_GRACE_S)

    def copied(
        self, version: Version, images: Sequence[ImageSpan], spots: bytes = b"", *, kept: Iterable[str] = ()
    ) -> None:
        """All images lie in the slot. Returns at once; the keeper hashes, seals, replicates and persists.

        Args:
            version: which one.
            images: where they lie.
            spots: 8 bytes for each name that was registered as shared; the keeper compares those of its ranks.
            kept: bundles of which not a byte was written: their images are what stood there when the slot was begun.
        """
        self._caller.tell(messages.Copied(version=version, images=tuple(images), spots=spots, kept=tuple(sorted(kept))))

    def persist(self, version: Version) -> None:
        """`version`, begun without `durable`, is due for storage after all. One rank that says so is enough."""
        self._caller.tell(messages.Persist(version=version))

    def abandon(self, version: Version, reason: str) -> None:
        """This rank gives the version up. Final, and announced to all."""
        self._caller.tell(messages.Abandon(version=version, reason=reason))

    def propose(self, proposal: Proposal) -> None:
        """Asks for a save or a stop that all ranks make at one step; the answer comes to `Announced.on_appointment`."""
        self._caller.tell(messages.Propose(proposal=proposal))

    def note_cadence(self, reason: str) -> None:
        """Tell the keeper how often this rank saves, in words, for whoever asks it."""
        self._caller.tell(messages.Cadence(reason=reason))

    def note_idle(self, idle: Idle) -> None:
        """Tell the keeper what this rank measured of its waits, for whoever asks it."""
        self._caller.tell(messages.Cadence(idle=idle))

    def show_waits(self, fds: tuple[int, ...]) -> None:
        """Have what this rank saves hashed and sent in the waits that a page shows (its descriptors, of keeper.slots.idle_windows)."""
        _, got = self._call(messages.ShowWaits(), messages.Ok, CALL_TIMEOUT_S, fds)
        frames.close_fds(got)

    # --- coming back

    def obtain(self, version: Version, fetches: Sequence[Fetch], *, timeout_s: float) -> tuple[Located, ...]:
        """Makes bundles present on this node and maps them, in the order of `fetches` (of core.recovery).

        A fetch of chunks is answered by runs of chunks, or by the whole image if that is here.

        Copies from peers and storage are checked against the seal when they arrive; the caller verifies what it
        loads all the same.

        Raises:
            CorruptError: a copy is not what its seal says. VersionNotFound: the copy is gone.
            KeeperLost, StorageError: the source does not answer. MemoryRefused: no room.
        """
        request = messages.Obtain(version=version, fetches=tuple(fetches), timeout_s=timeout_s, mapped=self._have())
        reply, fds = self._call(request, messages.Obtained, timeout_s + GRACE_S)
        try:
            refs = {fetch.ref.bundle_id: fetch.ref for fetch in fetches}
            told = dict.fromkeys(found.bundle_id for found in reply.found)
            if list(told) != list(refs):
                raise KeeperError("the keeper answered with other bundles than were asked for")
            return tuple(self._locate(refs[found.bundle_id], found, fds) for found in reply.found)
        finally:
            try:
                frames.close_fds(fds)
            finally:
                frames.close_fds(fds)  # a signal's handler may have raised before the first one began

    def release(self) -> None:
        """Let memory of what was obtained be used again: it is no longer read. `begin` implies it."""
        self._caller.tell(messages.Release())

    def quarantine(self, version: Version, bundle_id: str, *, node: int | None, reason: str) -> None:
        """A copy failed its digest: the keeper of `node` (None: storage) does not offer it again."""
        where = -1 if node is None else node
        self._ask(messages.Condemn(version=version, bundle_id=bundle_id, node=where, reason=reason), messages.Ok)

    # --- leaving

    def goodbye(self, *, finished: bool, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """This rank leaves; `finished`: it will not come back. When all local ranks finished the keeper ends."""
        self._left = finished  # from here on the keeper may end, and that is no loss
        try:
            self._ask(messages.Goodbye(finished=finished), messages.Ok, timeout_s)
        except KeeperLost:
            if not finished or self.alive:  # else it ended before its answer was sent
                raise

    def close(self) -> None:
        """Ends the connection and unmaps the slots. The keeper keeps what they hold."""
        self._caller.close()
        with self._mapping:
            self._is_detached = True
            # No call between: what a signal's handler raises leaves the rest to the next call.
            self._left_over, self._slots = (*self._left_over, *self._slots.values()), {}
        self._mapped.tell()
        for slot in self._left_over:
            slot.close()

    def detach(self) -> tuple[Slot, ...]:
        """Ends the connection, but keeps the slots mapped, to be handed to the next keeper by `adopt`."""
        self._caller.close()
        with self._mapping:
            self._is_detached = True
            slots, self._slots = tuple(self._slots.values()), {}
        self._mapped.tell()
        return slots

    # --- inside

    def _map(self, slot_ids: Sequence[int], fds: list[int]) -> None:
        """Maps slots that are new here, outside of the lock: it takes 0.1 s per GiB. Takes the descriptors over."""
        if len(slot_ids) != len(fds):
            frames.close_fds(fds)
            raise KeeperError(f"the keeper announced {len(slot_ids)} new slots and sent {len(fds)} descriptors")
        try:
            for number in slot_ids:
                self._map_one(number, fds.pop(0))
        finally:
            frames.close_fds(fds)

    def _map_one(self, number: int, fd: int) -> None:
        me = threading.get_ident()
        try:
            with self._mapping:
                if number in self._slots or self._coming.get(number, me) != me:  # two answers had it
                    frames.close_fds([fd])
                    return
                self._coming[number] = me
            slot = Slot.adopt(fd, slot_id=number)
            with self._mapping:
                if self._is_detached:  # nobody looks after it any more
                    slot.close()
                    raise KeeperLost("the connection is closed")
                if self._slots.setdefault(number, slot) is not slot:  # a signal's handler has mapped it in between
                    slot.close()
        finally:
            with self._mapping:
                if self._coming.get(number) == me:
                    del self._coming[number]
            self._mapped.tell()

    def _have(self) -> tuple[int, ...]:
        """The slots that are mapped here, or that another thread of ours maps: the keeper sends all others."""
        me = threading.get_ident()
        with self._mapping:
            return (*self._slots, *(number for number, thread in list(self._coming.items()) if thread != me))

    def _slot(self, number: int, timeout_s: float) -> Slot:
        """A slot that is mapped here, or is being mapped by another thread of ours.

        Raises:
            LevelNotReached: it is not mapped in time, or nobody is at it. KeeperLost: the connection was closed meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._mapped.next() as change:
                is_coming = number in self._coming
                slot = self._slots.get(number)  # behind that: it stands here before it is taken out there
                if slot is not None:
                    return slot
                if self._is_detached:
                    raise KeeperLost("the connection is closed")
                if not is_coming:
                    raise _BrokenOffError(f"who mapped slot {number} was interrupted")
                if not change.wait(deadline - time.monotonic()):
                    raise LevelNotReached(f"slot {number} was not mapped within {timeout_s:g} s")

    def _locate(self, ref: BundleRef, found: messages.Found, fds: list[int]) -> Located:
        slot = self._slots.get(found.slot_id)
        if slot is not None:  # mapped already; a second mapping would cost its page faults
            view = slot.window(found.start, found.length).toreadonly()
        elif 0 <= found.fd < len(fds):
            view = slot_memory.map_readonly(fds[found.fd], found.start, found.length)
        elif found.fd < 0:  # another thread of ours maps it
            limit_s = slot_memory.patience_s(found.length)
            view = self._slot(found.slot_id, limit_s).window(found.start, found.length).toreadonly()
        else:
            raise KeeperError("the keeper named a descriptor that it did not send")
        return Located(ref, found.seal, view, found.source, found.seconds, found.chunks)
