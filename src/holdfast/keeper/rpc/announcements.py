"""Holds what a keeper announced to one client: levels of versions, alarms, the work it does, the steps it named.

Levels arrive as pushes: `level` answers from memory, `wait` blocks until a push says so. A level is never named before the
keeper announced it. There is no lock: a signal's handler that strikes a look would keep it, and the reader could take nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.base.errors import LevelNotReached
from holdfast.base.progress_report import progress_text
from holdfast.core.model import Level, Version
from holdfast.core.scheduling.step_agreement import Appointment
from holdfast.keeper.rpc import messages
from holdfast.tiers.wire.latch import Changes

logger = logging.getLogger(__name__)

# Versions whose level is remembered, at least; callers ask about recent ones only.
MAX_LEVELS = 128
MAX_ALARMS = 64
# A version that is not durable so long after a newer one became so, and of which no keeper said as long that it is being written or
# will be again, is tried no more: the newer one took its place. Nothing is said while a new coordinator is found (up to some 7 s), or
# until the lease of a writer that froze has ended and the next one in line has begun (LEASE_S of core.versions.writer_failover).
PASSED_S = 15.0


@dataclass(frozen=True, slots=True)
class VersionLevel:
    """Holds what is known of a version here: the levels it reached, one by one, and why it stands where it stands."""

    reached: frozenset[Level]
    reason: str
    abandoned: bool = False
    due: bool = False  # it was ordered into storage

    @property
    def is_written(self) -> bool:
        """Return whether it is on its way to storage."""
        return self.due and Level.DURABLE not in self.reached and not self.abandoned

    @property
    def level(self) -> Level:
        """The highest level reached."""
        return max(self.reached, default=Level.NONE)


class Announced:
    """Holds what one keeper announced since the client connected. Any thread.

    Args:
        rank: the client's; None for a viewer.
        alive: whether the keeper is there.
    """

    def __init__(self, rank: int | None, alive: Callable[[], bool]) -> None:
        self._rank = rank
        self._alive = alive
        self._changes = Changes()
        # The reader thread alone writes to these, but for times; of others' looks each is one step, or at a copy.
        self._incarnation = 0
        self._due: tuple[Version, VersionLevel] | None = None
        self._levels: dict[Version, VersionLevel] = {}
        self._stored_s: dict[Version, float] = {}  # of durable versions, since when that is known
        self._told_s: dict[Version, float] = {}  # when something was said of a version
        self._alarms: dict[str, str] = {}
        self._working: dict[str, messages.Working] = {}
        self._appointment_callbacks: list[Callable[[Appointment], None]] = []

    @property
    def alarms(self) -> tuple[str, ...]:
        """Return what the keeper warned of since we connected, one line per subject, newest last."""
        return tuple(self._alarms.values())

    def working(self, what: str, version: Version) -> str:
        """Return how far the keeper is with `what` (of keeper.slots.progress) of `version`, in words; empty if it did not say."""
        told = self._working.get(what)
        if told is None or told.version != version:
            return ""
        return progress_text(told.done_bytes, told.total_bytes, told.seconds)

    def on_appointment(self, callback: Callable[[Appointment], None]) -> None:
        """Calls `callback(appointment)` in the reader thread when the coordinator named a step for all ranks."""
        self._appointment_callbacks.append(callback)

    def level(self, version: Version) -> tuple[Level, str]:
        """The level that was announced for `version`, and the reason."""
        known = self._levels.get(version)
        if known is None:
            return Level.NONE, "nothing was announced yet" if self._alive() else "the keeper is lost"
        return known.level, known.reason

    def known(self, version: Version) -> VersionLevel | None:
        """All that was announced for `version`; None if nothing was."""
        return self._levels.get(version)

    @property
    def newest_due(self) -> tuple[Version, VersionLevel] | None:
        """The newest version that was ordered into storage, and what is known of it; None if none was."""
        return self._due

    @property
    def captured(self) -> Version | None:
        """The newest version that was announced as captured, or more; None if none was."""
        return max((version for version, known in list(self._levels.items()) if known.reached), default=None)

    def superseded(self, version: Version) -> str:
        """Return why `version` does not become durable any more; empty as long as it may, or if it is."""
        if version.incarnation < self._incarnation:
            return f"a later restore took its place: incarnation {self._incarnation} runs now"
        if over := self._alarms.get(messages.superseded(version.incarnation)):
            return over
        passed_s = time.monotonic() - PASSED_S
        if self._told_s.get(version, passed_s) > passed_s:
            return ""
        newer = (stored for stored, since_s in list(self._stored_s.items()) if stored > version and since_s <= passed_s)
        stored = None if version in self._stored_s else next(newer, None)
        return "" if stored is None else f"{stored} is durable, and took its place"

    def assembled(self, incarnation: int) -> None:
        """The job came together as this incarnation: no version of an earlier one is committed any more."""
        self._incarnation = max(self._incarnation, incarnation)
        self._changes.tell()

    def nothing_heard(self, version: Version) -> None:
        """The keeper does not answer: that it says nothing of `version` means nothing."""
        self._told_s[version] = time.monotonic()

    def wait(self, version: Version, level: Level, timeout_s: float) -> Level:
        """Blocks until `version` reaches `level`; returns the level it has then.

        Raises:
            LevelNotReached: it was abandoned, a newer incarnation forbids it, a newer version took its place, time is over, or the keeper is lost. Names the level reached.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changes.next() as change:
                known = self._levels.get(version, VersionLevel(frozenset(), "nothing was announced yet"))
                # A durable version need not be replicated, so a higher level does not stand for that one.
                if level in known.reached or (level is Level.CAPTURED and known.reached):
                    return known.level
                left = deadline - time.monotonic()
                if level is Level.DURABLE and (over := self.superseded(version)):
                    known = replace(known, reason=over, abandoned=True)
                if known.abandoned or not self._alive() or left <= 0:
                    break
                change.wait(min(left, PASSED_S))
        lost = "" if self._alive() else "; the keeper is lost"
        late = f"; waited {timeout_s:g} s" if left <= 0 and not known.abandoned else ""
        raise LevelNotReached(
            f"{version} is {known.level.name.lower()}, not {level.name.lower()}: {known.reason}{lost}{late}",
            remedy="see holdfast status for what holds it up; training may go on",
        )

    def wake(self) -> None:
        """Lets everybody who waits look again: the keeper is lost."""
        self._changes.tell()

    # --- what arrives

    def take(self, message: messages.AnyMessage) -> None:
        """Takes what the keeper pushed."""
        if isinstance(message, messages.Progress):
            self._progressed(
                message.version,
                VersionLevel(frozenset(message.reached), message.reason, message.abandoned, message.due),
            )
        elif isinstance(message, messages.Alarm):
            self._alarmed(message)
        elif isinstance(message, messages.Working):
            self._told_of_work(message)
        elif isinstance(message, messages.Appointed):
            for callback in tuple(self._appointment_callbacks):
                callback(message.appointment)
        else:
            logger.warning("the keeper pushed %s, which means nothing here", type(message).__name__)

    def _progressed(self, version: Version, news: VersionLevel) -> None:
        self._told_s[version] = time.monotonic()
        self._levels[version] = news
        if news.due and (self._due is None or version >= self._due[0]):
            self._due = version, news
        if Level.DURABLE in news.reached:
            self._stored_s.setdefault(version, time.monotonic())
        _forget_oldest(self._levels, self._told_s)
        _forget_oldest(self._stored_s, self._stored_s)
        _forget_oldest(self._told_s, self._told_s)
        self._changes.tell()

    def _told_of_work(self, message: messages.Working) -> None:
        """Work for this rank is logged: it waits for it. What else is said is kept for whoever asks."""
        if message.rank not in (-1, self._rank):
            return
        self._working[message.what] = message
        if message.rank == self._rank:
            logger.info("%s %s: %s", message.what, message.version, self.working(message.what, message.version))

    def _alarmed(self, message: messages.Alarm) -> None:
        logger.warning("the keeper warns: %s", message.text)  # pushes may come before `connect` has returned
        self._alarms.pop(message.key, None)
        self._alarms[message.key] = message.text
        for oldest in list(self._alarms)[:-MAX_ALARMS]:
            del self._alarms[oldest]
        self._changes.tell()


def _forget_oldest(known: dict[Version, Any], since_s: Mapping[Version, float]) -> None:
    """Leaves, of more than twice MAX_LEVELS versions, the MAX_LEVELS of the latest times."""
    if len(known) > 2 * MAX_LEVELS:
        for oldest in sorted(known, key=lambda version: since_s.get(version, 0.0))[:-MAX_LEVELS]:
            known.pop(oldest, None)
