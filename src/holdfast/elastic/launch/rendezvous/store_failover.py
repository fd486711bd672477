"""A rendezvous that outlives the host of its store: torchrun's c10d rendezvous, moved to another store when that is gone.

The host is whichever launcher found the job's endpoint on its own machine; it may be killed like any other. Every
launcher keeps a store of its own ready (`elastic.launch.rendezvous.standby_store`) and knows those of the others. Who loses the store looks for
the place where the job meets now (`core.elastic.rendezvous_failover`): the endpoint, if a new launcher opened it again, else the store
of the lowest member that lives. There a new rendezvous is held, in which living workers keep their processes. A
launcher that waits elsewhere, newly started at the endpoint or woken up after the others had left it, finds the new
address in its own store and comes over.

What it cannot do: keep two halves of a divided job apart. A job of a fixed size cannot come together twice; of two
halves of an elastic one the later has the higher incarnation, and the earlier commits nothing more.

Used by `elastic.launch.agent` for jobs of several nodes over `--rdzv-backend=c10d`. Methods may raise one of `LOST`: the caller
tells it to `lost` and begins the rendezvous again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from holdfast.core.elastic.rendezvous_failover import is_whole, where
from holdfast.elastic.launch.rendezvous.own_clock import judge_by_own_clock
from holdfast.elastic.launch.rendezvous.peer_links import PeerLinks
from holdfast.elastic.launch.rendezvous.prompt_rendezvous import be_prompt, drop_participant, look_first
from holdfast.elastic.launch.rendezvous.standby_store import USES, Dialler, StandbyStore, address_of, call_apart

logger = logging.getLogger(__name__)

MEMBERS = "holdfast.members"
DEFAULT_PORT = 29400  # torchrun's own for this backend
# How long the place is looked for; as long as torchrun waits for a rendezvous to come together.
FIND_S = 600.0
LOOK_S = 0.2
# Who waits for another launcher's word after a rendezvous waits so long before the job meets again. It gives no sign of
# life meanwhile, for a store serves one call at a time.
WORD_S = 20.0
SILENT_S = 2.0
# A store that is lost again so soon, so often, is not the reason.
SETTLED_S, MOST_MOVES = 30.0, 20


def fall_silent(handler: Any, *, wait_s: float = 0.0) -> None:
    """Stop the thread by which torch tells the others that this launcher lives. It may hang in a store that says nothing."""
    if hasattr(handler, "_stop_heartbeats"):
        call_apart(handler._stop_heartbeats, "hf old heartbeats", wait_s=wait_s)


class RendezvousMoved(RendezvousError):
    """The job meets elsewhere by now."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the job meets at {address}")
        self.address = address


LOST = (DistError, RendezvousConnectionError, RendezvousMoved)


