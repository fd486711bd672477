"""`plan --pipeline`: the step of a pipeline that is not built yet, its bubbles, and a checkpoint placed into them.

GPipe, 1F1B and Interleaved1F1B are known here; the orders of all other schedules are asked of the installed torch
(`checkpoint.pipeline.schedule_actions`, as a child). The figures are those of the event model (`core.pipeline.event_model`) and of the placement
(`core.pipeline.bubble_placement`); the picture is `cli.planning.pipeline_timeline`'s, the page that of `cli.timeline`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from holdfast.base.config import parse_seconds, parse_share, parse_size
from holdfast.base.errors import UsageError
from holdfast.cli import console, subcommands, timeline
from holdfast.cli.planning import job_file, pipeline_timeline
from holdfast.core.pipeline.bubble_placement import Load, Placement, Window, highest_cadence, place
from holdfast.core.pipeline.event_model import (
    Action,
    Costs,
    Kind,
    Order,
    Timeline,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    stages_of,
)

_KNOWN = {"gpipe": gpipe, "1f1b": one_f_one_b}
_INTERLEAVED = "interleaved1f1b"
_SHARE_OF_INPUT = 0.5  # of a backward that is split: gradients of inputs, then of weights
COLUMNS = 120
MAX_LINES = 32
HELP = """

\b
A pipeline for --pipeline; in brackets what holds without a line:
  schedule = "1F1B"          # GPipe, Interleaved1F1B, or another of torch
  ranks = 4                  # of the pipeline
  microbatches = 8           # of a step
  stages = 1                 # per rank (1 for GPipe and 1F1B, else 2)
  forward = "10ms"           # time of a stage for one micro-batch, or a list by stage
  backward = "20ms"          # the same (twice forward)
  layers = [[30, "1ms"], "4ms"]  # instead of both: the model's, shared by all stages
  hop = "0s"                 # from the end of an action until its result is at the next rank (0s)
  sync = "0s"                # reduction of gradients after the last backward, or a list by rank (0s)
  optimizer = "0s"           # after that; the same (0s)
  state = "1GiB"             # bytes that a stage holds, or a list by stage (1GiB)
  rate = "10GB"              # bytes per second of the copy (10GB)
  chunk = "4MiB"             # bytes that are copied at a time (4MiB)
  call = "0s"                # what the call of a save stops a step for (0s)
  budget = "0.5%"            # share of a step that saves may cost (0.5%)
  from = "0s"                # draw the step from this time on
  to = "1s"                  # and until this time
