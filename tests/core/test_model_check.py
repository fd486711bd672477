"""Every order of saves, skips, deaths, slow storage and late messages that a small job can meet, and rules taken out.

A check that finds nothing proves something only if it finds what is wrong: below, each rule of the protocol is
switched off once, and the check has to come back with a story that ends in the promise that the rule keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.layout import parity_groups
from holdfast.core.model import Decision, Version
from holdfast.core.versions import slot_guard
from holdfast.core.versions.coordinator_board import Board
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger
from holdfast.core.versions.slot_guard import Knowledge, SlotView
from model_check import replicas, world
from model_check.explorer import Result, check
from model_check.state import Bounds
from sample_kit import MORE, sampled

Patch = pytest.MonkeyPatch

ALONE, PAIR, NEIGHBOURS, THREE = (0, 0), (0, 1), (0, 0, 1), (0, 1, 2)

SOUND = {
    "two ranks, every message late": Bounds(PAIR, max_step=4, late_home=True),
    "two ranks that skip and fail": Bounds(PAIR, skips=1, failures=1),
    "three slots": Bounds(PAIR, num_slots=3, max_step=4, skips=1),
    "storage of any slowness": Bounds(PAIR, durable_every=1, max_step=3),
    "a trainer dies twice": Bounds(PAIR, max_step=2, trainer_deaths=2),
    "a keeper dies": Bounds(PAIR, keeper_deaths=1),
    "a keeper dies, storage is slow": Bounds(PAIR, max_step=2, keeper_deaths=1, durable_every=1),
    "a keeper dies and then a trainer": Bounds(PAIR, max_step=2, keeper_deaths=1, trainer_deaths=1),
    "the keeper of one node dies between two deaths of trainers": Bounds(
        ALONE, max_step=1, keeper_deaths=1, trainer_deaths=2
    ),
    "saves overlap the sealing": Bounds(PAIR, overlap=True, skips=1),
    "three ranks": Bounds(THREE, max_step=3),
    "three ranks, one dies": Bounds(THREE, max_step=2, trainer_deaths=1),
    "three ranks, three slots": Bounds(THREE, num_slots=3, max_step=2, skips=1),
    "two of three ranks on one node": Bounds(NEIGHBOURS, skips=1, max_step=2),
    "second copies": Bounds(PAIR, replicas=True, max_step=3),
    "a node does not wait for second copies": Bounds(PAIR, replicas=True, impatience=1, max_step=2),
    "second copies are made again": Bounds(PAIR, replicas=True, repeats=1, max_step=3),
    "parity": Bounds(THREE, replicas=True, parity=True, max_step=2),
    "parity, and a keeper dies": Bounds(THREE, replicas=True, parity=True, keeper_deaths=1, max_step=1),
    "parity, and a trainer dies": Bounds(THREE, replicas=True, parity=True, trainer_deaths=1, max_step=1),
    "a second copy is written to storage": Bounds(PAIR, replicas=True, takeovers=1, max_step=2),
}

DEEP = {
    "all faults of trainers": Bounds(PAIR, skips=1, failures=1, trainer_deaths=1),
    "all faults": Bounds(PAIR, skips=1, failures=1, trainer_deaths=1, keeper_deaths=1, max_step=2),
    "keepers and trainers die": Bounds(PAIR, keeper_deaths=1, trainer_deaths=1),
    "keepers die in turn": Bounds(PAIR, keeper_deaths=2),
    "trainers die in turn": Bounds(PAIR, trainer_deaths=2),
    "keepers die while storage is slow": Bounds(PAIR, keeper_deaths=1, skips=1, durable_every=1),
    "overlap and faults": Bounds(PAIR, overlap=True, skips=1, failures=1, keeper_deaths=1),
    "neighbours": Bounds(NEIGHBOURS, keeper_deaths=1),
    "three ranks and a keeper dies": Bounds(THREE, max_step=2, keeper_deaths=1, skips=1),
    "a node stops waiting for second copies": Bounds(PAIR, replicas=True, impatience=1),
    "nodes stop waiting and a trainer dies": Bounds(PAIR, replicas=True, impatience=2, trainer_deaths=1, max_step=2),
    "a node stops waiting and a keeper dies": Bounds(PAIR, replicas=True, impatience=1, keeper_deaths=1, max_step=2),
    "second copies are made again and a trainer dies": Bounds(PAIR, replicas=True, repeats=1, trainer_deaths=1),
    "second copies are made again and a node stops waiting": Bounds(
        PAIR, replicas=True, repeats=2, impatience=1, max_step=2
    ),
    "second copies are made again and a keeper dies": Bounds(
        PAIR, replicas=True, repeats=1, keeper_deaths=1, max_step=2
    ),
    "second copies are written to storage": Bounds(PAIR, replicas=True, takeovers=2, max_step=3),
    "second copies are written to storage and a trainer dies": Bounds(
        PAIR, replicas=True, takeovers=1, trainer_deaths=1, max_step=2
    ),
    "three versions with parity": Bounds(THREE, replicas=True, parity=True),
    "a node stops waiting for parity": Bounds(THREE, replicas=True, parity=True, impatience=1, max_step=2),
    "parity is made again": Bounds(THREE, replicas=True, parity=True, repeats=1, max_step=2),
    "parity, and a trainer dies later": Bounds(THREE, replicas=True, parity=True, trainer_deaths=1, max_step=2),
    "three slots and a trainer dies": Bounds(THREE, num_slots=3, max_step=2, trainer_deaths=1, skips=1),
}


def holds(bounds: Bounds) -> Result:
    """Checks, and says how much was looked at."""
    result = check(bounds)
    print(f"{result.num_states} states, {result.num_moves} moves")
    assert result.finding is None, str(result.finding)
    return result


QUICK = (
    "a node does not wait for second copies", "a second copy is written to storage", "parity, and a keeper dies",
    "parity, and a trainer dies", "saves overlap the sealing", "storage of any slowness",
    "the keeper of one node dies between two deaths of trainers", "three ranks", "two of three ranks on one node",
)  # fmt: skip


@pytest.mark.parametrize("name", sampled(SOUND, *QUICK))
def test_no_order_of_events_breaks_a_promise(name: str) -> None:
    assert holds(SOUND[name]).num_states > 100


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DEEP)
def test_no_order_of_events_breaks_a_promise_in_deep(name: str) -> None:
    assert holds(DEEP[name]).num_states > 5000


# --- rules taken out


def overwrite_the_oldest(patch: Patch) -> None:
    patch.setattr(slot_guard, "reusable", lambda slot, _: Decision(not slot.pins, "overwrite the oldest"))


def abandoned_stays(patch: Patch) -> None:
    original = slot_guard.reusable
    forgetful = lambda slot, known: original(slot, Knowledge(known.captured, frozenset(), known.lineage))  # noqa: E731
    patch.setattr(slot_guard, "reusable", forgetful)


def slot_by_counting(patch: Patch) -> None:
    original = NodeLedger.begin

    def begin(self: NodeLedger, rank: int, version: Version, own: Sequence[SlotView]) -> Decision[int | None]:
        empty = [SlotView(slot.index) for slot in own]  # the guard would say no; who counts does not ask it
        decision = original(self, rank, version, empty)
        return decision if decision.value is None else Decision(version.step % len(own), "counted")

    patch.setattr(NodeLedger, "begin", begin)


def lineage_ignored(patch: Patch) -> None:
    patch.setattr(Lineage, "is_live", lambda *_: True)


def pins_ignored(patch: Patch) -> None:
    original = slot_guard.reusable
    patch.setattr(slot_guard, "reusable", lambda slot, known: original(replace(slot, pins=0), known))


def skips_not_noticed(patch: Patch) -> None:
    patch.setattr(Board, "_skipped_by", lambda *_: [])


def neighbours_wait_for_each_other(patch: Patch) -> None:
    patch.setattr(NodeLedger, "_pass_by", lambda *_: None)


def one_rank_is_enough(patch: Patch) -> None:
    original = Board._try_captured

    def try_captured(self: Board, version: Version, entry: object) -> list[object]:
        world_size, self._topology = self._topology, replace(self._topology, node_of=self._topology.node_of[:1])
        try:
            return list(original(self, version, entry))  # type: ignore[arg-type]
        finally:
            self._topology = world_size

    patch.setattr(Board, "_try_captured", try_captured)


def giving_up_means_going_past(patch: Patch) -> None:
    """A rank that gives version 3 up may still be sealing version 2."""
    original = Board.abandoned

    def abandoned(self: Board, version: Version, rank: int, reason: str) -> list[object]:
        self._high[rank] = max(self._high.get(rank, version), version)
        return list(original(self, version, rank, reason))

    patch.setattr(Board, "abandoned", abandoned)


def adopted_slots_stay_untold(patch: Patch) -> None:
    patch.setattr(NodeLedger, "adopt", lambda *_, **__: ())


def ranks_do_not_tell_what_they_resumed_from(patch: Patch) -> None:
    """A keeper's slots are of the incarnation before, and nobody tells it which bundles make up their version."""
    patch.setattr(world, "told_by_ranks", lambda _: frozenset())


