"""A DeepSpeed training as its users write it, with one line of holdfast; run by test_deepspeed.py. No test."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from kill_once import strike
from torch import nn

import holdfast.adapters.deepspeed as hf
from holdfast.testing.contracts import adapter_output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--native", action="store_true", help="without holdfast, from DeepSpeed's own files")
    parser.add_argument("--tag", help="what load_checkpoint is given")
    parser.add_argument(
        "--count-by", type=int, default=0, help="the script names its tags, so many more with each step"
    )
    parser.add_argument("--same-tag", action="store_true", help="every save has the tag that a restart loads")
    parser.add_argument("--durable-every", type=int, default=1)
    parser.add_argument("--no-native", action="store_true", help="DeepSpeed's own files are left away")
    parser.add_argument("--own-files", action="store_true", help="DeepSpeed's own files are loaded where need be")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--kill", type=int, default=-1, help="rank 1 kills itself with SIGKILL in this step, once")
    parser.add_argument("--term", choices=("one", "all", "job"), default="", help="SIGTERM instead, to whom")
    options = parser.parse_args()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, options.width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(options.width, 8))
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "zero_optimization": {"stage": options.stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": options.bf16},
        "steps_per_print": 1000,
        "gradient_accumulation_steps": options.accumulate,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    if not options.native:
        engine.checkpoint_engine = hf.checkpoint_engine(
            engine, options.root, durable_every=options.durable_every, native=not options.no_native,
            own_files=options.own_files,
        )  # fmt: skip
    rank, dtype = engine.global_rank, torch.bfloat16 if options.bf16 else torch.float32
    weights = [parameter.detach() for parameter in engine.module.parameters()] if options.stage == 0 else []
    torch.manual_seed(7 + rank)  # of the dropout
    is_first = options.same_tag and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    engine.load_checkpoint(options.root, tag=None if is_first else options.tag)
    adapter_output.start(rank, engine.global_steps)
    adapter_output.whole(rank, engine.global_steps, weights)
    while engine.global_steps < options.steps:
        step = engine.global_steps
        source = torch.Generator().manual_seed(1000 * step + rank)
        for _ in range(options.accumulate):
            x, y = torch.randn(4, 32, generator=source), torch.randn(4, 8, generator=source)
            loss = (engine(x.to(dtype)) - y).pow(2).mean()
            engine.backward(loss)
            if step == options.kill:
                strike(Path(options.root, "killed"), options.term)
            engine.step()
        if not options.native:
            named = f"global_step{options.count_by * engine.global_steps}" if options.count_by else None
            engine.save_checkpoint(options.root, tag=options.tag if options.same_tag else named)
        adapter_output.step(rank, step, [loss.detach(), *state(engine)])
    adapter_output.whole(rank, engine.global_steps, weights)
    print(
        f"state {rank} {adapter_output.digest(state(engine))}\n", end="", flush=True
    )  # one write: ranks share the pipe
    engine.destroy()
    torch.distributed.destroy_process_group()


def state(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """Everything of this rank that training changes."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    found = [torch.tensor(engine.lr_scheduler.get_lr())]
    found += [getattr(parameter, "ds_tensor", parameter).detach() for parameter in engine.module.parameters()]
    for group in inner.param_groups:
        for parameter in group["params"]:
            found += [value for value in inner.state.get(parameter, {}).values() if isinstance(value, torch.Tensor)]
    found += list(getattr(optimizer, "single_partition_of_fp32_groups", []))
    found += list(getattr(optimizer, "fp32_partitioned_groups_flat", []))
    return found


if __name__ == "__main__":
    main()
