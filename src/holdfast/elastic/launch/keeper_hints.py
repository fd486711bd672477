"""The launcher's word to its node's keeper: these ranks start now, so fetch what they will restore (`keeper.fetch.prefetch`).

Between this word and the first rank's lie the imports and the building of the model. The launchers of a job tell each
other where their keepers are when they meet (`elastic.launch.rendezvous.incarnation_rounds`), so that a new node finds what the others hold in memory.
A keeper that does not hear it, or cannot do it, costs that time and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from holdfast.base.errors import HoldfastError, KeeperLost
from holdfast.keeper.rpc.caller import Caller, dial
from holdfast.keeper.rpc.messages import OPERATOR, AnyMessage, Hello, Message, Preload
from holdfast.keeper.rpc.paths import RuntimePaths

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0


class KeeperHints:
    """Tells what one launcher says to its keeper.

    Args:
        place: of the keeper; None: there is none, and nothing is said.
        ranks_per_reader: as the trainers will have it.
    """

    def __init__(self, place: RuntimePaths | None = None, ranks_per_reader: int = 1) -> None:
        self._place = place
        self._ranks_per_reader = ranks_per_reader

    def address(self) -> str:
        """Return where other nodes find the keeper; empty if it does not answer."""
        try:
            caller = self._dial()
        except HoldfastError as error:
            logger.info("the keeper was not asked where it is: %s", error)
            return ""
        caller.close()
        return caller.welcome.address

    def starts(self, group: Any, keepers: Sequence[str]) -> None:
        """The workers of torchrun's `group` start, on the nodes whose keepers are these.

        Nothing is said if it is not known which ranks the other nodes have, or if two launchers share a keeper.
        """
        size, world_size = group.group_world_size, group.workers[0].world_size
        if len(keepers) != size or len(set(keepers)) != size or "" in keepers or world_size % size:
            return
        local = world_size // size
        if [worker.global_rank for worker in group.workers] != [group.group_rank * local + i for i in range(local)]:
            return
        self._say(
            Preload(
                node=group.group_rank,
                node_of=tuple(rank // local for rank in range(world_size)),
                addresses=tuple(keepers),
                ranks_per_reader=self._ranks_per_reader,
            )
        )

    def _say(self, message: Message) -> None:
        try:
            with contextlib.closing(self._dial()) as caller:
                caller.call(message, timeout_s=TIMEOUT_S)
        except HoldfastError as error:
            logger.info("nothing is preloaded: %s", error)

    def _dial(self) -> Caller:
        if self._place is None:
            raise KeeperLost("there is no keeper yet")
        hello = Hello(job=self._place.job, role=OPERATOR)
        return dial(self._place.address, hello, timeout_s=TIMEOUT_S, on_push=_ignore, on_lost=_ignore)


def _ignore(_: AnyMessage | str) -> None:
    """One question, one answer."""
