"""The scripts of the Hugging Face doors: a tiny GPT-2 or Llama from its configuration, real text. Not a test itself.

torchrun hf_worker.py ROOT --steps N --way trainer|accelerate|fsdp [--wide] [--own DIR] [--resume PATH]

--own: the Trainer also saves by itself, every second step. --resume: it is told a path to go on from.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from pydoc_data import topics

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from holdfast.adapters.huggingface import keep, wrap
from holdfast.testing.contracts import adapter_output

warnings.filterwarnings("ignore")
LENGTH = 32


class Text(torch.utils.data.Dataset):
    """Bytes of Python's own documentation, in rows."""

    def __init__(self, rows: int = 64) -> None:
        text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        self.rows = [torch.tensor(list(text[i * LENGTH : (i + 1) * LENGTH])) for i in range(rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def gpt2(width: int) -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )


def llama(width: int) -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2
        )
    )


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[p][key] for p in model.parameters() for key in sorted(optimizer.state[p])]
    return [*model.parameters(), *moments]


class Tell(TrainerCallback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        adapter_output.start(self.rank, state.global_step)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):  # type: ignore[no-untyped-def]
        adapter_output.step(
            self.rank, state.global_step - 1, tensors(model, getattr(optimizer, "optimizer", optimizer))
        )


def with_trainer(options: argparse.Namespace, rank: int) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            output_dir=options.own or place, max_steps=100, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            use_cpu=True, save_strategy="steps" if options.own else "no", save_steps=2, report_to=[], disable_tqdm=True, logging_steps=2, seed=3, learning_rate=1e-3,
        )  # fmt: skip
        trainer = Trainer(gpt2(80 if options.wide else 64), arguments, train_dataset=Text())
        trainer = keep(trainer, options.root)
        trainer.add_callback(Tell(rank))
        trainer.add_callback(Until(options.steps))
        trainer.train(resume_from_checkpoint=options.resume or None)


class Until(TrainerCallback):
    """Ends early, with the schedule of the whole run."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        control.should_training_stop = state.global_step >= self.steps


def with_accelerate(options: argparse.Namespace, *, fsdp: bool) -> None:
    accelerator = Accelerator(cpu=True)
    if fsdp:  # Accelerate shards on devices only; its code for FSDP2 runs on the CPU all the same, once it is told to
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
        )  # fmt: skip
        shared = AcceleratorState._shared_state
        shared["distributed_type"], shared["fsdp_plugin"] = DistributedType.FSDP, plugin
    rank = accelerator.process_index
    torch.manual_seed(0)
    model = llama(80 if options.wide else 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data = Text()
    torch.manual_seed(100 + rank)
    checkpointer = wrap(accelerator, options.root)
    start = checkpointer.restore()
    adapter_output.start(rank, start)
    adapter_output.whole(rank, start, list(model.parameters()))
    for step in range(start, options.steps):
        rows = [data[(step * accelerator.num_processes + rank) * 2 + i]["input_ids"] for i in range(2)]
        batch = torch.stack(rows)
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        checkpointer.step(step)
        adapter_output.step(rank, step, [loss, *tensors(model, optimizer.optimizer)])
    adapter_output.whole(rank, options.steps, list(model.parameters()))
    checkpointer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--way", choices=("trainer", "accelerate", "fsdp"))
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--own", default="")
    parser.add_argument("--resume", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.way == "trainer":
        with_trainer(options, int(os.environ["RANK"]))
    else:
        with_accelerate(options, fsdp=options.way == "fsdp")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
