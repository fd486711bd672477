"""A trainer of TRL that is killed once at a named moment, and what it ended with. Not a test itself.

trl_story.py ROOT FACTS --plan PLAN [--kill MOMENT:STEP] [--of RANK] [--term] [--ranks N], as `hf_story` has them. The model is a
tiny GPT-2 with random weights, its tokenizer has one token for each of 96 letters; both are made here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hf_story import MADE_BY_TIME, STRIKE, Counts, Kills, digest
from story_server import serve
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from holdfast.adapters.huggingface import keep

warnings.filterwarnings("ignore")
LETTERS = [chr(code) for code in range(32, 126)]
WORDS = ("copy the state", "keep the step", "send a page", "read it back", "ask the keeper", "count to ten")
EVALUATES = {"eval_strategy": "steps", "eval_steps": 3}

# Two batches are a step. GRPO makes its completions for four batches, and learns from each of them twice: so from every
# fourth step on others are made, and a restart between two of these goes on with those of the version.
PLANS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, {"max_length": 16, **EVALUATES}),
    "packed": (SFTTrainer, SFTConfig, {"max_length": 16, "packing": True, "packing_strategy": "wrapped"}),
    "completion": (SFTTrainer, SFTConfig, {"max_length": 24, "completion_only_loss": True, "num_train_epochs": 2}),
    "dpo": (DPOTrainer, DPOConfig, {"max_length": 24, **EVALUATES}),
    "grpo": (GRPOTrainer, GRPOConfig, {"steps_per_generation": 4, "num_iterations": 2}),
    "fresh": (GRPOTrainer, GRPOConfig, {"beta": 0.1, **EVALUATES}),
    "synced": (GRPOTrainer, GRPOConfig, {"steps_per_generation": 4, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3}),
    "entropy": (GRPOTrainer, GRPOConfig, {"steps_per_generation": 4, "use_adaptive_entropy": True, "entropy_coef": 0.1}),
    "rloo": (RLOOTrainer, RLOOConfig, {"steps_per_generation": 4, "num_iterations": 2}),
}  # fmt: skip
OF_GROUPS = {"num_generations": 2, "max_completion_length": 6}


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<end>", *LETTERS]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def rows(plan: str, start: int) -> Dataset:
    texts = [f"{one}, {other}" for one, other in itertools.permutations(WORDS, 2)][start : start + 20]
    if plan in ("sft", "packed"):
        return Dataset.from_list([{"text": text} for text in texts])
    if plan == "completion":
        return Dataset.from_list([{"prompt": text[:8], "completion": text[8:]} for text in texts])
    if plan == "dpo":
        return Dataset.from_list([{"prompt": text[:8], "chosen": text[8:], "rejected": text[:7:-1]} for text in texts])
    return Dataset.from_list([{"prompt": text[:8]} for text in texts])


def vowels(completions: list[str], **_: Any) -> list[float]:
    """The reward: how many letters are vowels, and a little for each other one."""
    return [sum(letter in "aeiou" for letter in text) + 0.01 * sum(map(ord, text)) for text in completions]


def live(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("facts", type=Path)
    parser.add_argument("--plan", choices=PLANS)
    parser.add_argument("--kill", default="")
    parser.add_argument("--of", type=int, default=0)
    parser.add_argument("--term", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0")) if options.ranks > 1 else 0
    STRIKE.aim(options.facts, rank, at=options.kill, of=options.of, term=options.term)
    trainer_of, config_of, plan = PLANS[options.plan]
    of_groups = trainer_of in (GRPOTrainer, RLOOTrainer)
    arguments = config_of(
        output_dir=str(options.facts.with_suffix(".out")), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, seed=3, save_strategy="no", logging_steps=2,
        per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, gradient_checkpointing=False,
        **(OF_GROUPS if of_groups else {}), **{"max_steps": 9 if "num_train_epochs" not in plan else -1, **plan},
    )  # fmt: skip
    torch.manual_seed(0)
    letters = tokenizer()
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=len(letters), n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    ))  # fmt: skip
    more = {"reward_funcs": vowels} if of_groups else {}
    if plan.get("beta") or options.plan in (
        "dpo",
        "rloo",
    ):  # TRL finds a reference by the name of the model: here by its place
        place = options.facts.with_suffix(".model")
        model.save_pretrained(place)
        letters.save_pretrained(place)
        model = GPT2LMHeadModel.from_pretrained(place)
    evaluated = {"eval_dataset": rows(options.plan, 20).select(range(4))} if "eval_steps" in plan else {}
    trainer = trainer_of(
        model=model, args=arguments, train_dataset=rows(options.plan, 0), processing_class=letters, callbacks=[Kills()], **evaluated, **more
    )  # fmt: skip
    counts = Counts()
    trainer = keep(trainer, options.root)
    trainer.add_callback(counts)
    trainer.train()
    history = [
        {name: value for name, value in entry.items() if not name.endswith((*MADE_BY_TIME, "step_time"))}
        for entry in trainer.state.log_history
    ]
    moments = [
        tensor
        for per in trainer.optimizer.optimizer.state.values()
        for _, tensor in sorted(per.items())
        if torch.is_tensor(tensor)
    ]
    reference = getattr(trainer, "ref_model", None)
    facts = {
        "step": trainer.state.global_step, "parameters": digest(list(trainer.model.parameters())), "optimizer": digest(moments),
        "reference": digest(list(reference.parameters())) if reference is not None else "", "history": history,
        "counts": counts.count, "random": torch.rand(1).item().hex(), "starts": counts.told,
    }  # fmt: skip
    (options.facts.with_suffix(f".{rank}") if rank else options.facts).write_text(json.dumps(facts), encoding="utf-8")


def main(words: list[str]) -> None:
    live(words)
    # After DDP is gone: as the last owner of the group it would end it with the interpreter locked, while a thread of gloo may
    # wait for that lock to drop what the last evaluation gathered.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    serve(main) if sys.argv[1:] == ["--serve"] else main(sys.argv[1:])
