"""Tells what happened, as facts: one call to emit, any number of handlers plugged in from above.

An event has a dotted name and plain fields (numbers, strings). Handlers are called in the thread that emits and must
be quick; one that fails is reported once and dropped, for an observer must never stop training. Counters are the sums
that tests and the status page read. There is one `Events` per process top (trainer, keeper, command), passed down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

Value = int | float | str | bool | None


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
        self._counters: dict[str, float] = {}
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
            except Exception:  # an observer must never stop training
                logger.exception("event handler failed at %s and is dropped", name)
                with self._lock:
                    self._handlers = [h for h in self._handlers if h is not handler]

    def count(self, name: str, amount: float = 1) -> None:
        """Adds `amount` to the counter `name` (unit last in the name: `storage_read_bytes`)."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def counters(self) -> dict[str, float]:
        """A copy of all counters."""
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
