"""The slots of a rank on their way: granted at once, mapped here one after the other while the rank restores or trains.

The keeper says at once whether the budget allows them, and makes their pages in the background. A thread asks for the
first one, then for the others, maps each and hands it on, so neither a restore nor training waits for memory that only
a later save needs. On few cores it begins once all is restored that needs none of them. What becomes of the slots is never raised here: a save that comes before the first of them is given
up, and `fault` says why there will be none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from holdfast.base.config import MAX_SLOTS
from holdfast.base.errors import HoldfastError
from holdfast.checkpoint.device import accelerator
from holdfast.keeper.rpc.client import KeeperClient, Slot
from holdfast.tiers.memory.usable_cores import usable_cores
from holdfast.tiers.wire.latch import Changes

logger = logging.getLogger(__name__)

# With fewer cores the threads that make pages take those that a restore needs: pages are made after it.
CORES_FOR_BOTH = 8
# How often who waits for slots looks whether that is in vain.
LOOK_S = 1.0


def comes_after_restore() -> bool:
    """Return whether this machine has too few cores to make memory for saves beside a restore."""
    return usable_cores() < CORES_FOR_BOTH


class Reservation:
    """`num_slots` slots of `num_bytes` that a keeper has granted.

    Args:
        came: called in the thread with every slot, once, before it counts as there.

    Attributes:
        fault: why there will be no more slots; None while they are being made, or when all are there.
    """

    def __init__(self, client: KeeperClient, num_bytes: int, num_slots: int, came: Callable[[Slot], None]) -> None:
        self.client = client
        self.fault: HoldfastError | None = None
        self.num_bytes = num_bytes
        self._num_slots = num_slots
        self._came = came
        self._changed = Changes()
        self._handing = threading.Lock()  # held while a slot is handed on, which may take long
        self._there: list[Slot] = []
        self._is_over = False
        self._has_begun = False
        self._began_s = time.monotonic()

    @property
    def is_complete(self) -> bool:
        return len(self._there) >= self._num_slots

    @property
    def is_dead(self) -> bool:
        """Return whether nobody works at it any more although slots are missing."""
        return not self.is_complete and (self.fault is not None or not self.client.alive)

    def begin(self, behind: Callable[[Callable[[], None], str], None]) -> None:
        """Has the slots mapped in a thread that `behind` starts, unless that was begun before."""
        if not self._has_begun:
            self._has_begun = True
            behind(self.run, "holdfast slots")

    def run(self) -> None:
        """Maps the slots as they come. The thread's work; does not raise."""
        accelerator.leave_captures_alone()
        try:
            for num_ready in range(1, self._num_slots + 1):
                if self._is_over:
                    return
                for slot in self.client.prepare(self.num_bytes, self._num_slots, num_ready=num_ready):
                    self._take(slot)
        except HoldfastError as error:
            self._end(error)
        except Exception as error:  # the top of the thread: the next save says it
            logger.exception("slots of %d bytes were not mapped", self.num_bytes)
            self._end(HoldfastError(f"slots were not mapped: {type(error).__name__}: {error}"))
        else:
            logger.info("%d slots of %d bytes after %.2f s", self._num_slots, self.num_bytes, self.seconds)

    @property
    def may_widen(self) -> bool:
        """Return whether all slots are there, and a rank may have one more."""
        return self.is_complete and self._num_slots < MAX_SLOTS and not self._is_over

    def widen(self) -> None:
        """One slot more, if the keeper has room for it and for as much again, twice. A thread's work; does not raise."""
        accelerator.leave_captures_alone()
        try:
            for slot in self.client.prepare(self.num_bytes, self._num_slots + 1, spare=True):
                self._take(slot)
        except HoldfastError as error:
            logger.info("saves wait for %d slots, for there is no room for one more: %s", self._num_slots, error)
        except Exception:  # the top of the thread: it goes on with the slots that are there
            logger.exception("one slot more of %d bytes was not mapped", self.num_bytes)
        else:
            self._num_slots += 1
            logger.info("saves come faster than storage or a replica: %d slots now", self._num_slots)

    @property
    def seconds(self) -> float:
        """Return how long ago it began."""
        return time.monotonic() - self._began_s

    def wait(self, num_slots: int, timeout_s: float, *, hopeless: Callable[[], object] = lambda: False) -> bool:
        """Waits until so many slots are there, or will not be, or `hopeless` says so; whether they are."""
        wanted = min(num_slots, self._num_slots)
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0.0 and not hopeless():
            with self._changed.next() as change:
                if len(self._there) >= wanted or self.fault or self._is_over:
                    break
                change.wait(min(left_s, LOOK_S))
        return len(self._there) >= wanted

    def wait_all(self, timeout_s: float, *, hopeless: Callable[[], object] = lambda: False) -> bool:
        """The same for all of them."""
        return self.wait(self._num_slots, timeout_s, hopeless=hopeless)

    def again(self, client: KeeperClient) -> Reservation:
        """The same of another keeper, which was handed the slots that are there."""
        return Reservation(client, self.num_bytes, self._num_slots, self._came)

    def close(self, timeout_s: float) -> None:
        """Nothing is handed on any more; waits so long for what is being handed on. The thread ends with the connection."""
        self._is_over = True
        self._changed.tell()
        if self._handing.acquire(timeout=timeout_s):
            self._handing.release()

    def _take(self, slot: Slot) -> None:
        if any(slot is known for known in self._there):
            return
        with self._handing:
            if self._is_over:
                return
            self._came(slot)
        self._there.append(slot)
        self._changed.tell()

    def _end(self, fault: HoldfastError) -> None:
        if not self._is_over:
            logger.warning("slots are missing: %s", fault)
        self.fault = fault
        self._changed.tell()
