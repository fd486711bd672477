"""Knows the saves of one rank that found no slot in time, and keeps the last of them as it was, for it may be come back to.

What an optimizer owns stays as it is until its next step, and whoever comes back asks whether it did. All else goes on: random numbers,
positions in the data, running means of a last evaluation. Of that, small tensors are set aside; the larger ones are looked at, and a
version of which one was written is not come back to. So no version has tensors of two moments.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from holdfast.checkpoint.entries.types import Gathered, LiveTensors
from holdfast.checkpoint.survivors.seen_tensors import SeenTensors
from holdfast.core.model import Version

logger = logging.getLogger(__name__)

# What is set aside of one save: buffers, random states, what objects hand out.
ASIDE_BYTES = 1 << 20
# Saves that are left out now and then say so at level WARNING once within this time.
TELL_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class _AsItWas:
    """One state: what is small in it are copies. `larger` was looked at then."""

    version: Version
    gathered: Gathered
    larger: SeenTensors


class RepeatedReasons:
    """Tells a reason that comes again with every step at level WARNING once within `TELL_EVERY_S`, else at level DEBUG."""

    def __init__(self) -> None:
        self._last: tuple[str, float] = ("", 0.0)

    def level(self, reason: str) -> int:
        """Return the level at which to log it now."""
        now, (before, told_s) = time.monotonic(), self._last
        if reason == before and now - told_s < TELL_EVERY_S:
            return logging.DEBUG
        self._last = reason, now
        return logging.WARNING


class LeftOutSaves:
    """Those since the last one that found a slot.

    Attributes:
        num: how many there are.
    """

    def __init__(self) -> None:
        self.num = 0
        self._last: _AsItWas | None = None
        self._warned_s = -TELL_EVERY_S

    def keep(self, version: Version, gathered: Gathered) -> None:
        """The state of a version that found no slot, at a time at which it is still there."""
        tensors, left = LiveTensors.of(gathered.tensors), ASIDE_BYTES
        aside, larger = {}, {}
        for name, live in sorted(tensors.items(), key=lambda item: item[1].local.nbytes):
            if live.late:
                continue
            left -= live.local.nbytes
            if left >= 0 or live.local.is_inference():  # of which torch counts no writes
                aside[name] = replace(live, local=live.local.detach().clone())
            else:
                larger[name] = live.local
        kept = replace(gathered, tensors=LiveTensors(tensors.lasting, {**tensors.fresh, **aside}))
        self._last = _AsItWas(version, kept, SeenTensors(larger))
        self._last.larger.look(version.step)

    def as_it_was(self, version: Version) -> Gathered | None:
        """Return the state of a version that is come back to; None if it was not left out."""
        return self._last.gathered if self._last is not None and self._last.version == version else None

    def why_changed(self, version: Version) -> str:
        """Return why a version cannot be come back to, beside what an optimizer owns; empty if it can, or was not left out."""
        if self._last is None or self._last.version != version:
            return ""
        return self._last.larger.why_written("tensors that no optimizer owns")

    def add(self, version: Version, reason: str) -> None:
        """A save found no slot; the first one since one did says so, if that was not said a moment ago."""
        self.num += 1
        told = self.num > 1 or time.monotonic() - self._warned_s < TELL_EVERY_S
        self._warned_s = self._warned_s if told else time.monotonic()
        what = "%s is left out, and so are later ones until a slot is free: %s"
        logger.log(logging.DEBUG if told else logging.WARNING, what, version, reason)

    def found(self) -> None:
        """A save has a slot."""
        if self.num > 1:
            logger.info("saves find a slot again; %d were left out", self.num)
        self.num, self._last = 0, None
