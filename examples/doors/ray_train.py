"""Ray Train: workers that Ray starts again go on where the last ones were. Needs the extra `ray`.

python examples/doors/ray_train.py --steps 200 --workers 2
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray.train.torch
import torch

from holdfast.adapters.ray import keep
from holdfast.testing.gpt import ByteGPT, Text


def train(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(ByteGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = Text(rank=rank, world_size=workers)
    torch.manual_seed(rank)

    checkpointer = keep(model=model, optimizer=optimizer, loader=loader)  # below the run's own directory
    start = checkpointer.restore()
    print(f"rank {rank} starts at step {start}", flush=True)
    for step in range(start, config["steps"]):
        loss = model(*next(loader))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.17g}", flush=True)
        checkpointer.step(step, {"loss": loss.item()})  # Ray is told when a version goes to storage
    checkpointer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkpoints", default="checkpoints/ray")
    options = parser.parse_args()

    ray.init(num_cpus=options.workers + 1, include_dashboard=False)
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"steps": options.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        run_config=ray.train.RunConfig(
            name="train",
            storage_path=os.path.abspath(options.checkpoints),
            failure_config=ray.train.FailureConfig(max_failures=-1),  # as often as it takes
        ),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
