"""The page on which a trainer shows its waits, and the sender of replicas that keeps to them.

A page is a few bytes of shared memory without a name, one per rank of a pipeline. The trainer's thread writes it as a wait begins and
ends; the keeper looks at it between two blocks of what it sends from that rank's slots. Nobody is woken and nobody waits for a
lock: a page that was written half misplaces a block and nothing else. The keeper reads it as a file, so that an owner who shortens
it cannot end the keeper.

Without a page, and for whatever a trainer waits for, nothing is held back; with one, a transfer is held back for a step in all
at most (`core.windows.may_send`). Written by `train.gate`, read for `node.peers`.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.windows import Shown, may_send

PAGE_BYTES = 64
MAGIC = 0x48465731
# magic, whether a wait is under way, its number, until when it should last, seconds of a step
_LAYOUT = struct.Struct("<IIQdd")
# How often a shut page is looked at again.
LOOK_S = 0.002
# What a block is expected to take before one was sent.
FIRST_BLOCK_S = 0.0005


class WindowPage:
    """The trainer's side; its thread alone writes.

    Attributes:
        fd: the page, to be handed to the keeper; -1 once it is closed.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("holdfast-windows", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, PAGE_BYTES)
        self._map = mmap.mmap(self.fd, PAGE_BYTES)
        self._number = 0
        self._period = 0.0
        self.shut()

    def step(self, period_s: float) -> None:
        """How long a step takes; told to the keeper with the next wait."""
        self._period = period_s

    def open(self, until_s: float | None) -> None:
        """A wait began that should last until then (monotonic); None: nobody knows."""
        self._number += 1
        _LAYOUT.pack_into(self._map, 0, MAGIC, 1, self._number, math.inf if until_s is None else until_s, self._period)

    def shut(self) -> None:
        """The wait is over."""
        _LAYOUT.pack_into(self._map, 0, MAGIC, 0, self._number, 0.0, self._period)

    def close(self) -> None:
        """Lets go of the page; whoever reads it still sees a shut one that holds nothing back."""
        self._period = 0.0
        self.shut()
        self._map.close()
        os.close(self.fd)
        self.fd = -1


def look(fd: int) -> Shown | None:
    """What a page shows now; None if it is none."""
    try:
        content = os.pread(fd, _LAYOUT.size, 0)
    except OSError:
        return None
    if len(content) < _LAYOUT.size:
        return None
    magic, is_open, number, until_s, period_s = _LAYOUT.unpack(content)
    return Shown(number if is_open else 0, until_s, period_s) if magic == MAGIC else None


@dataclass(slots=True)
class Windows:
    """What the sender knows of the waits of local ranks, and what it has sent in them.

    Attributes:
        shown: what a rank's page shows now; None if it has none.
        wanted: whether a rank waits for a slot, and so for what is sent from it.
        shown_bytes: sent for ranks that have a page.
        inside_bytes: of these, in blocks that began and ended in one wait.
    """

    shown: Callable[[int], Shown | None]
    wanted: Callable[[int], bool]
    shown_bytes: int = 0
    inside_bytes: int = 0

    def turns(self) -> Turns:
        """The turns of one transfer."""
        return Turns(self)


class Turns:
    """One transfer's: how long it was held back so far, and how long its blocks take. One thread at a time.

    Args:
        windows: where to look, and where to count.
        clock, sleep: replaced in tests.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._windows = windows
        self._clock = clock
        self._sleep = sleep
        self._held_s = 0.0
        self._block_s = FIRST_BLOCK_S
        self._leaving: tuple[int, int, int, float] | None = None

    def wait(self, rank: int, num_bytes: int, moved: Callable[[], None] = lambda: None) -> None:
        """Returns when a block from a slot of `rank` may leave; calls `moved` while it holds one back."""
        self.sent()
        while (shown := self._windows.shown(rank)) is not None:
            now_s = self._clock()
            if may_send(shown, now_s, self._block_s, held_s=self._held_s) or self._windows.wanted(rank):
                self._leaving = (rank, num_bytes, shown.number, now_s)
                return
            moved()
            self._sleep(LOOK_S)
            self._held_s += self._clock() - now_s

    def sent(self) -> None:
        """The block that left last is sent."""
        if self._leaving is None:
            return
        rank, num_bytes, number, began_s = self._leaving
        self._leaving = None
        self._block_s = (self._block_s + self._clock() - began_s) / 2
        shown = self._windows.shown(rank)
        self._windows.shown_bytes += num_bytes
        if number and shown is not None and shown.number == number:
            self._windows.inside_bytes += num_bytes
