"""Sums up where every second of a run went, from the journal of its launcher. Pure.

A journal is a sequence of samples (when, newest step, seconds that the ranks had spent in each phase) and incidents. What
lies between two samples is dealt out as the phases grew in it; what no phase accounts for is start-up before the first
step and idle afterwards. An incident covers the seconds from the last progress to its end: detection first, then its
parts. So the parts always sum to the time between the first and the last line. Steps that were made before are
`recomputed`. A run that goes on from a saved version says so (`restored`): the steps before it are not its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.elastic.incident import Incident, from_facts

# Phase of a beat -> where its seconds are listed.
NAMES: Mapping[str, str] = {
    "START": "start-up",
    "COMPILE": "compile",
    "STEP": "steps",
    "COLLECTIVE": "steps",
    "DATA": "data",
    "EVALUATION": "evaluation",
    "SAVING": "stalls",
    "LOADING": "reload",
}
ORDER = (
    "steps", "data", "evaluation", "stalls", "start-up", "compile", "detection", "restart", "reload", "recomputed", "idle",
)  # fmt: skip
REPEATED = ("steps", "data", "stalls")


@dataclass(frozen=True, slots=True)
class Goodput:
    """The sums of one run.

    Attributes:
        wall_s: from the first line to the last.
        seconds: per name of ORDER; they sum to `wall_s`.
        steps: how many are finished, those of runs before included.
        made: of them, by this run, each counted once.
        again: made in this run more than once.
        watchdog: its mode; empty if the journal does not say.
        reports: what the watchdog told and left alone.
    """

    wall_s: float
    seconds: Mapping[str, float]
    steps: int
    made: int
    again: int
    incidents: tuple[Incident, ...]
    finished: bool
    watchdog: str = ""
    reports: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """The part of the time that went into steps that counted."""
        return self.seconds.get("steps", 0.0) / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(slots=True)
class _Sums:
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + max(0.0, seconds)


@dataclass(slots=True)
class _Lives:
    """Holds how many steps are finished, and made by whom: `first` by runs before, `num_made` by this one, repeats
    included.
    """

    first: int = 0
    newest: int = 0
    num_made: int = 0
    started: bool = False
    _at: int = 0

    def begin(self, step: int) -> None:
        """The ranks go on after so many steps."""
        if not self.started:
            self.first = self.newest = step
        self._at = step

    def reach(self, step: int) -> None:
        """So many steps are finished. A process that began anew and told nothing counts from 0."""
        if step > 0:
            self.num_made += step - self._at if step >= self._at else step
            self._at, self.newest = step, max(self.newest, step)
            self.started = self.started or step > self.first


def goodput(lines: Sequence[Mapping[str, Any]]) -> Goodput | None:
    """The sums of a journal; None if it tells nothing. Lines of unknown kinds are passed over."""
    times = [float(line["t"]) for line in lines if isinstance(line.get("t"), int | float)]
    if len(times) < 2:
        return None
    sums = _Sums()
    incidents = [(float(line["t"]), from_facts(line)) for line in lines if line.get("event") == "incident"]
    covered = _cover(incidents, min(times), sums)
    before: Mapping[str, Any] = {"t": min(times), "spent": {}, "step": 0}
    lives = _Lives()
    end = {**next((line for line in reversed(lines) if line.get("event") == "progress"), before), "t": max(times)}
    for sample in [*(line for line in lines if line.get("event") in ("progress", "restored")), end]:
        step = int(sample.get("step", 0))
        if sample.get("event") == "restored":
            lives.begin(step)
            continue
        repeated = 0 < step <= lives.newest and step != int(before.get("step", 0))
        _deal(before, sample, covered, sums, started=lives.started, repeated=repeated)
        if sample is not end:
            lives.reach(step)
        before = sample
    finished = any(line.get("event") == "end" and line.get("code") == 0 for line in lines)
    records = tuple(incident for _, incident in incidents)
    return Goodput(
        max(times) - min(times),
        sums.seconds,
        lives.newest,
        made=max(0, lives.newest - lives.first),
        again=max(0, lives.num_made - (lives.newest - lives.first)),
        incidents=records,
        finished=finished,
        watchdog=next((str(line["watchdog"]) for line in lines if line.get("watchdog")), ""),
        reports=tuple(str(line.get("reason", "")) for line in lines if line.get("event") == "report"),
    )


def _cover(incidents: Sequence[tuple[float, Incident]], begin: float, sums: _Sums) -> list[tuple[float, float]]:
    """The time that incidents take, none counted twice; their parts go into the sums."""
    covered: list[tuple[float, float]] = []
    for end, incident in sorted(incidents, key=lambda item: item[0]):
        first = max(begin, covered[-1][1] if covered else begin, end - incident.total_s - incident.found_s)
        if end <= first:
            continue
        scale = min(1.0, (end - first) / max(incident.total_s + incident.found_s, 1e-9))
        load = incident.seconds.get("T3", 0.0)
        sums.add("detection", incident.found_s * scale)
        sums.add("reload", load * scale)
        sums.add("compile", incident.seconds.get("T4", 0.0) * scale)
        sums.add("restart", (incident.total_s - load - incident.seconds.get("T4", 0.0)) * scale)
        covered.append((first, end))
    return covered


def _deal(
    before: Mapping[str, Any],
    sample: Mapping[str, Any],
    covered: Sequence[tuple[float, float]],
    sums: _Sums,
    *,
    started: bool,
    repeated: bool,
) -> None:
    """The time between two samples, without what incidents cover, to the phases that grew."""
    first, last = float(before["t"]), float(sample["t"])
    left = last - first - sum(max(0.0, min(last, end) - max(first, begin)) for begin, end in covered)
    if left <= 0:
        return
    past, now = before.get("spent") or {}, sample.get("spent") or {}
    grown = {name: float(now[name]) - float(past.get(name, 0.0)) for name in now}
    if any(value < -1e-6 for value in grown.values()):  # a process began anew
        grown = {name: float(value) for name, value in now.items()}
    total = sum(grown.values())
    scale = min(1.0, left / total) if total > 0 else 0.0
    for phase, value in grown.items():
        name = NAMES.get(phase, "idle")
        sums.add("recomputed" if repeated and name in REPEATED else name, value * scale)
    sums.add("idle" if started else "start-up", left - total * scale)
