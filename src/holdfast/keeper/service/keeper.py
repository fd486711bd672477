"""The keeper: one light process per job and node that owns the slots and outlives the trainers.

Puts the parts together, decides who may say what (roles), and when to end: when all local ranks finished and nothing
is left to persist, or some time after the last trainer left. It leaves nothing behind: socket, locks, log and
directory go, in that order, under the lock that made it the keeper.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.errors import InUse, KeeperError
from holdfast.base.events import Events, Handler
from holdfast.core.model import Version
from holdfast.keeper.coordination.coordinator import Coordinator
from holdfast.keeper.coordination.coordinator_client import CoordinatorClient
from holdfast.keeper.fetch.fetch_bundles import BundleFetcher
from holdfast.keeper.fetch.fetch_chunks import ChunkFetcher
from holdfast.keeper.fetch.prefetch import Preloader
from holdfast.keeper.fetch.streaming_relay import IncomingBundles, RelayRequests
from holdfast.keeper.observe import degraded_notice, keeper_status
from holdfast.keeper.observe.metrics import render
from holdfast.keeper.observe.metrics_port import MetricsPort
from holdfast.keeper.observe.run_summary import NAME as JOURNAL
from holdfast.keeper.observe.run_summary import RunFacts
from holdfast.keeper.replication.parity_builder import ParityBuilder
from holdfast.keeper.replication.rate_limit import Pace
from holdfast.keeper.replication.replicator import Replicator
from holdfast.keeper.rpc.listener import Network, open_door
from holdfast.keeper.rpc.messages import (
    KEEPER,
    OPERATOR,
    RANK,
    VIEWER,
    AnyMessage,
    Hello,
    Message,
    Welcome,
)
from holdfast.keeper.rpc.paths import RuntimePaths
from holdfast.keeper.rpc.server import Connection, Server
from holdfast.keeper.service.dispatch import Operations, Parts, Reply, require_role
from holdfast.keeper.service.job_change import JobChange, KeeperWorkers
from holdfast.keeper.service.peer_requests import PeerRequests
from holdfast.keeper.service.save_requests import SaveRequests
from holdfast.keeper.slots.idle_windows import Windows
from holdfast.keeper.slots.keeper_state import NodeState, StateCallbacks
from holdfast.keeper.slots.node_report import descent
from holdfast.keeper.slots.progress import Activities
from holdfast.keeper.slots.sealer import Sealer
from holdfast.keeper.slots.sessions import Trainer, Trainers
from holdfast.keeper.slots.slot_allocation import SlotAllocator
from holdfast.keeper.slots.slot_pool import SlotPool
from holdfast.keeper.slots.twin_diff import TwinExaminer
from holdfast.keeper.storage.lazy_storage import LazyStorage
from holdfast.keeper.storage.superseded_watch import SupersededWatch
from holdfast.keeper.storage.writer import Committer, Persister
from holdfast.keeper.storage.writer_failover import WriteAttempt, WriterFailover
from holdfast.tiers.memory.memory_budget import Budget
from holdfast.tiers.storage.encryption import KeySource

logger = logging.getLogger(__name__)

TICK_S = 0.5
# How long a keeper whose ranks finished waits for other nodes to complete a version that it wrote a part of.
COMMIT_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """Says what a keeper is started with.

    Attributes:
        root: checkpoint URL or absolute path.
        memory_budget: as in Config.
        linger_s: how long it waits for a trainer before it ends.
        network: how it talks to other nodes.
        encryption: where the key of bundle files comes from.
        metrics_port: as in Config.
        run_id: as in Config; names the journal of this node's launcher.
    """

    place: RuntimePaths
    root: str
    memory_budget: str
    linger_s: float
    network: Network = field(default_factory=Network)
    encryption: KeySource = field(default_factory=KeySource)
    metrics_port: int = 0
    run_id: str = "default"


class Keeper:
    """The process. Create it while holding the keeper lock, call `run`, then `clean`."""

    def __init__(self, options: KeeperOptions) -> None:
        self._options = options
        self._started_s = time.monotonic()
        self._finished_s = 0.0
        self._events = Events()
        place = options.place
        self._state = NodeState(place, SlotPool(Budget(place.budget, options.memory_budget)))
        lazy_storage = LazyStorage(options.root, self._events, encryption=options.encryption)
        self._examiner = TwinExaminer(self._state)
        self._activities = Activities(self._state)
        self._run_facts = RunFacts(place.runtime / f"run-{options.run_id}-{place.node}" / JOURNAL, options.root)
        incoming = IncomingBundles()
        self._trainers = Trainers(self._state, self._forget)
        reserve = SlotAllocator(self._state, self._trainers)
        self._bundle_fetcher = BundleFetcher(self._state, lazy_storage, self._activities, incoming, reserve.await_slot)
        self._failover = WriterFailover(self._state, self._events, self._write)
        self._persister = Persister(self._state, lazy_storage, self._events, self._activities, self._failover)
        self._pieces = ChunkFetcher(self._state, lazy_storage, self._events, self._activities)
        self._committer = Committer(self._state, lazy_storage, self._events)
        self._superseded = SupersededWatch(self._state, lazy_storage)
        self._replicator = Replicator(self._state, self._events, lambda: self._peers.inventory(wide=True))
        self._parity = ParityBuilder(self._state, self._events, self._replicator)
        trainers = self._trainers
        self._hashing, self._sending = (
            Windows(trainers.shown, trainers.listen, self._is_wanted, trainers.stay) for _ in range(2)
        )
        self._sealer = Sealer(self._state, self._events, self._hashing)
        self._saving = SaveRequests(self._state, self._trainers, self._sealer, self._failover)
        self._coordinator_client = CoordinatorClient(
            self._state, lambda assembly: Coordinator(self._state, self._committer, assembly)
        )
        pace = Pace(options.network.bandwidth)
        self._peers = PeerRequests(self._state, lambda: self._coordinator_client.coordinator, pace, self._sending)
        self._state.guard.rate = self._peers.rate
        self._preloader = Preloader(self._state, lazy_storage, self._activities, self._peers.survey)
        self._operations = self._connected(lazy_storage, reserve, incoming)
        place.socket.unlink(missing_ok=True)  # of a keeper that was killed; we hold the lock, so nobody listens there
        self._door = open_door(options.network, place)
        self._state.security = self._door.credentials if self._door else None
        self._server = Server(place.socket, self, self._door)

    def _connected(self, lazy_storage: LazyStorage, reserve: SlotAllocator, incoming: IncomingBundles) -> Operations:
        """Tells the state who carries out what follows from a fact; returns what clients may ask of the parts."""
        self._state.callbacks = StateCallbacks(
            report=self._coordinator_client.report,
            push=self._trainers.push,
            replicate=self._replicate,
            writing=self._failover.hear,
            began=self._failover.begin,
            examine=self._examiner.put,
            follow=self._coordinator_client.follow,
            changed=self._wake,
        )
        return Operations(
            Parts(
                state=self._state,
                lazy_storage=lazy_storage,
                job_change=JobChange(self._state, self._trainers, self._works(lazy_storage)),
                trainers=self._trainers,
                reserve=reserve,
                saving=self._saving,
                bundle_fetcher=self._bundle_fetcher,
                pieces=self._pieces,
                incoming=RelayRequests(self._state, incoming),
                peers=self._peers,
                coordinator_client=self._coordinator_client,
                refill=self._refill,
                preloader=self._preloader,
                status=self._status,
            )
        )

    def observe(self, handler: Handler) -> None:
        """Calls `handler` for everything that happens here from now on."""
        self._events.subscribe(handler)

    def run(self, ready: Callable[[], object]) -> None:
        """Serves until the job is over, nobody comes any more, or `stop`."""
        metrics = self._serve_metrics()
        ready()
        logger.info("keeper of %s for job %s listens", self._options.place.node, self._options.place.job)
        try:
            self._server.serve()
        finally:
            if metrics is not None:
                metrics.stop()
            self._end()

    def _serve_metrics(self) -> MetricsPort | None:
        """The port for Prometheus, if it is asked for. One that cannot be had is an alarm, and stops nothing."""
        port = self._options.metrics_port
        try:
            return MetricsPort(port, lambda: render([self._status()])) if port else None
        except OSError as error:
            self._state.alarms.warn("metrics", f"port {port} for metrics cannot be had: {error.strerror}")
            return None

    def stop(self) -> None:
        """Ends `run`; any thread or signal handler."""
        self._trainers.ending = True
        self._server.stop()

    def _works(self, lazy_storage: LazyStorage) -> KeeperWorkers:
        """Return what has to end, and what has to be forgotten, before this keeper serves another job."""
        workers = (self._sealer, self._examiner, self._persister, self._committer, self._replicator, self._parity)
        return KeeperWorkers(
            leave=(self._coordinator_client.leave, self._peers.leave, *(worker.leave for worker in workers)),
            idle=lambda: all(worker.idle for worker in workers),
            forget=(lazy_storage.forget, self._replicator.leave, self._state.forget_job),
        )

    def _replicate(self, version: Version) -> None:
        """A version was captured: what this node keeps for others is made. Under the state's lock."""
        self._replicator.put(version)
        self._parity.put(version)

    def _refill(self, version: Version) -> None:
        """All ranks resumed from `version`: what was lost of it is made again."""
        self._replicator.refill(version)
        self._parity.refill(version)

    def _write(self, writing: WriteAttempt) -> None:
        self._persister.put(writing)

    # --- the server's handler

    def greet(self, connection: Connection, hello: Hello) -> Message:
        """Lets a client in by its role."""
        if hello.job != self._options.place.job:
            raise InUse(f"this keeper belongs to job {self._options.place.job}, not {hello.job[:64]}")
        require_role(hello.role, connection.channel.principal, has_secret=self._door is not None)
        self._trainers.require_open()
        if hello.role == RANK and hello.rank >= 0:
            self._trainers.attach(connection, hello)
        elif hello.role == KEEPER:
            self._peers.attach(connection, hello)
        elif hello.role in (VIEWER, OPERATOR):
            connection.hello = hello
        else:
            raise KeeperError(f"{hello.role[:64]!r} is not a role")
        place, (job_id, lineage) = self._options.place, descent(self._state)
        return Welcome(
            node=place.node,
            pid=os.getpid(),
            incarnation=self._state.incarnation,
            job_id=job_id,
            lineage=lineage,
            address=self._door.address if self._door else place.address,
        )

    def handle(self, connection: Connection, message: AnyMessage, fds: list[int]) -> Reply:
        """Carries out what the client's role allows."""
        return self._operations.carry_out(connection, message, fds)

    def gone(self, connection: Connection) -> None:
        """A client left."""
        if connection.greeted.role == RANK:
            self._trainers.gone(connection)
        elif connection.greeted.role == KEEPER:
            self._peers.gone(connection)

    def tick(self) -> float:
        """Do what is due by the clock; return the seconds until the next look."""
        self._trainers.reap()
        self._peers.yield_slots(self._saving.starved())
        self._peers.give_sign()
        self._replicator.tick()
        self._parity.tick()
        with self._state.lock:
            self._failover.tick()
            if self._coordinator_client.coordinator is not None:
                self._coordinator_client.coordinator.tick()
        self._persister.tick()
        self._committer.tick()
        self._superseded.tick()
        next_s = self._saving.retry()
        if self._is_over():
            self._server.stop()
        return min(TICK_S, next_s)

    def _is_over(self) -> bool:
        state = self._state
        with state.lock:
            ranks = set(state.ledger.ranks) if state.ledger else set()
            busy = not (self._persister.idle and self._committer.idle and self._sealer.idle)
            if ranks and ranks <= state.finished and not busy:
                # What we wrote is worth nothing without the manifest, and the next coordinator asks us about it.
                now = time.monotonic()
                self._finished_s = self._finished_s or now
                committed = not state.awaits_commit() or now - self._finished_s > COMMIT_WAIT_S
                if committed and self._trainers.end(finished=True):
                    logger.info("all local ranks finished")
                    return True
            else:
                self._finished_s = 0.0
            alone_s = time.monotonic() - self._trainers.last_seen_s
            if alone_s >= self._options.linger_s and not busy and self._trainers.end(finished=False):
                logger.info("no trainer for %.0f s", alone_s)
                return True
        return False

    def _forget(self, trainer: Trainer) -> None:
        self._operations.forget(trainer)

    def _is_wanted(self, rank: int) -> bool:
        return self._saving.waits(rank)

    def _wake(self) -> None:
        """Something changed that a waiting save may have waited for."""
        self._saving.retry()
        self._server.wake()

    def _status(self) -> dict[str, Any]:
        sent = {
            "sent_bytes": self._peers.sent_bytes,
            "sent_shown_bytes": self._sending.shown_bytes,
            "sent_inside_bytes": self._sending.inside_bytes,
        }
        hashed = {"shown_bytes": self._hashing.shown_bytes, "inside_bytes": self._hashing.inside_bytes}
        with self._state.lock:
            preloaded, parity = self._preloader.facts(), self._parity.facts()
        return {
            "replication": self._replicator.facts() | sent,
            "parity": parity,
            "hashing": hashed,
            "preloaded": preloaded,
            "run": self._run_facts(),
        } | keeper_status.report(
            self._state,
            self._events,
            activities=self._activities,
            leader=self._coordinator_client.leader,
            trainers=self._trainers.connected,
            started_s=self._started_s,
        )

    # --- the end

    def _end(self) -> None:
        self._preloader.stop()
        self._bundle_fetcher.stop()
        self._pieces.stop()
        self._coordinator_client.stop()
        self._replicator.stop()
        self._parity.stop()
        self._persister.stop()
        self._committer.stop()
        self._superseded.stop()
        self._sealer.stop()
        self._examiner.stop()
        self._state.slot_pool.close()
        logger.info("keeper ends")


def become_keeper(place: RuntimePaths) -> int | None:
    """The keeper lock, held for life; None if another keeper has it."""
    lock = place.lock(place.keeper_lock, blocking=False)
    if lock is not None:
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())  # for people, and for whoever finds us frozen
    return lock


def clean(place: RuntimePaths) -> None:
    """Removes the node's directory, and the job's and the runtime's if they are empty. Under the keeper lock.

    The lock's file goes last: until then no other keeper can begin, so everything else here is ours. A directory that
    holds anything else stays.
    """
    degraded_notice.sweep(place)
    for file in (place.socket, place.port, place.log, place.start_lock, place.keeper_lock):
        file.unlink(missing_ok=True)
    for directory in (place.directory, place.directory.parent, place.runtime):
        try:
            directory.rmdir()
        except OSError:
            return  # another node's or job's keeper is there, or the next one of ours
