"""One rank of a pipeline whose stages take known times; prints what was measured and what the event model says of it.

`python bubbles_worker.py RANK WORLD STORE FORWARD_S SCHEDULE...` runs schedules one after the other on one process group; a
name with a tilde has a second stage that takes half as long again.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from holdfast.base.events import Events
from holdfast.testing.pipeline_gpt import Sleep
from holdfast.train.pipeline import Bubbles, Profile, predicted

MICROBATCHES = 8
STEPS = 5
ONE = ("GPipe", "1F1B")


class Stage(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)
        self.seconds = seconds

    def forward(self, value):
        return Sleep.apply(self.scale(value), self.seconds)


def build(name: str, rank: int, world: int, forward_s: float, uneven: bool):
    kind = schedules.get_schedule_class(name)
    count = 1 if name in ONE else 2
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    indices = [rank, 2 * world - 1 - rank] if v_shaped else [rank + i * world for i in range(count)]
    device = torch.device("cpu")
    stages = []
    for index in indices:
        seconds = forward_s / count * (1.5 if uneven and index == 1 else 1.0)
        stages.append(PipelineStage(Stage(seconds), index, world * count, device))
    built = kind(stages[0] if count == 1 else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    return built, stages


def run(name: str, rank: int, world: int, forward_s: float, uneven: bool) -> dict[str, object]:
    schedule, stages = build(name, rank, world, forward_s, uneven)
    watcher = Bubbles(schedule, Events())
    watcher.attach()
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    for number in range(STEPS):
        if rank == 0 and number == STEPS // 2:
            time.sleep(2 * forward_s)  # what lies between steps differs: now and then one is logged, or evaluated
        batch = (torch.ones(MICROBATCHES, 8),) if has_first else ()
        target = {"target": torch.zeros(MICROBATCHES, 8)} if has_last else {}
        schedule.step(*batch, **target)
    watcher._begin_step()
    watcher.detach()
    mine = watcher.profile()
    every: list[Profile] = [None] * world  # type: ignore[list-item]
    dist.all_gather_object(every, mine)
    model = predicted(watcher, every)
    return {
        "schedule": name + (" uneven" if uneven else ""),
        "measured": mine.idle,
        "predicted": model.ranks[rank].idle,
        "period": mine.period,
        "parts": sum(mine.costs[a.stage, a.kind] for a in watcher.orders[rank]) + mine.idle + mine.ending,
        "steps": mine.num_steps,
        "actions": [seen.what for seen in watcher.spans if seen.what not in ("wait", "copy")][
            -len(watcher.orders[rank]) :
        ],
        "ordered": [str(action) for action in watcher.orders[rank]],
        "left": sorted(k for s in stages for k in vars(s) if k.endswith("_one_chunk"))
        + [k for k in vars(schedule) if k == "step"],
    }


def main() -> None:
    rank, world, store, forward_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    rows = [run(name.rstrip("~"), rank, world, forward_s, uneven=name.endswith("~")) for name in sys.argv[5:]]
    print(json.dumps({"rank": rank, "rows": rows, "seam": schedules._wait_batch_p2p.__module__}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
