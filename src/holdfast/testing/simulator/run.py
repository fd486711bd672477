"""One seed: a cluster, ten faults or more at random moments, a time of calm, and what must hold at its end.

Every strike happens to the job as it is then: somebody dies, hangs, is cut off, slowed down, repeated, damaged; half of
the recoveries are struck again. Hangs and lost nodes are found by the real Watch (testing.simulator.watching). In the
end everything is healed and the job must reach every level again (V1, V3). The same seed gives the same run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.core.elastic.escalation import Fault
from holdfast.core.elastic.failure_detector import LOST_S
from holdfast.core.versions.slot_guard import SlotState
from holdfast.testing.simulator import watching
from holdfast.testing.simulator.clock import Clock, Violation
from holdfast.testing.simulator.simulated_escalation import Curse
from holdfast.testing.simulator.simulated_job import Job

MIN_FAULTS, MAX_FAULTS = 10, 16
# Six durable saves: a rank that is still busy with the save before gives one up, and that may happen to several in a row.
CALM_S = 12.0


@dataclass(frozen=True, slots=True)
class Result:
    """Says what became of a seed."""

    seed: int
    digest: str
    num_events: int
    faults: Counter[str]
    recoveries: int
    fills: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    violation: Violation | None = None
    story: list[str] = field(default_factory=list)


class Striker:
    """The faults of one run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done: Counter[str] = Counter()
        self.kinds: tuple[tuple[str, int, Callable[[], bool]], ...] = (
            ("crash", 5, self.crash),
            ("hang", 3, self.hang),
            ("keeper death", 4, self.keeper_death),
            ("coordinator death", 3, self.coordinator_death),
            ("node loss", 3, self.node_loss),
            ("partition", 3, self.partition),
            ("one-way partition", 3, self.one_way),
            ("delay", 2, self.delay),
            ("duplication", 2, self.duplication),
            ("reorder", 2, self.reorder),
            ("slow storage", 2, self.slow_storage),
            ("storage outage", 2, self.outage),
            ("unreadable storage", 2, self.unreadable),
            ("flipped bit", 2, self.flip),
            ("twins differ", 2, self.poison),
            ("broken groups", 2, self.broken_groups),
            ("cursed step", 2, self.curse),
        )

    def strike(self) -> None:
        """One fault that is possible now."""
        names = [name for name, _, _ in self.kinds]
        weights = [weight for _, weight, _ in self.kinds]
        actions = {name: action for name, _, action in self.kinds}
        for name in self.job.clock.chance.choices(names, weights, k=6):
            self.job.clock.say(f"fault: {name}")
            second = self.job.recovering
            if actions[name]():
                self.done[name] += 1
                self.done["second fault in recovery"] += int(second)
                return

    def _later(self, undo: Callable[[], None]) -> bool:
        self.job.clock.after(self.job.clock.chance.uniform(1.0, 6.0), undo)
        return True

    def crash(self) -> bool:
        """A trainer dies; all go back. In a recovery: it begins again."""
        rank = self.job.clock.chance.choice(list(self.job.layouts))
        self.job.end_process(rank)
        self.job.climb.failed(Fault.PROCESS, f"rank {rank} died", rank=rank, step=self.job.step)
        return True

    def hang(self) -> bool:
        """A trainer hangs; the watchdog's verdict, and the time it took, are the real ones."""
        job = self.job
        if job.recovering:
            return False
        rank = job.clock.chance.choice(list(job.layouts))
        job.hung.add(rank)
        found_s = watching.find_hang(job.clock.chance, rank, job.topology)
        attempt = job.attempt

        def killed() -> None:
            if attempt == job.attempt:
                job.memories.of[rank].die()
                why = f"rank {rank} hung and was killed after {found_s:.2f} s"
                job.climb.failed(Fault.PROCESS, why, rank=rank, step=job.step)

        job.clock.after(found_s, killed)
        return True

    def keeper_death(self) -> bool:
        """Any keeper; its trainers, if they live, keep the memory."""
        keeper = self.job.clock.chance.choice(self.job.keepers)
        if not keeper.alive:
            return False
        self.job.kill_keeper(keeper)
        return True

    def coordinator_death(self) -> bool:
        """The keeper with the desk."""
        desks = [keeper for keeper in self.job.keepers if keeper.alive and keeper.desk is not None]
        if not desks:
            return False
        self.job.kill_keeper(desks[0])
        return True

    def node_loss(self) -> bool:
        """A node with everything on it; silence and stuck peers tell."""
        job = self.job
        keeper = job.clock.chance.choice(job.keepers)
        if not keeper.alive:
            return False
        job.lose_node(keeper)
        found_s = watching.find_lost_node(job.clock.chance, keeper.node, job.topology) if len(job.keepers) > 1 else 0.1
        attempt = job.attempt

        def replaced() -> None:
            if attempt == job.attempt:
                job.climb.failed(Fault.NODE, f"node {keeper.node} was lost")

        job.clock.after(found_s, replaced)
        return True

    def _pairs(self) -> list[tuple[int, int]]:
        nodes = range(len(self.job.keepers))
        chosen = self.job.clock.chance.randrange(len(nodes))
        return [(chosen, other) for other in nodes if other != chosen]

    def partition(self) -> bool:
        """One node against the others."""
        pairs = self._pairs()
        both = [*pairs, *((b, a) for a, b in pairs)]
        self.job.network.partition(both, self.job.clock.chance.uniform(0.5, 6))
        return bool(pairs)

    def one_way(self) -> bool:
        """One node is heard and does not hear, or the other way round."""
        pairs = self._pairs()
        away = self.job.clock.chance.random() < 0.5
        self.job.network.partition(pairs if away else [(b, a) for a, b in pairs], self.job.clock.chance.uniform(0.5, 6))
        return bool(pairs)

    def delay(self) -> bool:
        """Messages take up to a second."""
        self.job.network.slow = 50.0
        return self._later(lambda: setattr(self.job.network, "slow", 1.0))

    def duplication(self) -> bool:
        """Every third message arrives twice."""
        self.job.network.repeats = 0.3
        return self._later(lambda: setattr(self.job.network, "repeats", 0.0))

    def reorder(self) -> bool:
        """Messages overtake each other."""
        self.job.network.reorders, self.job.network.slow = True, 20.0

        def undo() -> None:
            self.job.network.reorders, self.job.network.slow = False, 1.0

        return self._later(undo)

    def slow_storage(self) -> bool:
        """A write takes seconds."""
        self.job.storage.slow = 15.0
        return self._later(lambda: setattr(self.job.storage, "slow", 1.0))

    def outage(self) -> bool:
        """Storage is away."""
        storage = self.job.storage
        storage.down += 1
        return self._later(lambda: setattr(storage, "down", storage.down - 1))

    def unreadable(self) -> bool:
        """Storage lists its versions, takes new ones, and refuses to read."""
        storage = self.job.storage
        storage.unreadable += 1
        return self._later(lambda: setattr(storage, "unreadable", storage.unreadable - 1))

    def flip(self) -> bool:
        """A bit of a sealed copy in memory; only its digest can tell."""
        job = self.job
        sealed = [
            held for keeper in job.keepers for own in keeper.slots.values() for held in own
            if held.view.state is SlotState.SEALED and held.content
        ]  # fmt: skip
        if not sealed:
            return False
        held = job.clock.chance.choice(sealed)
        name = job.clock.chance.choice(sorted(held.content))
        held.content[name] += "~"
        job.observer.flipped = True
        if held.view.version == job.observer.complete:
            job.observer.complete = None
        return True

    def poison(self) -> bool:
        """A twin computes something else, once."""
        self.job.poisoned.add(self.job.clock.chance.choice(list(self.job.layouts)))
        return True

    def broken_groups(self) -> bool:
        """The groups break and no process dies."""
        if self.job.recovering:
            return False
        self.job.climb.failed(Fault.GROUPS, "groups broke")
        return True

    def curse(self) -> bool:
        """Let one rank die at one step from now on: because of the newest version, or whatever it comes from."""
        job, chance = self.job, self.job.clock.chance
        if job.climb.curse is not None:
            return False
        rank = chance.choice(list(job.layouts))
        job.climb.curse = Curse(rank, job.step + chance.randint(1, 3), curable=chance.random() < 0.5)
        return True


