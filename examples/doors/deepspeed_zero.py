"""DeepSpeed with ZeRO 2 that goes on where it was killed: one line. Needs the extra `deepspeed`.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/doors/deepspeed_zero.py --steps 200
"""

from __future__ import annotations

import argparse

import deepspeed
import torch

from holdfast.adapters.deepspeed import checkpoint_engine
from holdfast.testing.gpt import ByteGPT, Shape, Text

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2, "overlap_comm": False},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/deepspeed")
    options = parser.parse_args()

    deepspeed.init_distributed("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = ByteGPT(Shape(dropout=0.0))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    engine.checkpoint_engine = checkpoint_engine(engine, options.checkpoints)  # the one line
    loader = Text(rank=rank, world_size=world_size)

    _, client = engine.load_checkpoint(options.checkpoints)
    if client:
        loader.load_state_dict(client["loader"])
    print(f"rank {rank} starts at step {engine.global_steps}", flush=True)
    for step in range(engine.global_steps, options.steps):
        loss = engine(*next(loader))
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} step {step} loss {loss.item():.17g}", flush=True)
        engine.save_checkpoint(options.checkpoints, client_state={"loader": loader.state_dict()})
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
