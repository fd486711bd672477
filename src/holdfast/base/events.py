"""Tells what happened, as facts: one call to emit, any number of handlers plugged in from above.

An event has a dotted name and plain fields (numbers, strings). Handlers are called in the thread that emits and must
be quick; one that fails is reported once and dropped, for an observer must never stop training. Counters are the sums
that tests and the status page read. There is one `Events` per process top (trainer, keeper, command), passed down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast.base.handler_errors import pass_on

logger = logging.getLogger(__name__)

Value = int | float | str | bool | None

# Every counter of the package with its help. The unit stands last in a name, or the counter counts occurrences.
COUNTERS = {
    "cache_read_bytes": "State that was read from the page cache, where another rank had read it from storage.",
    "copy_seconds": "Time in which a trainer copied state into its slot beside the training step.",
    "copy_seconds_in_waits": "The part of copy_seconds that fell into waits of a pipeline.",
    "saves_left_out": "Saves that were due and found no slot in time.",
    "fence_wait_seconds": "Time in which optimizer steps waited for a copy to end, or for a device before what it copied is compared.",
    "hash_kept_bytes": "State that did not change, and was in memory with its digests instead of being hashed again.",
    "hashed_bytes": "State that was hashed after a save to memory.",
    "late_copied_bytes": "State that was copied after a call to save had returned.",
    "parity_bytes": "Parity of the state of other nodes that was made in memory here.",
    "preloaded_bytes": "State that was read into memory before a rank asked for it.",
    "relay_fallbacks": "Bundles that another node was to pass on, and that were read from storage instead.",
    "relay_received_bytes": "State that another node read from storage and passed on.",
    "replica_kept_bytes": "State of other nodes that did not change, and was in memory here already instead of being sent again.",
    "replicated_bytes": "State of other nodes that was copied into memory here as replicas.",
    "save_seconds": "Time in calls to save.",
    "slot_copied_bytes": "State that was copied for saves to memory.",
    "slot_kept_bytes": "State that did not change, and lay where it was to be copied to.",
    "storage_linked_bytes": "State that was stored already, and was given a name in another version instead of being written.",
    "storage_read_bytes": "State that was read from storage.",
    "storage_record_read_bytes": "Manifests and other records that were read from storage.",
    "storage_written_bytes": "State that was written to storage.",
    "takeovers": "Times at which this node took over what another node was to write.",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One fact. `at_s` is monotonic seconds of this process, good for differences only."""

    name: str
    at_s: float
    fields: dict[str, Value] = field(default_factory=dict)


Handler = Callable[[Event], None]


class Events:
    """The events of one process: emit, count, subscribe."""

    def __init__(self) -> None:
        self._handlers: list[Handler] = []
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def subscribe(self, handler: Handler) -> None:
        """Calls `handler` for every later event."""
        with self._lock:
            self._handlers.append(handler)

    def emit(self, name: str, **fields: Value) -> None:
        """Reports a fact; also logged at DEBUG."""
        event = Event(name, time.monotonic(), fields)
        logger.debug("%s %s", name, fields)
        for handler in tuple(self._handlers):
            try:
                handler(event)
            except Exception as error:  # an observer must never stop training
                pass_on(error)
                logger.exception("event handler failed at %s and is dropped", name)
                with self._lock:
                    self._handlers = [h for h in self._handlers if h is not handler]

    def count(self, name: str, amount: float = 1) -> None:
        """Adds `amount` to a counter; `COUNTERS` lists its name and says what it counts."""
        with self._lock:  # no call within: a signal's handler would keep the lock, which other threads need
            self._counters[name] += amount

    def counters(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counters)

    @contextmanager
    def span(self, name: str, **fields: Value) -> Iterator[dict[str, Value]]:
        """Emits `name` with `seconds` at the end of the block; the yielded dict takes more fields."""
        extra: dict[str, Value] = dict(fields)
        started = time.perf_counter()
        try:
            yield extra
        finally:
            self.emit(name, seconds=time.perf_counter() - started, **extra)