def copies_go_without_a_word(patch: Patch) -> None:
    """What patience was before: whoever has waited long enough overwrites, and others still call it replicated."""
    original = NodeLedger.give_up_copies

    def give_up(self: NodeLedger, version: Version) -> Decision[bool]:
        original(self, version)
        return Decision(self._captured is not None and version < self._captured, "")

    patch.setattr(NodeLedger, "give_up_copies", give_up)


def replicas_that_count_go(patch: Patch) -> None:
    patch.setattr(NodeLedger, "counts", lambda *_: False)


def what_stands_is_pulled_again(patch: Patch) -> None:
    patch.setattr(replicas, "stands", lambda *_: False)


def found_and_not_pinned(patch: Patch) -> None:
    """An order waits before its replica has come: it is pinned only if what is found when its turn comes is."""
    patch.setattr(replicas, "pins_when_its_turn_comes", lambda: False)


def dropped_copies_still_count(patch: Patch) -> None:
    original = Board._holders

    def holders(self: Board, entry: Any, bundle_id: str) -> set[int]:
        dropped, entry.dropped = entry.dropped, set()
        try:
            return original(self, entry, bundle_id)
        finally:
            entry.dropped = dropped

    patch.setattr(Board, "_holders", holders)


def slots_go_when_something_newer_is_captured(patch: Patch) -> None:
    """Parity needs the slots of all members: whoever overwrites one by the rule of what is captured takes it away."""
    patch.setattr(NodeLedger, "awaits_copies", lambda *_: False)


