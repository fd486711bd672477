"""Saves without a level in memory: straight from the live tensors to storage, while training waits.

What a job does when no keeper could be started or too little memory was granted, and nobody asked for a refusal. Only
what is due for storage is saved. Every bundle is written by one rank, one after the other, through memory for the
largest of them; when all ranks have written, rank 0 commits. The ranks agree in collectives, so every rank makes the
same calls; a fault of any of them gives the version up on all and training goes on.

There are no slots here, hence no captured or replicated level and nothing to take over. Called by `checkpoint.checkpointer.checkpointer`
in place of `checkpoint.save.memory_saver`.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.base.config import Config
from holdfast.base.errors import (
    ConfigError,
    CorruptError,
    Fenced,
    HoldfastError,
    LevelNotReached,
    MemoryRefused,
    StorageFull,
)
from holdfast.base.events import Events
from holdfast.base.handler_errors import of_a_handler, pass_on
from holdfast.checkpoint.capture.copy_plan import PlacedImage, Plan, Structure
from holdfast.checkpoint.capture.optimizer_fence import Fence
from holdfast.checkpoint.capture.twin_comparison import Shared
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.device.pinned_writes import PinnedWrites
from holdfast.checkpoint.entries.types import Gathered
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.bootstrap import Job
from holdfast.checkpoint.job.collectives import Meeting
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.save.save_handle import INTERRUPTED, SaveHandle
from holdfast.checkpoint.save.slot_patience import Waits
from holdfast.checkpoint.state.training_state import State
from holdfast.core.layout import bundles as bundle_layout
from holdfast.core.layout.bundles import fingerprint_of
from holdfast.core.model import Topology, Version
from holdfast.keeper.observe import degraded_notice
from holdfast.keeper.rpc.paths import RuntimePaths, place_of
from holdfast.keeper.storage.retention import RetentionRunner, make_room
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory.memory_budget import read_limits
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.version_store import Storage

logger = logging.getLogger(__name__)

# How often the ranks gather words in one save.
NUM_WORDS = 7
NOT_DURABLE = "without the level in memory only durable saves are made"


@dataclass(frozen=True, slots=True)
class _Written:
    """The part of a manifest that one rank wrote, and the (id, fingerprint) of its bundles."""

    name: str
    length: int
    digest: str
    rows: tuple[tuple[str, str], ...]


# From here on parts of the manifest are numbered that ranks write by themselves. Keepers number from 0, and one that was slow
# may write the same version at the same time: none of the two replaces a part that the other has committed.
PARTS_FROM = 500_000


class DirectSaver:
    """Saves straight to storage on one rank.

    Args:
        reason: why there is no level in memory.

    Attributes:
        keeps_link: keepers are wanted again as soon as they can be had.
        memory: None, for there is none to save to.
        begun: the newest save that came here.
        may_stand: a version that may be committed, though nobody heard so.
    """

    memory = None

    def __init__(
        self, state: State, link: KeeperLink, job: Job, storage: Storage, *, reason: str, config: Config, events: Events
    ) -> None:
        self._state = state
        self._link = link
        self._job = job
        self._storage = storage
        self._reason = reason
        self.keeps_link = False
        self.begun: SaveHandle | None = None
        self.may_stand: Version | None = None
        self._events = events
        # As if all ranks lived on one node: twins then divide the writing, and one copy of everything is written.
        self._topology = Topology(("all",), (0,) * job.group.world_size)
        self._structure: Structure | None = None
        self._structure_key = -1
        self._shared = Shared(set(range(job.group.world_size)) - {job.group.rank})
        self._behind_s = config.close_timeout_s
        self._retirement = RetentionRunner(events)
        topology, rank = job.topology, job.group.rank
        first = topology.ranks_on(topology.node_of[rank])[0] == rank
        self._place: RuntimePaths | None = place_of(job.assembly.root, config) if first else None
        self._resumed: Version | None = None
        self.fence = Fence(timeout_s=config.fence_timeout_s, behind_s=config.close_timeout_s, events=events)
        self.fence.guard(state.optimizers, state.stepped)

    def begin_together(self) -> DirectSaver:
        """Begins on all ranks, or on none; returns itself. Collective."""
        try:
            collectives.together(self._job.group, self.begin)
        except BaseException:
            self.close()
            raise
        return self

    def begin(self) -> None:
        """Says once, loudly, how this job saves, and refuses what cannot be saved before anything is trained.

        Raises:
            UsageError: a value that cannot be saved; names it.
        """
        self._structure_of(self._state.gather())
        if self._job.group.rank == 0:
            logger.error(
                "this job has no level in memory: %s. It saves to storage alone, while training waits; what is lost at "
                "a fault is everything since the last durable version. require_memory refuses to start instead",
                self._reason,
            )
        self._events.emit("durable_only", reason=self._reason, rank=self._job.group.rank)
        self._post("")

    def await_slots(self, timeout_s: float) -> None:
        """Does nothing: there are no slots."""

    def expect_slots(self, timeout_s: float, *, at_saves: bool) -> None:
        """Does nothing: there are no slots."""

    def restart(self, version: Version | None) -> None:
        """The tensors were written by a restore of `version`."""
        self._resumed = version
        self.fence.release(expected=True)

    def settle(self, timeout_s: float = 0.0, *, release: bool = False) -> None:
        """Does nothing: no copy is under way between two calls."""

    def void(self) -> None:
        """Does nothing: what was read from a device is proven to be in time before it is committed."""

    def close(self) -> bool:
        """Removes the hooks, and the note for `holdfast status`; nothing is written to memory of keepers."""
        self.fence.close()
        if self._place is not None:
            degraded_notice.withdraw(self._place)
        return True

    def save(self, handle: SaveHandle, *, durable: bool, why: Waits = Waits.ASKED) -> None:  # noqa: ARG002 - there are no slots
        """Saves the state as it is now as `handle.version`, and returns when it is durable or given up. Collective."""
        if not durable:
            handle.give_up(f"{NOT_DURABLE} ({self._reason})")
            return
        started = time.perf_counter()
        meeting = self._meeting(handle.version)
        try:
            self.begun = handle
            self._save(handle.version, meeting)
            handle.committed()
        except BaseException as error:  # a fault of ours ends no training
            handle.give_up(INTERRUPTED)  # at once: one more signal may come
            meeting.leave(error)
            self._failed(handle, error)
            pass_on(error)
            if not isinstance(error, Exception):
                raise
        seconds = time.perf_counter() - started
        self._events.emit("saved", version=str(handle.version), seconds=seconds, given_up=handle.given_up)
        if not handle.given_up:
            # What keepers still hold of earlier runs is older than this; their memory is needed more elsewhere.
            if not self.keeps_link:
                self._link.go_without_keeper(finished=True)
            self._post(str(handle.version))

    def broken_off(self, handle: SaveHandle, error: BaseException) -> None:
        """Gives a save up that a signal's handler broke off before it had begun here."""
        if self.begun is not handle:
            handle.give_up(INTERRUPTED)
            self._meeting(handle.version).leave(error)

    def _meeting(self, version: Version) -> Meeting:
        return Meeting(self._job.group, version.step, 1, self._job.assembly.root, num_words=NUM_WORDS)

    def has_stored(self, handle: SaveHandle) -> bool:
        """Return whether a version was committed, though nobody heard so; the handle knows it from then on."""
        is_stored = False
        try:
            is_stored = self.may_stand == handle.version and handle.is_stored()
        except Exception as error:  # noqa: BLE001 - of a path that is asked when it has just failed
            pass_on(error)
            logger.info("whether %s is in storage is not known: %s", handle.version, error)
        if is_stored:
            handle.committed()
        return is_stored

    def _failed(self, handle: SaveHandle, error: BaseException) -> None:
        """A save was not made, unless storage has it all the same: a fault of ours or of the device must not end the training."""
        is_ours = isinstance(error, Exception) and of_a_handler(error) is None
        told = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        if is_ours:
            handle.give_up(told)
        if self.has_stored(handle):
            logger.info("%s is durable, though its save ended with %s", handle.version, told)
        elif is_ours and not isinstance(error, HoldfastError):
            logger.error("saving %s failed", handle.version, exc_info=error)
        else:
            logger.warning("%s is given up: %s", handle.version, handle.given_up)
        if isinstance(error, StorageFull) and self._job.group.rank == 0:
            self._make_room()

    def _save(self, version: Version, group: Meeting) -> None:
        gathered = collectives.together(group, self._state.gather)
        self._shared.look_at((gathered.structure, gathered.storages), gathered.tensors)
        layout = collectives.together(group, lambda: self._structure_of(gathered)).layout
        _require_alike(collectives.gather_json(group, bundle_layout.shared_layout(layout)))
        _require_equal(collectives.gather_json(group, self._shared.digests(version.step)))
        mine = collectives.together(group, lambda: self._write_still(version))
        self.may_stand = version
        rows = collectives.gather_json(group, [mine.name, mine.length, mine.digest, mine.rows] if mine else None)
        written = [_Written(row[0], row[1], row[2], tuple(map(tuple, row[3]))) for row in rows if row]
        collectives.together(group, lambda: self._commit(version, written) if group.rank == 0 else None)
        if group.rank == 0:
            self._retire(version)

    def _write_still(self, version: Version) -> _Written | None:
        """Write as `_write` does, while no other thread steps.

        Raises:
            LevelNotReached: one does.
        """
        steps, within = self.fence.num_steps, self.fence.under_way() - {threading.get_ident()}
        written = self._write(version)
        if self.fence.is_void(steps, others_within=bool(within)):
            raise LevelNotReached(self.fence.stepped())
        return written

    def _write(self, version: Version) -> _Written | None:
        """This rank's bundles and the part that lists them; None if it has none.

        Raises:
            LevelNotReached: storage has the version, whose commit was not heard to be made. Nothing is written over it.
        """
        self._require_uncommitted(version)
        gathered = self._state.gather()
        structure = self._structure_of(gathered)
        values = structure.encode(gathered)
        plan = structure.plan(values)
        if not plan.images:
            return None
        tensors = [live.local for live in gathered.tensors.values()]
        if not (accelerator.caught_up(tensors, self._behind_s) and PinnedWrites().end(gathered, self._behind_s)):
            raise LevelNotReached("its device does not come to the end of what is queued")
        self._storage.require_job(self._job.assembly.job_id)
        stamp = make_stamp(version.incarnation)
        files = list(self._write_images(version, plan, values, gathered))
        self._storage.require_job(self._job.assembly.job_id)  # once more: the bundles may have taken minutes
        self._require_uncommitted(version)  # once more: a keeper that was slow may have done it
        name, length, digest = self._storage.write_part(version, PARTS_FROM + self._job.group.rank, files, stamp=stamp)
        return _Written(name, length, digest, tuple((file.ref.bundle_id, file.ref.fingerprint) for file in files))

    def _require_uncommitted(self, version: Version) -> None:
        """Raises LevelNotReached where storage has the version, whose commit was not heard to be made."""
        if self.may_stand == version and self._storage.is_committed(version, by_name=True):
            raise LevelNotReached("it was committed before")

    def _write_images(
        self, version: Version, plan: Plan, values: dict[str, bytes], gathered: Gathered
    ) -> Iterator[BundleFile]:
        """Bundle by bundle through one buffer; yields the files that stand."""
        most = max(image.plan.length for image in plan.images)
        available = read_limits().available
        if most > available:
            raise MemoryRefused(
                f"a bundle of {most} bytes cannot be written: {available} are available on this node",
                remedy="free memory on this node or raise the cgroup's limit",
            )
        memory, stamp = memoryview(mmap.mmap(-1, most)), make_stamp(version.incarnation)
        for image in plan.images:
            view = memory[: image.plan.length]
            _fill(view, image, plan, values.get(image.ref.bundle_id, b""), gathered)
            if open_checkpointers.broken.reason:  # read from a device behind a collective that was aborted, perhaps
                raise LevelNotReached(open_checkpointers.broken.reason)
            seal = image_format.seal(image.ref.bundle_id, view)
            yield self._storage.bundles.write(version, image.ref, seal, view, stamp=stamp)

    def _commit(self, version: Version, written: list[_Written]) -> None:
        assembly = self._job.assembly
        world_size = self._job.group.world_size
        manifest = Manifest(
            version=version,
            job_id=assembly.job_id,
            world_size=world_size,
            layout=fingerprint_of(world_size, {row for part in written for row in part.rows}),
            resumed_from=self._resumed,
            parts={part.name: (part.length, part.digest) for part in written},
        )
        self._storage.commit(manifest, stamp=make_stamp(version.incarnation), lineage=self._job.lineage.resumed)
        logger.info("%s is durable", version)

    def _retire(self, version: Version) -> None:
        try:
            self._retirement.after(self._storage, version, self._job.assembly, self._resumed)
        except Fenced as error:
            logger.info("retention is left to the incarnation that runs now: %s", error.what)
        except HoldfastError as error:
            pass_on(error)
            logger.warning("an old version was not removed: %s", error)

    def _make_room(self) -> None:
        try:
            make_room(self._storage, self._job.assembly)
        except HoldfastError as error:
            logger.info("what earlier incarnations left half done stays: %s", error)

    def _structure_of(self, gathered: Gathered) -> Structure:
        structure = self._structure
        if structure is None or gathered.structure != self._structure_key:
            if structure is None or not structure.fits(gathered):
                shards = [live.shard for live in gathered.tensors.values()]
                rank = self._job.group.rank
                structure = Structure(shards, gathered.values, rank=rank, topology=self._topology, still=gathered.still)
                structure.encode(gathered)
            self._structure, self._structure_key = structure, gathered.structure
        return structure

    def _post(self, durable: str) -> None:
        if self._place is None:
            return
        try:
            degraded_notice.post(self._place, root=self._job.assembly.root, reason=self._reason, durable=durable)
        except (ConfigError, OSError) as error:
            pass_on(error)
            logger.warning("`holdfast status` cannot be told: %s", error)


