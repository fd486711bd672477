"""One keeper, one job after the other: what happens when the ranks that come together belong to another job.

A keeper is found by path and run id, and outlives its trainers for a while. If the checkpoint directory was removed
meanwhile and a job began anew in its place, the job's id is another one, and its versions may bear the same names as
those that are held here. So nothing of the old job may stay, or reach the new one: first every fact of it loses its
effect, then what is under way ends, then slots, levels, tables and alarms go. Only then is the new job assembled. As
long as a trainer of the old job is connected the new one is refused.

All ranks of a job tell its id before the first of them is let in, so a job that goes on under another id in the same
processes is let in too. Owned by the keeper; the ranks' requests call it, each in its connection's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.base.errors import KeeperError
from holdfast.keeper.rpc.messages import Assembly
from holdfast.keeper.rpc.server import Connection
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.sessions import PREDECESSOR_TIMEOUT_S, Trainers

logger = logging.getLogger(__name__)

# Together with PREDECESSOR_TIMEOUT_S less than a client waits for its answer.
SETTLE_TIMEOUT_S = 4.0
# Whatever becomes idle tells nobody in particular.
LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class KeeperWorkers:
    """The parts of a keeper that have work of their own.

    Attributes:
        leave: ends what waits and what is under way, at its next step; each only asks.
        idle: whether nothing is under way any more.
        forget: drops what is remembered of a job.
    """

    leave: tuple[Callable[[], None], ...]
    idle: Callable[[], bool]
    forget: tuple[Callable[[], None], ...]


class JobChange:
    """Lets ranks assemble, one job at a time."""

    def __init__(self, state: NodeState, trainers: Trainers, works: KeeperWorkers) -> None:
        self._state = state
        self._trainers = trainers
        self._works = works
        self._turning = threading.Lock()
        self._left = ""  # the job whose remains are not gone yet

    def assemble(self, connection: Connection, assembly: Assembly) -> None:
        """A rank tells who belongs to the job.

        Raises:
            InUse: trainers of another job are connected. KeeperError: what was under way for it does not end.
            Otherwise as `NodeState.assemble`.
        """
        self._trainers.join(connection, assembly.job_id)
        if not self._turning.acquire(timeout=PREDECESSOR_TIMEOUT_S + SETTLE_TIMEOUT_S):
            raise KeeperError("another rank is still being let in", remedy="try again")
        try:
            before = self._state.assembly
            if before is not None and before.job_id != assembly.job_id:
                self._trainers.await_alone(assembly.job_id, PREDECESSOR_TIMEOUT_S)
                logger.info(
                    "job %s is over, job %s begins: nothing of the old one is kept", before.job_id, assembly.job_id
                )
                self._left = before.job_id
                self._leave()
            if self._left:
                self._settle()
            self._state.assemble(assembly)
        finally:
            self._turning.release()

    def _leave(self) -> None:
        with self._state.lock:
            self._state.leave_job()
            for leave in self._works.leave:
                leave()

    def _settle(self) -> None:
        """Waits until nothing of the old job is under way, and forgets it."""
        state = self._state
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            with state.lock:
                if self._works.idle() and not any(held.pins for held in state.slot_pool):
                    for forget in self._works.forget:
                        forget()
                    self._left = ""
                    return
            if time.monotonic() >= deadline:
                raise KeeperError(
                    f"this keeper is still busy with job {self._left}, whose directory was replaced",
                    where=f"node {state.place.node}",
                    remedy="try again in a moment",
                )
            time.sleep(LOOK_EVERY_S)
