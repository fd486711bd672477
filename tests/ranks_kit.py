"""Ranks as threads of the test: what only needs ranks to meet is tested without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.base.errors import HoldfastError
from holdfast.train import agree


class Room:
    """`gather` meets at a barrier, as a collective does."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._rows: list[bytes] = [b""] * world_size
        self._barrier = threading.Barrier(world_size, timeout=10)

    def meet(self, rank: int, data: bytes) -> list[bytes]:
        self._rows[rank] = data
        self._barrier.wait()
        rows = list(self._rows)
        self._barrier.wait()
        return rows


class Rank:
    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.world_size, self._room = rank, room.world_size, room

    def gather(self, data: bytes) -> list[bytes]:
        return self._room.meet(self.rank, data)


def on_all(count: int, work: Callable[[agree.Ranks], Any]) -> list[Any]:
    """What `work` returned or raised on every rank."""
    room = Room(count)

    def one(rank: int) -> Any:
        try:
            return work(Rank(room, rank))
        except HoldfastError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
