"""A Trainer that is killed once at a named moment, and what it ended with. Not a test itself.

hf_story.py ROOT FACTS --plan PLAN [--kill MOMENT:STEP] [--of RANK] [--term] [--ranks N] [--resume last] [--every CADENCE] [--batch N] [--more]

MOMENT: begin (before a step), part (between two batches of one step), step (behind the optimizer's step), log (behind a log entry),
eval (in the evaluation behind a step), evaluated (behind it), saving (in the trainer's own save, half of its files are there),
saved (behind it), epoch (in `on_epoch_end`), end (in `on_train_end`, before holdfast's), over (behind `train`). STEP: steps that
were made then. FACTS: a file, written at the end. --of: the rank, or -1 for all. --term: SIGTERM instead of SIGKILL. With --serve
instead of all that: see `story_server`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
from story_sampler import Drawn
from story_server import serve
from story_strike import Strike
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from holdfast.adapters.huggingface import keep

warnings.filterwarnings("ignore")
LENGTH, ROWS = 16, 20
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}


def each(number: int, *kinds: str) -> dict[str, Any]:
    """Arguments for log, evaluation or save after so many steps."""
    names = {"logging": "logging_strategy", "eval": "eval_strategy", "save": "save_strategy"}
    return {names[kind]: "steps" for kind in kinds} | {f"{kind}_steps": number for kind in kinds}


EPOCHS = {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"}
# Five steps are an epoch of one rank; a training without `num_train_epochs` here ends with step 13.
PLANS: dict[str, dict[str, Any]] = {
    "steps": {**each(3, "eval", "save"), **each(2, "logging"), **BEST},
    "epochs": {**EPOCHS, **BEST},
    "whole": {**EPOCHS, "num_train_epochs": 3, **BEST},
    "stops": {**each(1, "eval", "save"), **each(2, "logging"), **BEST, "learning_rate": 1.0},
    "rare": {**each(4, "eval", "save"), **each(1, "logging"), **BEST},
    "accumulate": {**each(2, "eval"), **each(4, "save"), **each(3, "logging"), "num_train_epochs": 4, "gradient_accumulation_steps": 2},
    "best": {**each(2, "eval", "logging"), "save_strategy": "best", "save_total_limit": 2, **BEST, "learning_rate": 0.1},
    "workers": {**each(3, "eval", "logging"), "save_strategy": "no", "dataloader_num_workers": 2, "num_train_epochs": 3},
    "stream": {**each(4, "eval", "save"), **each(3, "logging")},
    "limits": {**each(2, "eval", "save"), **each(2, "logging"), "save_total_limit": 1, "max_steps": 7, "eval_delay": 3, "logging_first_step": True},
    "first": {**each(3, "eval", "logging"), "eval_on_start": True, "save_strategy": "no"},
    "two": {**each(3, "eval", "logging"), "save_strategy": "no", "num_train_epochs": 2},
    "hooks": {**each(4, "eval", "logging"), "save_strategy": "no", "num_train_epochs": 3},
    "plateau": {**each(2, "eval", "logging"), "save_strategy": "no", "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0}, "metric_for_best_model": "loss"},
    "compiled": {**each(3, "eval", "logging"), "save_strategy": "no", "torch_compile": True, "torch_compile_backend": "eager"},
    "job": {**each(2, "eval", "save"), **each(1, "logging"), **BEST, "gradient_accumulation_steps": 2, "num_train_epochs": 4, "lr_scheduler_type": "cosine", "warmup_steps": 2, "dataloader_num_workers": 1, "save_total_limit": 2},
    "cut": {**each(3, "eval", "logging"), "save_strategy": "no", "num_train_epochs": 4},
    "short": {**each(3, "eval", "logging"), "save_strategy": "no"},
    "thaws": {**each(3, "eval", "logging"), "save_strategy": "no"},
    "loader": {**each(2, "eval", "logging"), "save_strategy": "no"},
    "drawn": {**each(3, "eval", "logging"), "save_strategy": "no"},
    "unseeded": {**each(3, "eval", "logging"), "save_strategy": "no", "accelerator_config": {"use_seedable_sampler": False}},
    "fits": {**each(3, "eval", "logging"), "save_strategy": "no", "auto_find_batch_size": True},
    "by epochs": {**EPOCHS, **BEST, "greater_is_better": True, "max_steps": 60},
    "draws": {**each(1, "save"), **each(2, "logging")},
    "plain": {**each(5, "logging"), "save_strategy": "no", "optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 3, "label_smoothing_factor": 0.1},
}  # fmt: skip
MADE_BY_TIME = ("runtime", "per_second")


def rows(start: int) -> list[dict[str, torch.Tensor]]:
    text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    cut = [torch.tensor(list(text[(start + i) * LENGTH : (start + i + 1) * LENGTH])) for i in range(ROWS)]
    return [{"input_ids": row, "labels": row} for row in cut]


def masked(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that draws random numbers of the process, as one for masked language models does."""
    made = default_data_collator(batch)
    return {**made, "input_ids": made["input_ids"].masked_fill(torch.rand(made["input_ids"].shape) < 0.2, 0)}