class MovingRendezvous(RendezvousHandler):
    """Is the rendezvous of one launcher, which may move. One thread uses it, beside the watch of its standby.

    Args:
        params: as torchrun makes them; the backend is c10d over TCP.

    Attributes:
        links: to the launchers that this one watches, as soon as all have met.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._params = params
        host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
        self._endpoint = address_of(host, port)
        self._members: dict[int, str] = {}
        self._told = ""
        self._rank = -1
        self._size = self._number = 0
        self._round: Store | None = None
        self._lost_s = self._found_s = 0.0
        self._in_a_row = 0
        self._trouble: Exception | None = None
        self._dialler = Dialler()
        self.links = PeerLinks()
        self._linked = False
        _, store = create_backend(params)
        self._begin(self._endpoint, store)
        address = params.local_addr or self._handler._this_node.addr
        self._standby = StandbyStore(address, params.local_addr or "", self._endpoint)
        self._standby.start(
            met=lambda: self._round is not None and not self._lost_s, members=lambda: tuple(self._members.values())
        )

    @property
    def store(self) -> Store:
        """The store in use; it outlives the rounds."""
        return self._store

    def lost(self, error: Exception) -> None:
        """The store is gone, or the job meets elsewhere: the next rendezvous is held where it meets now."""
        logger.warning("the rendezvous at %s is over for us: %s", self._address, str(error).splitlines()[0])
        now = time.monotonic()
        self._in_a_row = self._in_a_row + 1 if now - self._found_s < SETTLED_S else 1
        if self._in_a_row > MOST_MOVES:
            raise error
        self._lost_s, self._round = now, None
        self.links.close()  # what they say of ranks holds where the job met, and not where it meets next
        fall_silent(self._handler)

    def require(self) -> None:
        """Raises what `num_nodes_waiting` met."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    def find(self) -> None:
        """Goes where the job meets, if the store was lost.

        Raises:
            RendezvousTimeoutError: nobody opened a store.
        """
        while self._lost_s:
            others = {rank: address for rank, address in self._members.items() if address != self._standby.address}
            found = self._dialler.ask([self._endpoint, self._standby.address, *others.values()])
            found |= self._dialler.ask({answer.uses for answer, _ in found.values()} - found.keys())
            waited_s = time.monotonic() - self._lost_s
            decision = where(
                {address: answer for address, (answer, _) in found.items()},
                endpoint=self._endpoint,
                members=others | {self._rank: self._standby.address},
                me=self._rank,
                waited_s=waited_s,
                unsure=self._dialler.under_way(),
            )
            if decision.value in found:
                logger.warning("the job meets at %s: %s", decision.value, decision.reason)
                self._standby.use(decision.value)
                self._begin(decision.value, found[decision.value][1])
                return
            if waited_s > FIND_S:
                raise RendezvousTimeoutError(f"no rendezvous store was found in {FIND_S:.0f} s: {decision.reason}")
            time.sleep(LOOK_S)

    # What torchrun's loop calls.

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the others; again if one of them was lost on the way.

        Torch drops a launcher whose sign of life came late from a rendezvous that is complete already, and leaves the ranks
        of the others as they are: they would wait for words of a rank that nobody has.
        """
        look_first(self._handler)
        for rank in self.links.gone():
            self.drop(rank)  # else a replacement is let in when torch misses the dead one
        self.links.close()
        for _ in range(MOST_MOVES):
            info = self._handler.next_rendezvous()
            ranks = self._handler._state_holder.state.participants.values()
            if is_whole(ranks, self._handler.settings.min_nodes):
                break
            logger.warning("a launcher was lost while the job met, ranks %s are left: it meets again", sorted(ranks))
        else:
            raise RendezvousTimeoutError(f"{MOST_MOVES} times a launcher was lost while the job met")
        self._rank, self._size, self._round = info.rank, info.world_size, info.store
        self._told, self._number, self._linked = "", self._round_number(), False
        info.store.set(f"standby/{info.rank}", self._standby.address)
        return info

    def introduce(self) -> None:
        """Let the leader tell where all others can be found, before any worker starts. May raise one of `LOST`."""
        self._gather()

    def learn(self) -> None:
        """Take note of that. Who knew nobody would look for the others in vain if the host died in the next moment."""
        self._members = self._told_members(self._store.get(MEMBERS)) if self._store.check([MEMBERS]) else {}

    def num_nodes_waiting(self) -> int:
        """Launchers that wait to be taken in; one more if they meet without us.

        Torch drops a launcher from a rendezvous whose sign of life came late, and never tells it. If all the others
        go too, whoever comes next begins another round, and does not wait for the end of this one.
        """
        try:
            self._gather()
            waiting = self._handler.num_nodes_waiting()
        except LOST as error:  # torchrun's loop knows no remedy; ours asks `require` next
            self._trouble = error
            return 0
        if not waiting and self._round_number() != self._number:
            logger.warning("this launcher was counted as dead by mistake; it joins the others again")
            return 1
        return waiting

    def apart(self) -> str:
        """Return why those who met last are no longer together; empty if they are. May raise one of `LOST`."""
        waiting = self._handler.num_nodes_waiting()
        state = self._handler._state_holder.state
        if self._round_number() != self._number:
            return "the others meet without this launcher"
        if len(state.participants) < self._size:
            return f"{self._size - len(state.participants)} of {self._size} launchers that met are gone"
        return "a launcher waits to be let in" if waiting else ""

    def drop(self, rank: int) -> None:
        """Take a launcher that is proven gone out of the rendezvous, which else waits until it is silent for long.

        Args:
            rank: its group rank in the round that is on. May raise one of `LOST`.
        """
        if self._round_number() == self._number:
            drop_participant(self._handler, rank, self._number)

    def get_backend(self) -> str:
        """c10d."""
        return self._handler.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Return what torch's own handler returns."""
        return self._handler.use_agent_store

    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """The job is over."""
        self._handler.set_closed()

    def get_run_id(self) -> str:
        """The job's id."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """The job is over, for all."""
        self.leave()
        return self._handler.shutdown()

    def leave(self) -> None:
        """It goes on without this launcher."""
        self.links.close()
        self._standby.close()
        fall_silent(self._handler, wait_s=SILENT_S)

    # Parts.

    def _begin(self, address: str, store: Store) -> None:
        self._address, self._store = address, store
        self._lost_s, self._found_s = 0.0, time.monotonic()
        store.set_timeout(timedelta(seconds=WORD_S))
        backend = _Backend(store, self._params.run_id, self._look)
        self._handler = create_handler(store, backend, self._params)
        be_prompt(self._handler)
        judge_by_own_clock(self._handler)

    def _look(self, call: Callable[..., Any]) -> None:
        """Once a second at most: whether the job went elsewhere, and who its members are."""
        if call("check", [USES]):
            address = call("get", USES).decode()
            if address not in ("", self._address):
                raise RendezvousMoved(address)
        if call("check", [MEMBERS]):
            self._members = self._told_members(call("get", MEMBERS))

    @staticmethod
    def _told_members(text: bytes) -> dict[int, str]:
        return {int(rank): address for rank, address in json.loads(text).items()}

    def _round_number(self) -> int:
        return int(self._handler._state_holder.state.round)

    def _gather(self) -> None:
        """The leader tells everybody where all others can be found. Links lead there, as soon as that is known."""
        if self._round is None:
            return
        if self._rank != 0 and not self._linked and self._round.check(["standby/0"]):
            self._linked = True
            self.links.lead_to({0: self._round.get("standby/0").decode()})
        if self._rank != 0 or self._told:
            return
        keys = [f"standby/{rank}" for rank in range(self._size)]
        if self._round.check(keys):
            addresses = {rank: self._round.get(key).decode() for rank, key in enumerate(keys)}
            self._told = json.dumps(addresses)
            self._store.set(MEMBERS, self._told)
            self.links.lead_to({rank: address for rank, address in addresses.items() if rank != 0})


class _Backend(C10dRendezvousBackend):
    """Looks for news before it reads the state of the rendezvous."""

    def __init__(self, store: Store, run_id: str, look: Callable[[Callable[..., Any]], None]) -> None:
        super().__init__(store, run_id)
        self._news = look

    def get_state(self) -> Any:
        self._news(self._call_store)
        return super().get_state()
