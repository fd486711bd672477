"""Decides when a node is lost: never by one kind of evidence alone.

Broken groups among its peers are the first kind. The second is one of these:

- Its launcher's process is proven gone: the connection to it ended, which the kernel does when a process dies, and
  nobody listens any more where it listened. A process that is slow, stopped or starved keeps both.
- Its beats stay away for longer than they ever did before and it still lived. That is all that a machine without
  power leaves behind, and a slow one may look the same, so it takes seconds.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.model import Decision

# Silence for so long counts at the earliest.
LEAST_SILENCE_S = 4.0
# Beats that once came so many times later than usual may do so again.
FACTOR = 2.0
# Silence for so long counts whatever was seen before.
MOST_SILENCE_S = 30.0


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


def lost(nodes: Mapping[int, NodeFacts], *, broken: bool) -> Decision[int]:
    """Return the group rank of the node that is lost, -1 if none is.

    Args:
        nodes: by group rank.
        broken: whether a worker here met a broken group that nobody has explained.
    """
    if not broken:
        return Decision(-1, "no group is broken")
    for node, signs in sorted(nodes.items()):
        if signs.gone:
            return Decision(node, f"node {node} is lost: {signs.gone}, and the groups of its peers broke")
    for node, signs in sorted(nodes.items()):
        if signs.silent_s > patience_s(signs.longest_s):
            return Decision(node, f"node {node} is lost: it is silent, and the groups of its peers broke")
    return Decision(-1, "no node is silent for long, and none is proven gone")
