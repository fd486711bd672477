"""Twins differ: digests of every entry of this node's copy, so that the coordinator can say which entry and whose.

Happens only when silent corruption was found. The slot is pinned meanwhile; the version is given up by then, and
nobody else needs its bytes. One worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.base.errors import HoldfastError
from holdfast.core.model import Version
from holdfast.core.versions.node_ledger import Reports
from holdfast.core.versions.slot_guard import SlotState
from holdfast.core.versions.twin_vote import MAX_ENTRIES, Examined
from holdfast.keeper.slots.job_queue import HasWorker, Worker
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.tiers.format import image as image_format

_PIN = "examined"


@dataclass(frozen=True, slots=True)
class _Job:
    held: HeldSlot
    version: Version
    bundle_id: str


class TwinExaminer(HasWorker):
    """Looks at copies of bundles whose twins differ."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._worker: Worker[_Job] = Worker(
            "holdfast examiner", self._examine, lambda text: state.alarms.warn("examiner", text), on_idle=state.changed
        )

    def put(self, version: Version, bundle_id: str) -> None:
        """The bundle's twins differ in this version. Under the state's lock; a copy that is sealed later is put again."""
        for held in self._state.slot_pool:
            here = held.version == version and held.state is SlotState.SEALED and bundle_id in held.images
            new = here and not held.replica and not held.pins[_PIN]
            if new and self._worker.put(_Job(held, version, bundle_id)):
                held.pins[_PIN] = 1

    def leave(self) -> None:
        """Drops what waits: the job it is for is over. Under the state's lock."""
        for job in self._worker.clear():
            self._state.unpin(job.held, _PIN)

    def _examine(self, job: _Job) -> None:
        held, state = job.held, self._state
        try:
            place = held.images[job.bundle_id]
            view = held.slot.view[place.offset : place.offset + place.seal.length]
            image = image_format.read_image(view, job.bundle_id)
            entries = [*image.entries, *([image.values] if image.values is not None else [])]
            digests = tuple((e.name, image_format.chunk_digest(view[e.start : e.end])) for e in entries[:MAX_ENTRIES])
        except HoldfastError as error:
            state.alarms.warn(
                "examiner", f"the copy of bundle {job.bundle_id} of {job.version} cannot be read: {error}"
            )
            return
        finally:
            state.unpin(held, _PIN)
        with state.lock:
            if state.ledger is not None and job.version.incarnation == state.ledger.incarnation:
                examined = Examined(job.version, held.rank, job.bundle_id, digests)
                state.callbacks.report(Reports(examined=(examined,)))
