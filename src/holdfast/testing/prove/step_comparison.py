"""Decides whether lives of ranks made the steps of an undisturbed run. Pure: lists of steps in, verdict out.

How a life finds its place. Its steps carry no number of their own that a fault of a restart could not change, so they are placed
by what they hold. The first life begins at the first step. The last one, if the run ended well, ran to the end: its place follows from
its length alone, and is unique however often a digest repeats. A life that was interrupted is compared with every place that it may have, the latest
first: where several fit, all the states at these places are equal, so it does not matter which it was. No life may begin
behind the step that follows the last one which any rank had made: a step would be left out.

A digest is of all parameters, of all that the optimizer keeps (with its counters of steps) and of all buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from holdfast.base.terminal import some_of

DIGEST_BYTES = 8
# So many names of parts are told.
MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class Step:
    """Holds what one step of an optimizer left.

    Attributes:
        label: which optimizer it was.
        names: the parts: parameters, state of the optimizer, buffers.
        digests: 8 bytes for each.
        random: a digest of the generators of random numbers.
    """

    label: str
    names: tuple[str, ...]
    digests: bytes
    random: bytes

    def is_same(self, other: Step) -> bool:
        """Return whether both left the same, random numbers aside."""
        return self.digests == other.digests and self.label == other.label


@dataclass(frozen=True, slots=True)
class Difference:
    """Says where a run differs first.

    Attributes:
        rank: whose step it is.
        step: counted from 1 over all optimizers, as the undisturbed run counts.
        what: the parts that differ, or what else is wrong.
        life: 0 before the kill, 1 behind the first restart.
    """

    rank: int
    step: int
    what: str
    life: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """Says what came of a comparison.

    Attributes:
        difference: the first one; None if there is none.
        resumed_at: the step that was made first behind the last restart, counted from 1; None without a restart.
        again: how many steps of the rank that was killed were made a second time.
        random_from: the first step at which only the generators of random numbers differ; None if none does.
    """

    difference: Difference | None
    resumed_at: int | None = None
    again: int = 0
    random_from: int | None = None


Lives = Mapping[int, Sequence[Sequence[Step]]]


def compare_undisturbed(one: Lives, two: Lives) -> Difference | None:
    """Returns where two runs without a kill differ first, over all ranks."""
    found = []
    for rank in sorted(one.keys() | two.keys()):
        first, second = (lives.get(rank, [[]])[-1] for lives in (one, two))
        found += _compared(rank, first, second, 0, 0)
        if len(first) != len(second):
            what = f"one run made {len(first)} steps, the other {len(second)}"
            found.append(Difference(rank, min(len(first), len(second)) + 1, what))
    return _first(found)


def judge(expected: Mapping[int, Sequence[Step]], lives: Lives, *, killed: int, ended: bool) -> Judged:
    """Returns how a run with a kill compares with an undisturbed one.

    Args:
        expected: the steps of the undisturbed run, by rank.
        lives: those of the run with a kill.
        killed: the rank that was killed.
        ended: whether the run ended by itself and well, so that the last life of each rank is complete.
    """
    found: list[Difference] = []
    resumed: list[int] = []
    random: list[int] = []
    again = 0
    made = max((len(each[0]) for each in lives.values() if each), default=0)
    number = 0
    while any(len(each) > number for each in lives.values()):
        reached = made
        for rank, each in sorted(lives.items()):
            if number >= len(each):
                continue
            steps, last = expected.get(rank, ()), number == len(each) - 1
            place = 0 if number == 0 else _place(steps, each[number], made, whole=ended and last)
            if number and last:
                resumed.append(place + 1)
                again = len(each[0]) - place if rank == killed else again
            if place > made:
                what = f"{place - made} steps were left out" if place - made > 1 else "one step was left out"
                found.append(Difference(rank, made + 1, what, number))
                place = made
            found += _compared(rank, steps, each[number], place, number)
            if ended and last and place + len(each[number]) != len(steps):
                end = place + len(each[number])
                what = f"the run made {end} steps in all, the undisturbed one {len(steps)}"
                found.append(Difference(rank, min(end, len(steps)) + 1, what, number))
            random += _random(steps, each[number], place)
            reached = max(reached, place + len(each[number]))
        made = reached
        number += 1
    return Judged(_first(found), min(resumed, default=None), max(again, 0), min(random, default=None))


def _place(steps: Sequence[Step], life: Sequence[Step], made: int, *, whole: bool) -> int:
    """Returns where a life behind a restart begins, counted from 0.

    Args:
        steps: those of the undisturbed run.
        life: those of the life.
        made: steps that any rank had made before.
        whole: whether the life went to the end of the run.
    """
    by_length = len(steps) - len(life)
    if whole and by_length >= 0 and _fits(steps, life, by_length):
        return by_length
    places = range(min(made, len(steps)), -1, -1)
    for place in places:
        if _fits(steps, life, place):
            return place
    for place in chain(places, range(made + 1, len(steps))):  # it differs somewhere: it began where its first step is
        if _fits(steps, life[:1], place):
            return place
    if whole and by_length >= 0:
        return by_length
    return min(made, len(steps))


def _fits(steps: Sequence[Step], life: Sequence[Step], place: int) -> bool:
    return place + len(life) <= len(steps) and all(step.is_same(steps[place + at]) for at, step in enumerate(life))


def _compared(rank: int, steps: Sequence[Step], life: Sequence[Step], place: int, number: int) -> list[Difference]:
    for at, (one, two) in enumerate(zip(steps[place:], life, strict=False), place):
        if not one.is_same(two):
            return [Difference(rank, at + 1, _what(one, two), number)]
    return []


def _random(steps: Sequence[Step], life: Sequence[Step], place: int) -> list[int]:
    pairs = enumerate(zip(steps[place:], life, strict=False), place)
    return [at + 1 for at, (one, two) in pairs if one.random != two.random][:1]


def _what(one: Step, two: Step) -> str:
    """Returns the names of the parts that differ."""
    if one.label != two.label:
        return f"a step of {one.label} was made by {two.label}"
    if len(one.digests) != len(two.digests):
        missing = [name for name in one.names if name not in two.names]
        more = [name for name in two.names if name not in one.names]
        return f"without {some_of(missing, MAX_NAMES)}" if missing else f"with {some_of(more, MAX_NAMES)} besides"
    size = DIGEST_BYTES
    differ = (
        name
        for at, name in enumerate(one.names)
        if one.digests[at * size : (at + 1) * size] != two.digests[at * size : (at + 1) * size]
    )
    return some_of(differ, MAX_NAMES)


def _first(found: Sequence[Difference]) -> Difference | None:
    """Returns the first difference of a run: the earliest life, then the earliest step."""
    return min(found, key=lambda each: (each.life, each.step, each.rank), default=None)
