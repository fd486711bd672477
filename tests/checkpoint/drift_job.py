"""One rank of a pipeline of known work whose stages change while it trains.

`python drift_job.py RANK WORLD STORE ROOT STEPS SAVES [WIDTH]` prints where it begins, a line per step, each with the digest of
model and optimizer (`lives_kit`), when its last stage begins to hang, and at the end what happened in every step. SAVES says
before which steps the state is saved: `every` one, those of every other `block`, or `none`. WIDTH makes the state large.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from pipeline_job import state_of
from torch.distributed.pipelining import schedules

import holdfast
from holdfast.testing.gpt import Shape, Text
from holdfast.testing.pipeline_gpt import loss_of, stage

WIDTH, CONTEXT = 256, 8
MICROBATCHES = 4
FORWARD_S = 0.006
# From this step on: the name of the phase, and the factor of each rank's stage.
PHASES = {0: ("even", 1, 1), 18: ("slow", 1, 3), 36: ("hung", 1, 1), 37: ("short", 0.3, 0.3)}
# The last stage's forward of this micro-batch hangs, while the first one waits for what comes back.
HUNG_MICROBATCH, HANG_S = 0, 1.5
BLOCK = 3
# By the end of this one the waits are known.
LEARNT_STEP = 4
COUNTED = ("save_seconds", "fence_wait_seconds", "copy_seconds", "copy_seconds_in_waits")


def phase_of(step: int) -> tuple[str, float, float]:
    return PHASES[max(first for first in PHASES if first <= step)]


def is_saved(step: int, saves: str) -> bool:
    """Whether the state before this step is saved."""
    return saves == "every" or (saves == "block" and step // BLOCK % 2 == 0)


class Hang:
    """Before every forward of the last stage: hangs in one of them."""

    def __init__(self) -> None:
        self.step, self.microbatch = 0, 0

    def begin(self, step: int) -> None:
        self.step, self.microbatch = step, 0

    def __call__(self, *_: object) -> None:
        if phase_of(self.step)[0] == "hung" and self.microbatch == HUNG_MICROBATCH:
            print(json.dumps({"hangs": self.step}), flush=True)
            time.sleep(HANG_S)
        self.microbatch += 1


def main() -> None:
    rank, world, store, root, steps, saves, *width = sys.argv[1:]
    rank, world, steps = int(rank), int(world), int(steps)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    shape = Shape(width=int(*width or [WIDTH]), layers=2, context=CONTEXT, dropout=0.0)
    part = stage(shape, rank, world, sleep_s=FORWARD_S)
    hang = Hang()
    if part.is_last:
        part.submod.register_forward_pre_hook(hang)
    schedule = schedules.Schedule1F1B(part, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.submod.parameters(), lr=1e-3, fused=True)
    text = Text(context=CONTEXT, batch=2 * MICROBATCHES)
    checkpointer = holdfast.Checkpointer(
        root, model=part.submod, optimizer=optimizer, loader=text, every=10**9, durable_every=0
    )
    ends: list[str] = []
    checkpointer.events.subscribe(
        lambda event: ends.append(event.fields["given_up"]) if event.name == "saved" else None
    )
    start = checkpointer.restore()
    print(json.dumps({"start": start, "digest": state_of(part.submod, optimizer)}), flush=True)
    seen: list[dict] = []
    sent: list[dict] = []  # as the keeper counts it: when the waits are known, and after the last step
    for step in range(start, steps):
        name, *factors = phase_of(step)
        part.submod.seconds = FORWARD_S * factors[rank]
        hang.begin(step)
        before, began = checkpointer.events.counters(), time.perf_counter()
        saved = step > start and is_saved(step, saves)
        if saved:
            checkpointer.save(step - 1)
        inputs, targets = next(text)
        schedule.step(*([inputs] if part.is_first else []), **({"target": targets} if part.is_last else {}))
        for parameter in part.submod.stage.blocks.parameters():
            parameter.grad.copy_(parameter * (step + 1))  # they compute nothing, and all moments would stay zero
        optimizer.step()
        ended, now = time.perf_counter(), checkpointer.events.counters()
        optimizer.zero_grad(set_to_none=False)
        row = {"phase": name, "number": step, "saved": saved, "began": began, "ended": ended}
        seen.append(row | {key: now.get(key, 0.0) - before.get(key, 0.0) for key in COUNTED})
        print(json.dumps({"step": step, "digest": state_of(part.submod, optimizer)}), flush=True)
        if step in (LEARNT_STEP, steps - 1):
            sent.append(checkpointer.keeper_status()["replication"])
    if saves != "none":
        checkpointer.save(steps - 1).wait("captured", 60)
    spans = [(span.what, span.start, span.end) for span in checkpointer.bubbles.spans if not span.what[0].isdigit()]
    end = {"rows": seen, "given_up": [reason for reason in ends if reason], "spans": spans}
    end |= {"sent": sent, "waits": checkpointer.keeper_status()["ranks"][str(rank)]["waits"]}
    print(json.dumps(end), flush=True)
    dist.barrier()
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
