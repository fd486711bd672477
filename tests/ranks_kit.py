"""Ranks as threads of the test: what only needs ranks to meet is tested without processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.base.errors import HoldfastError
from holdfast.checkpoint.job import collectives
from holdfast.testing.room import Room


def on_all(count: int, work: Callable[[collectives.Ranks], Any]) -> list[Any]:
    """What `work` returned or raised on every rank."""
    room = Room(count)

    def one(rank: int) -> Any:
        try:
            return work(room.rank(rank))
        except HoldfastError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
