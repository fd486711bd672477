"""Tells how the agents of a job move from one incarnation of the worker groups to the next, over the rendezvous store.

A rendezvous of TorchElastic settles who takes part (one *round*). Within it, every failure that is mended without a new
rendezvous raises the incarnation: any agent proposes the next number, after its failed process was killed and reaped;
one writer, the agent of group rank 0, opens a fresh store for the workers and publishes its address by compare-and-set.
So every key that workers write belongs to one incarnation, and late writes of an older one go to a store that is gone.

Agents also leave a beat here every second, and in it whether all their ranks stand in collectives, and of the first one whether it
misses the beat of another; what it means that one is silent, or that all stand, is `agent`'s and core.elastic.failure_detector' business.
Calls are short; only `open` waits. One thread uses it. Keys: `recoveries/<group rank>`, `version/<group rank>`,
`keeper/<group rank>`, `node/<name>`, `ranks/<group rank>`, `now`, `want/<n>`, `ends/<n>`, `anew`, `done/<n>`, `done/<n>/<group rank>`, `beat/<group rank>`, `spent/<group rank>`, `over`, `left`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from holdfast.checkpoint.liveness.open_checkpointers import NO_WISH

logger = logging.getLogger(__name__)

PREFIX = "holdfast"
BEAT_S = 1.0
LOOK_S = 1.0
OPEN_TIMEOUT_S = 120.0
POLL_S = 0.01
LEAVE_S = 5.0
STUCK, UNSURE = " stuck", " unsure"  # behind a beat


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Says what all agents start their workers with.

    Attributes:
        number: 1, 2, ... within the round.
        port: of the workers' store, at the address of the agent of group rank 0.
        recoveries: how often the job came back before, for `TORCHELASTIC_RESTART_COUNT`.
        reason: why there is this one.
        older: whether the newest version is to be passed over.
        version: which one is to be restored, because the operator named it; `NO_WISH`, or empty: the newest. See `open_checkpointers.Wish`.
    """

    number: int
    port: int
    recoveries: int
    reason: str = ""
    older: bool = False
    version: str = ""


class RoundAbandoned(DistError):
    """A round that comes to nothing: who met is no longer together, and meets again."""


@dataclass(frozen=True, slots=True)
class RoundOver:
    """The round is over: what every agent does now (`restart`, `again` or `stop`), and why."""

    action: str
    reason: str


