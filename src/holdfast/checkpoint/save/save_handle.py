"""Defines what `save` returns: the version, the level it has reached, and a wait for the one that is wanted."""

from __future__ import annotations

import logging
import math
import numbers
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from holdfast.base.errors import HoldfastError, KeeperLost, LevelNotReached, UsageError
from holdfast.base.handler_errors import forgive, pass_on
from holdfast.checkpoint.liveness import heartbeat
from holdfast.core.elastic.worker_facts import Phase
from holdfast.core.layout.parity_groups import NONE
from holdfast.core.model import Level, Topology, Version
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.slots.progress import WRITING
from holdfast.tiers.storage.read_limit import ReadLimit

logger = logging.getLogger(__name__)

# Waits longer than this say that they wait, and on what.
PROGRESS_S = 2.0
ASK_TIMEOUT_S = 2.0
# A keeper that answers at all does so within this. It is asked why a wait that is over was in vain.
LAST_ASK_S = 0.2
# How long a look into storage may take.
LOOK_S = 5.0
MAX_ALARMS = 3
# Of a keeper that does not answer, once within this time aloud.
TELL_EVERY_S = 60.0
SILENT = "; the keeper of this node does not answer"
INTERRUPTED = "the save was interrupted"


class Keepers(Protocol):
    """Tells the keeper of now, and the last one there was (`checkpoint.job.keeper_link`)."""

    @property
    def client(self) -> KeeperClient | None:
        """The connection, or None while there is no living keeper."""

    @property
    def last_client(self) -> KeeperClient | None:
        """The connection of now or, where it ended, the last one."""


class _NoKeepers:
    """Is the link of a save that is not made."""

    client = last_client = None


