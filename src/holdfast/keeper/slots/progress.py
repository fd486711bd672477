"""Tells what a keeper is in the middle of, when it takes long: writing a version, fetching bundles, for a rank or
before one asks.

Told to the local trainers every two seconds while it lasts, and shown in the status. Each activity has one owner, which
counts bytes as they move; nothing waits for anything here but the state's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.base.progress_report import Meter
from holdfast.core.model import Version
from holdfast.keeper.rpc.messages import Working
from holdfast.keeper.slots.keeper_state import NodeState

WRITING = "writing"
RESTORING = "restoring"
PRELOADING = "preloading"


@dataclass(frozen=True, slots=True, eq=False)
class _Activity:
    what: str
    version: Version
    rank: int
    meter: Meter


class Activities:
    """The activities of one keeper."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._under_way: list[_Activity] = []

    @contextmanager
    def start(
        self, what: str, version: Version, total_bytes: int, *, rank: int = -1
    ) -> Iterator[Callable[[int], None]]:
        """Around the work; yields what to call with the bytes of each part that is done.

        Args:
            what: WRITING, RESTORING or PRELOADING.
            version: whose bytes move.
            total_bytes: all that are to move.
            rank: for whom; -1 for all.
        """

        def say(done_bytes: int, seconds: float) -> None:
            message = Working(
                what=what, version=version, rank=rank, done_bytes=done_bytes, total_bytes=total_bytes, seconds=seconds
            )
            with self._state.lock:
                self._state.callbacks.push(f"working {what} {rank}", message)

        activity = _Activity(what, version, rank, Meter(total_bytes, say))
        with self._state.lock:
            self._under_way.append(activity)
        try:
            yield activity.meter.add
        finally:
            with self._state.lock:
                self._under_way.remove(activity)

    def report(self) -> list[dict[str, Any]]:
        """Return the activities as the status shows them. Under the state's lock."""
        return [
            {
                "what": activity.what,
                "version": str(activity.version),
                "rank": activity.rank,
                "done_bytes": activity.meter.done_bytes,
                "total_bytes": activity.meter.total_bytes,
                "seconds": activity.meter.seconds,
            }
            for activity in self._under_way
        ]
