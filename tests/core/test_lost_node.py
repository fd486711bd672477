"""When a node is lost: two kinds of evidence, and more patience with one that was silent before and lived."""

from __future__ import annotations

import pytest

from holdfast.core.elastic.lost_node import LEAST_SILENCE_S, MOST_SILENCE_S, NodeFacts, lost, patience_s

GONE = "its launcher has ended"


@pytest.mark.parametrize(
    ("nodes", "broken", "found"),
    [
        ({1: NodeFacts(gone=GONE)}, True, 1),  # at once
        ({1: NodeFacts(gone=GONE)}, False, -1),  # nobody misses it
        ({1: NodeFacts(silent_s=3600.0)}, False, -1),  # only the channel is broken
        ({1: NodeFacts(silent_s=LEAST_SILENCE_S)}, True, -1),  # a slow one
        ({1: NodeFacts(silent_s=LEAST_SILENCE_S + 0.1)}, True, 1),  # a machine without power says nothing more
        ({1: NodeFacts(silent_s=11.0, longest_s=6.0)}, True, -1),  # it was as slow before, and lived
        ({1: NodeFacts(silent_s=12.1, longest_s=6.0)}, True, 1),
        ({1: NodeFacts(silent_s=MOST_SILENCE_S + 0.1, longest_s=600.0)}, True, 1),
        ({1: NodeFacts(silent_s=20.0), 2: NodeFacts(gone=GONE)}, True, 2),  # proof before silence
        ({}, True, -1),
    ],
)
def test_a_node_is_lost(nodes: dict[int, NodeFacts], broken: bool, found: int) -> None:
    decision = lost(nodes, broken=broken)
    assert decision.value == found
    assert decision.reason


def test_patience_grows_with_the_longest_silence_and_has_bounds() -> None:
    known = [patience_s(seconds) for seconds in (0.0, 1.0, 2.5, 6.0, 14.0, 100.0)]
    assert known == sorted(known)
    assert known[0] == LEAST_SILENCE_S
    assert known[-1] == MOST_SILENCE_S
