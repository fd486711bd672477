"""Counts a launcher as dead by this one's own clock: for so long it has looked, and seen no new sign of life.

Torch compares the time that a launcher wrote with the time that it is here. Clocks of two machines may differ by seconds, and then
one drops the other from a rendezvous in which all are. And where the host of the store stands still nobody can give a sign of life:
the first who looks when it goes on would drop all the others. Here a time in which this launcher could not look counts for nobody.

It uses names of `torch.distributed.elastic.rendezvous.dynamic_rendezvous` that are not public; they are the same from
torch 2.11 to 2.15.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _remove_participant_epilogue,
)

# A launcher looks once a second. What passed between two looks counts up to this: without one nobody was seen to be silent.
MOST_S = 1.5


class OwnClock:
    """Takes those out of the state of a rendezvous that are silent for long, as this launcher sees it.

    Args:
        handler: of this launcher; it keeps itself.
    """

    def __init__(self, handler: DynamicRendezvousHandler) -> None:
        self._node, self._settings = handler._this_node, handler._settings
        self._holder: Any = handler._state_holder
        self._silent_s: dict[Any, tuple[datetime, float]] = {}
        self._looked_s = time.monotonic()

    def sanitize(self) -> None:
        """Torch's `_sanitize`: called with every state that was read."""
        now = time.monotonic()
        passed_s, self._looked_s = min(MOST_S, now - self._looked_s), now
        state = self._holder._state
        before, self._silent_s = self._silent_s, {}
        for node, sign in state.last_heartbeats.items():
            known, silent_s = before.get(node, (sign, -passed_s))
            self._silent_s[node] = (sign, silent_s + passed_s if known == sign else 0.0)
        most_s = (self._settings.keep_alive_interval * self._settings.keep_alive_max_attempt).total_seconds()
        dead = [node for node, (_, silent_s) in self._silent_s.items() if silent_s > most_s and node != self._node]
        met = len(state.participants)
        for node in dead:
            del state.last_heartbeats[node]
            state.participants.pop(node, None)
            state.wait_list.discard(node)
            state.redundancy_list.discard(node)
        self._holder._dead_nodes = dead
        if len(state.participants) < met:
            _remove_participant_epilogue(state, self._settings)


def judge_by_own_clock(handler: DynamicRendezvousHandler) -> None:
    """Let this launcher's clock alone say who is silent."""
    handler._state_holder._sanitize = OwnClock(handler).sanitize  # type: ignore[attr-defined]
