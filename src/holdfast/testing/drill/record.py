"""Holds what the lane of a crash drill learns of a trial, fact by fact: the journal's lines as values that can be
judged.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.model import Level, Version
from holdfast.testing.checks.invariants import Ack, Course, Life, Resumed, Violation
from holdfast.testing.checks.write_order import FileOp, NamedDurable
from holdfast.testing.drill.crash_points import Strike
from holdfast.testing.drill.shared import KEEP_LAST
from holdfast.testing.drill.trial_plan import Aim, Trial


@dataclass(slots=True)
class Measured:
    """Remembers how long phases last: (shape, actor, phase) -> what was seen in trials without a strike."""

    seconds: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    points: dict[tuple[str, str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    passes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)

    def strike(self, aim: Aim, shape: str) -> Strike:
        """The planned strike in seconds and numbers."""
        if aim.exact is not None:
            number, point = aim.exact
            depth = (point + 0.5) / (point + 1)
            return Strike(aim.phase, aim.actor, aim.victims, number, True, depth, 0.0, point + 1, aim.cut)
        key = (shape, aim.actor, aim.phase)
        # Scripts differ: with a little less than the usual number the strike comes in nearly every trial.
        passes = max(1, int(0.8 * self.passes[key] / max(1, self.runs[shape])))
        points = int(0.95 * statistics.median(self.points.get(key, [4])))
        return Strike(
            phase=aim.phase,
            actor=aim.actor,
            victims=aim.victims,
            occurrence=1 + min(passes - 1, int(aim.turn * passes)),
            stepped=aim.stepped and points > 0,
            fraction=aim.fraction,
            seconds=statistics.median(self.seconds.get(key, [0.002])) * (2.0 if aim.phase == "save" else 1.1),
            points=points,
        )

    def add(self, shape: str, fact: dict[str, Any]) -> None:
        """One pass through a phase, of a process that was not to die."""
        key = (shape, fact["who"], fact["phase"])
        self.seconds[key].append(fact["seconds"])
        self.points[key].append(fact["points"])
        if fact["life"] == 0:  # the script of a last life is short
            self.passes[key] += 1


@dataclass(slots=True)
class Tally:
    """Counts one trial of a job: its strike's life and those up to the next one; the first has all
    before it.

    Attributes:
        began: when, in seconds of the monotonic clock.
        struck: the planned strike happened.
        acknowledged: levels that were named.
        refused: saves and restores that were given up with a reason.
    """

    began: float
    struck: bool = False
    acknowledged: int = 0
    refused: int = 0


class Record:
    """All facts of one job.

    Attributes:
        course: the lives, for the judge.
        tallies: of its trials, in order; at least one.
        history: file operations and what was called durable, in causal order.
        lines: the journal for a person.
        passes: (phase, number, points) of each pass through a phase of keepers in the first life, if they are measured.
    """

    def __init__(self, trial: Trial, measured: Measured) -> None:
        self.course = Course(KEEP_LAST)
        self.history: list[FileOp | NamedDurable] = []
        self.lines: list[str] = []
        self.tallies: list[Tally] = []
        self.passes: list[tuple[str, int, int]] = []
        self._trial = trial
        self._measured = measured
        self._began = time.monotonic()
        self._aimed = False
        self._kinds = {
            "resumed": self._resumed,
            "saving": self._saving,
            "twisted": self._twisted,
            "ack": self._acknowledged,
            "refused": self._refused,
            "failed": self._failed,
            "strike": self._strike,
            "phase": self._phase,
            "file": self._file,
        }

    @property
    def life(self) -> Life:
        return self.course.lives[-1]

    @property
    def struck(self) -> bool:
        """The strike of the trial under way happened."""
        return self.tallies[-1].struck

    @struck.setter
    def struck(self, happened: bool) -> None:
        self.tallies[-1].struck = happened

    def begin(self, life: Life, *, aimed: bool) -> None:
        """A new life; one with a strike of its own begins a trial, unless none before it had one."""
        if not self.tallies or (aimed and self._aimed):
            self.tallies.append(Tally(time.monotonic()))
        self._aimed |= aimed
        self.course.lives.append(life)

    def note(self, fact: dict[str, Any]) -> None:
        """Takes in one line of the journal."""
        if fact["e"] not in {"file", "phase"}:
            self.say(json.dumps(fact))
        kind = self._kinds.get(fact["e"])
        if kind is not None:
            kind(fact)

    def say(self, what: str) -> None:
        """A line for a person who looks for the reason of a violation."""
        self.lines.append(f"{(time.monotonic() - self._began) * 1000:5.0f} ms {what}")

    def fault(self, invariant: str, what: str) -> None:
        """Something that no process of the life may do."""
        self.life.faults.append(Violation(invariant, f"life {len(self.course.lives)}: {what}"))

    def _resumed(self, fact: dict[str, Any]) -> None:
        version = Version.parse(fact["version"])
        self.life.resumed.append(Resumed(_rank(fact), fact["incarnation"], version, fact["digest"]))

    def _saving(self, fact: dict[str, Any]) -> None:
        self.life.states[Version(fact["incarnation"], fact["step"]), _rank(fact)] = fact["digest"]

    def _twisted(self, fact: dict[str, Any]) -> None:
        self.life.suspects |= {Version(fact["incarnation"], fact["step"])}

    def _acknowledged(self, fact: dict[str, Any]) -> None:
        version = Version.parse(fact["version"])
        if version is None:
            self.fault("S13", f"{fact['version']!r} was acknowledged, which is no version")
            return
        self.tallies[-1].acknowledged += 1
        self.life.acks.append(Ack(version, Level(fact["level"]), _rank(fact)))
        if fact["level"] == Level.DURABLE:
            self.history.append(NamedDurable(version))

    def _refused(self, _: dict[str, Any]) -> None:
        self.tallies[-1].refused += 1

    def _failed(self, fact: dict[str, Any]) -> None:
        if not self.struck:  # a process whose peer was killed may meet any error of the collectives
            self.fault("V2", f"{fact['who']} failed: {fact['what']}")

    def _strike(self, _: dict[str, Any]) -> None:
        self.struck = True

    def _phase(self, fact: dict[str, Any]) -> None:
        self._measured.add(self._trial.shape, fact)
        if fact["life"] == 0 and fact["who"].startswith("k"):
            self.passes.append((fact["phase"], fact["pass"], fact["points"]))

    def _file(self, fact: dict[str, Any]) -> None:
        facts = {
            name: fact[name] for name in ("call", "path", "source", "failed", "absent", "replaces") if name in fact
        }
        self.history.append(FileOp(**facts))


def _rank(fact: dict[str, Any]) -> int:
    return int(fact["who"][1:])