class Stream(torch.utils.data.IterableDataset):
    """Rows without a number that anybody tells, and without an end."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        number = 0
        while True:
            yield from rows(number)
            number += ROWS


class Short(torch.utils.data.IterableDataset):
    """The same without a length that anybody tells, five batches of four."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from rows(0)


STRIKE = Strike()


def reached(moment: str, step: int) -> None:
    """Ends this process once, if it is its moment."""
    STRIKE.reached(f"{moment}:{step}", int(os.environ.get("RANK", "0")), torch.distributed.barrier)


class Kills(TrainerCallback):
    """Listed before holdfast's own."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reached("begin", state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reached("part", state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reached("step", state.global_step + 1)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reached("log", state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reached("eval", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reached("evaluated", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reached("saved", state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reached("epoch", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reached("end", state.global_step)


class Counts(TrainerCallback, ExportableState):
    """What happened, in a state that the trainer may keep; random numbers are drawn in some hooks."""

    def __init__(self) -> None:
        self.count = dict.fromkeys(("steps", "parts", "evaluations", "saves", "logs", "epochs", "epochs begun"), 0)
        self.told: list[int] = []
        self.last = ""  # the weights behind the last step, before the best ones may be loaded

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.told.append(state.global_step)
        self.last = digest(list(model.parameters()))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.rand(1)
        # A restart within an epoch begins it once more.
        self.count["epochs begun"] += float(state.epoch or 0.0).is_integer()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count["parts"] += 1

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.count["steps"] += 1
        self.last = digest(list(model.parameters()))
        torch.rand(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count["evaluations"] += 1

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count["logs"] += 1

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count["saves"] += 1
        torch.rand(1)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count["epochs"] += 1
        torch.rand(1)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": dict(self.count)}}


class Asks(TrainerCallback):
    """Steers the trainer: evaluations and log entries beside its plan."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step in (3, 6):
            control.should_evaluate = control.should_log = True
        if state.global_step == 7:
            control.should_save = True
        return control


class Cuts(TrainerCallback):
    """Ends two epochs before their data does, and logs a number of NumPy's."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step in (3, 7)
        if state.global_step == 4:
            self.trainer.log({"mine": np.float32(1.5)})


class Thaws(TrainerCallback):
    """Trains the embedding from a step on, as scripts do it that know nothing of restarts."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        model.transformer.wte.requires_grad_(False)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == 4:
            model.transformer.wte.requires_grad_(True)


class Story(Trainer):
    """A subclass as people write them; `other` is a network of its own with an optimizer of its own."""

    is_loader_own = is_order_own = is_memory_short = False

    def __init__(self, *args: Any, two: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        torch.manual_seed(11)
        self.two, self.other = two, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
        self.second = torch.optim.AdamW(self.other.parameters(), 1e-2)

    def get_train_dataloader(self) -> Any:
        if not self.is_loader_own:
            return super().get_train_dataloader()
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator
        )

    def _get_train_sampler(self, *args: Any) -> Any:
        return Drawn(ROWS) if self.is_order_own else super()._get_train_sampler(*args)

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        if self.is_memory_short and self._train_batch_size > 2 and self.state.global_step >= 2:
            raise RuntimeError("CUDA out of memory.")
        loss = super().training_step(*args, **options)
        if self.two and self.state.global_step % 2 == 0:
            self.second.zero_grad()
            (self.other(torch.ones(2, 4)) - loss.detach()).square().mean().backward()
            self.second.step()
        return loss

    def _save_rng_state(self, output_dir: str) -> None:
        reached("saving", self.state.global_step)  # model and optimizer are written, the trainer's state is not
        super()._save_rng_state(output_dir)


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.blake2b(b"".join(one.detach().numpy().tobytes() for one in tensors), digest_size=8).hexdigest()