class Round:
    """One agent's view of its round.

    Args:
        store: of the rendezvous round; every round has its own.
        address: where the agent of group rank 0 can be reached.
        keeper: where this node's keeper can be reached; empty: nowhere.
        node: what the keeper calls this node.
        ranks: which ranks of the job this agent has.

    Attributes:
        version: what the job has to restore first, because the operator named it, or `NO_WISH`; empty once it has restored.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        address: str,
        keeper: str = "",
        node: str = "",
        ranks: Sequence[int] = (),
    ) -> None:
        self.version = ""
        self._store = PrefixStore(PREFIX, store)
        self._rank, self.size, self.address = rank, size, address
        self._keeper, self._node, self._ranks = keeper, node, list(ranks)
        self._workers_store: TCPStore | None = None
        self._known: Incarnation | None = None
        self._raw = ""
        self.heartbeats = Heartbeats(self._store, rank, size, self.ranks_of)
        self._ranks_of: dict[int, tuple[int, ...]] = {}
        self._done: set[int] = set()
        self._refused: set[int] = set()
        self._spent: set[int] = set()

    @property
    def leads(self) -> bool:
        """Return whether this agent is the one that publishes."""
        return self._rank == 0

    def open(self, recoveries: int, apart: Callable[[], str], introduce: Callable[[], object] = object) -> Incarnation:
        """The first incarnation of the round, or the newest if others have gone on already.

        Args:
            recoveries: how often the job came back, as far as this agent knows; a new node knows of none.
            apart: asked once a second while others are waited for: why this round comes to nothing; empty: it does not.
            introduce: called by the leader when all have said a word and none has gone on yet.

        Raises:
            RoundAbandoned: somebody who met is gone, or did not say a word for long.
        """
        self._store.set(f"keeper/{self._rank}", self._keeper)
        self._store.add(f"node/{self._node}", 1)
        self._store.set(f"ranks/{self._rank}", json.dumps(self._ranks))
        self._store.set(f"version/{self._rank}", self.version)
        self._store.set(f"recoveries/{self._rank}", str(recoveries))
        if self.leads and not self._store.check(["now"]):
            told = [f"recoveries/{rank}" for rank in range(self.size)]
            _await(lambda: bool(self._store.check(told)), apart)
            introduce()
            wishes = [self._store.get(f"version/{rank}").decode() for rank in range(self.size)]
            # A node that joins later was started with the same command, and the job has come back to it long ago.
            self.version = next((wish for wish in wishes if wish != NO_WISH), NO_WISH) if all(wishes) else ""
            self._publish(_workers_store(), 1, max(int(self._store.get(key)) for key in told), "start")
        _await(lambda: self.newest() is not None, apart)
        assert self._known is not None
        return self._known

    def keepers(self) -> list[str]:
        """Return where the keepers of all nodes are, once the round is open."""
        return [self._store.get(f"keeper/{rank}").decode() for rank in range(self.size)]

    def namesakes(self) -> int:
        """Return how many agents have the name of this node, once the round is open."""
        return self._store.add(f"node/{self._node}", 0)

    def ranks_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the agent of this group rank, once the round is open."""
        if rank not in self._ranks_of:
            self._ranks_of[rank] = tuple(json.loads(self._store.get(f"ranks/{rank}")))
        return self._ranks_of[rank]

    def newest(self) -> Incarnation | None:
        """The incarnation in force; the leader first grants what was proposed."""
        self._read()
        if self.leads and self._known is not None:
            wanted = f"want/{self._known.number + 1}"
            if self._store.check([wanted]):
                told = json.loads(self._store.get(wanted))
                self._grant(self._known, told["reason"], older=told["older"])
        return self._known

    def _grant(self, known: Incarnation, reason: str, *, older: bool) -> None:
        """Publish the incarnation behind `known`. Without a descriptor or a port for its store: at the next look."""
        try:
            fresh = _workers_store()
        except DistError as error:
            if known.number not in self._refused:
                logger.error("no store for incarnation %d now, it is tried again: %s", known.number + 1, error)
            self._refused.add(known.number)
            return
        self._publish(fresh, known.number + 1, known.recoveries + 1, reason, older=older)
        self._read()

    def propose(self, number: int, reason: str, *, older: bool = False) -> None:
        """Asks for incarnation `number`; the first who asks gives the reason. The failed process must be gone."""
        text = json.dumps({"reason": reason, "older": older})
        self._store.compare_set(f"want/{number}", "", text)

    def wanted(self, number: int) -> bool:
        """Return whether somebody asked for incarnation `number`."""
        return bool(self._store.check([f"want/{number}"]))

    def ends(self, number: int) -> None:
        """A worker of this agent told of an error of its own in incarnation `number`, and is on its way out."""
        self._store.set(f"ends/{number}", "1")

    def somebody_ends(self, number: int) -> bool:
        """Return whether a worker of any agent is on its way out of incarnation `number`."""
        return bool(self._store.check([f"ends/{number}"]))

    def all_anew(self, reason: str = "") -> str:
        """Return why no process of this job runs its script again; empty if they do. `reason`: of this agent."""
        if reason:
            self._store.compare_set("anew", "", reason)
        return self._store.get("anew").decode() if self._store.check(["anew"]) else ""

    def finish(self, number: int) -> None:
        """All workers of this agent have finished in incarnation `number`."""
        if number not in self._done:
            self._done.add(number)
            self._store.set(f"done/{number}/{self._rank}", "1")
            self._store.add(f"done/{number}", 1)

    def has_finished(self, rank: int, number: int) -> bool:
        """Return whether the workers of the agent of this group rank have finished in incarnation `number`."""
        return bool(self._store.check([f"done/{number}/{rank}"]))

    def all_finished(self, number: int) -> bool:
        """Return whether the workers of all agents have finished."""
        return self.size == 1 or self._store.add(f"done/{number}", 0) >= self.size

    def spend(self) -> None:
        """Say that the workers of this agent, which were told to end, have ended or hang: nothing is saved here any more."""
        if self._rank not in self._spent:
            self._store.set(f"spent/{self._rank}", "1")
            self._spent.add(self._rank)

    def all_spent(self, gone: Collection[int]) -> bool:
        """Return whether every agent has said so, but for those of these group ranks, which are gone. Asks for few keys
        at a time.
        """
        for rank in range(self.size):
            if rank in self._spent or rank in gone:
                continue
            if not self._store.check([f"spent/{rank}"]):
                return False
            self._spent.add(rank)
        return True

    def end(self, over: RoundOver) -> None:
        """Ends the round for all agents; the first word stands."""
        self._store.compare_set("over", "", json.dumps(asdict(over)))

    def over(self) -> RoundOver | None:
        """Return whether somebody ended it."""
        if not self._store.check(["over"]):
            return None
        return RoundOver(**json.loads(self._store.get("over")))

    def leave(self) -> None:
        """We have read how the round ended. Waits a moment until all have: one of us hosts the store, and goes."""
        deadline = time.monotonic() + LEAVE_S
        try:
            self._store.add("left", 1)
            while self._store.add("left", 0) < self.size and time.monotonic() < deadline:
                time.sleep(POLL_S)
        except DistError as error:
            logger.info("the store went before all had left: %s", error)

    def close(self) -> None:
        """The workers' store of this round is gone."""
        self._workers_store = None

    def _read(self) -> None:
        if not self._store.check(["now"]):
            return
        raw = self._store.get("now").decode()
        if raw != self._raw:
            self._raw = raw
            self._known = Incarnation(**json.loads(raw))

    def _publish(self, fresh: TCPStore, number: int, recoveries: int, reason: str, *, older: bool = False) -> None:
        """Names a fresh store to all. Workers of the older incarnation lose theirs only now, and whoever waits there wakes up."""
        row = asdict(Incarnation(number, fresh.port, recoveries, reason, older, self.version))
        stored = self._store.compare_set("now", self._raw, json.dumps(row)).decode()
        if json.loads(stored)["port"] == fresh.port:
            self._workers_store = fresh


