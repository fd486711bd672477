"""Plans what a crash drill will do, drawn from a seed before anything runs: the same seed gives the same plan.

A job of one or two ranks lives several times. Each life is a script of saves, and nearly each holds a strike: who dies,
in which phase of whom, in which pass through it, and how deep in it. A strike and the coming back from it is a trial;
as many as STRIKES share a job, so that what one leaves behind is what the next one falls upon. How long a phase lasts is
measured when the drill starts, so an instant is planned as a fraction and not in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from holdfast.testing.drill.crash_points import MEASURE, RECORD

PHASES = ("save", "seal", "persist", "commit", "retention", "restore")
VICTIMS = ("trainer", "keeper")
CELLS = tuple(product(PHASES, VICTIMS))
# In one job.
STRIKES = 4
# Where a trial without a strike counts.
NO_STRIKE = (("none", "nobody"),)
# The phase of a strike that is not aimed at one: anywhere between the start of a trainer and the end of its script.
ANYTIME = "any time"

# One job of so many has a state that is large enough for writes past the page cache.
LARGE_EVERY = 8

SOLO, PAIR, TWINS = "solo", "pair", "twins"
# One rank alone; two ranks on two nodes, each with a state of its own; the same with equal state on both.
SHAPES = {SOLO: 1, PAIR: 2, TWINS: 2}
_SHAPE_WEIGHTS = {SOLO: 10, PAIR: 2, TWINS: 1}


@dataclass(frozen=True, slots=True)
class Save:
    """Train `gap` steps, save at `level`, and wait for that level or go on at once."""

    gap: int
    level: str
    wait: bool


def script(text: str) -> tuple[Save, ...]:
    """`C2` is a captured save after two steps, `d1` a durable one that nobody waits for, and so on."""
    levels = {"c": "captured", "d": "durable", "r": "replicated"}
    return tuple(Save(int(word[1:]), levels[word[0].lower()], word[0].isupper()) for word in text.split())


@dataclass(frozen=True, slots=True)
class Aim:
    """Names where the strike falls.

    Attributes:
        phase: one of PHASES.
        actor: the process whose phase it is (`t0`, `k1`, ...).
        victim: the process that dies; `n1` is a whole node, its trainer and its keeper.
        turn: which pass through the phase, as a fraction of the usual number.
        stepped: exactly before or after an operation; else after a fraction of the usual time.
        fraction: how deep in the phase.
        exact: (which pass, after how many operations) instead of the fractions, for cuts of power.
        cut: how the power of the checkpoints' file system is cut at that instant (power_cut_disk.py); 0 for not.
    """

    phase: str
    actor: str
    victim: str
    turn: float
    stepped: bool
    fraction: float
    exact: tuple[int, int] | None = None
    cut: int = 0

    @property
    def victims(self) -> tuple[str, ...]:
        """The names of all who die."""
        return (f"k{self.victim[1:]}", f"t{self.victim[1:]}") if self.victim.startswith("n") else (self.victim,)


@dataclass(frozen=True, slots=True)
class LifePlan:
    """One incarnation.

    Attributes:
        saves: what the trainers do after they came back.
        aim: the strike, if it falls into this life.
        onward: the trainers go on when their keeper dies; else they are killed with it.
        ends: how a life without a strike, or after its script, ends: `close` (orderly), `kill` (the trainers) or
            `kill all` (the keepers as well).
        roll_back: the user orders the oldest durable version.
        stranger: a foreign file is put into the oldest version's directory before this life.
        late_writer: after this life a process of a dead incarnation tries to commit again.
        twist: before the save of this number, counted from 1, a bit of rank 1's state flips, and flips back after it.
        damage: what is spoiled before this life: a byte of the newest version in `memory` or in `storage`.
        skew: rank 1 stops to save after that many saves, rank 0 goes on; 0 for none.
    """

    saves: tuple[Save, ...]
    aim: Aim | None = None
    onward: bool = False
    ends: str = "kill"
    roll_back: bool = False
    stranger: bool = False
    late_writer: bool = False
    twist: int = 0
    damage: str = ""
    skew: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One job from its first start to its end: one trial, or several that follow one another.

    Attributes:
        number: of its first trial.
        cells: (phase, victim) for each of its trials, one for each strike: where it counts in the table.
        large: its state is large enough for writes past the page cache.
        overlap: whether captures may overlap with training.
        plant: name of the bug that a test plants in its processes (shared.py).
        mode: `""`, or what the probes do besides: `measure` the phases, `record` every file operation.
        full_start: every process is a fresh interpreter, started as in production.
        disk: the kind of file system that the trial's checkpoints get for themselves (power_cut_disk.py); `""` for none.
    """

    number: int
    seed: int
    shape: str
    cells: tuple[tuple[str, str], ...]
    lives: tuple[LifePlan, ...]
    overlap: bool = True
    plant: str = ""
    mode: str = ""
    full_start: bool = False
    disk: str = ""
    large: bool = False


LAST_LIFE = LifePlan(saves=(Save(1, "captured", True), Save(1, "durable", True)), ends="close")
# Two durable saves, so that retention runs once more.
LAST_LIFE_RETIRING = LifePlan(saves=(Save(1, "durable", True), Save(1, "durable", True)), ends="close")


