"""Advises how often to save: what a cadence costs, what a failure then costs, and the interval at which both together
cost least.

The model is the classical one: failures come at a constant rate, at any moment; a save stops training for a while; a
failure costs the recovery and all work since the last save. A stretch of work t that ends with a save of cost c then takes
(1 / rate + recovery) * (exp(rate * (t + c)) - 1) on average (J. T. Daly, "A higher order estimate of the optimum
checkpoint interval", 2006); for rare failures the best t is near sqrt(2 * c / rate) (J. W. Young, 1974), which is where
the search begins. Pure. A simulation in the tests proves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, sqrt

from holdfast.core.model import Decision

# Of the best interval; neighbours of these shares are what a person compares.
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)
# Golden section: the rest of an interval that is cut in this ratio is cut in the same ratio by the other point.
_RATIO = (sqrt(5) - 1) / 2
# Precise enough for advice: the curve is flat at its lowest point.
_PRECISION = 1e-4


@dataclass(frozen=True, slots=True)
class Costs:
    """Says what a job and its cluster are like.

    Attributes:
        save_s: how long a save keeps training waiting.
        failures_per_s: of the whole job.
        recovery_s: from a failure to the first step again: detection, restart, reload.
    """

    save_s: float
    failures_per_s: float
    recovery_s: float


@dataclass(frozen=True, slots=True)
class Cadence:
    """Says what it means to save so often.

    Attributes:
        interval_s: work between two saves.
        saving: share of the time that goes into saves.
        lost_s: expected work that a failure destroys.
        overhead: all time that is not work (saves, recoveries, work made again), as a share of the work.
    """

    interval_s: float
    saving: float
    lost_s: float
    overhead: float

    @property
    def effective(self) -> float:
        """Return which part of all time is work that counts."""
        return 1 / (1 + self.overhead)


def weigh(interval_s: float, costs: Costs) -> Cadence:
    """Return what saving after every `interval_s` of work means."""
    period = interval_s + costs.save_s
    rate = costs.failures_per_s
    exponent = rate * period
    if exponent > 500:  # no stretch is ever finished
        return Cadence(interval_s, costs.save_s / period, period, inf)
    if rate == 0:
        return Cadence(interval_s, costs.save_s / period, period / 2, costs.save_s / interval_s)
    taken = (1 / rate + costs.recovery_s) * (exp(exponent) - 1)
    # Expected time since the stretch began, given that it ended with a failure.
    lost = 1 / rate - period / (exp(exponent) - 1)
    return Cadence(interval_s, costs.save_s / period, lost, taken / interval_s - 1)


def best(costs: Costs, *, least_s: float) -> Decision[Cadence]:
    """The cadence of least overhead, and why.

    Args:
        costs: what a save, a failure and a recovery cost.
        least_s: the shortest interval there is: a step, or what the storage needs for a version.
    """
    if costs.failures_per_s <= 0 or costs.save_s <= 0:
        found = weigh(least_s, costs)
        why = "nothing ever fails" if costs.failures_per_s <= 0 else "a save costs nothing"
        return Decision(found, f"as often as possible: {why}")
    guess = sqrt(2 * costs.save_s / costs.failures_per_s)
    low, high = guess / 100, guess * 10
    while high - low > _PRECISION * guess:
        left, right = high - _RATIO * (high - low), low + _RATIO * (high - low)
        if weigh(left, costs).overhead <= weigh(right, costs).overhead:
            high = right
        else:
            low = left
    interval = (low + high) / 2
    if interval <= least_s:
        return Decision(weigh(least_s, costs), "as often as possible: a save costs less than the work it protects")
    return Decision(weigh(interval, costs), "saves and lost work cost about the same")


def candidates(costs: Costs, *, least_s: float) -> tuple[Cadence, ...]:
    """The best cadence and its neighbours, ascending."""
    middle = best(costs, least_s=least_s).value.interval_s
    return tuple(weigh(at, costs) for at in sorted({max(least_s, share * middle) for share in SHARES}))
