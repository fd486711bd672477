"""An exhaustive model check of the protocol's memory: breadth first through every order of events, within bounds.

`check(Bounds(...))` visits every world that a small job can get into (testing.model_world) and judges each:

  S1   what was called captured is found again when all ranks come back, and with `replicas` what is called replicated
       is in two nodes at every moment
  S4   dead lineage is never chosen
  S5   no slot is given away while its bytes are being persisted
  S6   the newest complete version has a sealed copy of every shard, at every moment
  S13  nothing is called captured, or replicated, that is not
  V1   from every world saves become possible again once all messages have arrived, and with `replicas` second copies
       of them: no slot is locked for ever

The answer is how many worlds there were, and the shortest story that breaks a promise, if there is one. It runs the
real objects of core, so a rule that is taken out of them is missed here: the tests take out one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.versions.slot_guard import SlotState
from model_check import replicas
from model_check.state import Bounds, Broken, World
from model_check.world import Job

# So many saves may fail before one has to succeed, when nothing goes wrong any more.
MAX_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: its number in the protocol, what was seen, and the shortest way there."""

    invariant: str
    what: str
    story: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.invariant}: {self.what}", *self.story])


@dataclass(frozen=True, slots=True)
class Result:
    """Says what a check came to.

    Attributes:
        num_states: distinct worlds that were visited.
        num_moves: events that led from one to another.
    """

    num_states: int
    num_moves: int
    finding: Finding | None


class Explorer:
    """One breadth-first search."""

    def __init__(self, bounds: Bounds) -> None:
        self._job = Job(bounds)
        self._numbers: dict[World, int] = {}
        self._worlds: list[World] = []
        self._came_from: list[tuple[int, str]] = []
        self._calm: set[World] = set()
        self._num_moves = 0

    def run(self, max_states: int) -> Result:
        """Visits every world, or stops at the first that breaks a promise.

        Raises:
            OverflowError: there are more than `max_states`; the bounds are too wide to be exhausted.
        """
        self._visit(self._job.start(), 0, "the job starts")
        number = 0
        while number < len(self._worlds):
            world = self._worlds[number]
            last: tuple[str, ...] = ()
            try:
                for event, move in self._job.moves(world):
                    last = (event,)
                    self._num_moves += 1
                    self._visit(move(), number, event)
                last = ("everything arrives, and all ranks save again",)
                self._saves_again(world)
            except Broken as broken:
                return self._result(self._finding(broken, number, last))
            number += 1
            if len(self._worlds) > max_states:
                raise OverflowError(f"more than {max_states} states")
        return self._result(None)

    def _visit(self, world: World, parent: int, event: str) -> None:
        if world not in self._numbers:
            self._numbers[world] = len(self._worlds)
            self._worlds.append(world)
            self._came_from.append((parent, event))

    def _result(self, finding: Finding | None) -> Result:
        return Result(len(self._worlds), self._num_moves, finding)

    def _finding(self, broken: Broken, number: int, last: tuple[str, ...]) -> Finding:
        story: list[str] = []
        while number:
            number, event = self._came_from[number]
            story.append(event)
        return Finding(broken.invariant, broken.what, (*reversed(story), *last))

    # --- liveness

    def _saves_again(self, world: World) -> None:
        """V1: when all messages have arrived and nothing fails any more, a version is captured soon, and replicated."""
        job, world = self._job, self._quiet(world)
        if world in self._calm:
            return
        start = world
        for _ in range(MAX_ROUNDS):
            step = max(world.steps) + 1
            for rank in job.ranks:
                world = job.save(world, rank, step)
            world = self._quiet(world)
            captured = world.complete is not None and world.complete == world.acked and world.acked.step == step
            if captured and (not job.bounds.replicas or world.safest == world.complete):
                self._calm.add(start)
                return
        wanted = "captured and replicated" if job.bounds.replicas else "captured"
        raise Broken("V1", f"saves stay impossible: none of {MAX_ROUNDS} more becomes {wanted}")

    def _quiet(self, world: World) -> World:
        """The world when everything under way has ended well."""
        job = self._job
        for node in job.nodes:
            world = world if world.joined[node] else job.join(world, node)
        if not all(world.alive):
            world = job.recover(world)
        while True:
            before = world
            for rank in job.ranks:
                while any(slot.state is SlotState.WRITING for slot in world.slots[rank]):
                    world = job.seal(world, rank)
            for node in job.nodes:
                while world.inboxes[node]:
                    world = job.hear(world, node)
                while any(slot.pins for rank in job.topology.ranks_on(node) for slot in world.slots[rank]):
                    world = job.persisted(world, node)
            if job.bounds.replicas:
                world = replicas.arrive(job, world)
            if world == before:
                return world


def check(bounds: Bounds, *, max_states: int = 1_000_000) -> Result:
    """Explores everything within `bounds`.

    Raises:
        OverflowError: that is more than `max_states`.
    """
    return Explorer(bounds).run(max_states)
