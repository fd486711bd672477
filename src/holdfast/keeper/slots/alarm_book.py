"""Keeps the alarms of one keeper: what an operator should know, until it is over.

Repetitions are counted. Whoever watches hears of each new text once, and the status page shows all, newest last. Held by the
keeper's state, under its lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.model import Version
from holdfast.keeper.rpc.messages import Alarm, Message

logger = logging.getLogger(__name__)

MAX_ALARMS = 64


@dataclass(frozen=True, slots=True)
class Warned:
    """An alarm and when it was last raised (monotonic seconds)."""

    text: str
    at_s: float
    count: int


class AlarmBook:
    """The alarms of one keeper.

    Args:
        push: tells all who watch, by the key of what is told.

    Attributes:
        raised: by key, newest last.
    """

    def __init__(self, lock: threading.RLock, push: Callable[[str, Message], None]) -> None:
        self._lock = lock
        self._push = push
        self.raised: OrderedDict[str, Warned] = OrderedDict()

    def warn(self, key: str, text: str) -> None:
        """Something an operator should know; repetitions of a key are counted, not piled up, nor logged."""
        with self._lock:
            before = self.raised.pop(key, None)
            self.raised[key] = Warned(text, time.monotonic(), before.count + 1 if before else 1)
            while len(self.raised) > MAX_ALARMS:
                self.raised.popitem(last=False)
            if before is None or before.text != text:
                logger.warning("%s: %s", key, text)
                self._push(f"alarm {key}", Alarm(key=key, text=text))

    def is_raised(self, key: str) -> bool:
        """Return whether an alarm of that key stands."""
        return key in self.raised

    def calm(self, key: str) -> None:
        """End an alarm: what it was about is over."""
        with self._lock:
            self.raised.pop(key, None)

    def quarantined(self, version: Version, bundle_id: str, place: str, reason: str) -> None:
        """Raises the alarm that a copy of a bundle is used no more; `place` is a node or storage."""
        text = f"{place}: the copy of bundle {bundle_id} of {version} is not used: {reason}"
        self.warn(f"quarantine {version} {bundle_id} {place}", text)
