"""How often to save: numeric cases, and a simulation of failures whose optimum and overheads are those of the model."""

from __future__ import annotations

import random
from math import inf, sqrt

import pytest

from holdfast.core.scheduling.checkpoint_interval import Costs, best, candidates, weigh

DAY = 86_400.0


def simulated(interval_s: float, costs: Costs, *, num_stretches: int, seed: int) -> tuple[float, float]:
    """Overhead and mean lost work of a job that fails by dice: (time / work - 1, seconds per failure)."""
    dice = random.Random(seed)
    next_failure = dice.expovariate(costs.failures_per_s)
    spent = lost = 0.0
    failures = 0
    for _ in range(num_stretches):
        period = interval_s + costs.save_s
        while next_failure < period:
            spent, lost, failures = spent + next_failure, lost + next_failure, failures + 1
            # During a recovery it may fail again, and begins anew.
            recovery = costs.recovery_s
            next_failure = dice.expovariate(costs.failures_per_s)
            while next_failure < recovery:
                spent += next_failure
                next_failure = dice.expovariate(costs.failures_per_s)
            spent += recovery
            next_failure -= recovery
        spent += period
        next_failure -= period
    return spent / (num_stretches * interval_s) - 1, lost / max(failures, 1)


@pytest.mark.parametrize(
    "costs",
    [Costs(2.0, 1 / 3_600, 30.0), Costs(20.0, 1 / 7_200, 120.0), Costs(0.5, 1 / 600, 5.0)],
    ids=["hourly", "slow", "often"],
)
def test_a_simulation_has_its_optimum_where_the_advice_is(costs: Costs) -> None:
    advised = best(costs, least_s=0.01).value
    num = int(1_500_000 / advised.interval_s * (1 / 3_600) / costs.failures_per_s)
    at_advice, lost = simulated(advised.interval_s, costs, num_stretches=num, seed=1)
    others = [
        simulated(share * advised.interval_s, costs, num_stretches=int(num / share), seed=1)[0]
        for share in (0.5, 0.7, 0.85, 1.2, 1.5, 2.0)
    ]
    assert at_advice <= min(others) * 1.05
    assert advised.overhead == pytest.approx(at_advice, rel=0.05)
    assert advised.lost_s == pytest.approx(lost, rel=0.05)


def test_rare_failures_give_youngs_formula() -> None:
    costs = Costs(save_s=1.0, failures_per_s=1 / DAY, recovery_s=60.0)
    assert best(costs, least_s=0.1).value.interval_s == pytest.approx(sqrt(2 * DAY), rel=0.01)
    assert best(costs, least_s=0.1).reason == "saves and lost work cost about the same"


def test_numbers_of_a_case() -> None:
    """A save of 2 s after every 100 s, a failure an hour, a recovery of 30 s."""
    row = weigh(100.0, Costs(2.0, 1 / 3_600, 30.0))
    assert row.saving == pytest.approx(2 / 102)
    assert row.lost_s == pytest.approx(51, rel=0.01)
    # 2 % saves, 51 s of lost work and 30 s of recovery in an hour: 2.25 % more.
    assert row.overhead == pytest.approx(0.02 + 81 / 3_600, rel=0.05)
    assert row.effective == pytest.approx(1 - row.overhead, rel=0.01)


def test_extremes() -> None:
    assert best(Costs(0.0, 1.0, 1.0), least_s=2.0).value.interval_s == 2.0
    assert best(Costs(1.0, 0.0, 1.0), least_s=2.0).reason == "as often as possible: nothing ever fails"
    assert weigh(10.0, Costs(1.0, 0.0, 1.0)).overhead == 0.1
    assert weigh(1e6, Costs(1.0, 1.0, 1.0)).overhead == inf
    assert weigh(1e6, Costs(1.0, 1.0, 1.0)).effective == 0.0
    cheap = best(Costs(1e-6, 1 / DAY, 1.0), least_s=10.0)
    assert (cheap.value.interval_s, "as often as possible" in cheap.reason) == (10.0, True)


def test_candidates_surround_the_best_and_none_is_shorter_than_a_step() -> None:
    costs = Costs(2.0, 1 / 3_600, 30.0)
    rows = candidates(costs, least_s=50.0)
    assert [row.interval_s for row in rows] == sorted(row.interval_s for row in rows)
    assert rows[0].interval_s == 50.0
    assert min(rows, key=lambda row: row.overhead).interval_s == best(costs, least_s=50.0).value.interval_s
