"""The page on which a trainer shows its waits, and the keeper's work on that rank's slots that keeps to them.

A page is a few bytes of shared memory without a name, one per rank of a pipeline, and beside it a bell: an eventfd that is readable
while a wait is under way. The trainer's thread writes both as a wait begins and ends. The keeper looks at the page before every
block that it hashes or sends, and sleeps at the bell while the trainer computes. Nobody waits for a lock: a page that was
written half misplaces a block and nothing else. The keeper reads it as a file, so that an owner who shortens it cannot end it.

What is done in a rank's wait is done on that rank's processors: they have nothing to do then, and those of the others have.

Without a page, and for whatever a trainer waits for, nothing is held back; with one, the hashing of a version, or a transfer,
is held back for a step in all at most (`core.pipeline.wait_forecast.may_begin`). Written by `checkpoint.pipeline.copy_gate`, read for `keeper.slots.sealer` and `keeper.service.peer_requests`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.core.pipeline.wait_forecast import Shown, may_begin, patience_s

PAGE_BYTES = 64
MAGIC = 0x48465731
# magic, whether a wait is under way, its number, until when it should last, seconds of a step
_LAYOUT = struct.Struct("<IIQdd")
# How often a wait without room for a block is looked at again.
LOOK_S = 0.002
# The longest sleep at the bell: other reasons to begin than a wait do not ring it.
SLEEP_S = 0.05
# What a block is expected to take before there was one.
FIRST_BLOCK_S = 0.0005


class WindowPage:
    """The trainer's side; its thread alone writes.

    Attributes:
        fds: the page and the bell, to be handed to the keeper; empty once they are closed.
    """

    def __init__(self) -> None:
        page = os.memfd_create("holdfast-windows", os.MFD_CLOEXEC)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.fds: tuple[int, ...] = (page, self._bell)
        os.ftruncate(page, PAGE_BYTES)
        self._map = mmap.mmap(page, PAGE_BYTES)
        self._number = 0
        self._period = 0.0
        self.shut()

    def step(self, period_s: float) -> None:
        """Note how long a step takes; told to the keeper with the next wait."""
        self._period = period_s

    def open(self, until_s: float | None) -> None:
        """A wait began that should last until then (monotonic); None: nobody knows."""
        self._number += 1
        _LAYOUT.pack_into(self._map, 0, MAGIC, 1, self._number, math.inf if until_s is None else until_s, self._period)
        os.eventfd_write(self._bell, 1)

    def shut(self) -> None:
        """The wait is over."""
        with contextlib.suppress(BlockingIOError):  # it does not ring
            os.eventfd_read(self._bell)
        _LAYOUT.pack_into(self._map, 0, MAGIC, 0, self._number, 0.0, self._period)

    def close(self) -> None:
        """Lets go of both; whoever reads the page still sees a shut one that holds nothing back, and is woken for it.

        Called again it goes on where a signal's handler broke it off.
        """
        if not self._map.closed:
            self._period = 0.0
            self.shut()
            os.eventfd_write(self._bell, 1)
            self._map.close()
        while self.fds:
            fd, self.fds = self.fds[0], self.fds[1:]
            os.close(fd)


def look(fd: int) -> Shown | None:
    """Return what a page shows now; None if it is none."""
    try:
        content = os.pread(fd, _LAYOUT.size, 0)
    except OSError:
        return None
    if len(content) < _LAYOUT.size:
        return None
    magic, is_open, number, until_s, period_s = _LAYOUT.unpack(content)
    return Shown(number if is_open else 0, until_s, period_s) if magic == MAGIC else None


def listen(bell: int, timeout_s: float) -> None:
    """Sleeps until a wait begins, but no longer than this. Whoever closed the descriptor meanwhile has to ring first."""
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    poll.poll(1e3 * timeout_s)


@dataclass(slots=True)
class Windows:
    """Holds what the keeper knows of the waits of local ranks, and what it has done in them.

    Attributes:
        shown: what a rank's page shows now; None if it has none.
        listen: sleeps at a rank's bell, so many seconds at most.
        wanted: whether a rank waits for a slot, and so for what is done with it.
        stay: keeps the calling thread on the processors of a rank; None: no longer.
        shown_bytes: of blocks of ranks that have a page.
        inside_bytes: of these, of blocks that began and ended in one wait.
    """

    shown: Callable[[int], Shown | None]
    listen: Callable[[int, float], None]
    wanted: Callable[[int], bool]
    stay: Callable[[int | None], None]
    shown_bytes: int = 0
    inside_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def turns(self, held_s: float = 0.0) -> Turns:
        """The turns of one line of a transfer, held back for so long already, or of one version that is hashed."""
        return Turns(self, held_s=held_s)

    def count(self, num_bytes: int, *, inside: bool) -> None:
        """Counts a block. Any thread."""
        with self._lock:
            self.shown_bytes += num_bytes
            self.inside_bytes += num_bytes if inside else 0


class Turns:
    """Counts how long one transfer or version was held back so far, and how long its blocks take. One thread at a time.

    Args:
        windows: where to look, and where to count.
        held_s: how long it was held back before.
        clock, sleep: replaced in tests.

    Attributes:
        held_s: how long it was held back so far.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        held_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.held_s = held_s
        self._windows = windows
        self._clock = clock
        self._sleep = sleep
        self._block_s = FIRST_BLOCK_S
        self._begun: tuple[int, int, int, float] | None = None
        self._beside: int | None = None  # the rank on whose processors the thread is kept

    def wait(self, rank: int, num_bytes: int, moved: Callable[[], None] = lambda: None) -> None:
        """Returns when a block of a slot of `rank` may be hashed or sent; calls `moved` while it holds one back."""
        self._count()
        while (shown := self._windows.shown(rank)) is not None:
            now_s = self._clock()
            if may_begin(shown, now_s, self._block_s, held_s=self.held_s) or self._windows.wanted(rank):
                self._begun = (rank, num_bytes, shown.number, now_s)
                self._stay(rank if shown.number else None)
                return
            moved()
            if shown.number:
                self._sleep(LOOK_S)
            else:
                self._windows.listen(rank, min(SLEEP_S, patience_s(shown) - self.held_s))
            self.held_s += self._clock() - now_s
        self._stay(None)  # it shows its waits no more

    def done(self) -> None:
        """The block that began last is hashed or sent, and none follows now."""
        self._count()
        self._stay(None)

    def _stay(self, rank: int | None) -> None:
        """Stay as `Windows.stay` does; blocks follow one another in a wait, and most of them find the thread where it
        should be.
        """
        if rank != self._beside:
            self._beside = rank
            self._windows.stay(rank)

    def _count(self) -> None:
        """Count what is known of the block that began last, now that it is hashed or sent."""
        if self._begun is None:
            return
        rank, num_bytes, number, began_s = self._begun
        self._begun = None
        self._block_s = (self._block_s + self._clock() - began_s) / 2
        shown = self._windows.shown(rank)
        self._windows.count(num_bytes, inside=bool(number) and shown is not None and shown.number == number)
