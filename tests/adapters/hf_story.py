"""A Trainer that is killed once at a named moment, and what it ended with. Not a test itself.

hf_story.py ROOT FACTS --plan steps|epochs [--kill MOMENT:STEP] [--resume last]

MOMENT: begin (before a step), eval (in the evaluation behind it), end (in on_train_end, before holdfast's). FACTS: a file, written at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import warnings
from pathlib import Path
from pydoc_data import topics

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from holdfast.adapters.huggingface import keep

warnings.filterwarnings("ignore")
LENGTH, ROWS = 16, 20
PLANS = {
    "steps": {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2},
    "epochs": {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
    "often": {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2},
    "rare": {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4, "logging_steps": 1},
}
MADE_BY_TIME = ("runtime", "per_second")


def rows(start: int) -> list[dict[str, torch.Tensor]]:
    text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    cut = [torch.tensor(list(text[(start + i) * LENGTH : (start + i + 1) * LENGTH])) for i in range(ROWS)]
    return [{"input_ids": row, "labels": row} for row in cut]


class Kills(TrainerCallback):
    """Ends this process once; the marker outlives it."""

    def __init__(self, at: str, marker: Path) -> None:
        self.at, self.marker = at, marker

    def _reach(self, moment: str, step: int) -> None:
        if self.at == f"{moment}:{step}" and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self._reach("begin", state.global_step)

    def on_prediction_step(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self._reach("eval", state.global_step)

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self._reach("end", state.global_step)


class Counts(TrainerCallback, ExportableState):
    """Steps that were made, in a state that the trainer may keep."""

    def __init__(self) -> None:
        self.steps = 0
        self.told: list[int] = []

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.told.append(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.steps += 1

    def state(self) -> dict[str, object]:
        return {"args": {}, "attributes": {"steps": self.steps}}


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.blake2b(b"".join(each.detach().numpy().tobytes() for each in tensors), digest_size=8).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("facts", type=Path)
    parser.add_argument("--plan", choices=PLANS)
    parser.add_argument("--kill", default="")
    parser.add_argument("--resume", default="")
    parser.add_argument("--every", default="1")
    parser.add_argument("--rate", type=float, default=1e-2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    output = options.facts.with_suffix(".out")
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=13, per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True,
        seed=3, learning_rate=options.rate, load_best_model_at_end=True, metric_for_best_model="loss", **PLANS[options.plan],
    )  # fmt: skip
    kills = Kills(options.kill, options.facts.with_suffix(".killed"))
    counts = Counts()
    patience = EarlyStoppingCallback(3)
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=rows(0), eval_dataset=rows(ROWS), callbacks=[patience, kills]
    )
    trainer = keep(trainer, options.root, every=options.every)
    trainer.add_callback(counts)  # behind holdfast's own
    resume = get_last_checkpoint(output) if options.resume and output.is_dir() else None
    result = trainer.train(resume_from_checkpoint=resume)
    history = [
        {name: value for name, value in entry.items() if not name.endswith(MADE_BY_TIME)}
        for entry in trainer.state.log_history
    ]
    moments = [tensor for of_one in trainer.optimizer.optimizer.state.values() for _, tensor in sorted(of_one.items())]
    facts = {
        "step": trainer.state.global_step, "parameters": digest(list(trainer.model.parameters())), "optimizer": digest(moments),
        "history": history, "best": trainer.state.best_metric, "patience": patience.early_stopping_patience_counter,
        "counted": counts.steps, "loss": result.training_loss, "flos": trainer.state.total_flos,
        "checkpoints": sorted(path.name for path in output.iterdir()), "told": counts.told,
    }  # fmt: skip
    options.facts.write_text(json.dumps(facts), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
