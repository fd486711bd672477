"""The trainers of this node: which process is which rank, and what ends when one goes.

A rank is one living process. A second one is refused by name, after a bounded wait for a dying predecessor; a new
process of a dead rank takes its place, with the same slots. A trainer that dies leaves what it sealed; what it was
writing becomes empty, and that is announced. Once the keeper has decided to end nobody is let in: who comes then looks
for the next keeper instead of losing this one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.base.errors import InUse, KeeperError, KeeperLost
from holdfast.core.model import Version
from holdfast.core.pipeline.wait_forecast import Shown
from holdfast.core.recovery.version_choice import Source
from holdfast.keeper.rpc.messages import Hello, Message, Ok, ShowWaits
from holdfast.keeper.rpc.server import Connection
from holdfast.keeper.slots import cpu_affinity
from holdfast.keeper.slots.idle_windows import listen, look
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.tiers.memory.processes import has_ended, start_time

# How long a new trainer of a rank waits for the old one to be gone; a killed one frees its memory first.
PREDECESSOR_TIMEOUT_S = 5.0
# How often it is asked whether the processes live; the server wakes up far more often.
REAP_S = 0.2
# How long what a dead trainer said may lie unread on a busy machine. Its reader may as well be at work for it, for longer.
LAST_WORDS_S = 2.0
# What shows the waits of a rank: a page and its bell.
PAGE_FDS = 2


@dataclass(slots=True, eq=False)
class Trainer:
    """A connected rank.

    Attributes:
        started: when its process started; tells it from a later one with the same pid.
        reading: slots that are pinned because it restores from them, once per bundle.
        job_id: the job that it assembled; empty before.
        restored: of the version that it came back from, bytes of images and chunks by source.
        page: descriptors of the page that shows its waits and of its bell; (): there is none.
        finished: it said goodbye for good.
        died_s: when its process was found dead (`monotonic`); None while it lives.
    """

    rank: int
    connection: Connection
    started: int | None = None
    reading: list[HeldSlot] = field(default_factory=list)
    job_id: str = ""
    restored: tuple[Version, Counter[str]] | None = None
    page: tuple[int, ...] = ()
    finished: bool = False
    died_s: float | None = None

    @property
    def lives(self) -> bool:
        """Returns whether its process may. One of another pid namespace (no pid) lives as long as its connection."""
        return not has_ended(self.connection.pid, self.started)

    @property
    def process(self) -> str:
        """Return which process it is, in words."""
        pid = self.connection.pid
        return f"process {pid}" if pid > 0 else "a process of another pid namespace"

    def brought(self, version: Version, source: Source, num_bytes: int) -> None:
        """Bytes of `version` were made readable for it."""
        if self.restored is None or self.restored[0] != version:
            self.restored = (version, Counter())
        self.restored[1][source.name.lower()] += num_bytes


class Trainers:
    """The registry. Several threads, under the state's lock.

    Args:
        on_leave: called under the lock with a trainer that goes, before its slots are looked at.
    """

    def __init__(self, state: NodeState, on_leave: Callable[[Trainer], None]) -> None:
        self._state = state
        self._on_leave = on_leave
        self._came_or_went = threading.Condition(state.lock)
        self._trainers: dict[int, Trainer] = {}
        self.last_seen_s = time.monotonic()
        self.ending = False
        self._reap_at = 0.0

    def attach(self, connection: Connection, hello: Hello) -> None:
        """A trainer greets as a rank.

        Raises:
            InUse: another living process is that rank. KeeperLost: the keeper is on its way out.
        """
        deadline = time.monotonic() + PREDECESSOR_TIMEOUT_S
        with self._came_or_went:
            while (old := self._trainers.get(hello.rank)) is not None and not _same_process(old.connection, connection):
                left = deadline - time.monotonic()
                if left <= 0 and old.died_s is None:
                    raise InUse(
                        f"{old.process} is rank {hello.rank} of this job and lives",
                        where=f"node {self._state.place.node}",
                        remedy="stop it, or give this run another path or run id",
                    )
                self._came_or_went.wait(0.1)
            self.require_open()
            if old is not None:
                self._leave(old)
            connection.hello = hello
            self._trainers[hello.rank] = Trainer(hello.rank, connection, start_time(connection.pid))
            cpu_affinity.share(connection.pid)

    def require_open(self) -> None:
        """Refuse unless newcomers are let in.

        Raises:
            KeeperLost: the keeper is on its way out.
        """
        if self.ending:
            raise KeeperLost("this keeper is on its way out", where=f"node {self._state.place.node}")

    def finish(self, connection: Connection) -> int:
        """A rank said goodbye for good; which one."""
        trainer = self.of(connection)
        trainer.finished = True
        return trainer.rank

    def end(self, *, finished: bool) -> bool:
        """Lets nobody in from now on, unless somebody is here. Under the lock, so nobody slips in between.

        Args:
            finished: those that said goodbye for good do not count as being here.
        """
        self.ending = not [t for t in self._trainers.values() if not (finished and t.finished)]
        return self.ending

    def join(self, connection: Connection, job_id: str) -> None:
        """A rank says which job it belongs to."""
        with self._came_or_went:
            self.of(connection).job_id = job_id
            self._came_or_went.notify_all()

    def await_alone(self, job_id: str, timeout_s: float) -> None:
        """Waits until no trainer of another job is connected, as long as its processes may be dying.

        Raises:
            InUse: they live; names them.
        """
        deadline = time.monotonic() + timeout_s
        with self._came_or_went:
            while others := [t for t in self._trainers.values() if t.job_id not in ("", job_id)]:
                left = deadline - time.monotonic()
                if left <= 0:
                    names = ", ".join(f"{t.process} (rank {t.rank})" for t in others[:8])
                    raise InUse(
                        f"the checkpoint directory was replaced, but the job before still trains: {names}",
                        where=f"node {self._state.place.node}",
                        remedy="stop it, or give this run another path or run id",
                    )
                self._came_or_went.wait(min(left, 0.1))

    def show(self, connection: Connection, request: ShowWaits, fds: list[int]) -> Ok:
        """A rank shows its waits from now on."""
        if len(fds) != PAGE_FDS:
            raise KeeperError(f"a page and its bell were announced and {len(fds)} descriptors came")
        with self._state.lock:
            trainer = self.of(connection)
            _let_go(trainer)
            trainer.page = tuple(fds)
            fds.clear()
        return Ok(id=request.id)

    def shown(self, rank: int) -> Shown | None:
        """Return what a local rank shows of its waits; None if it shows none."""
        with self._state.lock:
            trainer = self._trainers.get(rank)
            return look(trainer.page[0]) if trainer is not None and trainer.page else None

    def listen(self, rank: int, timeout_s: float) -> None:
        """Sleeps until a wait of a local rank begins, its page is replaced or it goes, but no longer than this."""
        with self._state.lock:
            trainer = self._trainers.get(rank)
            if trainer is None or not trainer.page:
                return
            bell = os.dup(trainer.page[1])
        try:
            listen(bell, timeout_s)
        finally:
            os.close(bell)

    def stay(self, rank: int | None) -> None:
        """Keeps the calling thread on the processors of a local rank; None, or one that is gone: on all of the keeper's."""
        with self._state.lock:
            trainer = None if rank is None else self._trainers.get(rank)
        cpu_affinity.stay(trainer.connection.pid if trainer is not None else None)

    def gone(self, connection: Connection) -> None:
        """A trainer's connection ended."""
        with self._came_or_went:
            trainer = self._trainers.get(connection.greeted.rank)
            if trainer is not None and trainer.connection is connection:
                self._leave(trainer)

    def reap(self) -> None:
        """Cuts off trainers whose process is dead, for a child of theirs may hold the connection open.

        Who reads it hears the rest, then its end, and the trainer leaves by that; or after `LAST_WORDS_S`, when nobody read.
        """
        now = time.monotonic()
        if now < self._reap_at:
            return
        self._reap_at = now + REAP_S
        with self._state.lock:
            for trainer in [t for t in self._trainers.values() if not t.lives]:
                if trainer.died_s is None:
                    trainer.died_s = now
                    trainer.connection.channel.abort()
                if now - trainer.died_s >= LAST_WORDS_S:
                    self._leave(trainer)

    def has(self, trainer: Trainer) -> bool:
        """Return whether it is still here; its rank may be another process by now."""
        return self._trainers.get(trainer.rank) is trainer

    @property
    def connected(self) -> dict[int, Trainer]:
        with self._state.lock:
            return dict(self._trainers)

    def push(self, key: str, message: Message) -> None:
        """Send to all local trainers."""
        for trainer in self._trainers.values():
            trainer.connection.push(key, message)

    def _leave(self, trainer: Trainer) -> None:
        """Under the lock: what it was doing ends, what it sealed stays."""
        del self._trainers[trainer.rank]
        self.last_seen_s = time.monotonic()
        self._on_leave(trainer)
        for held in self._state.slot_pool.of_rank(trainer.rank):
            version = held.version
            if held.is_untouched and not held.pins and version is not None:
                held.clear()
                self._state.abandon(trainer.rank, version, "its process ended before the copy was complete")
        _let_go(trainer)
        trainer.connection.channel.abort()
        self._came_or_went.notify_all()
        self._state.callbacks.changed()

    def of(self, connection: Connection) -> Trainer:
        """The trainer at the other end; InUse if its rank is another process by now."""
        trainer = self._trainers.get(connection.greeted.rank)
        if trainer is None or trainer.connection is not connection:
            raise InUse(f"rank {connection.greeted.rank} is now another process")
        return trainer


def _let_go(trainer: Trainer) -> None:
    """Let go of its page. Under the lock."""
    for fd in trainer.page:
        os.close(fd)
    trainer.page = ()


def _same_process(one: Connection, other: Connection) -> bool:
    """Return whether a process connects again; not known, and so not believed, of those of another pid namespace (no
    pid).
    """
    return one.pid == other.pid > 0