class SaveHandle:
    """One save of this rank. Safe to drop: the save goes on without it.

    Attributes:
        version: what was saved.
        level: the level that was asked for; `wait` without an argument waits for it.
    """

    def __init__(
        self,
        version: Version,
        level: Level,
        *,
        link: Keepers,
        in_storage: Callable[[Version], bool],
        settle: Callable[[float], None],
        topology: Topology,
        timeout_s: float,
    ) -> None:
        self.version = version
        self.level = level
        self._link = link
        self._in_storage = in_storage
        self._asked, self._asking = link.client, threading.RLock()  # a signal's handler may ask in between
        self._settle = settle
        self._topology = topology
        self._timeout_s = timeout_s
        self._given_up = ""
        self._is_committed = False
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"SaveHandle({self.version}, {self._given_up or self.reached.name.lower()})"

    @property
    def given_up(self) -> str:
        """Return why this rank gave the version up; empty if it did not."""
        return self._given_up

    @property
    def reached(self) -> Level:
        """The level announced so far; does not wait."""
        if self._is_durable():
            return Level.DURABLE
        client = self._link.client
        return client.announced.level(self.version)[0] if client is not None else Level.NONE

    @property
    def durable(self) -> tuple[bool, str]:
        """(whether it is decided, why it is not durable); waits only for a keeper that is silent."""
        if self._is_durable():
            return True, ""
        client = self._link.client
        known = client.announced.known(self.version) if client is not None else None
        if self._given_up or (known is not None and known.abandoned):
            return True, self._given_up or (known.reason if known is not None else "")
        if client is not None and (over := self._over(client)):
            return True, over
        return False, known.reason if known is not None else "nothing was announced yet"

    def _over(self, client: KeeperClient, deadline: float = math.inf) -> str:
        """Returns why the version does not become durable any more. Who stood still must hear first what was said meanwhile."""
        if client.announced.superseded(self.version):
            try:
                client.status(timeout_s=_ask_s(deadline))  # behind all that the keeper said before
            except HoldfastError as error:
                pass_on(error)
                if client.alive:
                    client.announced.nothing_heard(self.version)
        return client.announced.superseded(self.version)

    def _goes_on(self, client: KeeperClient, until: float, deadline: float) -> bool:
        """Tells whether the version may become durable though `client` named a reason, before `until`, why it does not."""
        if not client.alive:
            return True  # it may have died before it told
        known = client.announced.known(self.version)
        return (
            time.monotonic() < until
            and not (known is not None and known.abandoned)
            and not self._over(client, deadline)
        )

    def _is_durable(self) -> bool:
        """Tells whether it is durable, by what was said last: storage keeps it when the connection to the keeper has ended."""
        client = self._link.last_client
        known = client.announced.known(self.version) if client is not None else None
        if known is not None and Level.DURABLE in known.reached:  # it stays so, also if no later keeper knows of it
            self._is_committed = True
        return self._is_committed

    def give_up(self, reason: str) -> None:
        """This rank will not complete the version. The first reason counts, but for that of a save that was broken off."""
        if self._given_up in ("", INTERRUPTED):
            self._given_up = reason

    def ask_again(self, look_s: float = LOOK_S) -> None:
        """The keeper that was asked may have died: before it told that the version is durable, or before it heard that it is due.

        A look into storage that had less than LOOK_S is not the last one for this keeper.
        """
        until = time.monotonic() + look_s
        if not self._asking.acquire(timeout=look_s):
            return
        try:
            client = self._link.client
            if client is self._asked or self.level is not Level.DURABLE or self._given_up or self._is_durable():
                return
            is_stored = self.is_stored(max(0.0, until - time.monotonic()))
            if is_stored or look_s >= LOOK_S:
                self._asked = client
            if not is_stored and client is not None:
                with forgive(KeeperLost):
                    client.persist(self.version)
        finally:
            self._asking.release()

    def is_stored(self, look_s: float = LOOK_S) -> bool:
        """Return whether storage has the version, whoever would have told so; looks there. False if that cannot be known."""
        try:
            if not self._is_committed and ReadLimit(look_s, 0, str(self.version)).run(
                lambda: self._in_storage(self.version)
            ):
                self._is_committed = True
        except HoldfastError as error:
            pass_on(error)
            logger.info("whether %s is in storage is not known: %s", self.version, error)
        return self._is_committed

    def _is_met(self, wanted: Level, client: KeeperClient | None, deadline: float) -> bool:
        """Return whether it is durable, and that is enough; looks in storage where `client` cannot tell."""
        look_s = min(LOOK_S, max(0.0, deadline - time.monotonic()))
        if wanted is Level.DURABLE and client is not None:
            self.ask_again(look_s)
        elif wanted is Level.DURABLE and not self._given_up:
            self.is_stored(look_s)
        return self._is_durable() and wanted is not Level.REPLICATED

    def committed(self) -> None:
        """It was seen, or written by all ranks, that the version is committed in storage; also if it was given up before."""
        self._is_committed, self._given_up = True, ""

    @heartbeat.phase(Phase.SAVING)
    def wait(self, level: Level | str | None = None, timeout_s: float | None = None) -> Level:
        """Blocks until the version is at `level` or above on all ranks; returns the level it has then.

        Every rank has to save the version, so waiting while others still train may take as long as they need. To wait for a level above
        the one that the save was asked for orders nothing: a version that is not due for storage is not written because of it.

        Args:
            level: `"captured"`, `"replicated"`, `"durable"` or a Level; the one asked for at the save by default.
            timeout_s: seconds; the setting `close_timeout_s` by default.

        Raises:
            LevelNotReached: it was given up by some rank, time is over, or the keeper is lost. Says which and why.
            UsageError: no such level, `timeout_s` is no number, or in a forked child of the process that saved.
        """
        if os.getpid() != self._pid:
            raise UsageError("a forked child cannot wait for a save of its parent", remedy="wait in the parent")
        wanted = self.level if level is None else as_level(level)
        timeout_s = self._timeout_s if timeout_s is None else as_seconds(timeout_s)
        deadline = time.monotonic() + timeout_s
        self._settle(timeout_s)
        if wanted is Level.REPLICATED and len(self._topology.nodes) < 2:
            raise LevelNotReached(
                f"{self.version} cannot be replicated: the job has one node",
                remedy='ask for "durable", or run on two nodes',
            )
        started = time.monotonic()
        said = -math.inf
        while True:
            client = self._link.client
            if self._is_met(wanted, client, deadline):
                return Level.DURABLE
            if self._given_up or client is None:
                raise LevelNotReached(
                    f"{self.version} did not reach {wanted.name.lower()}: {self._given_up or 'the keeper is lost'}",
                    remedy="training may go on; the next save tries again",
                )
            until = min(deadline, time.monotonic() + PROGRESS_S)
            try:
                return client.announced.wait(self.version, wanted, max(0.0, until - time.monotonic()))
            except LevelNotReached as error:
                pass_on(error)
                if wanted is Level.DURABLE and time.monotonic() < deadline and self._goes_on(client, until, deadline):
                    continue
                # Earlier than the end of this slice: the answer is final. So it is when all time is over.
                if time.monotonic() < until or until >= deadline:
                    return self._end(wanted, error, client, deadline)
            reached, reason = client.announced.level(self.version)
            if wanted is Level.REPLICATED and self._topology.redundancy == NONE and reached is not Level.NONE:
                raise LevelNotReached(  # of twins on several nodes it would have been heard with the level before
                    f"{self.version} is {reached.name.lower()}, and nothing makes it replicated: redundancy is none",
                    remedy='ask for "durable", or set redundancy to replica or parity:K',
                )
            working = client.announced.working(WRITING, self.version)
            alarms, loudness = _alarms(client, deadline), logging.INFO
            if alarms == SILENT:
                client.wake()
                if time.monotonic() - said >= TELL_EVERY_S:
                    said, loudness = time.monotonic(), logging.WARNING
            logger.log(
                loudness, "waiting for %s to be %s: %.0f s, now %s, %s%s%s",
                self.version, wanted.name.lower(), time.monotonic() - started, reached.name.lower(), reason,
                f"; writing {working}" if working else "", alarms,
            )  # fmt: skip

    def _end(self, wanted: Level, error: LevelNotReached, client: KeeperClient, deadline: float) -> Level:
        """Returns DURABLE if storage has it after all: a keeper forgets what it said long ago. Else the answer stands."""
        left_s = deadline - time.monotonic()
        if wanted is Level.DURABLE and left_s > 0 and self.is_stored(min(LOOK_S, left_s)):
            return Level.DURABLE
        raise LevelNotReached(error.what + _alarms(client, deadline), where=error.where, remedy=error.remedy) from error


