"""The last part of a plan: how often to save, from what a save, a failure and a recovery cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from holdfast.base.config import parse_seconds
from holdfast.base.errors import UsageError
from holdfast.cli import console
from holdfast.core.elastic.goodput import Goodput
from holdfast.core.layout.cost_plan import JobPlan
from holdfast.core.scheduling.checkpoint_interval import Cadence, Costs, best, candidates

# What a rank copies into its slot in a second, when nothing else is known; `benchmarks/stall.py` measures it.
COPY_BYTES_PER_S = 5e9
# Detection, restart and reload from memory; the journal of a run tells what it really was.
RECOVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Holds what is assumed of the cluster, as it was written: durations like `5000h`, `1.5s`, `20ms`.

    Attributes:
        mtbf: time between two failures of one node.
        step_time: of one training step.
        save_time: how long a save stops training; empty: what is copied, at COPY_BYTES_PER_S.
        recovery: from a failure to the first step again.
    """

    mtbf: str = "5000h"
    step_time: str = "1s"
    save_time: str = ""
    recovery: str = f"{RECOVERY_S:g}s"


def as_observed(assumptions: Assumptions, found: Goodput) -> Assumptions:
    """Return the assumptions with what a run was like in place of what is assumed: steps, failures of its node,
    recoveries.

    What it did not show (no failure, no step) stays as it is assumed. What a save costs is not in a journal.
    """
    steps, incidents = found.made + found.again, found.incidents
    spent = found.seconds.get("steps", 0.0) + found.seconds.get("recomputed", 0.0)
    if steps and spent:
        assumptions = replace(assumptions, step_time=f"{spent / steps:.6f}s")
    if incidents:
        back = fmean(incident.found_s + incident.total_s for incident in incidents)
        assumptions = replace(assumptions, mtbf=f"{found.wall_s / len(incidents):.3f}s", recovery=f"{back:.3f}s")
    return assumptions


@dataclass(frozen=True, slots=True)
class Advice:
    """The cadences to choose from, and the best."""

    costs: Costs
    step_s: float
    rows: tuple[Cadence, ...]
    best: Cadence
    reason: str


def advise(costs: JobPlan, assumptions: Assumptions) -> Advice:
    """Return how often this job should be captured.

    Raises:
        ConfigError, UsageError: an assumption is no positive duration.
    """
    step_s, mtbf_s = parse_seconds(assumptions.step_time), parse_seconds(assumptions.mtbf)
    save_s = max(costs.ranks.copied, default=0) / COPY_BYTES_PER_S
    save_s = parse_seconds(assumptions.save_time) if assumptions.save_time else save_s
    if step_s <= 0 or mtbf_s <= 0:
        raise UsageError("a step, and the time between two failures, are longer than nothing")
    assumed = Costs(save_s, len(costs.topology.nodes) / mtbf_s, parse_seconds(assumptions.recovery))
    chosen = best(assumed, least_s=step_s)
    return Advice(assumed, step_s, candidates(assumed, least_s=step_s), chosen.value, chosen.reason)


def print_advice(advice: Advice, assumptions: Assumptions) -> None:
    """The assumptions, and a row per cadence."""
    costs = advice.costs
    console.say()
    console.say(
        f"How often to save, if a node fails every {assumptions.mtbf}, a step takes {assumptions.step_time}, a save stops "
        f"training for {_text(costs.save_s)} and coming back takes {_text(costs.recovery_s)}:"
    )
    rows = [
        (
            f"{'*' if row == advice.best else ' '} {max(1, round(row.interval_s / advice.step_s))} steps",
            _text(row.interval_s),
            f"{row.saving:.3%}",
            _text(row.lost_s),
            f"{row.overhead:.3%}",
            f"{row.effective:.3%}",
        )
        for row in advice.rows
    ]
    console.print_table(("every", "or", "time for saves", "a failure costs", "overhead", "training"), rows)
    console.say(f"* {advice.reason}")


def document(advice: Advice) -> dict[str, Any]:
    """The same for `--json`; all in seconds or shares."""
    costs = advice.costs
    return {
        "save_s": costs.save_s,
        "failures_per_s": costs.failures_per_s,
        "recovery_s": costs.recovery_s,
        "best": _row(advice.best) | {"reason": advice.reason},
        "candidates": [_row(row) for row in advice.rows],
    }


def _row(row: Cadence) -> dict[str, Any]:
    facts = {"interval_s": row.interval_s, "saving": row.saving, "lost_s": row.lost_s, "overhead": row.overhead}
    return facts | {"effective": row.effective}


def _text(seconds: float) -> str:
    """`1.2 ms`, `3.4 s`, `5.6 min`, `7.8 h`."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