def plan(num_trials: int, seed: int) -> list[Trial]:
    """Jobs with so many strikes, over all phases and victims in turn; trial n is the same whatever their number."""
    return [draw(first // STRIKES, seed, min(STRIKES, num_trials - first)) for first in range(0, num_trials, STRIKES)]


def draw(job: int, seed: int, num_strikes: int = STRIKES) -> Trial:
    """The first trials of job `job` in the plan of `seed`."""
    dice = random.Random(f"{seed}/{job}")
    shape = dice.choices(list(_SHAPE_WEIGHTS), list(_SHAPE_WEIGHTS.values()))[0]
    overlap = dice.random() < 0.7
    record = job % 10 == 1
    numbers = range(job * STRIKES, job * STRIKES + num_strikes)
    cells = tuple(_cell(number, seed) for number in numbers)
    aims = [
        _aim(phase, victim, shape, random.Random(f"{seed}/{n}/aim"))
        for n, (phase, victim) in zip(numbers, cells, strict=True)
    ]
    return Trial(
        number=numbers[0],
        seed=seed,
        shape=shape,
        cells=cells,
        lives=lives(aims, dice, plain=record),
        overlap=overlap,
        mode=RECORD if record else "",
        large=job % LARGE_EVERY == LARGE_EVERY - 1,
    )


def _cell(number: int, seed: int) -> tuple[str, str]:
    """Each once in as many trials as there are cells, in an order of its own: every phase follows every other."""
    turn, place = divmod(number, len(CELLS))
    return random.Random(f"{seed}/{turn}/cells").sample(CELLS, len(CELLS))[place]


def lives(aims: Sequence[Aim], dice: random.Random, *, plain: bool = False) -> tuple[LifePlan, ...]:
    """The course of a job with these strikes: a life for each, one that ends in order, and at times a twist."""
    course: list[LifePlan] = []
    for aim in aims:
        onward = aim.victim.startswith("k") and dice.random() < 0.5
        spoil = dice.choice(("memory", "storage")) if dice.random() < 0.08 and not plain else ""
        if aim.phase != "restore":
            script = saves(dice, 5 if aim.phase in {"save", "seal", "persist"} else 6)
            course.append(LifePlan(script, aim, onward=onward))
            continue
        if not course:
            course.append(LifePlan(saves(dice, 5), ends=dice.choice(("kill", "kill all"))))
        course.append(LifePlan(saves(dice, 2), aim, onward=onward, damage=spoil))
    extra = "" if plain else dice.choices(("", "back", "damage", "stranger", "late"), (20, 16, 24, 16, 24))[0]
    if extra == "back":
        return (*course, LifePlan(saves(dice, 2), roll_back=True), LAST_LIFE)
    if extra == "damage":
        return (*course, replace(LAST_LIFE, damage=dice.choice(("memory", "storage"))))
    if extra == "stranger":
        return (*course, replace(LAST_LIFE_RETIRING, stranger=True))
    return (*course, replace(LAST_LIFE, late_writer=extra == "late"))


def saves(dice: random.Random, count: int) -> tuple[Save, ...]:
    """A script: at least half of the saves are durable, so that retention has work; gaps make counting fail."""
    levels = ["durable"] * max(1, count - 2) + ["captured"] * min(2, count - 1)
    dice.shuffle(levels)
    return tuple(Save(dice.choice((1, 1, 2, 3)), level, dice.random() < 0.6) for level in levels)


def _aim(phase: str, victim: str, shape: str, dice: random.Random) -> Aim:
    nodes = range(SHAPES[shape])
    node = dice.choice(nodes)
    if phase in {"save", "restore"}:
        actor = f"t{dice.choice(nodes)}"
    else:
        # Commit and retention are the coordinator's, which is the keeper of the lowest living node.
        actor = f"k{0 if phase in {'commit', 'retention'} else dice.choice(nodes)}"
    dies = f"{victim[0]}{node}"
    if len(nodes) > 1 and victim == "keeper" and dice.random() < 0.4:
        dies = f"n{node}"
    return Aim(phase, actor, dies, dice.random(), dice.random() < 0.5, dice.random())


def dry_runs(shapes: Sequence[str] = tuple(SHAPES)) -> list[Trial]:
    """Trials without a strike, by which a lane learns how long phases last."""
    return [
        Trial(
            -1,
            0,
            shape,
            NO_STRIKE,
            (LifePlan(saves(random.Random(shape), 6), ends=ends), LAST_LIFE),
            mode=MEASURE,
        )
        for shape in shapes
        for ends in (("kill all", "kill") if shape == SOLO else ("kill all",))
    ]


def full_starts(num_trials: int, seed: int) -> list[Trial]:
    """Trials in which every process is a fresh interpreter and death comes from outside, at any time of a life."""
    found = []
    for number in range(num_trials):
        dice = random.Random(f"{seed}/full/{number}")
        victim = VICTIMS[number % len(VICTIMS)]
        aim = Aim(ANYTIME, "t0", f"{victim[0]}0", 0.0, False, dice.random())
        first = LifePlan(saves(dice, 6), aim, onward=dice.random() < 0.5)
        found.append(Trial(number, seed, SOLO, ((ANYTIME, victim),), (first, LAST_LIFE), full_start=True))
    return found
