"""Makes torch's rendezvous prompt: who waits looks ten times a second, and who is proven dead is taken out at once.

Torch looks once a second, which is right for thousands of launchers and slow for a few: a launcher that was dropped, one
that comes instead, and one that waits for it each lose a second or two. And it keeps a dead participant until its signs of
life have stayed away for seconds, and lets nobody in until then.

It also reads the whole stack, with its source, for the name of every event that it records, though by default nobody hears
events. That is some milliseconds, and seconds on a node that has no processor to spare. Then no launcher's word is in time:
each finds the state changed by the other's sign of life, and all begin again, for minutes.

It uses names of `torch.distributed.elastic.rendezvous.dynamic_rendezvous` that are not public; they are the same from
torch 2.11 to 2.15.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _Action,
    _remove_participant_epilogue,
    _RendezvousContext,
)

POLL_S = 0.1
# More launchers than this would keep the store busy with their looks; they have torch's pace.
MOST_NODES = 32
DROP_S = 5.0


class _Prompt:
    """Stands before torch's executor of rendezvous operations. One that is told to wait a second waits a tenth."""

    def __init__(self, handler: DynamicRendezvousHandler) -> None:
        self._executor: Any = handler._op_executor
        self._holder: Any = handler._state_holder
        self._node, self._settings = handler._this_node, handler._settings

    def run(self, operation: Callable[[Any, float], Any], deadline: float, *args: Any, **kwargs: Any) -> None:
        """Torch's `run`."""

        def promptly(context: Any, until: float) -> Any:
            action = operation(context, until)
            while action is _Action.SYNC:
                time.sleep(POLL_S)
                self._holder._last_sync_time = -1  # what is known is not asked for again for a second
                self._holder.sync()
                self._executor._state = self._holder.state  # what it does next it does to this one
                action = operation(_RendezvousContext(self._node, self._holder.state, self._settings), until)
            return action

        self._executor.run(promptly, deadline, *args, **kwargs)


def be_prompt(handler: DynamicRendezvousHandler) -> None:
    """Record no event that nobody hears; look more often, if only few launchers can meet there."""
    if isinstance(get_logging_handler("dynamic_rendezvous"), logging.NullHandler):
        for teller in (handler, handler._op_executor, handler._state_holder):
            teller._record = _unheard  # type: ignore[union-attr,method-assign]
    if handler._settings.max_nodes <= MOST_NODES:
        handler._op_executor = _Prompt(handler)  # type: ignore[assignment]  # has what is used of it


def _unheard(*_: object, **__: object) -> None:
    """Record nothing."""


def look_first(handler: DynamicRendezvousHandler) -> None:
    """Read the state of the rendezvous, so that who comes to one that has been held does not wait for up to 0.3 s.

    At the beginning of a job torch waits so that not all come at once. May raise what the store does.
    """
    with handler._heartbeat_lock:
        handler._state_holder.sync()


def drop_participant(handler: DynamicRendezvousHandler, rank: int, number: int) -> None:
    """Take the participant with this rank out of round `number`, as torch does with one that is silent for long.

    Raises:
        RendezvousError: the store is gone.
    """

    def drop(context: Any, until: float) -> Any:
        state = context.state
        dead = [node for node, known in state.participants.items() if known == rank]
        if state.round != number or not state.complete or not dead or time.monotonic() > until:
            return _Action.FINISH
        del state.participants[dead[0]]
        state.last_heartbeats.pop(dead[0], None)
        _remove_participant_epilogue(state, handler._settings)
        return _Action.KEEP_ALIVE  # ours is renewed, and all of it is written

    with handler._heartbeat_lock:
        handler._op_executor.run(drop, time.monotonic() + DROP_S)
