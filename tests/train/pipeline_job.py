"""One rank of a pipeline that trains on real text and saves at every step, inside its bubbles.

`python pipeline_job.py RANK WORLD STORE ROOT STEPS SCHEDULE [INSIDE]` prints a line per step and a last one with what it
ended at. There are two stages, or two per rank if the schedule is one of several; INSIDE says how the ranks of one stage
divide it: `fsdp` or `tp`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.base.events import Event
from holdfast.core.model import Version
from holdfast.testing.gpt import Shape, Text
from holdfast.testing.pipeline_gpt import loss_of, stage

STAGES = 2
MICROBATCHES = 4
SHAPE = Shape(width=64, layers=4, context=32)


def digest(tensors) -> str:
    """Of what this rank holds of them."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def note(event: Event, cadences: list[int], saved: list[int]) -> None:
    if event.name == "cadence":
        cadences.append(event.fields["every"])
    elif event.name == "saved":
        saved.append(Version.parse(event.fields["version"]).step)


def divide(model: nn.Module, inside: str, ranks) -> None:
    """Divides a stage between the ranks of its mesh."""
    for block in model.blocks:
        if inside == "tp":
            parallelize_module(block, ranks, {"expand": ColwiseParallel(), "contract": RowwiseParallel()})
        else:
            fully_shard(block, mesh=ranks)
    if inside == "fsdp":
        fully_shard(model, mesh=ranks)


def stage_of(rank: int, world: int, inside: str) -> PipelineStage:
    if not inside:
        return stage(SHAPE, rank, world)
    mesh = init_device_mesh("cpu", (STAGES, world // STAGES), mesh_dim_names=("pp", inside))
    part = stage(SHAPE, mesh["pp"].get_local_rank(), STAGES, mesh["pp"].get_group())
    divide(part.submod, inside, mesh[inside])
    return part


def stages_of(name: str, rank: int, world: int, inside: str) -> list[PipelineStage]:
    if not issubclass(schedules.get_schedule_class(name), schedules.PipelineScheduleMulti):
        return [stage_of(rank, world, inside)]
    second = 2 * world - 1 - rank if name in ("ZBVZeroBubble", "DualPipeV") else rank + world
    return [stage(SHAPE, index, 2 * world) for index in (rank, second)]


def main() -> None:
    rank, world, store, root, steps, name, *inside = sys.argv[1:]
    rank, world, steps = int(rank), int(world), int(steps)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    parts = stages_of(name, rank, world, "".join(inside))
    schedule = schedules.get_schedule_class(name)(parts if len(parts) > 1 else parts[0], MICROBATCHES, loss_fn=loss_of)
    model = nn.ModuleList(part.submod for part in parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Where a settings file says how often, nothing here overrides it.
    cadence = {} if "HOLDFAST_CONFIG" in os.environ else {"every": 1, "durable_every": 10}
    text = Text(context=SHAPE.context, batch=2 * MICROBATCHES)
    checkpointer = holdfast.Checkpointer(
        root, model=model, optimizer=optimizer, schedule=schedule, loader=text, **cadence
    )
    cadences: list[int] = []
    saved: list[int] = []
    checkpointer.events.subscribe(lambda event: note(event, cadences, saved))
    start = checkpointer.restore()
    losses = []
    for step in range(start, steps):
        inputs, targets = next(text)
        found: list[torch.Tensor] = []
        ends = {"target": targets, "losses": found} if any(part.is_last for part in parts) else {}
        schedule.step(*([inputs] if any(part.is_first for part in parts) else []), **ends)
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(sum(found))] if found else []
        checkpointer.step(step)
        print(json.dumps({"step": step}), flush=True)
    counted = checkpointer.events.counters()
    told = checkpointer.keeper_status()["ranks"][str(rank)]["cadence"]
    checkpointer.close()
    report = checkpointer.last_restore
    end = {
        "start": start,
        "weights": digest(model.parameters()),
        "last_loss": losses[-1] if losses else None,
        "late": counted.get("late_copied_bytes", 0),
        "copy": counted.get("copy_seconds", 0),
        "stalled": counted["save_seconds"] + counted.get("fence_wait_seconds", 0.0),
        "inside": counted.get("copy_seconds_in_waits", 0),
        "cadences": cadences,
        "saved": saved,
        "told": told,
        "sources": sorted(report.bytes) if report else [],
    }
    print(json.dumps(end), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
