"""Decides how often to save: a cadence in steps, in seconds, or both (steps win).

Pure: `now_s` is an argument. Called once per step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.core.model import Decision

_STEPS = re.compile(r"\d+\Z")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)\Z")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Cadence:
    """Save when `steps` have passed since the last one; without `steps`, when `seconds` have.

    Attributes:
        steps: every so many steps, or None.
        seconds: every so many seconds, or None. Ignored when `steps` is given.
    """

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Cadence:
        """The cadence written as `"10"`, `"30s"`, `"10,30s"` or `"0"` (never).

        Raises:
            ValueError: any other text; the message says what is allowed.
        """
        steps: int | None = None
        seconds: float | None = None
        for part in (piece.strip() for piece in str(text).split(",")):
            if _STEPS.match(part) and steps is None:
                steps = int(part)
            elif (match := _SECONDS.match(part)) and seconds is None:
                seconds = float(match[1]) * _UNITS[match[2]]
            else:
                raise ValueError(f'cadence {text!r} is not of the form "10" (steps), "30s" (seconds) or "10,30s"')
        if seconds is not None and seconds <= 0:
            raise ValueError(f"cadence {text!r} has no positive number of seconds")
        return cls(steps, seconds)

    @property
    def text(self) -> str:
        """Return it in words that are the same for all spellings of one cadence."""
        steps = [str(self.steps)] if self.steps else []
        return ",".join([*steps, *([f"{self.seconds:.12g}s"] if self.seconds else [])]) or "0"

    @property
    def is_set(self) -> bool:
        """Return whether anything is ever due."""
        return bool(self.steps) or self.needs_agreement

    @property
    def needs_agreement(self) -> bool:
        """Return whether ranks could decide differently: a clock is involved."""
        return self.steps is None and self.seconds is not None

    def due(self, *, step: int, last_step: int | None, now_s: float, last_s: float) -> Decision[bool]:
        """Return whether `step` is to be saved.

        Args:
            step: the step just finished.
            last_step: the step of the last save that the cadence asked for, or None. The first step that is a
                multiple decides in steps, so that all ranks agree without talking.
            now_s: monotonic seconds.
            last_s: when the last one was taken, or when the run began.
        """
        if self.steps is not None:
            due = self.steps > 0 and (step + 1) % self.steps == 0 and step != last_step
            return Decision(due, f"every {self.steps} steps")
        if self.seconds is not None:
            return Decision(now_s - last_s >= self.seconds, f"every {self.seconds:g} s")
        return Decision(False, "no cadence")
