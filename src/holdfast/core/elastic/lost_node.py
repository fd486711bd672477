"""Decides when a node is lost: never by one kind of evidence alone.

A `Sign` at one of its peers is the first kind. The second is one of these:

- Its launcher's process is proven gone: the connection to it ended, which the kernel does when a process dies, and
  nobody listens any more where it listened. A process that is slow, stopped or starved keeps both.
- Its beats stay away for longer than they ever did before and it still lived. That is all that a machine without
  power leaves behind, and a slow one may look the same, so it takes seconds. Where ranks have finished and wait for
  others nothing is broken, and it takes minutes.

Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.model import Decision

# Silence for so long counts at the earliest.
LEAST_SILENCE_S = 4.0
# Beats that once came so many times later than usual may do so again.
FACTOR = 2.0
# Silence for so long counts whatever was seen before.
MOST_SILENCE_S = 30.0
# The same where ranks have only finished: torchrun's time for its barrier at the end of a job.
AWAITED_S = 300.0


class Sign(enum.Enum):
    """Names what shows at a peer that a node may be lost."""

    BROKEN = "the groups of its peers broke"
    UNANSWERED = "nobody answers what its peers asked for after a failure"
    AWAITED = "its peers have finished and wait for it"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Holds what is known of one node.

    Attributes:
        silent_s: seconds since a beat of it was new; 0 if none is missing.
        longest_s: seconds of the longest silence that a new beat of it ended.
        gone: the proof that its launcher has ended, as a phrase; empty: there is none.
    """

    silent_s: float = 0.0
    longest_s: float = 0.0
    gone: str = ""


def patience_s(longest_s: float) -> float:
    """Return how many seconds of silence count, where beats were once `longest_s` seconds apart."""
    return min(MOST_SILENCE_S, max(LEAST_SILENCE_S, FACTOR * longest_s))


def lost(nodes: Mapping[int, NodeFacts], sign: Sign | None) -> Decision[int]:
    """Return the group rank of the node that is lost, -1 if none is.

    Args:
        nodes: by group rank.
        sign: what shows here that one may be; None: nothing.
    """
    if sign is None:
        return Decision(-1, "nobody misses a node")
    for node, signs in sorted(nodes.items()):
        if signs.gone:
            return Decision(node, f"node {node} is lost: {signs.gone}, and {sign.value}")
    for node, signs in sorted(nodes.items()):
        if signs.silent_s > (AWAITED_S if sign is Sign.AWAITED else patience_s(signs.longest_s)):
            return Decision(node, f"node {node} is lost: it is silent, and {sign.value}")
    return Decision(-1, "no node is silent for long, and none is proven gone")
