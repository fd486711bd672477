"""Runs trials of the crash drill and of the power drill until every planted bug is found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

from holdfast.testing.drill import crash_drill
from holdfast.testing.drill.crash_drill import DrillError, Lanes, Progress
from holdfast.testing.drill.outcome import Outcome
from holdfast.testing.drill.trial_plan import Trial
from planted import crash
from planted.path import tests_in_path

# Trials of power cuts for one bug.
MAX_CUTS = 60
# Bugs of the order of writes, most of which a killed process does not show; and in which phases power is cut for them.
CUT_IN = {
    "no-fsync-of-files": ("persist", "commit"),
    "commit-not-synced": ("persist", "commit"),
    "manifest-before-bundles": ("commit",),
    "written-in-place": ("persist", "commit"),
    "durable-before-manifest": ("persist", "commit"),
    "retired-before-commit": ("commit",),
    "files-before-manifest": ("retention",),
}


@dataclass(slots=True)
class Quarry:
    """A planted bug and what was seen of it."""

    name: str
    trials: int = 0
    found_by: tuple[str, str] | None = None

    def add(self, outcome: Outcome) -> None:
        """Counts a trial; only a violation of an invariant that the bug is said to break finds it."""
        self.trials += 1
        fitting = [violation for violation in outcome.violations if violation[0] in crash.BUGS[self.name].invariants]
        if fitting and self.found_by is None:
            self.found_by = fitting[0]

    def __str__(self) -> str:
        found, what = self.found_by or ("MISSED", crash.BUGS[self.name].what)
        return f"{self.name:<28} {found:<6} {self.trials:>3} trials  {what[:90]}"


@contextmanager
def open_lanes(count: int) -> Iterator[Lanes]:
    """Lanes whose processes have the bug of their trial."""
    with tests_in_path(), crash_drill.open_lanes(count, "planted.crash_lane") as lanes:
        yield lanes


def hunt(lanes: Lanes, names: Sequence[str], seed: int, progress: Progress) -> list[Quarry]:
    """Runs, for every planted bug, trials that suit it, until it is found or its trials are used up.

    Raises:
        DrillError: a trial without a fault was not clean.
    """
    sick = [outcome for outcome in lanes.warm_up if outcome.violations]
    if sick:  # then anything would be found
        raise DrillError(sick[0])
    quarries = {name: Quarry(name) for name in names}
    return _work(lanes, quarries, _suitable(quarries, seed), progress)


def hunt_by_cuts(lanes: Lanes, names: Sequence[str], trials: Sequence[Trial], progress: Progress) -> list[Quarry]:
    """Runs, for every planted bug, drawn trials of a plan of power cuts, until it is found or MAX_CUTS are used up."""
    quarries = {name: Quarry(name) for name in names}
    return _work(lanes, quarries, _cuts(quarries, trials), progress)


def _work(lanes: Lanes, quarries: dict[str, Quarry], trials: Iterator[Trial], progress: Progress) -> list[Quarry]:
    outcomes: list[Outcome] = []
    for outcome in lanes.work(trials):
        quarries[outcome.plant].add(outcome)
        outcomes.append(outcome)
        progress.show(sum(quarry.found_by is not None for quarry in quarries.values()), outcomes)
    return list(quarries.values())


def _suitable(quarries: dict[str, Quarry], seed: int) -> Iterator[Trial]:
    waiting = {name: iter(crash.trials(name, seed)) for name in quarries}
    given: Counter[str] = Counter()
    while waiting:
        # The one with the fewest trials that nobody has answered yet, so that slow ones do not occupy every lane.
        name = min(waiting, key=lambda name: given[name] - quarries[name].trials)
        trial = None if quarries[name].found_by is not None else next(waiting[name], None)
        if trial is None:
            del waiting[name]
        else:
            given[name] += 1
            yield trial


def _cuts(quarries: dict[str, Quarry], trials: Sequence[Trial]) -> Iterator[Trial]:
    drawn = {}
    for name in quarries:
        fitting = [trial for trial in trials if trial.cells[0][0] in CUT_IN[name]]
        drawn[name] = random.Random(name).sample(fitting, min(MAX_CUTS, len(fitting)))
    for turn, name in product(range(MAX_CUTS), quarries):
        if quarries[name].found_by is None and turn < len(drawn[name]):
            yield replace(drawn[name][turn], plant=name)
