"""To storage, in the background, straight from the slots: bundles and parts by every node, the manifest by one.

A slot is pinned while it is written. Any error leaves the version without the durable level, says so, and touches
nothing else: memory levels go on. The newest version that failed is written again from memory, with growing pauses, as
long as it is held and nothing newer is due; the alarm stands until then. The order of writes is tiers.storage's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.base.errors import CorruptError, Fenced, HoldfastError, KeeperError
from holdfast.base.events import Events
from holdfast.core.commit import CommitOrder, PartReport, to_retire
from holdfast.core.lineage import Lineage
from holdfast.core.model import BundleRef, Level, Version
from holdfast.node.activity import WRITING, Activities
from holdfast.node.arena import Held
from holdfast.node.messages import Assembly
from holdfast.node.state import NodeState
from holdfast.node.vault import Vault
from holdfast.node.worker import Worker
from holdfast.tiers.manifest import Manifest
from holdfast.tiers.memory import ImagePlace
from holdfast.tiers.registry import make_stamp
from holdfast.tiers.storage import Storage

logger = logging.getLogger(__name__)

PIN = "persisting"
# Between two attempts at one version: doubled each time.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class _Again:
    """The version that failed last, and when it is tried again. Under the state's lock."""

    def __init__(self) -> None:
        self._version: Version | None = None
        self._at_s = 0.0
        self._pause_s = FIRST_PAUSE_S

    def failed(self, version: Version, error: HoldfastError) -> None:
        """An attempt failed; only what may get better by itself is tried again."""
        if not error.retryable:
            return
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S) if version == self._version else FIRST_PAUSE_S
        self._version, self._at_s = version, time.monotonic() + self._pause_s

    def due(self) -> Version | None:
        """The version whose time has come."""
        return self._version if time.monotonic() >= self._at_s else None

    def forget(self, *, unless: Version | None = None) -> None:
        """It succeeded, or something else takes its place."""
        if self._version != unless:
            self._version = None

    def postpone(self) -> None:
        """An attempt begins; whether it failed will be told."""
        self._at_s = float("inf")


class Persister:
    """Writes the bundles that this node represents."""

    def __init__(self, state: NodeState, vault: Vault, events: Events, activities: Activities) -> None:
        self._state = state
        self._vault = vault
        self._events = events
        self._activities = activities
        self._worker: Worker[Version] = Worker(
            "holdfast persister", self._persist, lambda text: state.alarm("persister", text), on_idle=state.changed
        )
        self._again = _Again()

    def put(self, version: Version) -> None:
        """A version is due for storage; its slots are pinned already. Under the state's lock."""
        self._again.forget(unless=version)
        if not self._worker.put(version):
            self._state.unpin_version(version, PIN)

    @property
    def idle(self) -> bool:
        return self._worker.idle

    def leave(self) -> None:
        """Drops what waits: the job it is for is over. Under the state's lock."""
        self._worker.clear()
        self._again.forget()

    def stop(self) -> None:
        """Ends the worker; a bundle in the middle of being written stays a temporary file."""
        self._worker.stop()

    def _persist(self, version: Version) -> None:
        state = self._state
        try:
            with self._events.span("node.persisted", version=str(version)) as facts:
                facts["size_bytes"] = self._write_version(version)
            state.calm("storage")
            with state.lock:
                self._again.forget()
        except HoldfastError as error:
            state.alarm("storage", f"{version} is not durable: {error}")
            with state.lock:
                if self._worker.is_last:
                    self._again.failed(version, error)
        finally:
            state.unpin_version(version, PIN)

    def tick(self) -> None:
        """Writes again what failed, if it is time and its bytes are still held."""
        state = self._state
        with state.lock:
            version, ledger = self._again.due(), state.ledger
            if version is None or ledger is None or self._worker.stopping:
                return
            plan = ledger.to_persist(version) if version.incarnation == ledger.incarnation else ()
            held = all(state.arena.find(version, ref.bundle_id, rank) for rank, ref in plan)
            if plan and held and Level.DURABLE not in ledger.standing(version)[0]:
                self._again.postpone()
                state.persist(version)
            else:
                self._again.forget()

    def _write_version(self, version: Version) -> int:
        state = self._state
        with state.lock:
            plan = [(ref, self._locate(version, rank, ref)) for rank, ref in state.need_ledger().to_persist(version)]
            assembly = state.assembly
        total = sum(place.seal.length for _, (_, place) in plan)
        with self._activities.start(WRITING, version, total) as progress:
            self._write_plan(version, plan, assembly, progress)
        return total

    def _write_plan(
        self,
        version: Version,
        plan: Sequence[tuple[BundleRef, tuple[Held, ImagePlace]]],
        assembly: Assembly | None,
        progress: Callable[[int], None],
    ) -> None:
        state = self._state
        storage = self._vault.open()
        if assembly is not None:
            storage.require_job(assembly.job_id)  # else what follows would stand in somebody else's directory
        stamp = make_stamp(version.incarnation)
        files = []
        for ref, (held, place) in plan:
            self._require_current(version, assembly)
            view = held.slot.view[place.offset : place.offset + place.seal.length]
            files.append(storage.write_bundle(version, ref, place.seal, view, stamp=stamp, progress=progress))
        self._require_current(version, assembly)
        name, length, digest = storage.write_part(version, state.node, files, stamp=stamp)
        ids = tuple(sorted(ref.bundle_id for ref, _ in plan))
        state.wrote(PartReport(version, state.node, name, length, digest, ids))

    def _locate(self, version: Version, rank: int, ref: BundleRef) -> tuple[Held, ImagePlace]:
        found = self._state.arena.find(version, ref.bundle_id, rank)
        if found is None:
            raise CorruptError(f"the slot that held bundle {ref.bundle_id} of {version} is gone")
        return found

    def _require_current(self, version: Version, assembly: Assembly | None) -> None:
        """A writer of a dead incarnation stops early; what it wrote is harmless either way. One of a job that is over
        must stop: another job's directory may stand at the same path.
        """
        now = self._state.assembly
        if now is None or assembly is None or now.job_id != assembly.job_id:
            raise Fenced("the job is over")
        if version.incarnation < now.incarnation:
            raise Fenced(f"incarnation {version.incarnation} is over")
        if self._worker.stopping:
            raise KeeperError("the keeper stops")


