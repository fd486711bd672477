"""The part of an agent that meets the others: under its node's name, and at another place when the store is lost.

Decisions: `core.elastic.node_lease`, `core.elastic.rendezvous_failover`.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.launcher.api import LaunchConfig

from holdfast.elastic.launch.agent_options import Rules
from holdfast.elastic.launch.base_agent import BaseAgent
from holdfast.elastic.launch.rendezvous.incarnation_rounds import RoundAbandoned
from holdfast.elastic.launch.rendezvous.node_lease import Identity
from holdfast.elastic.launch.rendezvous.store_failover import LOST, MovingRendezvous

logger = logging.getLogger(__name__)


class RendezvousAgent(BaseAgent):
    """An agent that claims its node's name before every rendezvous, and begins one anew wherever the job meets."""

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, rules: Rules) -> None:
        super().__init__(spec, config, grace_s=rules.grace_s)
        self._rules = rules
        self._num_namesakes, self._has_told_of_namesakes = 1, False
        handler = spec.rdzv_handler
        self._meeting = handler if isinstance(handler, MovingRendezvous) else None
        store = getattr(handler, "_store", None)  # of the c10d rendezvous; it outlives the rounds
        self._identity = (
            Identity(store, rules.name, guard_s=rules.guard_s) if rules.name and store is not None else None
        )

    def _tell_of_namesakes(self) -> None:
        """Warn once that launchers with one name are one node, whose versions are in no other node's memory. For a script
        that makes versions.
        """
        if self._num_namesakes > 1 and not self._has_told_of_namesakes:
            self._has_told_of_namesakes = True
            logger.warning(
                "%d launchers of this job have one node name, %s: they count as one node, and no version is kept in the"
                " memory of another one. Give each a --node-label of its own",
                self._num_namesakes,
                self._rules.node,
            )

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                with self._identity.renewed() if self._identity is not None else nullcontext():
                    super()._initialize_workers(worker_group)
                return
            except RoundAbandoned as error:  # the store lives, and whoever is left meets there again
                if self._meeting is None:
                    raise
                logger.warning("the job meets again: %s", error)
            except LOST as error:
                if self._meeting is None:
                    raise
                self._meeting.lost(error)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._meeting is not None:
            self._meeting.find()
        if self._identity is not None:
            if self._meeting is not None:
                self._identity.at(self._meeting.store)
            self._identity.claim()
        super()._rendezvous(worker_group)
