"""Notices that this rank's keeper cannot reach that of the first node: then no version of all ranks comes about.

Keepers report to that of the first node that they reach. One that reaches none before it coordinates itself, and hears of its own ranks
alone. A firewall between two machines does that, in one direction too, and it may be put up at any time. A keeper that died is
replaced within seconds. So it counts only when it lasts.

A healthy job asks nothing. Called by `checkpoint.checkpointer.storage_fallback` for who saves and sees nothing captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.base.errors import KeeperError
from holdfast.checkpoint.job.keeper_link import ASK_S, SILENT_S, KeeperLink

ASK_EVERY_S = 1.0


class LostContact:
    """Knows on one rank since when it is so.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, link: KeeperLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._clock = link, clock
        self._ask_at_s = 0.0
        self._since_s: float | None = None
        self._where = ""

    def forget(self) -> None:
        """Versions become captured."""
        self._since_s = None

    @property
    def why(self) -> str:
        """Return why no version becomes captured; empty if nothing is known that lasts. Asks the keeper now and then."""
        if self._clock() >= self._ask_at_s and not self._link.silent:
            self._ask()
        if self._since_s is None or self._clock() - self._since_s < SILENT_S:
            return ""
        return f"{self._where} for {SILENT_S:g} s, so no version is of all ranks"

    def lasts(self) -> bool:
        """Return whether it is so now."""
        self._ask()
        return self._since_s is not None

    def _ask(self) -> None:
        client = self._link.client
        self._ask_at_s = self._clock() + ASK_EVERY_S
        try:
            status = client.status(timeout_s=ASK_S) if client is not None else {}
        except KeeperError:  # it is lost, or slow, which others notice: no step waits for it again soon
            self._ask_at_s, self._since_s = self._clock() + SILENT_S, None
            return
        leader, nodes = status.get("coordinator", -1), status.get("nodes", [])
        if leader == 0:
            self._since_s = None
        elif leader > 0:
            self._where = f"the keeper of {nodes[status['index']]} has not reached that of {nodes[0]}"
            self._since_s = self._clock() if self._since_s is None else self._since_s
