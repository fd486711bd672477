"""A pipeline as it was seen, held against what the event model says of it.

Half of the steps tell what everything costs; the waits of the other half are predicted from that and compared one by
one. Nothing is fitted to the waits or to the length of a step: a hop is timed from the end of one rank's action to the
begin of another's, on the clock that all processes of a machine share. So a model with another order, other needs or
other costs says other waits, and is found out.

Only the shortest steps count: in the others a program beside took a processor, and medians of what is left
are taken, for the same reason. Which steps those are has nothing to do with what the model says.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import forked
from holdfast.core.pipeline.event_model import Action, Costs, Kind, Order, Timeline, _leaving, _needs

WORKER = str(Path(__file__).parent / "checkpoint" / "event_model_worker.py")
# A hop is timed where the receiver surely waited for it.
SURELY_S = 2e-3


@dataclass(frozen=True)
class Step:
    """One step of one rank. Seconds.

    Attributes:
        costs: of every action, with what the schedule does around it.
        begins, ends: of every action, on the clock of the machine.
        waits: before every action. Messages of the step before may still have to be taken by a neighbour; whether a rank
            waits for that at the end of a step or at the begin of the next is all one, and counts as the first wait.
        ending: from the last action to the next step, without waits.
    """

    actions: tuple[str, ...]
    costs: tuple[float, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    waits: tuple[float, ...]
    ending: float
    period: float


@dataclass(frozen=True)
class Seen:
    """A schedule on all ranks: per rank its steps, the first one left out."""

    schedule: str
    orders: tuple[Order, ...]
    ranks: tuple[tuple[Step, ...], ...]
    rows: tuple[Mapping[str, Any], ...] = ()

    def only(self, numbers: Iterable[int]) -> Seen:
        """These steps of them."""
        wanted = list(numbers)
        return Seen(self.schedule, self.orders, tuple(tuple(steps[n] for n in wanted) for steps in self.ranks))

    def halves(self, of: float = 0.5) -> tuple[Seen, Seen]:
        """Of the shortest steps, such a part of all, every second one, and the others."""
        periods = [max(steps[n].period for steps in self.ranks) for n in range(len(self.ranks[0]))]
        quiet = sorted(sorted(range(len(periods)), key=periods.__getitem__)[: max(2, int(of * len(periods)))])
        return self.only(quiet[::2]), self.only(quiet[1::2])


def run(tmp_path: Path, world: int, work: str, steps: int, *names: str, timeout_s: float = 100) -> list[Seen]:
    """What the workers of these schedules saw."""
    place = [str(world), str(tmp_path / "store"), work, str(steps)]
    workers = [
        forked.Popen([sys.executable, WORKER, str(rank), *place, *names], stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        told = [json.loads(worker.communicate(timeout=timeout_s)[0]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(30)
            worker._close()
    assert all(one["seam"] == "torch.distributed.pipelining.schedules" for one in told)
    return [seen([one["rows"][number] for one in told]) for number in range(len(names))]


def seen(rows: Sequence[Mapping[str, Any]]) -> Seen:
    """One schedule, told by its ranks in order."""
    told = rows[0]["orders"]
    orders = tuple(tuple(Action(s, Kind(kind), m, joined) for s, kind, m, joined in order) for order in told)
    return Seen(rows[0]["schedule"], orders, tuple(tuple(_steps(row)[1:]) for row in rows), tuple(rows))


def _steps(row: Mapping[str, Any]) -> list[Step]:
    starts = row["starts"]
    each: list[list[Any]] = [[] for _ in starts[1:]]
    number = 0
    for span in row["spans"]:
        while span[1] >= starts[number + 1]:
            number += 1
        each[number].append(span)
    return [_step(spans, start, end) for spans, start, end in zip(each, starts, starts[1:], strict=False)]


def _step(spans: Sequence[Any], start: float, end: float) -> Step:
    actions, costs, begins, ends, waits = [], [], [], [], [0.0]
    waited = 0.0  # since the last action
    for what, began, ended in spans:
        if what == "wait":
            waits[-1] += ended - began
            waited += ended - began
            continue
        actions.append(what)
        costs.append(ended - (ends[-1] if ends else start) - waited)
        begins.append(began)
        ends.append(ended)
        waits.append(0.0)
        waited = 0.0
    ending = end - ends[-1] - waited
    waits[0] += waits.pop()
    return Step(tuple(actions), tuple(costs), tuple(begins), tuple(ends), tuple(waits), ending, end - start)


def costs_of(told: Seen) -> Costs:
    """What these steps say that everything costs."""
    compute: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for order, steps in zip(told.orders, told.ranks, strict=True):
        for step in steps:
            for action, seconds in zip(order, step.costs, strict=True):
                compute[action.stage, action.kind].append(seconds)
    ending = {rank: median(step.ending for step in steps) for rank, steps in enumerate(told.ranks)}
    return Costs({key: median(each) for key, each in compute.items()}, hop=median(_hops(told)), ending=ending)


def _hops(told: Seen) -> list[float]:
    present = {action for order in told.orders for action in order}
    last_stage = max(action.stage for action in present)
    found = []
    for number in range(len(told.ranks[0])):
        left: dict[Action, tuple[int, float]] = {}
        for rank, order in enumerate(told.orders):
            for index, end in enumerate(told.ranks[rank][number].ends):
                left |= dict.fromkeys(_leaving(order, index), (rank, end))
        for rank, order in enumerate(told.orders):
            step = told.ranks[rank][number]
            for action, began, waited in zip(order, step.begins, step.waits, strict=True):
                need = _needs(action, last_stage, present)
                if need is not None and left[need][0] != rank and waited > SURELY_S:
                    found.append(began - left[need][1])
    return found


def disorder(told: Seen) -> list[str]:
    """Where ranks did other things than their orders say, or in another order."""
    return [
        f"rank {rank}: {' '.join(step.actions)} instead of {' '.join(map(str, order))}"
        for rank, (order, steps) in enumerate(zip(told.orders, told.ranks, strict=True))
        for step in steps
        if step.actions != tuple(map(str, order))
    ]


def idle_ratios(model: Timeline, told: Seen) -> list[float]:
    """Per rank the idle time that the model says over that which was seen."""
    return [
        row.idle / median(sum(step.waits) for step in steps) for row, steps in zip(model.ranks, told.ranks, strict=True)
    ]


def unlike(model: Timeline, told: Seen, *, noise_s: float) -> list[str]:
    """Where model and pipeline differ: a wait by more than `noise_s`, or the idle time of a rank by more than a tenth.

    A wait is known by the action before which it is (a backward, whether it is split or not); one that only the model has,
    or only the pipeline, has no length in the other.
    """
    found = []
    for rank, (row, steps) in enumerate(zip(model.ranks, told.ranks, strict=True)):
        says = {_whole(str(row.spans[wait.index].action)): wait.seconds for wait in row.waits}
        for index, action in enumerate(map(_whole, steps[0].actions)):
            was, said = median(step.waits[index] for step in steps), says.get(action, 0.0)
            if abs(said - was) > noise_s:
                found.append(f"rank {rank} before {action}: {said * 1e3:.1f} ms, seen {was * 1e3:.1f}")
    for rank, ratio in enumerate(idle_ratios(model, told)):
        if not 0.9 <= ratio <= 1.1:
            found.append(f"rank {rank}: idle time is {ratio:.3f} of what was seen")
    return found


def _whole(action: str) -> str:
    return action.replace(Kind.INPUT.value, Kind.BACKWARD.value)
