"""Rules of the core taken out, one at a time: a simulation that cannot fail proves nothing.

Each entry replaces one real function for the time of a context, and names the invariants of which one must be reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from holdfast.core.elastic import escalation, failure_detector
from holdfast.core.elastic.escalation import EscalationPolicy, RecoveryAction, RecoveryDecision
from holdfast.core.elastic.failure_detector import Watch
from holdfast.core.model import Decision, Version
from holdfast.core.recovery import survivor_vote, version_choice
from holdfast.core.recovery.survivor_vote import Offer
from holdfast.core.recovery.version_choice import Quarantine
from holdfast.core.versions import slot_guard
from holdfast.core.versions.coordinator_board import Announcement, Board, Kind
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger
from holdfast.core.versions.slot_guard import Knowledge, SlotView
from holdfast.testing.simulator import persisting
from holdfast.testing.simulator.run import Result, run
from holdfast.testing.simulator.trainer_state import Memory

SEEDS_PER_BUG = 60


@dataclass(frozen=True, slots=True)
class Bug:
    """One rule taken out: where, what stands there instead, and which invariants break."""

    owner: Any
    name: str
    replacement: Callable[[Any], Any]
    breaks: tuple[str, ...]


def hunt(name: str, first_seed: int, seeds: int = SEEDS_PER_BUG) -> Result | None:
    """The first seed that finds a planted bug by one of its invariants."""
    bug = BUGS[name]
    with mock.patch.object(bug.owner, bug.name, bug.replacement(getattr(bug.owner, bug.name))):
        for seed in range(first_seed, first_seed + seeds):
            result = run(seed)
            if result.violation is not None and result.violation.invariant in bug.breaks:
                return result
    return None


def _overwrite_the_oldest(_: Any) -> Any:
    return lambda slot, _known: Decision(not slot.pins, "the oldest")


def _abandoned_stays(original: Any) -> Any:
    return lambda slot, known: original(slot, Knowledge(known.captured, frozenset(), known.lineage))


def _pins_ignored(original: Any) -> Any:
    return lambda slot, known: original(replace(slot, pins=0), known)


def _slot_by_counting(original: Any) -> Any:
    def begin(self: NodeLedger, rank: int, version: Version, own: Sequence[SlotView]) -> Decision[int | None]:
        decision: Decision[int | None] = original(self, rank, version, [SlotView(slot.index) for slot in own])
        return decision if decision.value is None else Decision(version.step % len(own), "counted")

    return begin


def _all_but_one_is_enough(original: Any) -> Any:
    def try_captured(self: Any, version: Version, entry: Any) -> Any:
        if entry.is_open and 0 < len(entry.sealed) == self._topology.world_size - 1:
            return [Announcement(Kind.CAPTURED, version, "nearly all ranks sealed it")]
        return original(self, version, entry)

    return try_captured


def _replicated_at_once(_: Any) -> Any:
    def try_replicated(_self: Any, version: Version, entry: Any) -> Any:
        entry.under_replicated.clear()
        return [Announcement(Kind.REPLICATED, version, "surely")] if entry.is_open is False else []

    return try_replicated


def _parts_not_awaited(original: Any) -> Any:
    def try_commit(self: Any, version: Version, entry: Any) -> Any:
        entry.unwritten.clear()
        return original(self, version, entry)

    return try_commit


def _quarantine_ignored(original: Any) -> Any:
    return lambda version, table, facts: original(version, table, replace(facts, quarantine=Quarantine()))


def _unreachable_is_damaged(_: Any) -> Any:
    return lambda _version, reason, _why, **_more: Decision(None, reason)


def _notes_not_awaited(original: Any) -> Any:
    def agree(offers: Sequence[Offer], **more: Any) -> Any:
        every = tuple({version for offer in offers for version in offer.notes})
        return original([replace(offer, notes=every) for offer in offers], **more)

    return agree


def _window_not_seen(_: Any) -> Any:
    return lambda self: Offer(self.noted, tuple(self.notes), "")


def _device_believed(_: Any) -> Any:
    return lambda _self: None


def _waiters_condemned(_: Any) -> Any:
    return lambda *_args: False


def _never_quiet(_: Any) -> Any:
    return lambda *_args: False


def _always_quiet(_: Any) -> Any:
    return lambda *_args: True


def _heartbeats_believed(original: Any) -> Any:
    def judge_nodes(self: Any, now_s: float, nodes: Any) -> Any:
        found = original(self, now_s, nodes)
        return [replace(verdict, kind=failure_detector.Kind.REPLACE_NODE) for verdict in found]

    return judge_nodes


def _never_the_same_place(_: Any) -> Any:
    return lambda *_args: False


def _always_once_more(_: Any) -> Any:
    return lambda *_args: RecoveryDecision(RecoveryAction.REPLACE, "once more")


def _retention_keeps_one(_: Any) -> Any:
    return lambda durable, **_more: tuple(sorted(durable)[:-1])


def _nothing(_: Any) -> Any:
    return lambda *_args, **_more: []


def _no_reports(_: Any) -> Any:
    return lambda *_args, **_more: ()


BUGS: dict[str, Bug] = {
    "overwrite-the-oldest": Bug(slot_guard, "reusable", _overwrite_the_oldest, ("S6", "S1")),
    "abandoned-stays": Bug(slot_guard, "reusable", _abandoned_stays, ("V1",)),
    "pins-ignored": Bug(slot_guard, "reusable", _pins_ignored, ("S5", "S1")),
    "slot-by-counting": Bug(NodeLedger, "begin", _slot_by_counting, ("S6", "S5", "S1")),
    "lineage-ignored": Bug(Lineage, "is_live", lambda _: lambda *_args: True, ("S4", "V1", "S11")),
    "all-but-one-is-enough": Bug(Board, "_try_captured", _all_but_one_is_enough, ("S13",)),
    "replicated-at-once": Bug(Board, "_try_replicated", _replicated_at_once, ("S13",)),
    "parts-not-awaited": Bug(Board, "_try_commit", _parts_not_awaited, ("S2", "S13")),
    "twins-not-compared": Bug(Board, "_compare_twins", _nothing, ("S16",)),
    "adopted-slots-untold": Bug(NodeLedger, "adopt", _no_reports, ("V1", "S1")),
    "quarantine-ignored": Bug(version_choice, "_complete", _quarantine_ignored, ("V2", "S5")),
    "unreachable-is-damaged": Bug(version_choice, "_awaited", _unreachable_is_damaged, ("S1",)),
    "notes-not-awaited": Bug(survivor_vote, "agree", _notes_not_awaited, ("S3",)),
    "window-not-seen": Bug(Memory, "offer", _window_not_seen, ("S12",)),
    "device-believed": Bug(Memory, "void", _device_believed, ("S20",)),
    "retention-keeps-one": Bug(persisting, "to_retire", _retention_keeps_one, ("S11",)),
    "waiters-condemned": Bug(Watch, "_stands", _waiters_condemned, ("V4",)),
    "always-quiet": Bug(Watch, "_is_quiet", _always_quiet, ("V4",)),
    "never-quiet": Bug(Watch, "_is_quiet", _never_quiet, ("V4",)),
    "progress-forgotten": Bug(EscalationPolicy, "progressed", lambda _: lambda _self: None, ("V4",)),
    "older-never-tried": Bug(escalation, "_same_place", _never_the_same_place, ("V2",)),
    "never-stops": Bug(EscalationPolicy, "_answer", _always_once_more, ("V2",)),
    "heartbeats-believed": Bug(Watch, "_judge_nodes", _heartbeats_believed, ("V4",)),
}
