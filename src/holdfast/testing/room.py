"""Ranks as threads of one process: what needs ranks only to meet is run without a process group."""

from __future__ import annotations

import threading

import torch


class Room:
    """A room is where the ranks of a job meet.

    Args:
        timeout_s: how long they wait for each other.
    """

    def __init__(self, world_size: int, *, timeout_s: float = 10.0) -> None:
        self.world_size = world_size
        self._rows: list[bytes] = [b""] * world_size
        self._barrier = threading.Barrier(world_size, timeout=timeout_s)

    def rank(self, number: int) -> Rank:
        """The rank of this number, for the thread that is it."""
        return Rank(self, number)

    def meet(self, rank: int, data: bytes) -> list[bytes]:
        """Gathers as a collective does."""
        self._rows[rank] = data
        self._barrier.wait()
        rows = list(self._rows)
        self._barrier.wait()
        return rows


class Rank:
    """One rank; `checkpoint.job.collectives.Ranks`."""

    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.world_size, self._room = rank, room.world_size, room

    def gather(self, data: bytes) -> list[bytes]:
        return self._room.meet(self.rank, data)

    def give(self, data: bytes) -> bytes:
        return self.gather(data)[0]

    def send(self, data: torch.Tensor, to: int) -> None:
        """Nothing travels between two of them."""
        raise NotImplementedError("these ranks only gather")

    def receive(self, num_bytes: int, origin: int) -> torch.Tensor:
        """Nothing travels between two of them."""
        raise NotImplementedError("these ranks only gather")
