"""Waiting together for what cannot be reached: a path that refuses for a while is no reason to decide without it.

Rank 0 asks; while the answer is an error that may pass by itself, all ranks pause and it asks again. So no rank stands in a
collective for longer than a pause and one attempt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from holdfast.base.errors import HoldfastError
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.collectives import Ranks

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 5.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[float, bytes])


class WaitLimit:
    """Knows how long something is waited for, from the first time that it is missed."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since_s: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def __str__(self) -> str:
        waited_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        return f"waited {waited_s:.0f} s of {self.limit_s:g} s"

    def pause(self, asked_s: float | None = None) -> float:
        """Returns the seconds to wait before it is asked for again; 0 if the time is over.

        Args:
            asked_s: when that was asked for which is missed, on the monotonic clock; now by default.
        """
        now = time.monotonic()
        first_s = now if asked_s is None else asked_s
        self._since_s = first_s if self._since_s is None else self._since_s
        left_s = self._since_s + self.limit_s - now
        pause_s, self._pause_s = min(self._pause_s, left_s), min(2 * self._pause_s, MAX_PAUSE_S)
        return max(0.0, pause_s)


def share(group: Ranks, make: Callable[[], bytes], patience: WaitLimit) -> bytes:
    """Returns what rank 0 makes, on all ranks; an error that may pass by itself is waited out. Collective.

    Raises:
        HoldfastError: of rank 0, raised by all: it cannot pass, or it lasted.
    """
    while True:
        pause_s, made = _decoder.decode(
            collectives.share(group, lambda: b"" if group.rank else _attempt(make, patience))
        )
        if not pause_s:
            return made
        time.sleep(pause_s)


def _attempt(make: Callable[[], bytes], patience: WaitLimit) -> bytes:
    asked_s = time.monotonic()
    try:
        return _encoder.encode((0.0, make()))
    except HoldfastError as error:
        pause_s = patience.pause(asked_s) if error.retryable and not error.condemns else 0.0
        if not pause_s:
            raise
        logger.warning("waiting: %s; %s", error, patience)
        return _encoder.encode((pause_s, b""))
