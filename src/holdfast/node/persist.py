"""To storage, in the background, straight from the slots: bundles and parts by every node, the manifest by one.

A slot is pinned while it is written. Any error leaves the version without the durable level, says so, and touches
nothing else: memory levels go on, and a later version tries again. The order of writes is tiers.storage's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.base.errors import CorruptError, Fenced, HoldfastError, KeeperError
from holdfast.base.events import Events
from holdfast.core.commit import CommitOrder, PartReport, to_retire
from holdfast.core.lineage import Lineage
from holdfast.core.model import BundleRef, Version
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


class Persister:
    """Writes the bundles that this node represents."""

    def __init__(self, state: NodeState, vault: Vault, events: Events) -> None:
        self._state = state
        self._vault = vault
        self._events = events
        self._worker: Worker[Version] = Worker(
            "holdfast persister", self._persist, lambda text: state.alarm("persister", text), on_idle=state.changed
        )

    def put(self, version: Version) -> None:
        """A version is due for storage; its slots are pinned already. Under the state's lock."""
        if not self._worker.put(version):
            self._state.unpin_version(version, PIN)

    @property
    def idle(self) -> bool:
        return self._worker.idle

    def stop(self) -> None:
        """Ends the worker; a bundle in the middle of being written stays a temporary file."""
        self._worker.stop()

    def _persist(self, version: Version) -> None:
        state = self._state
        try:
            with self._events.span("node.persisted", version=str(version)) as facts:
                facts["size_bytes"] = self._write(version)
            state.calm("storage")
        except HoldfastError as error:
            state.alarm("storage", f"{version} is not durable: {error}")
        finally:
            state.unpin_version(version, PIN)

    def _write(self, version: Version) -> int:
        state = self._state
        with state.lock:
            plan = [(ref, self._locate(version, rank, ref)) for rank, ref in state.need_ledger().to_persist(version)]
        storage = self._vault.open()
        stamp = make_stamp(version.incarnation)
        files = []
        for ref, (held, place) in plan:
            self._require_current(version)
            view = held.slot.view[place.offset : place.offset + place.seal.length]
            files.append(storage.write_bundle(version, ref, place.seal, view, stamp=stamp))
        name, length, digest = storage.write_part(version, state.node, files, stamp=stamp)
        ids = tuple(sorted(ref.bundle_id for ref, _ in plan))
        state.wrote(PartReport(version, state.node, name, length, digest, ids))
        return sum(file.length for file in files)

    def _locate(self, version: Version, rank: int, ref: BundleRef) -> tuple[Held, ImagePlace]:
        found = self._state.arena.find(version, ref.bundle_id, rank)
        if found is None:
            raise CorruptError(f"the slot that held bundle {ref.bundle_id} of {version} is gone")
        return found

    def _require_current(self, version: Version) -> None:
        """A writer of a dead incarnation stops early; what it wrote is harmless either way."""
        if version.incarnation < self._state.incarnation:
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

    def put(self, job: CommitJob) -> bool:
        """Queues a commit."""
        return self._worker.put(job)

    @property
    def idle(self) -> bool:
        return self._worker.idle

    def stop(self) -> None:
        """Ends the worker."""
        self._worker.stop()

    def _commit(self, job: CommitJob) -> None:
        version = job.order.version
        try:
            storage = self._vault.open()
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
