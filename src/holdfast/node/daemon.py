"""The keeper: one light process per job and node that owns the slots and outlives the trainers.

Puts the parts together, decides who may say what (roles), and when to end: when all local ranks finished and nothing
is left to persist, or some time after the last trainer left. It leaves nothing behind: socket, locks, log and
directory go, in that order, under the lock that made it the keeper.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from holdfast.base.errors import InUse, KeeperError
from holdfast.base.events import Events
from holdfast.node import messages, status
from holdfast.node.arena import Arena
from holdfast.node.coordinate import Coordinator
from holdfast.node.messages import (
    KEEPER,
    RANK,
    VIEWER,
    AnyMessage,
    Hello,
    InventoryReply,
    Message,
    Ok,
    StatusReply,
    Welcome,
)
from holdfast.node.obtain import Obtainer
from holdfast.node.peers import PeerDesk
from holdfast.node.persist import Committer, Persister
from holdfast.node.places import Place
from holdfast.node.replicate import Replicator
from holdfast.node.seal import Sealer
from holdfast.node.server import Answer, Connection, Server
from holdfast.node.state import NodeState, Outlets
from holdfast.node.trainers import TrainerDesk
from holdfast.node.uplink import Uplink
from holdfast.node.vault import Vault
from holdfast.tiers.budget import Budget
from holdfast.tiers.procs import take_lock

logger = logging.getLogger(__name__)

TICK_S = 0.5

Reply = Message | Answer | None


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """What a keeper is started with.

    Attributes:
        root: checkpoint URL or absolute path.
        memory_budget: as in Config.
        linger_s: how long it waits for a trainer before it ends.
    """

    place: Place
    root: str
    memory_budget: str
    linger_s: float


class Keeper:
    """The process. Create it while holding the keeper lock, call `run`, then `clean`."""

    def __init__(self, options: KeeperOptions) -> None:
        self._options = options
        self._started_s = time.monotonic()
        self._events = Events()
        place = options.place
        self._state = NodeState(place, Arena(Budget(place.budget, options.memory_budget)))
        vault = Vault(options.root, self._events)
        self._sealer = Sealer(self._state, self._events)
        self._obtainer = Obtainer(self._state, vault, self._events)
        self._persister = Persister(self._state, vault, self._events)
        self._committer = Committer(self._state, vault, self._events)
        self._replicator = Replicator(self._state, self._events)
        self._trainers = TrainerDesk(self._state, self._sealer, self._obtainer)
        self._uplink = Uplink(self._state, lambda assembly: Coordinator(self._state, self._committer, assembly))
        self._peers = PeerDesk(self._state, lambda: self._uplink.coordinator)
        self._state.outlets = Outlets(
            report=self._uplink.report,
            push=self._trainers.push,
            replicate=self._replicator.put,
            persist=self._persister.put,
            follow=self._uplink.follow,
            changed=self._wake,
        )
        self._table = self._operations()
        place.socket.unlink(missing_ok=True)  # of a keeper that was killed; we hold the lock, so nobody listens there
        self._server = Server(place.socket, self)

    def run(self, ready: Callable[[], None]) -> None:
        """Serves until the job is over, nobody comes any more, or `stop`."""
        ready()
        logger.info("keeper of %s for job %s listens", self._options.place.node, self._options.place.job)
        try:
            self._server.serve()
        finally:
            self._end()

    def stop(self) -> None:
        """Ends `run`; any thread or signal handler."""
        self._server.stop()

    # --- the server's handler

    def greet(self, connection: Connection, hello: Hello) -> Message:
        """Lets a client in by its role."""
        if hello.protocol != messages.PROTOCOL:
            raise KeeperError(
                f"the client speaks protocol {hello.protocol}, this keeper {messages.PROTOCOL}",
                remedy="use one version of holdfast in a job",
            )
        if hello.job != self._options.place.job:
            raise InUse(f"this keeper belongs to job {self._options.place.job}, not {hello.job[:64]}")
        if hello.role == RANK and hello.rank >= 0:
            self._trainers.attach(connection, hello)
        elif hello.role == KEEPER:
            self._peers.attach(connection, hello)
        elif hello.role == VIEWER:
            connection.hello = hello
        else:
            raise KeeperError(f"{hello.role[:64]!r} is not a role")
        return Welcome(node=self._options.place.node, pid=os.getpid(), incarnation=self._state.incarnation)

    def handle(self, connection: Connection, message: AnyMessage, fds: list[int]) -> Reply:
        """Carries out what the client's role allows."""
        operation = self._table.get((connection.greeted.role, type(message)))
        if operation is None:
            raise KeeperError(f"a {connection.greeted.role} may not say {type(message).__name__}")
        return operation(connection, message, fds)

    def gone(self, connection: Connection) -> None:
        """A client left."""
        if connection.greeted.role == RANK:
            self._trainers.gone(connection)
        elif connection.greeted.role == KEEPER:
            self._peers.gone(connection)

    def tick(self) -> float:
        """What is due by the clock."""
        self._trainers.reap()
        self._peers.yield_slots(self._trainers.starved())
        next_s = self._trainers.retry()
        if self._is_over():
            self._server.stop()
        return min(TICK_S, next_s)

    def _is_over(self) -> bool:
        state = self._state
        with state.lock:
            ranks = set(state.ledger.ranks) if state.ledger else set()
            busy = not (self._persister.idle and self._committer.idle and self._sealer.idle)
            if ranks and ranks <= state.finished and not busy:
                logger.info("all local ranks finished")
                return True
            alone_s = time.monotonic() - self._trainers.last_seen_s
            if not self._trainers.num_trainers and alone_s >= self._options.linger_s and not busy:
                logger.info("no trainer for %.0f s", alone_s)
                return True
        return False

    def _wake(self) -> None:
        """Something changed that a waiting save may have waited for."""
        self._trainers.retry()
        self._server.wake()

    def _operations(self) -> dict[tuple[str, type], Callable[..., Reply]]:
        """Who may say what; what is not listed is refused."""
        trainers, peers, state = self._trainers, self._peers, self._state
        by_rank: dict[type, Callable[..., Reply]] = {
            messages.Assemble: lambda c, m, f: _done(m, state.assemble(m.assembly)),
            messages.Resume: lambda c, m, f: _done(m, state.resume(m.incarnation, m.version)),
            messages.Register: lambda c, m, f: _done(m, self._register(c, m)),
            messages.Prepare: lambda c, m, f: trainers.prepare(c, m),
            messages.Adopt: lambda c, m, f: trainers.adopt(c, m, f),
            messages.Begin: lambda c, m, f: trainers.begin(c, m),
            messages.Copied: lambda c, m, f: trainers.copied(c, m),
            messages.Abandon: lambda c, m, f: trainers.abandon(c, m.version, m.reason),
            messages.Obtain: lambda c, m, f: trainers.obtain(c, m),
            messages.Release: lambda c, m, f: trainers.release(c),
            messages.Goodbye: lambda c, m, f: trainers.goodbye(c, finished=m.finished, request=m.id),
            messages.Propose: lambda c, m, f: self._propose(m),
            messages.Condemn: lambda c, m, f: peers.condemn(m),
        }
        by_keeper: dict[type, Callable[..., Reply]] = {
            messages.Report: lambda c, m, f: peers.report(c, m),
            messages.Propose: lambda c, m, f: peers.propose(m),
            messages.AskSeals: lambda c, m, f: peers.seals(c, m),
            messages.Pull: lambda c, m, f: peers.pull(c, m),
            messages.Release: lambda c, m, f: peers.release(c),
            messages.Condemn: lambda c, m, f: peers.condemn(m),
            messages.Ping: lambda c, m, f: Ok(id=m.id),
        }
        by_anyone: dict[type, Callable[..., Reply]] = {
            messages.TakeInventory: lambda c, m, f: InventoryReply(id=m.id, inventory=peers.inventory(wide=m.wide)),
            messages.AskStatus: lambda c, m, f: self._status(m),
        }
        roles = {RANK: by_rank | by_anyone, KEEPER: by_keeper | by_anyone, VIEWER: by_anyone}
        return {(role, kind): operation for role, table in roles.items() for kind, operation in table.items()}

    def _register(self, connection: Connection, message: messages.Register) -> None:
        if message.layout.rank != connection.greeted.rank:
            raise KeeperError(f"rank {connection.greeted.rank} registers the layout of rank {message.layout.rank}")
        self._state.register(message.layout)

    def _propose(self, message: messages.Propose) -> None:
        with self._state.lock:
            self._uplink.propose(message.proposal)

    def _status(self, message: messages.AskStatus) -> StatusReply:
        found = status.report(
            self._state,
            self._events,
            leader=self._uplink.leader,
            pids=self._trainers.ranks,
            started_s=self._started_s,
        )
        return StatusReply(id=message.id, status=msgspec.Raw(msgspec.msgpack.encode(found)))

    # --- the end

    def _end(self) -> None:
        self._obtainer.stop()
        self._uplink.stop()
        self._replicator.stop()
        self._persister.stop()
        self._committer.stop()
        self._sealer.stop()
        self._state.arena.close()
        logger.info("keeper ends")


def become_keeper(place: Place) -> int | None:
    """The keeper lock, held for life; None if another keeper has it."""
    place.make()
    return take_lock(place.keeper_lock, blocking=False)


def clean(place: Place) -> None:
    """Removes the node's directory, and the job's and the runtime's if they are empty. Under the keeper lock."""
    place.socket.unlink(missing_ok=True)
    shutil.rmtree(place.directory, ignore_errors=True)
    for directory in (place.directory.parent, place.runtime):
        try:
            directory.rmdir()
        except OSError:
            return  # another node's or job's keeper is there


def _done(message: Message, _: None) -> Ok:
    return Ok(id=message.id)