def live(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("facts", type=Path)
    parser.add_argument("--plan", choices=PLANS)
    parser.add_argument("--kill", default="")
    parser.add_argument("--of", type=int, default=0, help="the rank that is killed; -1: all")
    parser.add_argument("--term", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--resume", default="")
    parser.add_argument("--every", default="1")
    parser.add_argument("--batch", type=int, default=4, help="rows of a batch")
    parser.add_argument("--more", action="store_true", help="call `train` once more, and then told to begin anew")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0")) if options.ranks > 1 else 0
    STRIKE.aim(options.facts, rank, at=options.kill, of=options.of, term=options.term)
    output = options.facts.with_suffix(".out")
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    plan = {"learning_rate": 1e-2, **PLANS[options.plan]}
    if "num_train_epochs" not in plan:
        plan = {"max_steps": 13, **plan}
    arguments = TrainingArguments(
        output_dir=str(output), per_device_train_batch_size=options.batch, use_cpu=True, report_to=[], disable_tqdm=True, seed=3, **plan
    )  # fmt: skip
    counts, patience = Counts(), EarlyStoppingCallback(3)
    callbacks = [*([patience] if plan.get("load_best_model_at_end") else []), Kills()]
    callbacks += [Asks()] if options.plan == "hooks" else []
    cuts = Cuts()
    callbacks += {"cut": [cuts], "thaws": [Thaws()]}.get(options.plan, [])
    data = {"stream": Stream(), "short": Short(), "by epochs": Short()}.get(options.plan) or rows(0)
    two = options.plan == "two"
    collator = masked if options.plan == "draws" else default_data_collator
    trainer = Story(
        GPT2LMHeadModel(config), arguments, data_collator=collator, train_dataset=data, eval_dataset=rows(ROWS),
        callbacks=callbacks, two=two,
    )  # fmt: skip
    cuts.trainer, trainer.is_loader_own = trainer, options.plan == "loader"
    trainer.is_order_own, trainer.is_memory_short = options.plan == "drawn", options.plan == "fits"
    more = {"other": trainer.other, "second": trainer.second} if two else {}
    trainer = keep(trainer, options.root, every=options.every, **more)
    trainer.add_callback(counts)  # behind holdfast's own
    resume = get_last_checkpoint(output) if options.resume and output.is_dir() else None
    result = trainer.train(resume_from_checkpoint=resume)
    reached("over", trainer.state.global_step)
    history = [
        {name: float(value) for name, value in entry.items() if not name.endswith(MADE_BY_TIME)}
        for entry in trainer.state.log_history
    ]
    optimizers = [trainer.optimizer.optimizer, *([trainer.second] if two else [])]
    every = [(one.state, each) for one in optimizers for group in one.param_groups for each in group["params"]]
    moments = [
        tensor for of, each in every if each in of for _, tensor in sorted(of[each].items()) if torch.is_tensor(tensor)
    ]
    facts = {
        "step": trainer.state.global_step, "last": counts.last, "parameters": digest(list(trainer.model.parameters())), "optimizer": digest(moments),
        "other": digest(list(trainer.other.parameters())), "history": history, "best": trainer.state.best_metric,
        "patience": patience.early_stopping_patience_counter, "counts": counts.count, "loss": result.training_loss,
        "flos": trainer.state.total_flos, "rates": trainer.lr_scheduler.get_last_lr(), "random": torch.rand(1).item().hex(),
        "checkpoints": sorted(path.name for path in output.iterdir()) if output.is_dir() else [], "starts": counts.told,
    }  # fmt: skip
    if options.more:
        steps = [counts.count["steps"]]
        for told in (None, False):
            trainer.train(resume_from_checkpoint=told)
            steps.append(counts.count["steps"] - sum(steps))
        facts["steps of each"] = steps
    (options.facts.with_suffix(f".{rank}") if rank else options.facts).write_text(json.dumps(facts), encoding="utf-8")


def main(words: list[str]) -> None:
    live(words)
    # After DDP is gone: as the last owner of the group it would end it with the interpreter locked, while a thread of gloo may
    # wait for that lock to drop what the last evaluation gathered.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    serve(main) if sys.argv[1:] == ["--serve"] else main(sys.argv[1:])
