"""Tells how long the watchdog waits before it acts: `careful` by default, `quick` on request. Pure.

What proves a fault by itself (an exit, a stop signal) is acted on at once in both. For everything else `careful` waits for
minutes, learns from the longest pause that ended well, and takes a rank that stops at the same place again after it was
replaced for the proof that its own limit was wrong. `quick` finds a hang in seconds, and replaces ranks that were only
slow: it is meant for scripts whose ranks never pause. Seconds throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from holdfast.core.elastic.worker_facts import STEPPING, Beat, Phase

FACTOR = 2.4  # p99 comes from buckets a fifth wide, so this is at most three times what was measured
LONGEST_FACTOR = 1.5
TOGETHER_FACTOR, BUSY_FACTOR, MOVING_FACTOR, DEVICE_FACTOR = 3.0, 3.0, 10.0, 10.0
ENOUGH_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Mode:
    """Says how patient the watchdog is. All but the first and the last are seconds without progress.

    Attributes:
        name: as `--watchdog` takes it.
        floors_s: per phase: (at least, while there is too little to learn from).
        stopped_s: of a rank that was stopped by a signal.
        busy_s: of a rank that computes, reads or writes while all others wait for it.
        chosen_s: of a quiet rank that waits for something of its own choice: an answer, a child, a future, a queue.
        device_s: of a quiet rank that has an accelerator open: longer than device groups wait by themselves.
        alone_s: of the only rank of a job; `unwaited_s`: of a quiet rank for which nobody waits.
        together_s: of all ranks that wait in collectives, and none is missing.
        moving_s: the same while their threads compute.
        disk_s: in state D, with nothing moving.
        learns: whether a start lasts until training has settled, pauses that ended well raise limits, stacks must agree before a loop is endless, and a rank that was
            replaced in vain is only reported.
    """

    name: str
    floors_s: Mapping[Phase, tuple[float, float]]
    stopped_s: float
    busy_s: float
    chosen_s: float
    device_s: float
    alone_s: float
    unwaited_s: float
    together_s: float
    moving_s: float
    disk_s: float
    learns: bool

    def limit_s(self, beat: Beat, phase: Phase) -> float:
        """Seconds without progress that are not yet strange in `phase`."""
        stepping = phase in STEPPING
        if stepping and self.learns and not beat.settled:
            phase, stepping = Phase.START, False
        floor, unlearned = self.floors_s[phase]
        samples = beat.samples.get(phase, 0)
        if stepping:
            samples = max(samples, beat.samples.get(Phase.STEP, 0))
        if samples < (ENOUGH_SAMPLES if stepping else 1):
            return max(unlearned, self._longest_s(beat, phase))
        known = max(beat.p99_s.get(phase, 0.0), beat.step_p99_s if stepping else 0.0)
        return max(floor, FACTOR * known, self._longest_s(beat, phase))

    def together_limit_s(self, beat: Beat, *, moving: bool) -> float:
        """Return how long this rank may stand in a collective in which nobody is missing."""
        floor, unlearned = self.floors_s[Phase.COLLECTIVE]
        if self.learns and (beat.samples.get(Phase.STEP, 0) < ENOUGH_SAMPLES or not beat.settled):
            floor = unlearned
        limit = max(floor, FACTOR * max(beat.p99_s.get(Phase.COLLECTIVE, 0.0), beat.step_p99_s))
        longest = max(self._longest_s(beat, Phase.COLLECTIVE), self.granted_s(beat))
        if moving:
            return max(MOVING_FACTOR * limit, self.moving_s, longest)
        return max(TOGETHER_FACTOR * limit, self.together_s, longest)

    def granted_s(self, beat: Beat) -> float:
        """Return how long the script itself lets ranks wait for others, and a bit: its group ends the wait before. 0: unsaid."""
        return beat.group_s + self.together_s if self.learns and beat.group_s else 0.0

    def _longest_s(self, beat: Beat, phase: Phase) -> float:
        return LONGEST_FACTOR * beat.longest_s.get(phase, 0.0) if self.learns else 0.0


# Beyond the ten minutes that holdfast itself gives a last save or a restore (close_timeout_s).
_LONG: Mapping[Phase, tuple[float, float]] = {
    Phase.START: (1800.0, 1800.0),
    Phase.COMPILE: (1800.0, 1800.0),
    Phase.SAVING: (900.0, 900.0),
    Phase.LOADING: (1800.0, 1800.0),
}
CAREFUL = Mode(
    "careful",
    MappingProxyType(
        {
            **_LONG,
            Phase.STEP: (120.0, 300.0),
            Phase.COLLECTIVE: (20.0, 300.0),
            Phase.DATA: (300.0, 600.0),
            Phase.EVALUATION: (900.0, 900.0),
        }
    ),
    stopped_s=2.8,
    busy_s=900.0,
    chosen_s=900.0,
    device_s=900.0,
    alone_s=900.0,
    unwaited_s=3600.0,
    together_s=60.0,
    moving_s=120.0,
    disk_s=900.0,
    learns=True,
)
QUICK = Mode(
    "quick",
    MappingProxyType(
        {
            **_LONG,
            Phase.STEP: (2.8, 300.0),
            Phase.COLLECTIVE: (2.8, 300.0),
            Phase.DATA: (2.8, 300.0),
            Phase.EVALUATION: (60.0, 600.0),
        }
    ),
    stopped_s=2.8,
    busy_s=30.0,
    chosen_s=0.0,
    device_s=0.0,
    alone_s=0.0,
    unwaited_s=0.0,
    together_s=0.0,
    moving_s=120.0,
    disk_s=120.0,
    learns=False,
)
MODES: Mapping[str, Mode] = MappingProxyType({mode.name: mode for mode in (CAREFUL, QUICK)})
