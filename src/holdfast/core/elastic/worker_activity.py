"""Signs of life of a silent worker, and when each was seen last: computing, waking, moving bytes or memory. Pure.

Two looks are compared at most `WINDOW_S` apart, so that what a worker did an hour ago excuses nothing, and a slow trickle
is not lost between looks. Below the thresholds a process is quiet: some libraries keep threads that wake now and then.
"""

from __future__ import annotations

import math

from holdfast.core.elastic.worker_facts import WorkerSample

WINDOW_S = 10.0
# Processor time: a share, and what a look from outside costs. Waking: as often as a wait with a timeout does.
QUIET_SHARE, QUIET_S = 0.02, 0.1
QUIET_WAKES_HZ, QUIET_WAKES = 1.5, 3
# Bytes: a thread that reports figures of the machine now and then is no work.
QUIET_BYTES, QUIET_BYTES_HZ = 32 << 10, 1 << 10
QUIET_MEMORY_BYTES = 8 << 20
# Ready for so much of the time and not let run: whatever it does, it is not at rest.
STARVED_SHARE, STARVED_S = 0.5, 1.0


class Activity:
    """One worker's since its last sign of progress. Times are of the clock that `take` is given.

    Attributes:
        moved_s: when anything was seen last.
        transferred_s: when bytes or memory moved last.
        main_s, threads_s: when its main thread, or all its threads, were seen to compute last; long ago, if never.
        helpers_s: the same of its other threads and its descendants. A main thread that wakes often to look whether they are
            ready does not compute.
    """

    def __init__(self, now_s: float) -> None:
        self.moved_s = self.transferred_s = now_s
        self.main_s = self.threads_s = self.helpers_s = -math.inf
        self._from: WorkerSample | None = None  # of what computes and wakes
        self._from_s = now_s
        self._bytes: WorkerSample | None = (
            None  # of what moves bytes, which may come slowly beside quick signs of the other kind
        )
        self._bytes_s = now_s
        self._helpers: WorkerSample | None = None  # the same of those that compute slowly
        self._helpers_at_s = now_s

    def take(self, sight: WorkerSample, now_s: float) -> None:
        """Compares with an earlier look. A sight without anything of the kernel is no look."""
        if not sight.busy_s and not sight.wakes:
            return
        if self._from is None or self._bytes is None or self._helpers is None:
            self._from = self._bytes = self._helpers = sight
            self._from_s = self._bytes_s = self._helpers_at_s = now_s
            return
        if helped := _helped(self._helpers, sight, now_s - self._helpers_at_s):
            self.helpers_s = now_s
        if helped or now_s - self._helpers_at_s >= WINDOW_S:
            self._helpers, self._helpers_at_s = sight, now_s
        if (
            transferred := _transferred(self._bytes, sight, now_s - self._bytes_s)
        ) or now_s - self._bytes_s >= WINDOW_S:
            self._bytes, self._bytes_s = sight, now_s
        if transferred:
            self.transferred_s = self.moved_s = now_s
        if (computed := self._computed(self._from, sight, now_s)) or now_s - self._from_s >= WINDOW_S:
            self._from, self._from_s = sight, now_s
        if computed:
            self.moved_s = now_s

    def slept(self, seconds: float) -> None:
        """The watcher itself did not run for so long: that time does not count."""
        self.moved_s += seconds
        self.transferred_s += seconds
        self.main_s += seconds
        self.threads_s += seconds
        self.helpers_s += seconds
        self._helpers_at_s += seconds
        self._from_s += seconds
        self._bytes_s += seconds

    def _computed(self, before: WorkerSample, now: WorkerSample, now_s: float) -> bool:
        """Return whether anything computes, wakes, or is kept from it."""
        elapsed = now_s - self._from_s
        noise = _noise_s(elapsed)
        if main := now.busy_s - before.busy_s > noise:
            self.main_s = now_s
        if threads := now.spent_s - before.spent_s > noise:
            self.threads_s = now_s
        family = abs(now.family_s - before.family_s) > noise  # it falls when a child ends that nobody awaits
        woke = now.wakes - before.wakes > QUIET_WAKES + QUIET_WAKES_HZ * elapsed
        if woke and now_s - self.helpers_s > WINDOW_S:
            self.main_s = now_s
        starved = elapsed >= STARVED_S and now.starved_s - before.starved_s > STARVED_SHARE * elapsed
        return main or threads or family or woke or starved


def _noise_s(elapsed: float) -> float:
    return max(QUIET_S, QUIET_SHARE * elapsed)


def _helped(before: WorkerSample, now: WorkerSample, elapsed: float) -> bool:
    others = (now.spent_s - now.busy_s) - (before.spent_s - before.busy_s)
    return max(others, now.family_s - before.family_s) > _noise_s(elapsed)


def _transferred(before: WorkerSample, now: WorkerSample, elapsed: float) -> bool:
    allowed = QUIET_BYTES + QUIET_BYTES_HZ * elapsed
    sockets = (now.socket_bytes or 0) - (before.socket_bytes or 0)
    known = now.socket_bytes is not None and before.socket_bytes is not None
    grown = abs(now.memory_bytes - before.memory_bytes)
    return (
        now.file_bytes - before.file_bytes > allowed or (known and abs(sockets) > allowed) or grown > QUIET_MEMORY_BYTES
    )
