"""Looks at the workers of one node ten to twenty times a second and says which are to be replaced. In the launcher.

Reads each worker's page (checkpoint.liveness.heartbeat_page) and, when it is silent, what the kernel says of it (elastic.watchdog.proc_stats); the verdict is
core.elastic.failure_detector', with the patience of a core.elastic.watch_mode. A worker that made no progress for half its limit gets the signal on
which its fault handler appends all stacks to its page: what they show is read by elastic.watchdog.stack_dump, and they go to a file for
people. No thread of the worker is needed for any of this, and none of ours is started: `poll` is called by whoever supervises.

Must never: kill (the caller does), block, send a signal that the worker does not handle, or raise.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from holdfast.base import private
from holdfast.base.config import Config
from holdfast.base.errors import ConfigError
from holdfast.checkpoint.liveness import heartbeat_page
from holdfast.core.elastic.failure_detector import Exit, Kind, Verdict, Watch, cause
from holdfast.core.elastic.watch_mode import CAREFUL, MODES, Mode
from holdfast.core.elastic.worker_facts import WorkerSample
from holdfast.elastic.watchdog import worker_interrupt
from holdfast.elastic.watchdog.proc_stats import ProcessSampler, oom_kills, vitals
from holdfast.elastic.watchdog.run_journal import Journal
from holdfast.elastic.watchdog.stack_dump import UNKNOWN, Stack, read_stack

logger = logging.getLogger(__name__)

# Below this a worker is not looked at more closely than its page.
CLOSER_AFTER_S = 0.4
# How often it is looked at through the kernel then.
CLOSER_EVERY_S = 0.2
# How often a worker that is to end, and cannot answer, is asked for its stacks.
ASK_AGAIN_S = 5.0
MAX_STACKS = 64
MAX_PLACES = 8


@dataclass(slots=True)
class _Worker:
    pid: int
    page_fd: int
    pidfd: int
    changes: int = -1
    since_s: float = 0.0
    asked: bool = False
    asked_s: float = -math.inf
    sight: WorkerSample | None = None
    looked_s: float = 0.0
    stack: Stack = UNKNOWN
    places: tuple[str, ...] = ()


def make_watch(settings: Config, options: argparse.Namespace) -> Watchdog | None:
    """The watchdog of this launcher; None if it is switched off."""
    mode = MODES.get(getattr(options, "watchdog", CAREFUL.name))
    return None if mode is None else Watchdog(directory_of(settings), mode)


def directory_of(settings: Config) -> Path:
    """Return where stacks and the journal of a run lie on this node."""
    return settings.runtime_path / f"run-{settings.run_id}-{settings.node}"


class Watchdog:
    """The watchdog of one launcher.

    Args:
        directory: for stack dumps and the journal; created when needed.
        mode: how patient it is.
    """

    def __init__(self, directory: Path, mode: Mode = CAREFUL) -> None:
        self.directory = directory
        self.journal = Journal(directory, mode.name)
        self._watch = Watch(mode)
        self._examiner = ProcessSampler()
        self._workers: dict[int, _Worker] = {}
        self._num_stacks = 0
        self._oom_kills = oom_kills()

    def started(self, rank: int, pid: int, page_fd: int) -> None:
        """A process has this rank from now on, or begins anew in it; what was known of the rank is forgotten.

        The page's descriptor stays the caller's; -1 says that there is no page, then only being stopped counts.
        """
        self.gone(rank)
        now = time.monotonic()
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # it ended already; the caller will see it
        self._workers[rank] = _Worker(pid, page_fd, pidfd, since_s=now)
        self._watch.started(rank, now)

    def gone(self, rank: int) -> None:
        """The rank has no process here now."""
        self._watch.gone(rank)
        worker = self._workers.pop(rank, None)
        if worker is not None:
            self._examiner.forget(worker.pid)
            os.close(worker.pidfd)

    def begin_round(self) -> None:
        """The ranks of this node may be others from now on: those that it had are not looked at until they start."""
        self._forget_all()
        self._watch.begin_round()

    def ended(self) -> None:
        """All workers have ended, and their pages are still open: the journal gets the last that they say."""
        self.journal.progress(time.monotonic(), self._workers_read(), always=True)
        self._forget_all()

    def close(self, code: int | None = None) -> None:
        """No more workers; the launcher's exit code goes into the journal."""
        self._forget_all()
        self.journal.close(code)

    def _forget_all(self) -> None:
        for rank in tuple(self._workers):
            self.gone(rank)

    def why_it_ended(self, code: int) -> str:
        """A phrase for a worker's exit; negative codes are signals."""
        kills = oom_kills()
        out_of_memory, self._oom_kills = kills > self._oom_kills and code == -signal.SIGKILL, kills
        return cause(Exit(code, out_of_memory))

    @property
    def stuck(self) -> bool:
        """Return whether all workers here have stood in collectives for long, at the last look."""
        return self._watch.stuck

    def poll(
        self,
        now: float,
        silent_nodes: Mapping[int, tuple[float, tuple[int, ...]]] | None = None,
        *,
        world_size: int | None = None,
        stuck_elsewhere: Sequence[int] = (),
        may_replace: bool = True,
        may_lose_node: bool = True,
    ) -> list[Verdict]:
        """Return what is to be done now; every order is given once, and its rank is not looked at any more until it
        starts again.

        Args:
            now: monotonic.
            silent_nodes: other nodes of which nothing is heard: (for how many seconds, their ranks).
            world_size: ranks of the job, if known.
            stuck_elsewhere: ranks of nodes whose watchdogs are `stuck`.
            may_replace: False: one more failure would end the job.
            may_lose_node: False: a lost node would.
        """
        sights = [self._look(rank, worker, now) for rank, worker in self._workers.items()]
        orders = []
        looked = self._watch.look(
            now, sights, silent_nodes,
            world_size=world_size, stuck_elsewhere=stuck_elsewhere, may_replace=may_replace,
            may_lose_node=may_lose_node,
        )  # fmt: skip
        for verdict in looked:
            if verdict.kind is Kind.LOOK:
                self._ask(verdict.rank)
            elif verdict.kind is Kind.WAIT:
                logger.info("%s", verdict.reason)
            elif verdict.kind is Kind.REPORT:
                logger.warning("watchdog: %s (%s)", verdict.reason, "; ".join(verdict.evidence))
                self.journal.report(verdict.ranks, verdict.reason)
            else:
                logger.warning("%s (%s)", verdict.reason, "; ".join(verdict.evidence))
                orders.append(verdict)
        for rank in (rank for order in orders if order.kind is not Kind.RESTART_ALL for rank in order.ranks):
            self.gone(rank)
        self.journal.progress(now, self._workers_read())
        return orders

    def why_hopeless(self, now: float, ranks: Sequence[int]) -> str:
        """Returns why none of these ranks will do anything any more, when their job was told to end; empty if one may.
        The ranks are those that have not ended.
        """
        for rank in ranks:
            self._ask_anew(rank, now)
        sights = [self._look(rank, worker, now) for rank, worker in self._workers.items() if rank in ranks]
        return self._watch.why_hopeless(now, sights) if len(sights) == len(ranks) else ""

    def _workers_read(self) -> dict[int, int]:
        return {rank: worker.page_fd for rank, worker in self._workers.items() if worker.page_fd >= 0}

    def _look(self, rank: int, worker: _Worker, now: float) -> WorkerSample:
        reading = (
            heartbeat_page.read(worker.page_fd)
            if worker.page_fd >= 0
            else heartbeat_page.Reading(bytes(heartbeat_page.PAGE_BYTES))
        )
        if reading.beat.changes != worker.changes:
            worker.changes, worker.since_s = reading.beat.changes, now
            worker.asked, worker.stack, worker.places, worker.sight = False, UNKNOWN, (), None
        if now - worker.since_s < CLOSER_AFTER_S:
            return WorkerSample(rank, reading.beat)
        if worker.asked:
            self._collect(rank, worker)
        if worker.sight is None or now - worker.looked_s >= CLOSER_EVERY_S:
            worker.sight, worker.looked_s = self._look_closer(rank, worker, reading, now), now
        waits_in = worker.stack.waits_in or worker.sight.waits_in
        call = "" if worker.stack.explained else worker.sight.call
        return replace(worker.sight, stands=worker.stack.stands, waits_in=waits_in, call=call, places=worker.places)

    def _look_closer(self, rank: int, worker: _Worker, reading: heartbeat_page.Reading, now: float) -> WorkerSample:
        beat, seen = reading.beat, self._examiner.look(worker.pid, now, ours=reading.dump_thread)
        if seen is None:
            return WorkerSample(rank, beat, state="Z")
        return WorkerSample(rank, beat, **asdict(seen))

    def _ask(self, rank: int) -> None:
        """Has the worker append its stacks, if it would survive the signal."""
        worker = self._workers.get(rank)
        if worker is None or worker.page_fd < 0:
            return
        reading = heartbeat_page.read(worker.page_fd)
        number = reading.dump_signal
        seen = vitals(worker.pid)
        if not number or seen is None or not seen.catches >> (number - 1) & 1:
            return
        if not heartbeat_page.is_dumped_to(worker.page_fd, worker.pid, reading.dump_fd):
            return  # the script has closed the descriptor, and its number may be a file of its own
        # No signal is to end the call in which the main thread waits. When it computes it answers itself: its frames change.
        if seen.state in "SD" and reading.dump_thread:
            worker.asked = worker_interrupt.signal_thread(worker.pid, reading.dump_thread, number)
            if worker.asked:
                return
        try:
            signal.pidfd_send_signal(worker.pidfd, number)
            worker.asked = True
        except OSError:
            logger.debug("rank %d ended before it could be asked for its stacks", rank)

    def _ask_anew(self, rank: int, now: float) -> None:
        """Stacks that are older than its last sign of life show where it was, not where it is."""
        worker = self._workers.get(rank)
        if worker is None:
            return
        if worker.asked_s < self._watch.moved_s(rank):
            worker.asked, worker.stack, worker.places = False, UNKNOWN, ()
        if not worker.asked and now - worker.asked_s > ASK_AGAIN_S and self._watch.is_at_rest(rank, now):
            worker.asked_s = now
            self._ask(rank)

    def _collect(self, rank: int, worker: _Worker) -> None:
        text = heartbeat_page.take_dump(worker.page_fd)
        if not text:
            return
        worker.stack = read_stack(text)
        worker.places = (*worker.places, worker.stack.place)[-MAX_PLACES:]
        if self._num_stacks >= MAX_STACKS:
            return
        self._keep(rank, worker.pid, text)

    def _keep(self, rank: int, pid: int, text: str) -> None:
        """Writes stacks into a file for people."""
        self._num_stacks += 1
        try:
            private.make(self.directory, below=self.directory.parent)
            name = f"stacks-rank{rank}-{pid}-{self._num_stacks}.txt"
            fd = private.open_in(self.directory, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
        except (OSError, ConfigError) as error:
            logger.warning("the stacks of rank %d could not be written: %s", rank, error)
        else:
            logger.info("the stacks of rank %d, which makes no progress, are in %s", rank, self.directory / name)
