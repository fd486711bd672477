"""Holds what one trial of the crash drill came to; passed from a lane to the driver as JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on a trial.

    Attributes:
        number, phase, victim, plant: as in its plan.
        struck: the planned strike happened; else the phase was not reached and the trial ended otherwise.
        acknowledged: levels that were named.
        refused: saves and restores that were given up with a reason.
        violations: (invariant, what).
        passes: as in Record.
        evidence: what the journal and the logs said, when something was violated.
    """

    number: int
    phase: str
    victim: str
    plant: str
    struck: bool
    acknowledged: int
    refused: int
    seconds: float
    violations: tuple[tuple[str, str], ...] = ()
    evidence: tuple[str, ...] = ()
    passes: tuple[tuple[str, int, int], ...] = ()
