"""One rank of a small pipeline that trains until it is killed and tells the digest of its state after every step.

`python kill_job.py RANK WORLD STORE ROOT EVERY` prints `{"start": ..., "digest": ...}`, then a line per step.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch
import torch.distributed as dist
from pipeline_job import state_of
from torch.distributed.pipelining import schedules

import holdfast
from holdfast.testing.gpt import Shape, Text
from holdfast.testing.pipeline_gpt import loss_of, stage

SHAPE = Shape(width=16, layers=2, heads=2, context=8)
MICROBATCHES = 2


def main() -> None:
    rank, world, store, root, every = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, int(world)), rank=int(rank), world_size=int(world))
    part = stage(SHAPE, int(rank), int(world))
    schedule = schedules.Schedule1F1B(part, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.submod.parameters(), lr=1e-3)
    text = Text(context=SHAPE.context, batch=2 * MICROBATCHES)
    checkpointer = holdfast.Checkpointer(
        root, model=part.submod, optimizer=optimizer, loader=text, every=int(every), durable_every=0
    )
    start = checkpointer.restore()

    watched = checkpointer.bubbles is not None and checkpointer.bubbles.orders[int(rank)] != ()
    print(json.dumps({"start": start, "digest": state_of(part.submod, optimizer), "watched": watched}), flush=True)
    for step in itertools.count(start):
        inputs, targets = next(text)
        schedule.step(*([inputs] if part.is_first else []), **({"target": targets} if part.is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step, "digest": state_of(part.submod, optimizer)}), flush=True)
        checkpointer.step(step)


if __name__ == "__main__":
    main()
