"""A bound on how many verbs of a backend run at once, so that a job of many bundles does not flood the store.

A wrapper: it waits for its turn and changes nothing else. The wait has a deadline, because a verb that hangs must not
hold all the others for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from holdfast.base.errors import StorageBusy
from holdfast.tiers.backends.interface import Backend, Wrapper

T = TypeVar("T")

TURN_TIMEOUT_S = 300.0


class Limited(Wrapper):
    """A backend of which at most `at_once` verbs run. Any thread may call it."""

    def __init__(self, inner: Backend, at_once: int, *, turn_timeout_s: float = TURN_TIMEOUT_S) -> None:
        super().__init__(inner)
        self._turns = threading.BoundedSemaphore(at_once)
        self._turn_timeout_s = turn_timeout_s

    def _call(self, verb: Callable[[], T]) -> T:
        if not self._turns.acquire(timeout=self._turn_timeout_s):
            raise StorageBusy("too many requests are under way and none of them ends", where=self.properties.where)
        try:
            return verb()
        finally:
            self._turns.release()