def run(seed: int, *, verbose: bool = False, parity: bool = False) -> Result:
    """One run from its seed; with `parity` of three nodes or more that keep parity of each other."""
    clock = Clock(seed, verbose=verbose)
    violation = None
    striker: Striker | None = None
    job: Job | None = None
    try:
        job = Job(clock, parity=parity)
        striker = Striker(job)
        job.split_hurts = clock.chance.random() < 0.3
        for _ in range(clock.chance.randint(MIN_FAULTS, MAX_FAULTS)):
            quick = clock.chance.random() < 0.3
            clock.run(clock.now_s + (clock.chance.uniform(0.05, 0.8) if quick else clock.chance.uniform(1.0, 6.0)))
            striker.strike()
            job.observer.check_bounds(job.keepers)
        _calm(job)
    except Violation as found:
        violation = found
    done = striker.done if striker else Counter()
    recoveries = job.recoveries if job else 0
    fills = job.memories.fills if job else 0
    answers = job.climb.answers if job else Counter()
    return Result(seed, clock.digest, clock.num_events, done, recoveries, fills, answers, violation, clock.lines)


def _calm(job: Job) -> None:
    """Faults end; within a bound every level is reached again."""
    clock = job.clock
    clock.say("calm")
    job.climb.curse = None  # somebody mended the script; a strike now would be one more fault
    clock.run(clock.now_s + LOST_S + 2.0)  # partitions heal, hangs and lost nodes are found, recoveries end
    limit = clock.now_s + 130
    while (job.recovering or job.hung or not all(job.alive.values())) and clock.now_s < limit:
        clock.run(clock.now_s + 1.0)
    if job.recovering or job.hung or not all(job.alive.values()):
        raise Violation("V2", "faults are over and the job does not train")
    job.newest_captured_step = job.newest_durable_step = -1
    began = job.step
    clock.run(clock.now_s + CALM_S)
    if job.newest_captured_step < began:
        raise Violation("V1", f"nothing saved after step {began} was captured in {CALM_S:.0f} s of calm")
    if job.newest_durable_step < began:
        raise Violation("V1", f"nothing saved after step {began} became durable in {CALM_S:.0f} s of calm")
    job.observer.check_bounds(job.keepers)
