"""A `transformers.Trainer` that goes on where it was killed: one line. Needs the extra `huggingface`.

torchrun --nproc-per-node 2 examples/doors/huggingface_trainer.py --steps 200
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from holdfast.adapters.huggingface import keep
from holdfast.testing.gpt import Text


class Tell(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        print(f"rank {args.process_index} starts at step {state.global_step}", flush=True)

    def on_log(self, args: Any, state: Any, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            print(f"rank {args.process_index} step {state.global_step - 1} loss {logs['loss']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/huggingface")
    options = parser.parse_args()

    torch.manual_seed(0)
    windows, _ = next(Text(batch=256))
    rows = [{"input_ids": row, "labels": row} for row in windows]
    shape = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            output_dir=place, max_steps=options.steps, per_device_train_batch_size=4, lr_scheduler_type="constant",
            use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1, seed=3,
            log_on_each_node=False, logging_nan_inf_filter=False,
        )  # fmt: skip
        trainer = Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=rows, callbacks=[Tell()])
        trainer = keep(trainer, options.checkpoints)  # the one line
        trainer.train()


if __name__ == "__main__":
    main()
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()  # behind main: DDP is gone then, and the group ends unlocked
