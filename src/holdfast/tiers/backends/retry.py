"""Trying again what may pass by itself: the one retry loop around a backend.

Only StorageBusy is tried again, because only an object store says it, and only its verbs are safe to repeat after an
error: on a file system an error of fsync must never be followed by another try on the same file (see `posix_io`). Attempts
and time are bounded; pauses double, with jitter so that a thousand nodes do not come back in step.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.base.errors import StorageBusy
from holdfast.tiers.backends.interface import Backend, Wrapper

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


class Retrying(Wrapper):
    """A backend that tries again. Any thread may call it.

    After a lost reply `create` answers False, "the same was there before", which means success too.

    Args:
        policy: how often.
        sleep: waits so many seconds; a test passes its own.
    """

    def __init__(self, inner: Backend, policy: Policy = Policy(), *, sleep: Callable[[float], None] = time.sleep):
        super().__init__(inner)
        self._policy = policy
        self._sleep = sleep

    def _call(self, verb: Callable[[], T]) -> T:
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
