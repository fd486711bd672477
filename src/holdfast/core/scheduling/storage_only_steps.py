"""Decides when ranks without keepers meet to agree: rarely enough to cost nothing, often enough for a stop to be heard.

A job that goes on durable-only has nobody who could appoint a step, so its ranks meet in a collective. When, they all
know beforehand: each meeting names the step after which the next one is. Rank 0's clock decides what a cadence in
seconds asks for; anybody may ask for a stop. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# A stop that was asked for waits no longer than this (a SIGTERM is usually followed by SIGKILL after 30 s).
MAX_GAP_S = 5.0
# A guess from one fast step must not send everybody away for long.
GROWTH = 2


@dataclass(frozen=True, slots=True)
class MeetingInput:
    """Holds what one rank brings to a meeting. `save` and `next_step` of rank 0 count. `memory`: it could save there
    again.
    """

    stop: bool
    save: bool = False
    next_step: int = 0
    memory: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Says what all ranks do after the step of a meeting, and after which step they meet again."""

    save: bool
    stop: bool
    next_step: int
    memory: bool = False


def outcome(words: Sequence[MeetingInput]) -> Outcome:
    """The same on every rank, from what each said, by rank."""
    stop = any(word.stop for word in words)
    return Outcome(words[0].save or stop, stop, words[0].next_step, all(word.memory for word in words))


def next_step(*, step: int, gap: int, longest: int, elapsed_s: float, wait_s: float) -> int:
    """After which step to meet again.

    Args:
        step: the one that is finished.
        gap: steps since the last meeting; 0 at the first one.
        longest: the most steps that ever lay between two meetings.
        elapsed_s: seconds that the `gap` steps took.
        wait_s: seconds until a save is due by the clock.
    """
    if not gap:
        return step + 1
    most = GROWTH * max(gap, longest)
    room_s = min(max(wait_s, 0.0), MAX_GAP_S)
    if elapsed_s * most <= room_s * gap:
        return step + most
    return step + max(1, math.ceil(room_s * gap / elapsed_s))
