"""One rank of a pipeline that trains on real text and saves at every step, inside its bubbles.

`python pipeline_job.py RANK WORLD STORE ROOT STEPS SCHEDULE [INSIDE]` prints where it begins, a line per step, each with the
digest of model and optimizer (`lives_kit`), and a last one with what it ended at. There are two stages, or two per rank if
the schedule is one of several; INSIDE says how the ranks of one stage divide it: `fsdp` or `tp`.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import xxhash
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
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SHAPE = Shape(width=64, layers=4, context=32)


def digest(tensors) -> str:
    """Of what this rank holds of them."""
    found = xxhash.xxh3_128()
    for tensor in tensors:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Digest of all that a step of the optimizer changes: parameters, and their moments and counts."""
    parameters = list(model.parameters())
    held = [sorted(optimizer.state[parameter].items()) for parameter in parameters if parameter in optimizer.state]
    return digest([*parameters, *(value for row in held for _, value in row)])


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


def stages_of(name: str, rank: int, world: int, inside: str) -> list[PipelineStage]:
    """This rank's stages; V-shaped schedules give the first rank the first and the last one."""
    group = mesh = None
    at, ranks = rank, world
    if inside:
        mesh = init_device_mesh("cpu", (STAGES, world // STAGES), mesh_dim_names=("pp", inside))
        group, at, ranks = mesh["pp"].get_group(), mesh["pp"].get_local_rank(), STAGES
    if not issubclass(schedules.get_schedule_class(name), schedules.PipelineScheduleMulti):
        indices, count = [at], ranks
    else:
        indices, count = [at, 2 * ranks - 1 - at if name in V_SHAPED else at + ranks], 2 * ranks
    parts = [stage(SHAPE, index, count, group) for index in indices]
    for part in parts if mesh is not None else ():
        divide(part.submod, inside, mesh[inside])
    return parts


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
    print(json.dumps({"start": start, "digest": state_of(model, optimizer)}), flush=True)
    losses, began = [], time.perf_counter()
    for step in range(start, steps):
        inputs, targets = next(text)
        found: list[torch.Tensor] = []
        ends = {"target": targets, "losses": found} if any(part.is_last for part in parts) else {}
        schedule.step(*([inputs] if any(part.is_first for part in parts) else []), **ends)
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(sum(found))] if found else []
        print(json.dumps({"step": step, "digest": state_of(model, optimizer)}), flush=True)
        checkpointer.step(step)
    seconds = time.perf_counter() - began
    counted = checkpointer.events.counters()
    copies = [span.what for span in checkpointer.bubbles.spans if span.what.startswith("copy")]
    told = checkpointer.keeper_status()["ranks"][str(rank)]["cadence"]
    checkpointer.close()
    report = checkpointer.last_restore
    end = {
        "last_loss": losses[-1] if losses else None,
        "late": counted.get("late_copied_bytes", 0),
        "copies": len(copies),
        "inside": copies.count("copy"),
        "seconds": seconds,
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
