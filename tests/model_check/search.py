"""The search of a small model check: every world that events lead to, and the shortest story to one that breaks a promise.

`explorer.py` has its own: its worlds are many, so it numbers them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from model_check.state import Broken

World = TypeVar("World", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Found:
    """Says what a search came to: how many worlds there were, and the shortest story that breaks a promise, or an empty
    one.
    """

    num_states: int
    invariant: str = ""
    story: tuple[str, ...] = ()


def search(start: World, moves: Callable[[World], Iterable[tuple[str, World]]]) -> Found:
    """Visits every world from `start` on, nearest first.

    Args:
        start: the first world.
        moves: gives what may happen in a world, and the world after it; raises Broken where a promise does not hold.
    """
    came: dict[World, tuple[World | None, str]] = {start: (None, "")}
    queue = [start]
    for world in queue:
        try:
            for event, after in moves(world):
                if after not in came:
                    came[after] = (world, event)
                    queue.append(after)
        except Broken as broken:
            story = [f"{broken.invariant}: {broken.what}"]
            at: World | None = world
            while at is not None:
                at, event = came[at]
                story.append(event)
            return Found(len(came), broken.invariant, tuple(reversed(story)))
    return Found(len(came))