def the_last_piece_is_not_waited_for(patch: Patch) -> None:
    patch.setattr(Board, "_stands", lambda _, entry, __: bool(entry.replicas.get(parity_groups.STANDS)))


PLANTED: list[Any] = [  # how, in which bounds, what it breaks
    (overwrite_the_oldest, Bounds(PAIR), "S6"),
    (overwrite_the_oldest, Bounds(THREE, num_slots=3), "S6"),
    (abandoned_stays, Bounds(PAIR, failures=1), "V1"),
    (slot_by_counting, Bounds(PAIR, failures=1), "S6"),
    (lineage_ignored, Bounds(PAIR, trainer_deaths=1), "V1"),
    (pins_ignored, Bounds(PAIR, durable_every=1), "S5"),
    (skips_not_noticed, Bounds(PAIR, skips=2), "V1"),
    (neighbours_wait_for_each_other, Bounds(NEIGHBOURS), "V1"),
    (one_rank_is_enough, Bounds(PAIR), "S13"),
    (giving_up_means_going_past, Bounds(PAIR, overlap=True), "S6"),
    (adopted_slots_stay_untold, Bounds(PAIR, keeper_deaths=1), "V1"),
    (ranks_do_not_tell_what_they_resumed_from, Bounds(ALONE, max_step=1, keeper_deaths=1, trainer_deaths=2), "S1"),
    (copies_go_without_a_word, Bounds(PAIR, replicas=True, impatience=1), "S13"),
    pytest.param(replicas_that_count_go, Bounds(PAIR, num_slots=3, max_step=4, replicas=True), "S13", marks=MORE),
    pytest.param(dropped_copies_still_count, Bounds(PAIR, replicas=True, impatience=1), "S13", marks=MORE),
    pytest.param(found_and_not_pinned, Bounds(PAIR, replicas=True, takeovers=1), "S5", marks=MORE),
    pytest.param(
        slots_go_when_something_newer_is_captured,
        Bounds(THREE, replicas=True, parity=True, max_step=3),
        "S13",
        marks=MORE,
    ),
    (the_last_piece_is_not_waited_for, Bounds(THREE, replicas=True, parity=True, max_step=2), "S13"),
    (what_stands_is_pulled_again, Bounds(PAIR, replicas=True, repeats=1), "V1"),
]


@pytest.mark.parametrize(("plant", "bounds", "expected"), PLANTED, ids=lambda item: getattr(item, "__name__", ""))
def test_a_rule_that_is_missing_is_missed(
    plant: Callable[[Patch], None], bounds: Bounds, expected: str, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    result = check(bounds)
    assert result.finding is not None, f"nothing found in {result.num_states} states"
    print(f"{result.num_states} states\n{result.finding}")
    assert result.finding.invariant == expected
    assert len(result.finding.story) <= 24


def test_too_wide_bounds_are_refused() -> None:
    with pytest.raises(OverflowError):
        check(Bounds(PAIR), max_states=50)
