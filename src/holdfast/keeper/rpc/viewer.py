"""Asks a keeper what it holds and does: all that a viewer may, and the ground that a trainer's connection stands on.

Every call has a deadline. When the keeper is gone `alive` turns False, the callbacks fire, waiting calls raise
KeeperLost at once and so do later ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.base.errors import KeeperError, KeeperLost
from holdfast.base.handler_errors import pass_on
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.announcements import Announced
from holdfast.keeper.rpc.caller import Caller, dial
from holdfast.keeper.rpc.messages import Inventory, Message
from holdfast.keeper.rpc.stopped_keeper import wake
from holdfast.tiers.wire import frames

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0

R = TypeVar("R", bound=Message)
Self = TypeVar("Self", bound="KeeperViewer")


class KeeperViewer:
    """One connection to the keeper of this node. Use `connect`; safe to call from several threads.

    Attributes:
        announced: what the keeper announced since.
    """

    _caller: Caller
    _directory: Path

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.announced = Announced(rank, lambda: self.alive)
        self._left = False
        self._lost_callbacks: list[Callable[[str], None]] = []

    @classmethod
    def connect(
        cls: type[Self],
        socket_path: str | Path,
        *,
        job: str,
        rank: int | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Self:
        """Connects to the keeper that listens at `socket_path`.

        Args:
            socket_path: `RuntimePaths.socket` of keeper.rpc.paths, or `unix:<path>`.
            job: `Place.job`; a keeper of another job refuses.
            rank: the trainer's rank; None for a viewer, who may only look.
            timeout_s: for connecting and being welcomed; a predecessor that is dying is waited for.

        Raises:
            KeeperLost: nobody listens. InUse: another living process is that rank. KeeperError: refused.
        """
        client = cls(rank)
        client._directory = Path(str(socket_path).removeprefix("unix:")).parent
        role = messages.VIEWER if rank is None else messages.RANK
        hello = messages.Hello(job=job, role=role, rank=-1 if rank is None else rank)
        client._caller = dial(
            str(socket_path), hello, timeout_s=timeout_s, on_push=client.announced.take, on_lost=client._lost
        )
        return client

    @property
    def alive(self) -> bool:
        """Return whether the keeper is there; False as soon as its end of the connection closed."""
        return self._caller.alive

    def answers(self, timeout_s: float) -> bool:
        """Return whether the keeper answers at all within this time."""
        try:
            self.status(timeout_s=timeout_s)
        except KeeperLost as error:
            pass_on(error)
            return False
        return True

    def wake(self) -> bool:
        """Continues the keeper if a signal has stopped it; returns whether it did."""
        return wake(self._directory)

    @property
    def welcome(self) -> messages.Welcome:
        """Return what the keeper said of itself when we connected."""
        return self._caller.welcome

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Calls `callback(reason)` once, in the reader thread, when the keeper is lost."""
        self._lost_callbacks.append(callback)

    def inventory(self, *, wide: bool = True, timeout_s: float = CALL_TIMEOUT_S) -> Inventory:
        """Return what all reachable keepers hold (`wide=False`: only this one)."""
        return self._ask(messages.TakeInventory(wide=wide), messages.InventoryReply, timeout_s).inventory

    def status(self, *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """Return what the keeper says about itself; plain values only. Fields: docs/spec/keeper.md."""
        reply = self._ask(messages.AskStatus(), messages.StatusReply, timeout_s)
        return msgspec.msgpack.decode(reply.status, type=dict[str, Any])

    def inside(self, *, timeout_s: float = CALL_TIMEOUT_S) -> msgspec.Raw:
        """Return what the job is made of, as msgpack; fields: docs/spec/keeper.md."""
        return self._ask(messages.AskInside(), messages.InsideReply, timeout_s).inside

    def close(self) -> None:
        """Ends the connection."""
        self._caller.close()

    def _ask(self, request: Message, wanted: type[R], timeout_s: float = CALL_TIMEOUT_S) -> R:
        reply, fds = self._call(request, wanted, timeout_s)
        frames.close_fds(fds)
        return reply

    def _call(
        self, request: Message, wanted: type[R], timeout_s: float, fds: Sequence[int] = ()
    ) -> tuple[R, list[int]]:
        reply, got = self._caller.call(request, timeout_s=timeout_s, fds=fds)
        if not isinstance(reply, wanted):
            frames.close_fds(got)
            raise KeeperError(f"the keeper answered {type(request).__name__} with {type(reply).__name__}")
        return reply, got

    def _lost(self, reason: str) -> None:
        self.announced.wake()
        if self._left:
            return
        logger.warning("the keeper of this node is lost: %s; training goes on without the memory level", reason)
        for callback in tuple(self._lost_callbacks):
            callback(reason)
