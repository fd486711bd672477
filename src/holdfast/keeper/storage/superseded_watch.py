"""Tells the ranks of a node that a newer incarnation is registered, so that what they wait for never becomes durable.

Who commits is refused at once, and only the coordinator's node commits. The other nodes would wait for their time limit:
so whoever has waited a while for a commit looks itself. Held by the keeper; looks in a thread, for a mount may hang.
"""

from __future__ import annotations

import time

from holdfast.base.errors import Fenced, HoldfastError
from holdfast.keeper.rpc.messages import Assembly, superseded
from holdfast.keeper.slots.job_queue import HasWorker, Worker
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.storage.lazy_storage import LazyStorage
from holdfast.tiers.storage.version_store import NEWER_RUNS

# How long a commit may be awaited before somebody looks, and how often then.
PATIENCE_S = 5.0


class SupersededWatch(HasWorker):
    """Looks for a newer incarnation, for as long as this node awaits a commit."""

    def __init__(self, state: NodeState, lazy_storage: LazyStorage) -> None:
        self._state = state
        self._lazy_storage = lazy_storage
        self._next_s = 0.0
        self._worker: Worker[Assembly] = Worker(
            "holdfast superseded watch", self._look, lambda text: state.alarms.warn("superseded watch", text)
        )

    def tick(self) -> None:
        """Has somebody look, if it is time and none looks already."""
        now = time.monotonic()
        if not self._state.awaits_commit():
            self._next_s = 0.0
        elif not self._next_s:
            self._next_s = now + PATIENCE_S
        elif now >= self._next_s and self.idle:
            self._next_s = now + PATIENCE_S
            with self._state.lock:
                assembly = self._state.assembly
            if assembly is not None:
                self._worker.put(assembly)

    def _look(self, assembly: Assembly) -> None:
        """Raises the alarm by which ranks stop waiting; a path that cannot be read now proves nothing."""
        where = newer_run(self._lazy_storage, assembly.incarnation, assembly.job_id)
        key = superseded(assembly.incarnation)
        with self._state.lock:
            if where and key not in self._state.alarms.raised:
                error = Fenced(NEWER_RUNS, where=where)
                self._state.alarms.warn(key, f"incarnation {assembly.incarnation}: {error}")


def newer_run(lazy_storage: LazyStorage, incarnation: int, job_id: str) -> str:
    """Return where a newer incarnation of the job is registered; empty if none is, or if the path cannot be read now."""
    try:
        storage = lazy_storage.open()
        storage.require_job(job_id)
        return storage.where if storage.incarnations.highest() > incarnation else ""
    except HoldfastError:
        return ""