def _require_alike(layouts: Sequence[Mapping[str, tuple[int, str]]]) -> None:
    """Refuses a version of ranks that would cut what they share in different ways: parts of it would be in no file.

    Raises:
        LevelNotReached: names ranks. On every rank alike.
    """
    told: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for rank, found in enumerate(layouts):
        for group, (size, digest) in found.items():
            told[group].append((rank, size, digest))
    for rows in told.values():
        first, size, digest = rows[0]
        other = next((rank for rank, *row in rows if row != [size, digest]), None)
        if other is not None:
            raise LevelNotReached(f"ranks {first} and {other} share tensors, and do not hold the same of them")
        if len(rows) != size:
            raise LevelNotReached(f"of {size} ranks that share tensors with rank {first} {len(rows)} hold them")


def _require_equal(digests: Sequence[Mapping[str, str]]) -> None:
    """Refuses a version of rows of ranks that differ, for ranks that share a tensor divide the writing of it.

    Raises:
        CorruptError: ranks that should hold the same tensors do not; names two of them. On every rank alike.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, found in enumerate(digests):
        for group, digest in found.items():
            other, known = first.setdefault(group, (rank, digest))
            if digest != known:
                raise CorruptError(f"ranks {other} and {rank} hold different values of tensors that they should share")


def _fill(view: memoryview, image: PlacedImage, plan: Plan, values: bytes, gathered: Gathered) -> None:
    """The image, from the live tensors: header, tensors and values are all of it."""
    header = image.plan.header
    view[: len(header)] = header
    base = torch.frombuffer(view, dtype=torch.uint8)
    parts = [part for part in plan.parts if image.start <= part.start < image.start + image.plan.length]
    with torch.no_grad():
        for part in parts:
            part.view_in(base, image.start).copy_(part.of(gathered.tensors[part.name]))
    if image.plan.values_span is not None:
        first, num_bytes = image.plan.values_span
        view[first : first + num_bytes] = values
