"""A job begins anew only where all that it saved was in memory alone, and is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.model import Level, Seal, Topology, Version
from holdfast.core.recovery.begin_anew import may_begin_anew
from holdfast.core.recovery.version_choice import Facts, MemoryCopy, Quarantine, Unreachable
from holdfast.core.versions.lineage import Lineage

OLD, NEW = Version(1, 4), Version(1, 5)
COPIES = (MemoryCopy.at(NEW, 0, 0, Seal("g0-0", 8, "aa")), MemoryCopy.at(OLD, 0, 0, Seal("g0-0", 8, "bb")))
LOST = Facts(COPIES, {}, {}, Lineage({}), Topology(("a", "b"), (0, 1)))


def judged(facts: Facts = LOST, levels: dict[Version, Level] | None = None, **more: Any) -> tuple[bool, str]:
    rest = {"in_storage": False, "silent": False, "condemned": (), **more}
    decision = may_begin_anew(facts, levels or {}, **rest)
    return decision.value, decision.reason


def test_what_was_in_memory_alone_and_went_with_its_node_is_no_reason_to_end() -> None:
    may, reason = judged(levels={NEW: Level.CAPTURED, OLD: Level.REPLICATED})
    assert may
    assert str(NEW) in reason


REFUSALS = {
    "stored": ({}, {"in_storage": True}, "storage"),
    "silent": ({}, {"silent": True}, "answer"),
    "condemned": ({}, {"condemned": (NEW,)}, "refused"),
    "was durable": ({}, {"levels": {OLD: Level.DURABLE}}, "was durable"),
    "suspect": ({"suspects": frozenset({OLD})}, {}, "refused"),
    "a bad copy": ({"quarantine": Quarantine(frozenset({(NEW, "g1-0", 1)}))}, {}, "refused"),
    "passed over": ({"quarantine": Quarantine(versions={NEW: "passed over"})}, {}, "refused"),
    "out of reach": ({"unreachable": Unreachable(copies={(NEW, "g1-0", 1): "late"})}, {}, "reached"),
    "a keeper is waited for": ({"unreachable": Unreachable(keepers=("b",))}, {}, "answer"),
    "copies differ": ({"memory": (*COPIES, MemoryCopy.at(NEW, 1, None, Seal("g0-0", 8, "cc")))}, {}, "differ"),
    "an unknown descent": ({"lineage": Lineage({3: Version(2, 5)})}, {}, "recorded"),
    "nothing was saved": ({"memory": ()}, {}, "no version"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_whatever_may_be_found_again_stays_an_error(case: str) -> None:
    facts, more, why = REFUSALS[case]
    may, reason = judged(replace(LOST, **facts), **more)
    assert not may
    assert why in reason
