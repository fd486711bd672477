"""One rank of a pipeline of known work whose stages change while it trains, saved at every step.

`python drift_job.py RANK WORLD STORE ROOT STEPS` tells where it begins and ends, with digests, what saving cost and
where copies ran in every phase of the run, and what its keeper sent to other nodes.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from pipeline_job import digest
from torch.distributed.pipelining import schedules

import holdfast
from holdfast.testing.gpt import Shape, Text
from holdfast.testing.pipeline_gpt import loss_of, stage

SHAPE = Shape(width=256, layers=2, context=8, dropout=0.0)
MICROBATCHES = 4
FORWARD_S = 0.006
# From this step on: the name of the phase, and the factor of each rank's stage.
PHASES = {0: ("even", 1, 1), 12: ("slow", 1, 3), 24: ("hung", 1, 1), 25: ("short", 0.3, 0.3)}
HANG_S = 1.5
COUNTED = ("save_seconds", "fence_wait_seconds", "copy_seconds", "copy_seconds_in_waits")


def phase_of(step: int) -> tuple[str, float, float]:
    return PHASES[max(first for first in PHASES if first <= step)]


def main() -> None:
    rank, world, store, root, steps = sys.argv[1:]
    rank, world, steps = int(rank), int(world), int(steps)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    part = stage(SHAPE, rank, world, sleep_s=FORWARD_S)
    schedule = schedules.Schedule1F1B(part, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.submod.parameters(), lr=1e-3, fused=True)
    text = Text(context=SHAPE.context, batch=2 * MICROBATCHES)
    checkpointer = holdfast.Checkpointer(root, model=part.submod, optimizer=optimizer, loader=text, durable_every=0)
    seen: list[dict] = []
    given_up: list[str] = []
    checkpointer.events.subscribe(
        lambda event: given_up.append(event.fields["given_up"]) if event.name == "saved" else None
    )
    start = checkpointer.restore()
    print(json.dumps({"start": start, "digest": digest(part.submod.parameters())}), flush=True)
    for step in range(start, steps):
        name, *factors = phase_of(step)
        part.submod.seconds = FORWARD_S * factors[rank]
        if name == "hung" and rank == world - 1:
            time.sleep(HANG_S)  # the others wait for it inside a window
        inputs, targets = next(text)
        before, began = checkpointer.events.counters(), time.monotonic()
        schedule.step(*([inputs] if part.is_first else []), **({"target": targets} if part.is_last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        handle = checkpointer.step(step)
        now = checkpointer.events.counters()
        row = {"phase": name, "step": step, "seconds": time.monotonic() - began}
        seen.append(row | {key: now.get(key, 0.0) - before.get(key, 0.0) for key in COUNTED})
    assert handle is not None
    handle.wait("captured", 20)
    end = {"rows": seen, "given_up": given_up, "digest": digest(part.submod.parameters())}
    print(json.dumps(end | {"sent": checkpointer.keeper_status()["replication"]}), flush=True)
    dist.barrier()
    if sys.stdin.readline():  # else it is killed here
        checkpointer.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
