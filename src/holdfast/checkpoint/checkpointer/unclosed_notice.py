"""Says at the end of a process, or when a Checkpointer goes, what a script that forgot `close()` leaves in memory alone.

Keepers hold that for `linger_s`, and then it is gone; the script would end with 0 and without a word. Nothing is said after
`close()` or `abandon()`, in a forked child, or where the newest version is durable.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable

from holdfast.checkpoint.checkpointer.session import Run
from holdfast.core.model import Level, Version

logger = logging.getLogger(__name__)


class UnclosedNotice:
    """Watches one Checkpointer, and does not keep it alive.

    Args:
        owner: whose end is awaited.
        run_of: returns what `owner` has between `restore` and `close`, if it has anything; MUST NOT hold `owner`.
        linger_s: how long a keeper waits for a restart.
    """

    def __init__(self, owner: object, run_of: Callable[[], Run | None], *, linger_s: float) -> None:
        self._last = _Last(run_of, linger_s)
        self._finalizer = weakref.finalize(owner, self._last.tell)

    def saved(self, run: Run) -> None:
        """A version was saved, or loaded: notes what is to be told if the objects go before the process ends."""
        self._last.note(run)

    def broken_off(self, by: str) -> None:
        """An exception ended `close`: tells now what is not durable, and nothing later."""
        self._last.tell(f"close() was broken off by {by}")

    def end(self) -> None:
        """It is closed: nothing is told any more."""
        self._finalizer.detach()


class _Last:
    """Holds what was last known, and tells it once."""

    def __init__(self, run_of: Callable[[], Run | None], linger_s: float) -> None:
        self._run_of = run_of
        self._linger_s = linger_s
        self._pid = os.getpid()
        self._missing: Version | None = None

    def note(self, run: Run | None) -> None:
        """Notes the newest version that is not durable, if there is one."""
        self._missing = None
        if run is None:
            return
        if (whole := run.whole) is not None:
            self._missing = whole.version if whole.reached is not Level.DURABLE else None
        elif run.fleeting is not None:
            self._missing = run.fleeting.version

    def tell(self, why: str = "close() was not called") -> None:
        """The object goes, the process ends, or `close` was broken off."""
        if os.getpid() != self._pid:
            return
        if (run := self._run_of()) is not None:
            self.note(run)
        if self._missing is not None:
            logger.error(
                "%s, and %s is not durable: memory alone holds it, for %g s. Start the job again within that time, "
                "and end the script with checkpointer.close(), or train in a block `with holdfast.Checkpointer(...)`",
                why,
                self._missing,
                self._linger_s,
            )