@dataclass(frozen=True, slots=True)
class CommitJob:
    """A manifest to write, and whom to tell."""

    order: CommitOrder
    assembly: Assembly
    resumed_from: Version | None
    done: Callable[[Version, bool], None]


class Committer:
    """Writes root manifests and applies retention; idle except on the coordinator's node."""

    def __init__(self, state: NodeState, vault: Vault, events: Events) -> None:
        self._state = state
        self._vault = vault
        self._events = events
        self._worker: Worker[CommitJob] = Worker(
            "holdfast committer", self._commit, lambda text: state.alarm("committer", text), on_idle=state.changed
        )
        self._again = _Again()

    def put(self, job: CommitJob) -> bool:
        """Queues a commit. Under the state's lock."""
        self._again.forget(unless=job.order.version)
        return self._worker.put(job)

    @property
    def idle(self) -> bool:
        return self._worker.idle

    def leave(self) -> None:
        """Drops what waits: the job it is for is over. Under the state's lock."""
        self._worker.clear()
        self._again.forget()

    def stop(self) -> None:
        """Ends the worker."""
        self._worker.stop()

    def tick(self) -> None:
        """Has this node's part reported again, if a commit failed and it is time: that is what orders it anew."""
        with self._state.lock:
            version = self._again.due()
            if version is not None and not self._worker.stopping:
                self._again.postpone()
                self._state.repeat_part(version)

    def _commit(self, job: CommitJob) -> None:
        version = job.order.version
        try:
            storage = self._vault.open()
            storage.require_job(job.assembly.job_id)
            manifest = Manifest(
                version=version,
                job_id=job.assembly.job_id,
                world_size=job.assembly.topology.world_size,
                layout=job.order.layout,
                resumed_from=job.resumed_from,
                parts={part.part: (part.length, part.digest) for part in job.order.parts},
            )
            storage.commit(manifest, stamp=make_stamp(version.incarnation))
        except HoldfastError as error:
            self._state.alarm("storage", f"{version} is not durable: {error}")
            job.done(version, False)
            with self._state.lock:
                self._again.failed(version, error)
            return
        logger.info("%s is durable", version)
        self._state.calm("storage")
        job.done(version, True)
        self._retire(storage, job)

    def _retire(self, storage: Storage, job: CommitJob) -> None:
        """Old versions go only after a newer commit, and with them what dead incarnations left half done. A failure
        here costs space, nothing else.
        """
        assembly = job.assembly
        try:
            old = to_retire(
                storage.versions(),
                keep_last=assembly.keep_last,
                keep_every=assembly.keep_every,
                protected=storage.pins(),
                lineage=Lineage(dict(assembly.lineage)).with_(assembly.incarnation, job.resumed_from),
            )
            for version in old:
                storage.retire(version)
                self._events.emit("node.retired", version=str(version))
            for version in storage.unfinished():
                if version.incarnation < assembly.incarnation:
                    storage.discard(version)
            storage.sweep(assembly.incarnation)
            self._state.calm("retention")
        except HoldfastError as error:
            self._state.alarm("retention", f"an old version was not removed: {error}")
