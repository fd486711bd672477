"""When a node is lost: two kinds of evidence, and more patience with one that was silent before and lived."""

from __future__ import annotations

import pytest

from holdfast.core.elastic.lost_node import (
    AWAITED_S,
    LEAST_SILENCE_S,
    MOST_SILENCE_S,
    NodeFacts,
    Sign,
    lost,
    patience_s,
)

GONE = "its launcher has ended"


@pytest.mark.parametrize(
    ("nodes", "sign", "found"),
    [
        ({1: NodeFacts(gone=GONE)}, Sign.BROKEN, 1),  # at once
        ({1: NodeFacts(gone=GONE)}, None, -1),  # nobody misses it
        ({1: NodeFacts(silent_s=3600.0)}, None, -1),  # only the channel is broken
        ({1: NodeFacts(silent_s=LEAST_SILENCE_S)}, Sign.BROKEN, -1),  # a slow one
        ({1: NodeFacts(silent_s=LEAST_SILENCE_S + 0.1)}, Sign.BROKEN, 1),  # a machine without power says nothing more
        ({1: NodeFacts(silent_s=11.0, longest_s=6.0)}, Sign.BROKEN, -1),  # it was as slow before, and lived
        ({1: NodeFacts(silent_s=12.1, longest_s=6.0)}, Sign.BROKEN, 1),
        ({1: NodeFacts(silent_s=MOST_SILENCE_S + 0.1, longest_s=600.0)}, Sign.BROKEN, 1),
        ({1: NodeFacts(silent_s=20.0), 2: NodeFacts(gone=GONE)}, Sign.BROKEN, 2),  # proof before silence
        ({}, Sign.BROKEN, -1),
        ({0: NodeFacts(silent_s=LEAST_SILENCE_S + 0.1)}, Sign.UNANSWERED, 0),
        ({1: NodeFacts(gone=GONE)}, Sign.AWAITED, 1),  # it died behind its last collective
        ({1: NodeFacts(silent_s=AWAITED_S)}, Sign.AWAITED, -1),  # nothing is broken: it may be moved, and come back
        ({1: NodeFacts(silent_s=AWAITED_S + 0.1)}, Sign.AWAITED, 1),
    ],
)
def test_a_node_is_lost(nodes: dict[int, NodeFacts], sign: Sign | None, found: int) -> None:
    decision = lost(nodes, sign)
    assert decision.value == found
    assert decision.reason


def test_patience_grows_with_the_longest_silence_and_has_bounds() -> None:
    known = [patience_s(seconds) for seconds in (0.0, 1.0, 2.5, 6.0, 14.0, 100.0)]
    assert known == sorted(known)
    assert known[0] == LEAST_SILENCE_S
    assert known[-1] == MOST_SILENCE_S
