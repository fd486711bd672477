"""Gradient accumulation, a GradScaler and two optimizers: a step is what ends with the optimizers' steps.

    python examples/accumulation.py --steps 200

Saving after whole steps only means that no half-summed gradient is ever part of the state.
"""

from __future__ import annotations

import argparse

import torch

import holdfast
from holdfast.testing.gpt import ByteGPT, Text

MICRO_BATCHES = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/accumulation")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = ByteGPT()
    decayed = torch.optim.AdamW([p for p in model.parameters() if p.dim() > 1], lr=3e-3, weight_decay=0.1)
    plain = torch.optim.SGD([p for p in model.parameters() if p.dim() < 2], lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    loader = Text()

    checkpointer = holdfast.Checkpointer(
        options.checkpoints, model=model, optimizer=[decayed, plain], scaler=scaler, loader=loader
    )
    start = checkpointer.restore()
    print(f"rank 0 starts at step {start}", flush=True)
    for step in range(start, options.steps):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*next(loader)) / MICRO_BATCHES
            scaler.scale(loss).backward()
            total += loss.item()
        for optimizer in (decayed, plain):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        print(f"rank 0 step {step} loss {total:.17g}", flush=True)
        checkpointer.step(step)
    checkpointer.close()


if __name__ == "__main__":
    main()
