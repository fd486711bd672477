"""Words what a rank of a pipeline measured of its waits, as people are told it: the log once, `holdfast status` always.

Pure. Made by `checkpoint.pipeline.idle_report`; kept and shown by the keeper.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Idle:
    """Seconds, of one step.

    Attributes:
        idle_s: mean of what the rank waits for its neighbours.
        period_s: mean from step to step.
        copy_s: what copying its state takes.
        left_s: which part of that fits into no wait; 0: a checkpoint at every step does.
        reason: all of it in words.
    """

    idle_s: float
    period_s: float
    copy_s: float
    left_s: float
    reason: str
