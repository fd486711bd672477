"""`plan --pipeline`: the step of a pipeline that is not built yet, its bubbles, and a checkpoint placed into them.

GPipe and 1F1B are known here; the orders of all other schedules are asked of the installed torch (`train.orders`, as a
child). The figures are those of the event model (`core.pipeline`) and of the placement (`core.bubbles`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.base.config import parse_seconds, parse_size
from holdfast.base.errors import UsageError
from holdfast.core.bubbles import Load, Placement, Window, highest_cadence, place
from holdfast.core.pipeline import Action, Costs, Kind, Order, Timeline, gpipe, one_f_one_b, simulate, stages_of
from holdfast.tools import launch, output, timeline

_KNOWN = {"gpipe": gpipe, "1f1b": one_f_one_b}
_SHARE_OF_INPUT = 0.5  # of a backward that is split: gradients of inputs, then of weights
COLUMNS = 120
MAX_LINES = 32
_KEYS = "ranks stages microbatches forward layers backward optimizer state rate chunk budget"
_REMEDY = (
    'write "1F1B ranks=4 microbatches=8 forward=10ms state=2GiB"; further: stages (per rank), layers instead '
    "of forward (30x1ms+4ms: of the model, shared by all stages), backward (default twice forward), "
    "optimizer, rate (bytes per second of the copy, default 10GB), chunk (4MiB), budget (0.005 of a step)"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline as it was described. Seconds and bytes; forward and backward of each stage, for one micro-batch."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    optimizer: float
    state: int
    rate: float
    chunk: int
    budget: float


def parse(text: str) -> Plan:
    """The plan that a line such as `1F1B ranks=4 microbatches=8 forward=10ms state=2GiB` describes.

    Raises:
        UsageError: a word that is none, or one that is missing; names it.
    """
    schedule, *words = text.split() or [""]
    pairs = {key: value for key, _, value in (word.partition("=") for word in words)}
    unknown = [key for key in pairs if key not in _KEYS.split()]
    missing = [key for key in ("ranks", "microbatches") if key not in pairs]
    missing += ["forward"] if not pairs.keys() & {"forward", "layers"} else []
    if not schedule or unknown or missing:
        what = f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing) or 'the schedule'}"
        raise UsageError(f"--pipeline {text!r}: {what}", remedy=_REMEDY)
    try:
        ranks = int(pairs["ranks"])
        stages = int(pairs.get("stages", 1 if schedule.lower() in _KNOWN else 2))
        forward = _forward(pairs, max(ranks * stages, 1))
        plan = Plan(
            schedule=schedule,
            ranks=ranks,
            stages=stages,
            microbatches=int(pairs["microbatches"]),
            forward=forward,
            backward=tuple(parse_seconds(pairs["backward"]) if "backward" in pairs else 2 * each for each in forward),
            optimizer=parse_seconds(pairs.get("optimizer", "0s")),
            state=parse_size(pairs.get("state", "1GiB")),
            rate=float(parse_size(pairs.get("rate", "10GB"))),
            chunk=parse_size(pairs.get("chunk", "4MiB")),
            budget=float(pairs.get("budget", "0.005")),
        )
    except ValueError as error:
        raise UsageError(f"--pipeline {text!r}: {error}", remedy=_REMEDY) from error
    if min(plan.ranks, plan.stages, plan.microbatches, plan.chunk, plan.rate) < 1:
        raise UsageError(f"--pipeline {text!r}: a number is zero", remedy=_REMEDY)
    return plan


def pipeline(text: str, *, as_json: bool) -> int:
    """Shows the step, its waits and where a checkpoint goes; returns the exit code.

    Raises:
        UsageError: a description or a schedule that does not exist.
    """
    plan = parse(text)
    step = simulate(orders(plan), _costs(plan))
    chunks = _chunks(plan)
    placements = {
        rank: place(chunks, [Window(wait.index, wait.seconds) for wait in row.waits])
        for rank, row in enumerate(step.ranks)
    }
    if as_json:
        output.print_json(_document(plan, step, placements))
    else:
        _show(plan, step, placements)
    return 0


def orders(plan: Plan) -> tuple[Order, ...]:
    """Per rank what it computes, in order.

    Raises:
        UsageError: torch knows no such schedule, or not with these numbers.
    """
    known = _KNOWN.get(plan.schedule.lower())
    if known is not None and plan.stages == 1:
        return known(plan.ranks, plan.microbatches)
    told = launch.ask("orders", [plan.schedule, str(plan.ranks), str(plan.stages), str(plan.microbatches)])
    if not told:
        raise UsageError(f"{plan.schedule} with these numbers is no schedule of the installed torch", remedy=_REMEDY)
    return tuple(
        tuple(Action(stage, Kind(kind), m, joined) for stage, kind, m, joined in row) for row in json.loads(told)
    )


def _forward(pairs: Mapping[str, str], num_stages: int) -> tuple[float, ...]:
    """Of every stage, from that of one or from those of the layers."""
    if "layers" not in pairs:
        return (parse_seconds(pairs["forward"]),) * num_stages
    if pairs.keys() & {"forward", "backward"}:
        raise ValueError("layers say what forward and backward would")
    layers: list[float] = []
    for term in pairs["layers"].split("+"):
        count, _, seconds = term.rpartition("x")
        layers += [parse_seconds(seconds)] * int(count or 1)
    return stages_of(layers, num_stages)


def _costs(plan: Plan) -> Costs:
    compute: dict[tuple[int, Kind], float] = {}
    for stage, (forward, backward) in enumerate(zip(plan.forward, plan.backward, strict=True)):
        split = backward * _SHARE_OF_INPUT
        each = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT: split, Kind.WEIGHT: backward - split}
        compute |= {(stage, kind): seconds for kind, seconds in each.items()}
    return Costs(compute, ending=dict.fromkeys(range(plan.ranks), plan.optimizer))


def _chunks(plan: Plan) -> list[float]:
    whole, rest = divmod(plan.state, plan.chunk)
    return [plan.chunk / plan.rate] * whole + ([rest / plan.rate] if rest else [])


def _cadence(plan: Plan, step: Timeline, placements: Mapping[int, Placement]) -> tuple[int, str]:
    loads = [Load(0.0, placements[rank].left_seconds, step.period) for rank in range(plan.ranks)]
    decision = highest_cadence(loads, budget=plan.budget)
    return decision.value, decision.reason


def _show(plan: Plan, step: Timeline, placements: Mapping[int, Placement]) -> None:
    many = f"{plan.stages} stages each, " if plan.stages > 1 else ""
    print(
        f"{plan.schedule}: {plan.ranks} ranks, {many}{plan.microbatches} micro-batches; a step takes {step.period:.3g} s"
    )
    print("digit: forward of that micro-batch, letter: backward, dot: idle, #: idle, and the checkpoint is copied\n")
    lines = timeline.draw(step, placements, column_s=max(rank.ends for rank in step.ranks) / COLUMNS)
    for line in lines[:MAX_LINES]:
        print(line)
    if len(lines) > MAX_LINES:
        print(f"and {len(lines) - MAX_LINES} ranks more")
    print()
    rows = [
        (rank, f"{step.idle_share(rank):.1%}", _ms(one.hidden_seconds + one.left_seconds), _ms(one.hidden_seconds), _ms(one.left_seconds))
        for rank, one in list(placements.items())[:MAX_LINES]
    ]  # fmt: skip
    output.print_table(("rank", "idle", "copy ms", "in waits ms", "left ms"), rows)
    every, reason = _cadence(plan, step, placements)
    print(
        f"\ncheckpoint every {every} step{'s' if every > 1 else ''}: {reason}" if every else f"\nnot in waits: {reason}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _document(plan: Plan, step: Timeline, placements: Mapping[int, Placement]) -> dict[str, Any]:
    every, reason = _cadence(plan, step, placements)
    return {
        "schedule": plan.schedule,
        "period_seconds": step.period,
        "every": every,
        "reason": reason,
        "ranks": [_rank(step, rank, placements[rank]) for rank in range(plan.ranks)],
    }


def _rank(step: Timeline, rank: int, placement: Placement) -> dict[str, Any]:
    waits: Sequence[Any] = step.ranks[rank].waits
    return {
        "idle_share": step.idle_share(rank),
        "hidden_seconds": placement.hidden_seconds,
        "left_seconds": placement.left_seconds,
        "reason": placement.reason,
        "waits": [{"before": wait.index, "start": wait.start, "seconds": wait.seconds} for wait in waits],
    }
