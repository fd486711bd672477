"""The gate before every chunk of a late copy: open while the trainer waits, shut while it computes.

The copier asks for a turn per chunk, with the time that the chunk should take; the trainer's thread opens the gate when
a wait begins and shuts it when the wait ends. A turn is given while the wait that is under way has room left for it, or
has lasted longer than was expected; so a mispredicted wait costs at most the one chunk that had begun. The fence takes
the gate away: from then on every turn is given, for the step is waiting for the copy itself.

The same waits are shown to the keeper on a page, for what it hashes and sends to other nodes (`keeper.slots.idle_windows`).

Nothing here can block training: the trainer's calls only set values.
"""

from __future__ import annotations

import threading
import time

from holdfast.core.pipeline.wait_forecast import has_room
from holdfast.keeper.slots.idle_windows import WindowPage

# So long a turn is waited for at least, and for two steps where these are longer. A gate that stays shut longer is steered
# by nobody (an evaluation, a loop of its own): what is left of the version is then copied beside whatever runs.
PATIENCE_S = 1.0
PATIENCE_STEPS = 2


class Gate:
    """One per rank; opened by the trainer's thread, passed by the copier's.

    Attributes:
        page: where the keeper sees the same; None: nowhere.
        period_s: seconds of a step, as far as is known.
    """

    def __init__(self) -> None:
        self.page: WindowPage | None = None
        self.period_s = 0.0
        self._lock = threading.RLock()  # taken in one step of the interpreter, which no handler comes between
        self._changed = threading.Condition(self._lock)
        self._until: float | None = None  # monotonic; until when the wait under way should last
        self._is_open = False
        self._hurry = False

    def open(self, expected_s: float | None) -> None:
        """A wait begins that should last so long; None: nobody knows."""
        with self._lock:
            self._is_open = True
            self._until = None if expected_s is None else time.monotonic() + expected_s
            self._changed.notify_all()
        if self.page is not None:
            self.page.open(self._until)

    def shut(self) -> None:
        """The wait is over."""
        with self._lock:
            self._is_open = False
        if self.page is not None:
            self.page.shut()

    def hurry(self, wanted: bool) -> None:
        """Give turns at once, or no longer: the step waits for the copy, or nobody steers the gate."""
        with self._lock:
            self._hurry = wanted
            self._changed.notify_all()

    @property
    def patience_s(self) -> float:
        """Return how long a turn is waited for."""
        return max(PATIENCE_S, PATIENCE_STEPS * self.period_s)

    def turn(self, seconds: float) -> bool:
        """Blocks until a chunk of so many seconds may be copied; True if that is inside a wait."""
        deadline = time.monotonic() + self.patience_s
        with self._lock:
            while not self._hurry:
                now = time.monotonic()
                if self._is_open and has_room(self._until, now, seconds):
                    return True
                if now >= deadline:
                    self._hurry = True
                    return False
                self._changed.wait(self._next_look(now, deadline))
            return False

    def _next_look(self, now: float, deadline: float) -> float:
        """Seconds until something may have changed without a word: the expected end of the wait, or the deadline."""
        if self._is_open and self._until is not None and self._until > now:
            return min(self._until, deadline) - now
        return deadline - now
