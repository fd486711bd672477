"""Copies of durable versions at further places (`save(also_to=...)`): one worker for each place, so that none waits for another.

Rank 0 of a job has this. While a copy waits for its turn or runs, the version is held at its own place (`tiers.storage.version_marks`): the
caller sees to that with `hold` and `release`, because it knows when all places are done. A place that is slower than the
saves for it gets the newest: at most MAX_WAITING versions wait for it, since what waits takes space at its own place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.base.errors import HoldfastError, LevelNotReached
from holdfast.base.progress_report import progress_text
from holdfast.core.model import Version
from holdfast.tiers.storage.copy_version import duplicate
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.version_store import Storage

logger = logging.getLogger(__name__)

MAX_WAITING = 8
JOIN_TIMEOUT_S = 1.0
LEFT = "the job left before it was copied"


@dataclass(slots=True)
class PlaceCopy:
    """One version on its way to one place.

    Attributes:
        ended: it is there, or will not be: then `why` says why not.
    """

    version: Version
    place: str
    ended: bool = False
    why: str = ""
    started_s: float = 0.0
    done_bytes: int = 0
    total_bytes: int = 0

    def end(self, why: str = "") -> None:
        """The first end counts."""
        if not self.ended:
            self.why, self.ended = why, True

    @property
    def text(self) -> str:
        """Return how far it is, in words."""
        if not self.started_s:
            return "waits for its turn"
        return progress_text(self.done_bytes, self.total_bytes, time.monotonic() - self.started_s)


class ExtraPlaces:
    """Copies versions to further places.

    Args:
        source: where the versions are durable.
        open_place: gives the storage of a place.
        incarnation: the one that runs; whose process this is stands in the marks of what it holds.
    """

    def __init__(self, source: Storage, open_place: Callable[[str], Storage], incarnation: int) -> None:
        self._source = source
        self._open_place = open_place
        self.stamp = make_stamp(incarnation)
        self._waiting: dict[str, deque[PlaceCopy]] = {}
        self._workers: list[threading.Thread] = []
        self._lock = threading.RLock()  # taken in one step of the interpreter, which no handler comes between
        self._changed = threading.Condition(self._lock)
        self._closed = False

    def restarted(self, incarnation: int) -> None:
        """Another incarnation runs in this process: marks of the one before count no more, and are to be made again."""
        self.stamp = make_stamp(incarnation)

    def hold(self, version: Version, old_stamp: str) -> str:
        """Holds the version and ends its hold with an older stamp; returns the stamp that it is held with.

        Raises:
            HoldfastError: the path refuses.
        """
        stamp = self.stamp
        self._source.marks.hold(version, stamp)
        if old_stamp:
            self._source.marks.release(version, old_stamp)
        return stamp

    def release(self, version: Version, stamp: str) -> None:
        """Ends the hold; if that fails, it ends with this process."""
        try:
            self._source.marks.release(version, stamp)
        except HoldfastError as error:
            logger.warning("%s stays held until another incarnation runs: %s", version, error)

    def start(self, version: Version, place: str) -> PlaceCopy:
        """A version that is durable is wanted at a place; returns at once."""
        copy = PlaceCopy(version, place)
        with self._lock:
            if self._closed:
                copy.end(LEFT)
                return copy
            if place not in self._waiting:
                self._waiting[place] = deque()
                name = f"holdfast copies to place {len(self._waiting)}"
                self._workers.append(threading.Thread(target=self._work, args=(place,), name=name, daemon=True))
                self._workers[-1].start()
            waiting = self._waiting[place]
            waiting.append(copy)
            if len(waiting) > MAX_WAITING:
                waiting.popleft().end(
                    f"{MAX_WAITING} newer versions wait for it: copies take longer than the saves between"
                )
            self._changed.notify_all()
        return copy

    def close(self) -> None:
        """Nothing more is copied; a copy that runs ends with the file that it reads or writes, which is not waited for long."""
        with self._lock:
            self._closed = True
            for waiting in self._waiting.values():
                while waiting:
                    waiting.popleft().end(LEFT)
            self._changed.notify_all()
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _work(self, place: str) -> None:
        while True:
            with self._lock:
                while not self._waiting[place] and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                copy = self._waiting[place].popleft()
            self._copy(copy)

    def _copy(self, copy: PlaceCopy) -> None:
        def progress(done: int, total: int) -> None:
            copy.done_bytes, copy.total_bytes = done, total
            if self._closed:
                raise LevelNotReached(f"{LEFT}: {copy.text}")

        copy.started_s = time.monotonic()
        try:
            duplicate(self._source, self._open_place(copy.place), copy.version, progress)
        except HoldfastError as error:
            copy.end(str(error))
        except Exception as error:  # the thread of the next copies
            logger.exception("copying %s to %s failed", copy.version, copy.place)
            copy.end(f"{type(error).__name__}: {error}")
        else:
            logger.info("%s is at %s too", copy.version, copy.place)
            copy.end()
