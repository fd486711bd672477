"""When an incident is over, from what workers tell and what their pages show."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from holdfast.core.ladder import Failure, Fault, Limits
from holdfast.train.cases import Cases


def page(step: int) -> Any:
    """Of a worker that has finished so many steps."""
    return SimpleNamespace(pid=1, beat=SimpleNamespace(step=step), spent_s=Counter(), num_steps=step)


def test_it_is_over_when_every_rank_has_told_where_it_came_back_from() -> None:
    """The survivor's page shows the steps of before the fault until it trains again: that is no step made since."""
    cases = Cases(Limits())
    cases.judge(Failure(Fault.PROCESS, rank=1), 0.0, [page(9), page(9)], {"ranks": [1]})
    cases.ordered(1.0, [0])
    cases.restored(1, {"step": 8, "source": "its own slot"})
    assert cases.look(2.0, {0: page(9), 1: page(10)}, all_run=True) is None
    cases.restored(0, {"step": 8, "source": "its own slot"})
    assert cases.look(3.0, {0: page(9), 1: page(10)}, all_run=True) is None, "it has not made a step yet"
    told = cases.look(4.0, {0: page(10), 1: page(10)}, all_run=True)
    assert told is not None
    assert told["came_back"] == {"0": "its own slot", "1": "its own slot"}