"""
_REMEDY = "`holdfast plan --help` shows an example"
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_One: TypeAlias = str | int | float
_Each: TypeAlias = _One | tuple[_One, ...]
Value = TypeVar("Value")


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"start": "from", "end": "to"}):
    """The file, as HELP shows it."""

    schedule: str
    ranks: _Count
    microbatches: _Count
    stages: _Count | None = None
    forward: _Each = ()
    backward: _Each = ()
    layers: tuple[_One | tuple[_Count, _One], ...] = ()
    hop: _One = "0s"
    sync: _Each = "0s"
    optimizer: _Each = "0s"
    state: _Each = "1GiB"
    rate: _One = "10GB"
    chunk: _One = "4MiB"
    call: _One = "0s"
    budget: _One = "0.5%"
    start: _One = "0s"
    end: _One | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline as it was described. Seconds and bytes; forward and backward are for one micro-batch.

    Attributes:
        forward, backward, state: of each stage.
        sync, optimizer: of each rank.
        hop: from the end of an action to the arrival of its result at another rank.
        call: what the call of a save stops a step for.
        shown: from when to when the step is drawn; None: to its end.
    """

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hop: float
    sync: tuple[float, ...]
    optimizer: tuple[float, ...]
    state: tuple[int, ...]
    rate: float
    chunk: int
    call: float
    budget: float
    shown: tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Says what comes of a plan."""

    plan: Plan
    step: Timeline
    placements: Mapping[int, Placement]
    tracks: Sequence[timeline.Track]


def load(file: str) -> Plan:
    """The plan that a file describes.

    Raises:
        UsageError: it cannot be read or understood; says where.
    """
    if "=" in file and not Path(file).exists():
        remedy = f"write them into a TOML file, a `key = value` each, and give its name; {_REMEDY}"
        raise UsageError("a pipeline is no longer described by words", where=f"--pipeline {file!r}", remedy=remedy)
    described = job_file.read(Path(file), Description, what="pipeline")
    try:
        return _plan(described)
    except ValueError as error:
        raise UsageError(str(error), where=f"--pipeline {file}", remedy=_REMEDY) from error


def _plan(described: Description) -> Plan:
    ranks = described.ranks
    stages = described.stages or (1 if described.schedule.lower() in _KNOWN else 2)
    rate, chunk = (_one(word, getattr(described, word), parse_size) for word in ("rate", "chunk"))
    if not (rate and chunk):
        raise ValueError(f"{'chunk' if rate else 'rate'} is zero; it must be at least 1")
    forward = _forward(described, ranks * stages)
    if not any(forward):
        raise ValueError("forward is zero for every stage; there is nothing to draw")
    start = _one("from", described.start, parse_seconds)
    end = None if described.end is None else _one("to", described.end, parse_seconds)
    if end is not None and end <= start:
        raise ValueError(f"to = {described.end} is not after from = {described.start}")
    backward = _each("backward", described.backward, ranks * stages, parse_seconds) if described.backward != () else ()
    return Plan(
        schedule=described.schedule,
        ranks=ranks,
        stages=stages,
        microbatches=described.microbatches,
        forward=forward,
        backward=backward or tuple(2 * each for each in forward),
        hop=_one("hop", described.hop, parse_seconds),
        sync=_each("sync", described.sync, ranks, parse_seconds),
        optimizer=_each("optimizer", described.optimizer, ranks, parse_seconds),
        state=_each("state", described.state, ranks * stages, parse_size),
        rate=float(rate),
        chunk=chunk,
        call=_one("call", described.call, parse_seconds),
        budget=_one("budget", described.budget, parse_share),
        shown=(start, end),
    )


def _one(word: str, value: _One, parse_one: Callable[[str], Value]) -> Value:
    try:
        return parse_one(str(value))
    except UsageError as error:
        raise ValueError(f"{word}: {error.what}; {error.remedy}") from error


def _each(word: str, given: _Each, count: int, parse_one: Callable[[str], Value]) -> tuple[Value, ...]:
    """The values of a key that stands for every stage, or every rank: one for all, or as many as there are."""
    values = tuple(_one(word, value, parse_one) for value in (given if isinstance(given, tuple) else (given,)))
    if len(values) not in (1, count):
        whose = "ranks" if word in ("sync", "optimizer") else "stages"
        raise ValueError(f"{word} has {len(values)} values for {count} {whose}; give one for all of them, or {count}")
    return values if len(values) == count else values * count


def pipeline(file: str | None, *, html: str | None, as_json: bool) -> int:
    """Shows the step, its waits and where a checkpoint goes; returns the exit code.

    Args:
        file: of the description; None: there is none, which is an error.
        html: where the step is written as a page; None: nowhere.
        as_json: figures instead of a picture.

    Raises:
        UsageError: a description or a schedule that does not exist, a page that cannot be written.
    """
    if file is None:
        raise UsageError("there is no step to draw", where=f"--html {html}", remedy="give --pipeline with it")
    found = predicted(load(file))
    _check_shown(found, file)
    if html is not None:
        _write(found, Path(html))
    if as_json:
        console.print_json(_document(found, html))
    else:
        _show(found, html)
    return 0


def predicted(plan: Plan) -> Prediction:
    """The step of a plan, with a checkpoint in its waits.

    Raises:
        UsageError: there is no such schedule.
    """
    told = orders(plan)
    step = simulate(told, _costs(plan))
    placements = {}
    for rank, row in enumerate(step.ranks):
        num_bytes = sum(plan.state[stage] for stage in {action.stage for action in told[rank]})
        placements[rank] = place(_chunks(plan, num_bytes), [Window(wait.index, wait.seconds) for wait in row.waits])
    endings = [
        {"gradient sync": sync, "optimizer": optimizer}
        for sync, optimizer in zip(plan.sync, plan.optimizer, strict=True)
    ]
    return Prediction(plan, step, placements, pipeline_timeline.tracks(step, placements, endings))


def orders(plan: Plan) -> tuple[Order, ...]:
    """Per rank what it computes, in order.

    Raises:
        UsageError: torch knows no such schedule, or not with these numbers.
    """
    known = _KNOWN.get(plan.schedule.lower())
    if known is not None and plan.stages == 1:
        return known(plan.ranks, plan.microbatches)
    if plan.schedule.lower() == _INTERLEAVED:
        try:
            return interleaved_1f1b(plan.ranks, plan.stages, plan.microbatches)
        except ValueError as error:
            remedy = "take a multiple of the ranks as number of micro-batches"
            raise UsageError(str(error), where=f"--pipeline {plan.schedule}", remedy=remedy) from error
    told = subcommands.ask("orders", [plan.schedule, str(plan.ranks), str(plan.stages), str(plan.microbatches)])
    if not told:
        raise UsageError(f"{plan.schedule} with these numbers is no schedule of the installed torch", remedy=_REMEDY)
    return tuple(
        tuple(Action(stage, Kind(kind), m, joined) for stage, kind, m, joined in row) for row in json.loads(told)
    )


def _forward(described: Description, num_stages: int) -> tuple[float, ...]:
    """Return the forward seconds of every stage, from that of one or from those of the layers."""
    if not described.layers:
        if described.forward == ():
            raise ValueError("forward or layers is missing")
        return _each("forward", described.forward, num_stages, parse_seconds)
    if described.forward != () or described.backward != ():
        raise ValueError("layers say what forward and backward would")
    terms = (term if isinstance(term, tuple) else (1, term) for term in described.layers)
    return stages_of([_one("layers", s, parse_seconds) for count, s in terms for _ in range(count)], num_stages)


def _costs(plan: Plan) -> Costs:
    compute: dict[tuple[int, Kind], float] = {}
    for stage, (forward, backward) in enumerate(zip(plan.forward, plan.backward, strict=True)):
        split = backward * _SHARE_OF_INPUT
        each = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT: split, Kind.WEIGHT: backward - split}
        compute |= {(stage, kind): seconds for kind, seconds in each.items()}
    ending = {rank: plan.sync[rank] + plan.optimizer[rank] for rank in range(plan.ranks)}
    return Costs(compute, hop=plan.hop, ending=ending)


def _chunks(plan: Plan, num_bytes: int) -> list[float]:
    whole, rest = divmod(num_bytes, plan.chunk)
    return [plan.chunk / plan.rate] * whole + ([rest / plan.rate] if rest else [])


def _cadence(found: Prediction) -> tuple[int, str]:
    plan = found.plan
    loads = [Load(plan.call, found.placements[rank].left_seconds, found.step.period) for rank in range(plan.ranks)]
    decision = highest_cadence(loads, budget=plan.budget)
    return decision.value, decision.reason


def _end(found: Prediction) -> float:
    return max(span.end for track in found.tracks for span in track.spans)


def _check_shown(found: Prediction, file: str) -> None:
    start, end = found.plan.shown[0], _end(found)
    if start >= end:
        raise UsageError(f"from = {start:g} s: the step is over after {end:.3g} s", where=f"--pipeline {file}")


def _title(plan: Plan) -> str:
    many = f"{plan.stages} stages each, " if plan.stages > 1 else ""
    return f"{plan.schedule}: {plan.ranks} ranks, {many}{plan.microbatches} micro-batches"


def _write(found: Prediction, page: Path) -> None:
    try:
        page.write_text(timeline.page(found.tracks, f"{_title(found.plan)} (predicted)"), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the page cannot be written: {error.strerror}",
            where=f"--html {page}",
            remedy="name a file in a directory that exists and that you may write to",
        ) from error


def _show(found: Prediction, html: str | None) -> None:
    plan, step = found.plan, found.step
    start, end = plan.shown[0], min(plan.shown[1] or _end(found), _end(found))
    picture = pipeline_timeline.Picture((end - start) / COLUMNS, start, end, _shades())
    console.say(f"{_title(plan)}; a step takes {step.period:.3g} s")
    console.say(f"{pipeline_timeline.legend(found.tracks, picture)}\n")
    console.say(f"from {start:.4g} s to {end:.4g} s, {_ms(picture.column_s)} ms a column")
    for line in pipeline_timeline.draw(found.tracks[:MAX_LINES], picture):
        console.say(line)
    if plan.ranks > MAX_LINES:
        console.say(f"and {plan.ranks - MAX_LINES} ranks more")
    console.say()
    rows = [
        (rank, f"{step.idle_share(rank):.1%}", _ms(one.hidden_seconds + one.left_seconds), _ms(one.hidden_seconds), _ms(one.left_seconds))
        for rank, one in list(found.placements.items())[:MAX_LINES]
    ]  # fmt: skip
    console.print_table(("rank", "idle", "copy ms", "in waits ms", "beside ms"), rows)
    every, reason = _cadence(found)
    console.say(
        f"\ncheckpoint every {every} step{'s' if every > 1 else ''}: {reason}" if every else f"\nnot in waits: {reason}"
    )
    if html is not None:
        console.say(f"{html}    open it in a browser")


def _shades() -> str:
    """Blocks where standard output can show them."""
    try:
        pipeline_timeline.BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return pipeline_timeline.PLAIN
    return pipeline_timeline.BLOCKS


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _document(found: Prediction, html: str | None) -> dict[str, Any]:
    every, reason = _cadence(found)
    return {
        "schedule": found.plan.schedule,
        "period_seconds": found.step.period,
        "every": every,
        "reason": reason,
        "html": html,
        "ranks": [_rank(found, rank) for rank in range(found.plan.ranks)],
    }


def _rank(found: Prediction, rank: int) -> dict[str, Any]:
    placement, waits = found.placements[rank], found.step.ranks[rank].waits
    return {
        "idle_share": found.step.idle_share(rank),
        "hidden_seconds": placement.hidden_seconds,
        "left_seconds": placement.left_seconds,
        "reason": placement.reason,
        "sync_seconds": found.plan.sync[rank],
        "optimizer_seconds": found.plan.optimizer[rank],
        "waits": [{"before": wait.index, "start": wait.start, "seconds": wait.seconds} for wait in waits],
    }
