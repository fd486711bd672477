"""Knows what of ours is open in this process and must be closed before its script runs again.

A script that is interrupted and run again in the same process builds its objects anew. The old ones may hold this
rank's place at the keeper, so they are closed, not left to the garbage collector. Weak references only: this list
keeps nothing alive.

When the job breaks off on a device, `void` comes before anything else: before sockets are cut and groups are aborted. An
aborted collective ends, and what was queued behind it runs on with what happens to be there. So whatever a device had not
finished at that moment, and all that is queued later in the same run, is nothing that may be saved or given to others.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.device import accelerator

logger = logging.getLogger(__name__)

# In the place of a version: the job was started, and its operator named none.
NO_WISH = "none"


@dataclass(slots=True)
class Broken:
    """Tells whether the run of this process broke off while it used a device, and its groups are aborted or soon will
    be.

    Attributes:
        reason: why nothing counts that a device has not finished yet; empty as long as everything does.
        stuck: why this process must end: a device may still write to memory of ours, or does nothing any more.
    """

    reason: str = ""
    stuck: str = ""


broken = Broken()


class Abandonable(Protocol):
    """An object that can be let go of without saving anything."""

    def void(self) -> None:
        """Count what a device has not finished by now neither as saved nor as live. From any thread; does not wait."""

    def abandon(self) -> None:
        """Ends everything it has; nothing is saved. Does not wait long."""

    def interrupted(self) -> None:
        """The same, but its owner keeps it and will begin anew with it."""


class RestoreInstructions:
    """Says what the agent wants of the next restore, and who tells it what came of that.

    Attributes:
        older: pass over the newest version: with it the job failed at the same place again and again.
        version: take this one, because the operator named it; `NO_WISH`: the job was started without; empty: it has come back
            since it was started.
        jobs: checkpoint path -> id of the job that it belonged to earlier in this run.
        works_on: called with a checkpoint path and the id of the job that it belongs to.
        restored: called with the step (-1: from the beginning) and where most of the state came from.
        saved: called with a step whose state is durable, from any thread.
    """

    def __init__(self) -> None:
        self.older = False
        self.version = NO_WISH
        self.jobs: Mapping[str, str] = {}
        self.works_on: Callable[[str, str], None] = lambda *_: None
        self.restored: Callable[[int, str], None] = lambda *_: None
        self.saved: Callable[[int], None] = lambda _: None

    def take_older(self) -> bool:
        """Return whether the newest version is to be passed over; it is, once."""
        older, self.older = self.older, False
        return older

    def take_version(self) -> str:
        """Returns `version`, once; empty from then on."""
        version, self.version = self.version, ""
        return version


wish = RestoreInstructions()
_open: weakref.WeakSet[Abandonable] = weakref.WeakSet()
# Paths of trainings that came to their end in this run of the script. A door that keeps trainings by a path looks here.
ended: set[str] = set()


def register(thing: Abandonable) -> None:
    """`thing` is open from now on."""
    _open.add(thing)


def void() -> None:
    """Make void what a device has not finished by now. MUST come before any group is aborted. From any thread; does not
    wait.
    """
    if accelerator.in_use() is None:
        return  # groups of hosts raise in whoever waits for them, and nothing runs on behind them
    broken.reason = broken.reason or "the job broke off before the device had finished it"
    for thing in list(_open):
        try:
            thing.void()
        except Exception as error:  # noqa: BLE001 - the job must be left whatever it is; what is not told is refused later
            pass_on(error)
            logger.warning("%s was not told that the job broke off: %s", type(thing).__name__, error)


def begin() -> None:
    """A new run begins in this process, and what it queues counts."""
    broken.reason = ""
    ended.clear()


def opened() -> list[Abandonable]:
    """Return what is open now."""
    return list(_open)


def abandon_all(*, kept: bool = False) -> None:
    """Closes what is still there; `kept`: the owners keep their objects (`holdfast.resumable`)."""
    for thing in list(_open):
        try:
            thing.interrupted() if kept else thing.abandon()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next run must be able to start
            pass_on(error)
            logger.warning("%s was not closed properly: %s", type(thing).__name__, error)
    if not kept:
        _open.clear()
