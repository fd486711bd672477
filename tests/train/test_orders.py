"""Orders of torch's own schedules, and that the event model can run every one of them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.pipelining import schedules

from holdfast.base.errors import UsageError
from holdfast.base.events import Events
from holdfast.core.pipeline import Costs, Kind, gpipe, one_f_one_b, simulate
from holdfast.train import orders
from holdfast.train.found import bubbles_of
from holdfast.train.orders import planned
from holdfast.train.pipeline import Bubbles

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
        assert timeline.ranks[rank].idle == pytest.approx(timeline.period - work)


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


def test_what_torch_refuses_is_refused_with_its_words() -> None:
    with pytest.raises(UsageError, match="no such schedule"):
        planned("NoSuch", num_ranks=2, stages_per_rank=1, num_microbatches=2)
    with pytest.raises(UsageError, match="one stage per rank"):
        planned("GPipe", num_ranks=2, stages_per_rank=2, num_microbatches=2)


def test_watching_a_step_costs_less_than_a_thousandth_of_it() -> None:
    """Four micro-batches on two ranks: eight actions and six waits, in a step of a tenth of a second."""
    inner = {"forward_one_chunk": _nothing, "backward_one_chunk": _nothing}
    stage = SimpleNamespace(**{**vars(orders._stage(0, 2, 1)), **inner})
    watcher = Bubbles(schedules.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss), Events())
    watcher.attach()

    def step() -> None:
        watcher._begin_step()
        for number in range(4):
            stage.forward_one_chunk(number)
            stage.backward_one_chunk(number)
        for _ in range(6):
            watcher.waited(_nothing, [None])

    costs = []
    for _ in range(20):
        began = time.thread_time()
        for _ in range(20):
            step()
        costs.append((time.thread_time() - began) / 20)
    watcher.detach()
    assert watcher.profile().num_steps == 400
    assert min(costs[10:]) < 0.1e-3, "and it does not grow with what was seen"


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
