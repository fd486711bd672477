"""One rank of a pipeline that stays when the other is killed: `stay_worker.py OUT KILL_AT`, run by `holdfast run`.

The function under `holdfast.resumable` builds stage and schedule anew; model, optimizer and checkpointer stay. Rank 1 kills
itself at step KILL_AT, once. Every call writes what it did.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_job import digest
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

import holdfast
from holdfast.testing.gpt import Shape, Text
from holdfast.testing.pipeline_gpt import GPTStage, loss_of

OUT, KILL_AT = Path(sys.argv[1]), int(sys.argv[2])
MICROBATCHES, STEPS = 4, 16
SHAPE = Shape(width=64, layers=4, context=32)


@holdfast.resumable
def train(model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, checkpointer: holdfast.Checkpointer) -> None:
    rank = dist.get_rank()
    schedule = Schedule1F1B(PipelineStage(model, rank, 2, torch.device("cpu")), MICROBATCHES, loss_fn=loss_of)
    start = checkpointer.restore()
    for step in range(start, STEPS):
        inputs, targets = next(text)
        schedule.step(*([] if rank else [inputs]), **({"target": targets} if rank else {}))
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(step)
        if (rank, step) == (1, KILL_AT) and not (OUT / "killed").exists():
            (OUT / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        facts = {"pid": os.getpid(), "start": start, "step": step, "weights": digest(model.parameters())}
        (OUT / f"{rank}-{os.getpid()}-{start}.json").write_text(json.dumps(facts))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = GPTStage(SHAPE, dist.get_rank(), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = Text(context=SHAPE.context, batch=2 * MICROBATCHES)
    config = holdfast.Config(trace_dir=str(OUT / "trace"))
    checkpointer = holdfast.Checkpointer(
        OUT / "ckpt", model=model, optimizer=optimizer, loader=text, durable_every=100, config=config
    )
    train(model, optimizer, text, checkpointer)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
