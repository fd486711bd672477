"""A stage that learns its shapes anew in a run that came back: what its module counts and draws is as if it had not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked

# A pipeline of one stage, whose forward counts in a buffer and draws from three generators; prints what it has at the end.
JOB = """
import random, sys
import numpy, torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
import holdfast

class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("drawn", torch.zeros((), dtype=torch.float64))
    def forward(self, x):
        self.drawn += random.random() + numpy.random.random()
        return x

root, store, first, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Draws(), nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = ScheduleGPipe(PipelineStage(model, 0, 1, torch.device("cpu")), 2, loss_fn=lambda out, to: (out - to).square().sum())
checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer, every=1, durable_every=0)
start = checkpointer.restore()
assert start == first, start
for step in range(start, steps):
    batch = torch.randn(4, 4)
    schedule.step(batch, target=batch)
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step(step)
    if step == steps - 1:
        print("END", model[1].num_batches_tracked.item(), model[3].drawn.item(), model[4].weight.sum().item(),
              torch.rand(1).item(), random.random(), numpy.random.random(), flush=True)
checkpointer.close()
dist.destroy_process_group()
"""


def live(home: Path, first: int, steps: int) -> str:
    """The last line of one process."""
    words = [str(home / "ckpt"), str(home / f"store{first}"), str(first), str(steps)]
    home.mkdir(exist_ok=True)
    done: subprocess.CompletedProcess[str] = forked.run(
        [sys.executable, "-W", "ignore", "-c", JOB, *words],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("END"))


def test_a_stage_that_came_back_learns_its_shapes_without_a_trace(runtime_dir: Path, tmp_path: Path) -> None:
    """It runs its module once more than the undisturbed run did: means moved, and in torch 2.10 all draws were others."""
    straight = live(tmp_path / "straight", 0, 4)
    live(tmp_path / "back", 0, 2)
    assert live(tmp_path / "back", 2, 4) == straight
