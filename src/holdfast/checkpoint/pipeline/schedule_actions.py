"""The order of actions of PyTorch's pipeline schedules, as the event model takes it.

The installed torch is the authority: its schedules say what each rank does, and nothing is described by the user. A
schedule that is not built yet is built on stages without tensors or process groups, which its order does not need.
GPipe and 1F1B are known by name (`core.pipeline.event_model`): their loops are fixed, older releases do not tell their order, and
the order that torch 2.13 tells for 1F1B names forwards that its loop does not run.

Run as a program it prints the orders of a planned schedule, for commands that must not import torch:
`python -m holdfast.checkpoint.pipeline.schedule_actions NAME RANKS STAGES_PER_RANK MICROBATCHES`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from holdfast.base.errors import UsageError
from holdfast.core.pipeline.event_model import Action, Kind, Order, gpipe, one_f_one_b

# By torch's names: the values are letters in torch 2.13, and numbers in 2.10.
_KINDS = {
    "FORWARD": Kind.FORWARD,
    "BACKWARD_INPUT": Kind.INPUT,
    "BACKWARD_WEIGHT": Kind.WEIGHT,
    "FULL_BACKWARD": Kind.BACKWARD,
}
_BY_NAME = {"ScheduleGPipe": gpipe, "Schedule1F1B": one_f_one_b}


def orders_of(schedule: Any) -> tuple[Order, ...]:
    """Per rank of the pipeline its computations on stages and micro-batches, in order.

    Raises:
        UsageError: not a schedule of `torch.distributed.pipelining`, or one that does not tell its order.
    """
    name = type(schedule).__name__
    if name in _BY_NAME:
        return _BY_NAME[name](schedule._num_stages, schedule._n_microbatches)
    told = getattr(schedule, "pipeline_order", None)
    if told:
        return tuple(tuple(_actions(told[rank])) for rank in sorted(told))
    raise UsageError(
        f"the order of {name} is not known",
        remedy="give a schedule of torch.distributed.pipelining; others are copied without regard to waits",
    )


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank."""
    several = getattr(schedule, "_stages", None)
    return list(several) if several is not None else [schedule._stage]


def planned(name: str, *, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> tuple[Order, ...]:
    """The orders of a schedule that nobody has built yet.

    Args:
        name: as torch names it: `GPipe`, `1F1B`, `Interleaved1F1B`, `LoopedBFS`, `InterleavedZeroBubble`,
            `ZBVZeroBubble`, `DualPipeV`.
        num_ranks: ranks of the pipeline.
        stages_per_rank: 1 for GPipe and 1F1B.
        num_microbatches: of one step.

    Raises:
        UsageError: an unknown name, or numbers that the schedule does not take; with its own words.
    """
    # Only who plans a pipeline pays for importing them.
    from torch.distributed.pipelining import schedules  # noqa: PLC0415

    try:
        kind = schedules.get_schedule_class(name)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        if single and stages_per_rank != 1:
            raise ValueError(f"{name} has one stage per rank, not {stages_per_rank}")
        stages: list[Any] = [_stage(index, num_ranks, stages_per_rank) for index in range(stages_per_rank)]
        built: Any = kind(stages[0] if single else stages, num_microbatches, loss_fn=_no_loss)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(f"no such schedule: {error}", remedy="see torch.distributed.pipelining") from error
    return orders_of(built)


def _stage(index: int, num_ranks: int, stages_per_rank: int) -> SimpleNamespace:
    from torch import nn  # noqa: PLC0415

    return SimpleNamespace(
        group_size=num_ranks,
        group_rank=0,
        num_stages=num_ranks * stages_per_rank,
        stage_index=index * num_ranks,
        is_first=index == 0,
        is_last=False,
        has_backward=True,
        submod=nn.Identity(),
    )


def _no_loss(*_: Any) -> None:
    return None


def _actions(told: Iterable[Any]) -> Iterator[Action]:
    for action in told:
        if action is None:
            continue
        if action.sub_actions is not None:
            # torch runs an overlapped pair one after the other and sends only then what both have made.
            *before, last = _actions(action.sub_actions)
            yield from (replace(each, joined=True) for each in before)
            yield last
        elif (kind := _KINDS.get(action.computation_type.name)) is not None:
            yield Action(action.stage_index, kind, action.microbatch_index)


def main(arguments: list[str]) -> int:
    """Prints one JSON document: per rank its actions as `[stage, kind, microbatch, joined]`."""
    name, *numbers = arguments
    num_ranks, stages_per_rank, num_microbatches = map(int, numbers)
    orders = planned(name, num_ranks=num_ranks, stages_per_rank=stages_per_rank, num_microbatches=num_microbatches)
    rows = [[[a.stage, a.kind.value, a.microbatch, a.joined] for a in order] for order in orders]
    sys.stdout.write(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
