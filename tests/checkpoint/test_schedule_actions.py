"""Orders of torch's own schedules, and that the event model can run every one of them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.pipelining import schedules

from calls_kit import worth
from holdfast.base.errors import UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.pipeline import schedule_actions as orders
from holdfast.checkpoint.pipeline.bubbles import Bubbles
from holdfast.checkpoint.pipeline.schedule_actions import planned
from holdfast.checkpoint.pipeline.schedule_discovery import bubbles_of
from holdfast.core.pipeline.event_model import Costs, Kind, gpipe, interleaved_1f1b, one_f_one_b, simulate

SCHEDULES = [
    ("GPipe", 4, 1, 8),
    ("1F1B", 4, 1, 8),
    ("Interleaved1F1B", 4, 2, 8),
    ("LoopedBFS", 4, 2, 8),
    ("InterleavedZeroBubble", 4, 2, 8),
    ("ZBVZeroBubble", 4, 2, 8),
    ("DualPipeV", 4, 2, 8),
]


@pytest.mark.parametrize(("name", "ranks", "stages", "microbatches"), SCHEDULES)
def test_every_schedule_of_torch_runs_in_the_event_model(name: str, ranks: int, stages: int, microbatches: int) -> None:
    orders = planned(name, num_ranks=ranks, stages_per_rank=stages, num_microbatches=microbatches)
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
    seconds = dict(zip(kinds, (1.0, 2.0, 1.0, 1.0), strict=True))
    timeline = simulate(orders, Costs({(s, k): seconds[k] for s in range(ranks * stages) for k in kinds}))
    work = stages * microbatches * 3.0
    for rank, order in enumerate(orders):
        done = sum(seconds[action.kind] for action in order)
        assert done == work, f"rank {rank} computes every forward and backward once"
        assert timeline.ranks[rank].idle == pytest.approx(timeline.period - work), "in a steady state"


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8), (4, 16)])
@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0)])
@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_two_equal_stages_per_rank_are_idle_as_the_closed_form_says(
    name: str, costs: tuple[float, float, float], ranks: int, microbatches: int
) -> None:
    """Narayanan et al. 2021; Qi et al. 2023 (ZB1P, ZB-V); DeepSeek's DualPipe, of an overlapped pair that takes F + B.

    Of costs of one stage: forward, gradients of inputs and of weights.
    """
    forward, inputs, weights = costs
    backward = inputs + weights
    each = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT: inputs, Kind.WEIGHT: weights}
    orders = planned(name, num_ranks=ranks, stages_per_rank=2, num_microbatches=microbatches)
    timeline = simulate(orders, Costs({(s, kind): t for s in range(2 * ranks) for kind, t in each.items()}))
    bubbles = {
        "InterleavedZeroBubble": forward + inputs - weights,
        "ZBVZeroBubble": forward + inputs - 2 * weights,
        "DualPipeV": (forward + backward) + backward - 3 * weights,
    }
    idle = (ranks - 1) * bubbles.get(name, forward + backward)
    assert [row.idle for row in timeline.ranks] == [idle] * ranks


def test_zero_bubble_schedules_wait_less_than_1f1b() -> None:
    idle = {}
    for name, stages in (("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)):
        orders = planned(name, num_ranks=4, stages_per_rank=stages, num_microbatches=8)
        part = 1.0 / stages
        costs = {(s, k): part * (2 if k is Kind.BACKWARD else 1) for s in range(4 * stages) for k in Kind}
        timeline = simulate(orders, Costs(costs))
        idle[name] = max(timeline.idle_share(rank) for rank in range(4))
    assert idle["ZBVZeroBubble"] < idle["Interleaved1F1B"] < idle["1F1B"]


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_one_stage_per_rank_is_known_by_name(name: str) -> None:
    make = {"GPipe": gpipe, "1F1B": one_f_one_b}[name]
    assert planned(name, num_ranks=3, stages_per_rank=1, num_microbatches=5) == make(3, 5)


@pytest.mark.parametrize(
    ("ranks", "stages", "microbatches"),
    [(1, 2, 3), (2, 2, 4), (4, 2, 3), (4, 2, 10), (4, 3, 8), (3, 1, 6), (16, 2, 64)],
)
def test_the_interleaved_order_that_is_known_without_torch_is_torchs(
    ranks: int, stages: int, microbatches: int
) -> None:
    told = planned("Interleaved1F1B", num_ranks=ranks, stages_per_rank=stages, num_microbatches=microbatches)
    assert interleaved_1f1b(ranks, stages, microbatches) == told


def test_the_schedules_of_the_stories_are_torchs() -> None:
    """A story of a real schedule writes out what each rank computes, so that a person can read it."""
    lines = (Path(__file__).parents[1] / "core/scenarios/bubbles_zero.txt").read_text(encoding="utf-8").splitlines()
    told = [dict(word.split("=") for word in line.split()[1:]) for line in lines if line.startswith("schedule ")]
    assert [one["of"] for one in told] == ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
    for one in told:
        orders = planned(one["of"], num_ranks=2, stages_per_rank=2, num_microbatches=4)
        assert [one["rank0"], one["rank1"]] == [",".join(map(str, order)) for order in orders]


def test_micro_batches_that_make_no_rounds_are_refused_as_torch_refuses_them() -> None:
    with pytest.raises(ValueError, match="9 micro-batches cannot be divided into 2 rounds"):
        interleaved_1f1b(4, 2, 9)
    with pytest.raises(UsageError, match="multiple of the number of rounds"):
        planned("Interleaved1F1B", num_ranks=4, stages_per_rank=2, num_microbatches=9)


def test_what_torch_refuses_is_refused_with_its_words() -> None:
    with pytest.raises(UsageError, match="no such schedule"):
        planned("NoSuch", num_ranks=2, stages_per_rank=1, num_microbatches=2)
    with pytest.raises(UsageError, match="one stage per rank"):
        planned("GPipe", num_ranks=2, stages_per_rank=2, num_microbatches=2)


class Watched:
    """A pipeline of two ranks, on the first of them: four micro-batches that compute nothing, and some waits."""

    def __init__(self) -> None:
        inner = {"forward_one_chunk": _nothing, "backward_one_chunk": _nothing}
        self.stage = SimpleNamespace(**{**vars(orders._stage(0, 2, 1)), **inner})
        self.watcher = Bubbles(schedules.Schedule1F1B(self.stage, 4, loss_fn=nn.functional.mse_loss), Events())
        self.watcher.attach()

    def step(self, num_waits: int = 6) -> None:
        self.watcher._begin_step()
        for number in range(4):
            self.stage.forward_one_chunk(number)
            self.stage.backward_one_chunk(number)
        for _ in range(num_waits):
            self.watcher.waited(_nothing, [None])


def test_watching_a_step_costs_about_a_thousandth_of_it_at_most() -> None:
    """Eight actions and six waits cost what some 1,700 calls of a function cost: 60 us, where a step takes a tenth of a second."""
    watched = Watched()

    def steps() -> None:
        for _ in range(20):
            watched.step()

    cost = worth(steps) / 20
    watched.watcher.detach()
    assert watched.watcher.profile().num_steps == 400
    # 100 us would be some 2,900 calls; beside other work the same calls have been seen to cost a twentieth more than that.
    assert cost < 5000, "it does not grow with what was seen"


def test_cost_of_a_wait_is_independent_of_history() -> None:
    few, many = calls_of_a_step(6, after=40), calls_of_a_step(60, after=40)
    assert many <= 10 * few
    assert calls_of_a_step(6, after=200) == few


def calls_of_a_step(num_waits: int, *, after: int) -> int:
    """Calls of functions in a step with so many waits, when so many steps were seen."""
    watched, count = Watched(), 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(after):
        watched.step(num_waits)
    sys.setprofile(note)
    try:
        watched.step(num_waits)
    finally:
        sys.setprofile(None)
    watched.watcher.detach()
    return count


def _nothing(*_: object) -> None:
    pass


def test_the_schedule_of_a_model_is_found_unless_there_are_two() -> None:
    stages = [SimpleNamespace(**{**vars(orders._stage(0, 2, 1)), "submod": nn.Linear(2, 2)}) for _ in range(2)]
    first, other = (schedules.ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss) for stage in stages)
    found = bubbles_of([stages[0].submod], Events())
    assert found is not None
    assert found._schedule is first
    assert bubbles_of([nn.Linear(2, 2)], Events()) is None, "a schedule of other models"
    second = schedules.ScheduleGPipe(stages[0], 8, loss_fn=nn.functional.mse_loss)
    assert bubbles_of([stages[0].submod], Events()) is None, "nobody can tell which of the two makes the steps"
    del second, other
