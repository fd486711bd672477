"""Tells where an agent's processes come from when forking fails: told once, tried again ever more rarely, never the end
of a job.

A machine may have no process, descriptor or memory left for a moment, and the fork server may be killed like anything else.
Those that run are not touched by that. A lost fork server is replaced by one that is started as a program: the agent has
threads by then and must not fork itself. That takes the seconds of an import, during which the agent goes on.

Times are monotonic.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.elastic.processes.forkserver import ForkServer, ForkServerLost

logger = logging.getLogger(__name__)

FIRST_TRY_S = 0.5
LAST_TRY_S = 60.0


class ProcessSupply:
    """Supplies one agent with processes.

    Args:
        program: the command that starts another one; the descriptor of its line is appended. Empty: there is none.
    """

    def __init__(self, forkserver: ForkServer, program: Sequence[str] = ()) -> None:
        self.forkserver = forkserver
        self._program = program
        self._told: set[str] = set()
        self._wait_s = FIRST_TRY_S
        self._again_at = 0.0

    def may_try(self, now: float) -> bool:
        """Return whether it is time for an attempt."""
        return now >= self._again_at and self.forkserver.ready

    def worked(self) -> None:
        """A process could be forked."""
        if self._told:
            logger.warning("processes can be forked again")
        self._told.clear()
        self._wait_s, self._again_at = FIRST_TRY_S, 0.0

    def failed(self, error: Exception, now: float) -> None:
        """Tell it, once for each cause, and wait before the next attempt; start another fork server if this one is lost."""
        self._again_at, self._wait_s = now + self._wait_s, min(2 * self._wait_s, LAST_TRY_S)
        if str(error) not in self._told:
            self._told.add(str(error))
            logger.error("%s; what runs goes on, and it is tried again", error)
        if isinstance(error, ForkServerLost) and self._program:
            try:
                replacement = ForkServer.start_program(self._program)
            except OSError as trouble:
                logger.warning("no other one can be started: %s", trouble)
                return
            self.forkserver.close()
            self.forkserver = replacement

    def close(self) -> None:
        """The fork server in use ends."""
        self.forkserver.close()