def _ask_s(deadline: float) -> float:
    """Return how long a keeper may take to answer a wait that ends then."""
    return min(ASK_TIMEOUT_S, max(LAST_ASK_S, deadline - time.monotonic()))


def _alarms(client: KeeperClient, deadline: float) -> str:
    """Return what the keeper warns of now; it is most likely the reason. `SILENT`: it does not answer."""
    try:
        alarms = client.status(timeout_s=_ask_s(deadline))["alarms"]
        return "".join(f"; {alarm['text']}" for alarm in alarms[-MAX_ALARMS:])
    except HoldfastError as error:
        pass_on(error)
        return SILENT if isinstance(error, KeeperLost) and client.alive else ""


def as_level(level: object) -> Level:
    """The level that a caller names.

    Raises:
        UsageError: no such level.
    """
    if isinstance(level, Level):
        return level
    names = {member.name.lower(): member for member in Level if member is not Level.NONE}
    if not isinstance(level, str) or level not in names:
        raise UsageError(f"{level!r} is no level", remedy=f"name one of {', '.join(names)}")
    return names[level]


def as_seconds(timeout_s: object) -> float:
    """The time that a caller gives, in seconds.

    Raises:
        UsageError: it is no number.
    """
    seconds = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not seconds or math.isnan(timeout_s):  # type: ignore[arg-type]
        raise UsageError(f"{timeout_s!r} is no time", remedy="give seconds as a number, such as 60")
    return float(timeout_s)  # type: ignore[arg-type]


def as_version(version: object) -> Version | None:
    """The version that a caller names.

    Raises:
        UsageError: no such name.
    """
    if version is None or isinstance(version, Version):
        return version
    parsed = Version.parse(version) if isinstance(version, str) else None
    if parsed is None:
        raise UsageError(f"{version!r} is not a version", remedy="name it as `holdfast ls` does: i000001-s0000000120")
    return parsed


def never(step: int, level: Level, reason: str, incarnation: int = 1) -> SaveHandle:
    """Returns the handle of a save that is not made, and is given up for a reason."""
    handle = SaveHandle(
        Version(incarnation, step),
        level,
        link=_NoKeepers(),
        in_storage=lambda _: False,
        settle=lambda _: None,
        topology=Topology(("",), (0,)),
        timeout_s=0.0,
    )
    handle.give_up(reason)
    return handle
