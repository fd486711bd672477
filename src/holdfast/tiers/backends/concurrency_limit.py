"""A bound on how many verbs of a backend run at once, so that a job of many bundles does not flood the store.

A wrapper: it waits for its turn and changes nothing else. The wait has a deadline, because a verb that hangs must not
hold all the others for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from holdfast.base.errors import StorageBusy
from holdfast.tiers.backends.interface import Backend, Properties

TURN_TIMEOUT_S = 300.0


class Limited:
    """A backend of which at most `at_once` verbs run. Any thread may call it."""

    def __init__(self, inner: Backend, at_once: int, *, turn_timeout_s: float = TURN_TIMEOUT_S) -> None:
        self._inner = inner
        self._turns = threading.BoundedSemaphore(at_once)
        self._turn_timeout_s = turn_timeout_s

    @property
    def properties(self) -> Properties:
        """Those of what is wrapped."""
        return self._inner.properties

    def prepare(self) -> None:
        """See Backend."""
        with self._turn():
            self._inner.prepare()

    def put(
        self,
        name: str,
        chunks: Iterable[memoryview],
        *,
        stamp: str,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """See Backend."""
        with self._turn():
            self._inner.put(name, chunks, stamp=stamp, progress=progress)

    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        """See Backend."""
        with self._turn():
            return self._inner.create(name, data, stamp=stamp)

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """See Backend."""
        with self._turn():
            return self._inner.read(name, offset=offset, length=length)

    def read_into(self, name: str, view: memoryview, *, offset: int = 0) -> int:
        """See Backend."""
        with self._turn():
            return self._inner.read_into(name, view, offset=offset)

    def listing(self, directory: str) -> list[tuple[str, int]]:
        """See Backend."""
        with self._turn():
            return self._inner.listing(directory)

    def delete(self, *names: str) -> None:
        """See Backend."""
        with self._turn():
            self._inner.delete(*names)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._turns.acquire(timeout=self._turn_timeout_s):
            raise StorageBusy("too many requests are under way and none of them ends", where=self.properties.where)
        try:
            yield
        finally:
            self._turns.release()
