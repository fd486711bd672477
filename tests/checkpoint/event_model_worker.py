"""One rank of a pipeline whose every action and wait is noted; prints what was seen, for `event_model_kit`.

`python event_model_worker.py RANK WORLD STORE WORK STEPS SCHEDULE...` runs schedules one after the other on one process
group. WORK is how many seconds the forwards of a rank sleep per micro-batch, and the backwards as well; or `gpt`: a real
transformer computes, each rank on a processor of its own. A name with a tilde has a second stage that takes half as long
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from holdfast.base.events import Events
from holdfast.checkpoint.pipeline.bubbles import Bubbles
from holdfast.testing.gpt import Shape
from holdfast.testing.pipeline_gpt import Sleep, loss_of, stage

MICROBATCHES = 8
ONE = ("GPipe", "1F1B")
SHAPE = Shape(width=256, layers=6, context=64, dropout=0.0)
# Of the transformer: few and long, so that a rank waits for a fifth of a step, some ten times what its actions vary.
FEW, SEQUENCES = 4, 4


class Stage(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)
        self.seconds = seconds

    def forward(self, value):
        return Sleep.apply(self.scale(value), self.seconds)


def sleeping(name: str, rank: int, world: int, forward_s: float) -> tuple[list[PipelineStage], Any]:
    """The stages of this rank, and the loss."""
    count = 1 if name.rstrip("~") in ONE else 2
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    indices = [rank, 2 * world - 1 - rank] if v_shaped else [rank + i * world for i in range(count)]
    stages = []
    for index in indices:
        seconds = forward_s / count * (1.5 if name.endswith("~") and index == 1 else 1.0)
        stages.append(PipelineStage(Stage(seconds), index, world * count, torch.device("cpu")))
    return stages, nn.functional.mse_loss


def run(name: str, rank: int, world: int, work: str, steps: int) -> dict[str, object]:
    if work == "gpt":
        stages, loss = [stage(SHAPE, rank, world)], loss_of
        batch, target = torch.randint(0, SHAPE.vocabulary, (2, FEW * SEQUENCES, SHAPE.context))
        microbatches, rest_s = FEW, 0.0
    else:
        stages, loss = sleeping(name, rank, world, float(work))
        batch, target = torch.ones(MICROBATCHES, 8), torch.zeros(MICROBATCHES, 8)
        # Between steps: an optimizer, a log.
        microbatches, rest_s = MICROBATCHES, float(work) / 2 if rank == 0 else 0.0
    kind = schedules.get_schedule_class(name.rstrip("~"))
    schedule = kind(stages[0] if name.rstrip("~") in ONE else stages, microbatches, loss_fn=loss)
    optimizer = torch.optim.AdamW([p for one in stages for p in one.submod.parameters()], lr=1e-4)
    watcher = Bubbles(schedule, Events())
    watcher.attach()
    inputs = (batch,) if any(one.is_first for one in stages) else ()
    targets = {"target": target} if any(one.is_last for one in stages) else {}
    starts = []
    for _ in range(steps):
        starts.append(time.perf_counter())
        schedule.step(*inputs, **targets)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(rest_s)
    starts.append(time.perf_counter())
    watcher._begin_step()
    watcher.detach()
    mine = watcher.profile()
    return {
        "schedule": name,
        "rank": rank,
        "orders": [[[a.stage, a.kind.value, a.microbatch, a.joined] for a in order] for order in watcher.orders],
        "starts": starts,
        "spans": [[seen.what, seen.start, seen.end] for seen in watcher.spans],
        "profile": {"idle": mine.idle, "period": mine.period, "ending": mine.ending, "num_steps": mine.num_steps},
        "costs": [[stage, kind.value, seconds] for (stage, kind), seconds in mine.costs.items()],
        "left": sorted(k for one in stages for k in vars(one) if k.endswith("_one_chunk"))
        + [k for k in vars(schedule) if k == "step"],
    }


def go_first(*, computes: bool) -> None:
    """This process runs before all else on the machine, where that is allowed, or the machine is what is measured.

    Beside other programs who has slept wakes up some 5 ms late now and then, and who computes gets half a processor. First at
    once is only who sleeps (real time): one that computes would keep the threads of its process group from running, so its
    session gets a larger share of each processor instead (autogroup of sched(7)).
    """
    with contextlib.suppress(OSError):
        if not computes:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            return
        with contextlib.suppress(PermissionError):  # it leads one already
            os.setsid()
        Path("/proc/self/autogroup").write_text("-20")


def main() -> None:
    rank, world, store, work, steps = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    torch.set_num_threads(1)
    if work == "gpt":
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {mine[rank % len(mine)]})
    go_first(computes=work == "gpt")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    rows = [run(name, rank, world, work, steps) for name in sys.argv[6:]]
    dist.barrier()
    dist.destroy_process_group()
    # Last, for it may be more than a pipe holds, and ranks are read one after the other.
    print(json.dumps({"rows": rows, "seam": schedules._wait_batch_p2p.__module__}))


if __name__ == "__main__":
    main()