class Heartbeats:
    """Leaves the beats of one agent in the store of its round, and looks at those of others.

    Args:
        ranks_of: the ranks of the agent of a group rank.
    """

    def __init__(self, store: Store, rank: int, size: int, ranks_of: Callable[[int], tuple[int, ...]]) -> None:
        self._store, self._rank, self._size, self._ranks_of = store, rank, size, ranks_of
        self._beat = 0
        self._beat_at = 0.0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._longest_s: dict[int, float] = {}

    def beat(self, now: float, *, stuck: bool = False) -> dict[int, float]:
        """Leaves our beat and looks at others', once a second: the leader at all, the rest at the leader. `stuck`: all
        ranks of this agent stand in collectives for long.

        Returns:
            Group rank -> seconds since a beat of it was new, of those that ever had one and missed one.
        """
        if self._size > 1 and now - self._beat_at >= BEAT_S:
            self._beat, self._beat_at = self._beat + 1, now
            unsure = self._rank == 0 and bool(self._silent(now))
            self._store.set(f"beat/{self._rank}", f"{self._beat}{UNSURE if unsure else ''}{STUCK if stuck else ''}")
            for rank in range(1, self._size) if self._rank == 0 else (0,):
                key = f"beat/{rank}"
                text = self._store.get(key) if self._store.check([key]) else b""
                before, at = self._seen.get(rank, (b"", now))
                if text and before != text:
                    self._seen[rank] = (text, now)
                    self._longest_s[rank] = max(now - at, self._longest_s.get(rank, 0.0))
        return self._silent(now)

    def _silent(self, now: float) -> dict[int, float]:
        return {rank: now - at for rank, (_, at) in self._seen.items() if now - at > 2 * BEAT_S}

    def is_one_missed(self, now: float) -> bool:
        """Return whether an agent is silent, as far as this one sees or the leader said in its last beat."""
        said, _ = self._seen.get(0, (b"", 0.0))
        return bool(self._silent(now)) or UNSURE.encode() in said

    def longest_silence_s(self, rank: int) -> float:
        """Return the seconds of the longest silence of the agent of this group rank that a new beat ended."""
        return self._longest_s.get(rank, 0.0)

    def stuck_elsewhere(self, now: float) -> list[int]:
        """Ranks of the agents that said in a beat which is still new that all of theirs stand in collectives."""
        said = [
            rank for rank, (text, at) in self._seen.items() if text.endswith(STUCK.encode()) and now - at <= 2 * BEAT_S
        ]
        return [number for rank in said for number in self._ranks_of(rank)]


def _workers_store() -> TCPStore:
    """Return a store for the workers of one incarnation, hosted here."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=OPEN_TIMEOUT_S))


def _await(ready: Callable[[], bool], apart: Callable[[], str]) -> None:
    """Wait for a word of another agent, as long as all who met are there."""
    deadline = time.monotonic() + OPEN_TIMEOUT_S
    look_at = time.monotonic() + LOOK_S
    while not ready():
        now = time.monotonic()
        if now > deadline:
            raise RoundAbandoned(f"an agent that met the others said nothing for {OPEN_TIMEOUT_S:.0f} s")
        if now > look_at:
            look_at = now + LOOK_S
            if why := apart():
                raise RoundAbandoned(why)
        time.sleep(POLL_S)
