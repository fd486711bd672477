"""Trying again what may pass by itself: the one retry loop around a backend.

Only StorageBusy is tried again, because only an object store says it, and only its verbs are safe to repeat after an
error: on a file system an error of fsync must never be followed by another try on the same file (see `files`). Attempts
and time are bounded; pauses double, with jitter so that a thousand nodes do not come back in step.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.base.errors import StorageBusy
from holdfast.tiers.backends.interface import Backend, Properties

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Policy:
    """Says how often and how long.

    Attributes:
        attempts: at most, the first included.
        first_pause_s: before the second attempt; doubled each time.
        max_pause_s: no pause is longer.
        total_s: after this no attempt is begun.
    """

    attempts: int = 6
    first_pause_s: float = 0.2
    max_pause_s: float = 5.0
    total_s: float = 120.0

    def pause_s(self, failures: int, jitter: float) -> float:
        """Return how long to wait after so many failures; `jitter` is 0 to 1."""
        return min(self.max_pause_s, self.first_pause_s * 2.0 ** (failures - 1)) * (0.5 + jitter / 2)


class Retrying:
    """A backend that tries again. Any thread may call it.

    Args:
        inner: what is called.
        policy: how often.
        sleep: waits so many seconds; a test passes its own.
    """

    def __init__(self, inner: Backend, policy: Policy = Policy(), *, sleep: Callable[[float], None] = time.sleep):
        self._inner = inner
        self._policy = policy
        self._sleep = sleep

    @property
    def properties(self) -> Properties:
        """Those of what is wrapped."""
        return self._inner.properties

    def prepare(self) -> None:
        """See Backend."""
        self._again(self._inner.prepare)

    def put(
        self,
        name: str,
        chunks: Iterable[memoryview],
        *,
        stamp: str,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """See Backend."""
        self._again(lambda: self._inner.put(name, chunks, stamp=stamp, progress=progress))

    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        """See Backend. After a lost reply the answer is False, "the same was there before": both mean success."""
        return self._again(lambda: self._inner.create(name, data, stamp=stamp))

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """See Backend."""
        return self._again(lambda: self._inner.read(name, offset=offset, length=length))

    def read_into(self, name: str, view: memoryview, *, offset: int = 0) -> int:
        """See Backend."""
        return self._again(lambda: self._inner.read_into(name, view, offset=offset))

    def listing(self, directory: str) -> list[tuple[str, int]]:
        """See Backend."""
        return self._again(lambda: self._inner.listing(directory))

    def delete(self, *names: str) -> None:
        """See Backend."""
        self._again(lambda: self._inner.delete(*names))

    def _again(self, verb: Callable[[], T]) -> T:
        started, failures = time.monotonic(), 0
        while True:
            try:
                return verb()
            except StorageBusy as error:
                failures += 1
                spent = time.monotonic() - started
                if failures >= self._policy.attempts or spent >= self._policy.total_s:
                    remedy = f"{error.remedy} (given up after {failures} attempts in {spent:.1f} s)"
                    raise StorageBusy(error.what, where=error.where, remedy=remedy) from error
                logger.info("attempt %d: %s", failures, error.what)
            self._sleep(self._policy.pause_s(failures, random.random()))
