"""A thread with a bounded queue of jobs: sealing, persisting, committing, pulling replicas.

The owner creates it, puts jobs, and stops it; stopping lets the job in hand finish and drops the rest. The thread
begins with the first job: what a job never needs (replicas on one node, say) costs nothing. A job that
fails must have handled its own errors: whatever still comes out is a bug here, is logged, and told to the owner.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0

J = TypeVar("J")


class Worker(Generic[J]):
    """One thread that does `work(job)` for every job, in order.

    Args:
        work: does one job.
        on_fault: told of an exception that `work` let through.
        on_idle: called when nothing is left to do.
        niceness: of the thread, as the scheduler knows it.
        bound: most jobs that may wait.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[J], None],
        on_fault: Callable[[str], None],
        *,
        on_idle: Callable[[], None] | None = None,
        niceness: int = 10,
        bound: int = 256,
    ) -> None:
        self._name = name
        self._work = work
        self._on_fault = on_fault
        self._on_idle = on_idle
        self._bound = bound
        self._niceness = niceness
        self._jobs: deque[J] = deque()
        self._busy = False
        self._stopping = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Return whether nothing waits and nothing is being done."""
        with self._changed:
            return not self._busy and not self._jobs

    @property
    def is_last(self) -> bool:
        """Return whether no job waits behind the one that is being done."""
        with self._changed:
            return not self._jobs

    @property
    def waiting(self) -> tuple[J, ...]:
        """Return the jobs that wait behind the one that is being done."""
        with self._changed:
            return tuple(self._jobs)

    @property
    def stopping(self) -> bool:
        """Return whether `stop` was called; long jobs look at it between their parts."""
        return self._stopping

    def put(self, job: J) -> bool:
        """Adds a job; False if the queue is full or the worker stops."""
        with self._changed:
            if self._stopping or len(self._jobs) >= self._bound:
                return False
            self._add(job)
            return True

    def clear(self) -> list[J]:
        """Drops all that wait, and returns them; the one in hand goes on."""
        with self._changed:
            dropped = list(self._jobs)
            self._jobs.clear()
            return dropped

    def replace(self, job: J) -> list[J]:
        """Adds a job in place of all that wait; returns those. Newest wins."""
        with self._changed:
            dropped = list(self._jobs)
            self._jobs.clear()
            if not self._stopping:
                self._add(job)
            return dropped

    def _add(self, job: J) -> None:
        """Under the lock."""
        self._jobs.append(job)
        self._changed.notify()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def stop(self, timeout_s: float = JOIN_TIMEOUT_S) -> bool:
        """Ends the thread; False if the job in hand did not end in time (the thread dies with the process)."""
        with self._changed:
            self._stopping = True
            self._jobs.clear()
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        # A worker has time; the trainers beside it have not.
        thread = threading.get_native_id()
        nice = max(self._niceness, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, nice)
        while (job := self._next()) is not None:
            try:
                self._work(job[0])
            except Exception as error:
                logger.exception("%s failed", self._name)
                self._on_fault(f"{self._name} failed: {type(error).__name__}: {error}")
            with self._changed:
                self._busy = False
            if self._on_idle is not None and self.idle:
                self._on_idle()

    def _next(self) -> tuple[J] | None:
        with self._changed:
            while not self._jobs and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            self._busy = True
            return (self._jobs.popleft(),)


class HasWorker:
    """Has one worker for its jobs."""

    _worker: Worker[Any]

    @property
    def idle(self) -> bool:
        """Return whether nothing waits and nothing is being done."""
        return self._worker.idle

    def stop(self) -> None:
        """Ends the worker."""
        self._worker.stop()
