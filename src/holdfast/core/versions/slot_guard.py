"""Decides which slot a new version may be written into: the overwrite guard of protocol section 4.

Pure. A slot may be reused only if it is empty, or holds a version older than the newest one known to be captured on
*all* ranks, or one of dead lineage, or an abandoned one; never while it is pinned (being sealed, persisted, sent or
read), nor before its memory is there. The slot is chosen by content, never by counting. Stale knowledge only waits longer. Without the abandoned rule
one missed save locks two slots for ever; with "overwrite the oldest" two ranks lose their last complete version after
three transitions (both are found by the exhaustive model check in the tests).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.core.model import Decision, Version
from holdfast.core.versions.lineage import Lineage


class SlotState(enum.Enum):
    """Names what a slot holds."""

    UNPOPULATED = "unpopulated"  # its pages are still being allocated; nobody has it, and nobody may
    EMPTY = "empty"
    WRITING = "writing"  # the header is invalid: payload bytes may be anything
    SEALED = "sealed"  # header and digests stand; the bytes are that version


@dataclass(frozen=True, slots=True)
class SlotView:
    """Holds what the guard needs to know of a slot.

    Attributes:
        pins: how many activities (sealing, persisting, sending, restoring) need its bytes.
    """

    index: int
    state: SlotState = SlotState.EMPTY
    version: Version | None = None
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Holds what a node knows of the job; it may be stale, never wrong.

    Attributes:
        captured: the newest version captured on all ranks, or resumed from.
        abandoned: versions that are never complete.
    """

    captured: Version | None = None
    abandoned: frozenset[Version] = frozenset()
    lineage: Lineage = field(default_factory=Lineage)


def reusable(slot: SlotView, knowledge: Knowledge) -> Decision[bool]:
    """Return whether the guard lets `slot` be overwritten, and why."""
    version = slot.version
    if slot.state is SlotState.UNPOPULATED:
        return Decision(False, f"slot {slot.index} is still being made")
    if slot.pins:
        return Decision(False, f"slot {slot.index} is in use ({version})")
    if slot.state is SlotState.EMPTY or version is None:
        return Decision(True, f"slot {slot.index} is empty")
    if version in knowledge.abandoned:
        return Decision(True, f"slot {slot.index} holds the abandoned {version}")
    if not knowledge.lineage.is_live(version):
        return Decision(True, f"slot {slot.index} holds {version} of dead lineage")
    if knowledge.captured is not None and version < knowledge.captured:
        return Decision(True, f"slot {slot.index} holds {version}, older than {knowledge.captured} captured everywhere")
    if version == knowledge.captured:
        return Decision(False, f"slot {slot.index} holds {version}, the newest captured everywhere")
    return Decision(False, f"slot {slot.index} holds {version}, not yet known to be captured on all ranks")


def choose_slot(slots: Sequence[SlotView], knowledge: Knowledge) -> Decision[int | None]:
    """The slot for the next version: an empty one, else the reusable one with the oldest version, else None."""
    verdicts = [(slot, reusable(slot, knowledge)) for slot in slots]
    free = [(slot, verdict) for slot, verdict in verdicts if verdict.value]
    if not free:
        return Decision(None, "; ".join(verdict.reason for _, verdict in verdicts) or "no slots are reserved")
    slot, verdict = min(free, key=lambda item: (item[0].version is not None, item[0].version or Version(0, 0)))
    return Decision(slot.index, verdict.reason)
