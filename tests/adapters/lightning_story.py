"""A fit of Lightning that is killed once at a named moment, and what it ended with. Not a test itself.

lightning_story.py ROOT FACTS --plan PLAN [--kill MOMENT:STEP] [--of RANK] [--term] [--ranks N] [--zero]

MOMENT: begin (of a batch), val (a batch of the validation), validated (behind it, before Lightning's own
save), saving, saved (around that of the plan "job"), batch (behind a batch, in a callback that is listed last), epoch (in
`on_train_epoch_end` of that callback), end (in `on_train_end`); STEP: optimizer steps that were made then. FACTS: a file that is
written at the end. --of: the rank, or -1 for all. --term: SIGTERM instead of SIGKILL. --zero: no line of holdfast in the
script. With --serve instead of all that: reads words from standard input, a
list in JSON for each life, and makes a life of each in a fork.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from story_server import serve
from story_strike import Strike
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.adapters.lightning import keeper

WIDTH, ROWS, BATCH = 8, 48, 4
EPOCH = ROWS // BATCH
PLANS: dict[str, dict[str, Any]] = {
    "whole": {"max_epochs": 2, "val_check_interval": 5},
    "limit": {"max_epochs": 3, "limit_train_batches": 10, "val_check_interval": 5},
    "accumulate": {"max_epochs": 3, "limit_train_batches": 10, "accumulate_grad_batches": 3, "val_check_interval": 3},
    "steps": {"max_steps": 17, "max_epochs": -1, "val_check_interval": 4, "check_val_every_n_epoch": None},
    "plateau": {"max_epochs": 2, "val_check_interval": 5},
    "stops": {"max_epochs": 4, "val_check_interval": 2},
    "manual": {"max_epochs": 2, "val_check_interval": 5},
    "manual norms": {"max_epochs": 2, "val_check_interval": 5},
    "iterable": {"max_epochs": 2, "val_check_interval": 5},
    "workers": {"max_epochs": 2, "val_check_interval": 5},
    "saves": {"max_epochs": 2, "val_check_interval": 3},
    "seldom": {"max_epochs": 2, "val_check_interval": 5},
    "manual and seldom": {"max_epochs": 2, "val_check_interval": 5},
    "average": {"max_epochs": 2, "val_check_interval": 5},
    "own": {"max_epochs": 2, "limit_train_batches": 7},
    "job": {"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 5},
    "compiled": {"max_epochs": 2, "val_check_interval": 5},
    "by epoch": {"max_epochs": 3, "val_check_interval": 5},
    "swa": {"max_epochs": 4},
    "groups": {"max_epochs": 3, "val_check_interval": 5},
    "own order": {"max_epochs": 3, "val_check_interval": 5},
    "cuts": {"max_epochs": 3, "val_check_interval": 4},
    "finds": {"max_epochs": 2, "val_check_interval": 5},
    "weighted": {"max_epochs": 3, "val_check_interval": 5, "use_distributed_sampler": True},
    "shared": {"max_epochs": 3, "val_check_interval": 5, "use_distributed_sampler": True},
    "shuffled": {"max_epochs": 3, "val_check_interval": 5},
    "measured": {"max_epochs": 3, "val_check_interval": 5},
    "reloads": {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
    "best": {"max_epochs": 3, "accumulate_grad_batches": 4, "val_check_interval": 2},
    "endless": {"max_epochs": 3, "limit_train_batches": 6, "limit_val_batches": 0},
    # Loaders that say no place.
    "plain": {"max_epochs": 3, "val_check_interval": 5},
    "plain in order": {"max_epochs": 2, "val_check_interval": 5, "precision": "bf16-mixed"},
    "plain limit": {"max_epochs": 3, "limit_train_batches": 10, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    "plain augmented": {"max_epochs": 2, "val_check_interval": 5},
    "plain workers": {"max_epochs": 3, "val_check_interval": 5},
    "plain stays": {"max_epochs": 3, "val_check_interval": 5},
    "plain stays and draws": {
        "max_epochs": 3,
        "limit_train_batches": 10,
        "limit_val_batches": 1,
        "val_check_interval": 5,
    },
    "plain validation stays": {"max_epochs": 3, "val_check_interval": 5},
    "plain validation own": {"max_epochs": 3, "val_check_interval": 5},
    "plain validation reloads": {"max_epochs": 3, "val_check_interval": 5, "reload_dataloaders_every_n_epochs": 1},
    "plain weighted": {"max_epochs": 3, "val_check_interval": 5, "use_distributed_sampler": True},
    "plain shared": {"max_epochs": 3, "val_check_interval": 5, "use_distributed_sampler": True},
    "plain stream": {"max_epochs": 3, "val_check_interval": 5},
    "plain stream of workers": {"max_epochs": 3, "val_check_interval": 5},
    "plain pair": {"max_epochs": 3, "val_check_interval": 5},
    "plain manual": {"max_epochs": 3, "val_check_interval": 5},
    "plain job": {"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 5},
    "plain reloads": {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
    "plain cuts": {"max_epochs": 3, "val_check_interval": 4},
    "plain steps": {"max_steps": 17, "max_epochs": -1, "val_check_interval": 4, "check_val_every_n_epoch": None},
    "plain drawn": {"max_epochs": 3, "val_check_interval": 5},
    "plain drawn twice": {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 2},
}


class Stream(torch.utils.data.IterableDataset):
    """Rows in order, of a number that nobody tells, with a place of its own; another order in each epoch."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.place, self.epoch = rows, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < len(self.rows):
            self.place += 1
            yield self.rows[(self.place * (2 * self.epoch + 1)) % len(self.rows)]
        self.place, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.epoch = state["place"], state["epoch"]


class Drawn(torch.utils.data.IterableDataset):
    """Rows in an order that is drawn at the beginning of each epoch; each worker has its part of them. Nothing knows where it is."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        order, worker = torch.randperm(len(self.rows)), torch.utils.data.get_worker_info()
        yield from self.rows[order[worker.id :: worker.num_workers] if worker else order]


class Augmented(torch.utils.data.Dataset):
    """Rows with noise, drawn when they are loaded."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002 - as augmentations draw


def plain(plan: str, rows: torch.Tensor) -> Any:
    """Loaders that say no place."""
    loader, kind = torch.utils.data.DataLoader, plan.partition(" ")[2]
    if kind in ("stream", "stream of workers"):
        return loader(Drawn(rows), batch_size=BATCH, num_workers=2 * ("workers" in kind))
    if kind == "weighted":
        weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(8))
        return loader(rows, batch_size=BATCH, sampler=torch.utils.data.WeightedRandomSampler(weights.tolist(), ROWS))
    if kind == "pair":  # the second is gone over twice, and a part
        return [loader(part, batch_size=BATCH, shuffle=True) for part in (rows, rows[: 2 * ROWS // 5])]
    if kind in ("augmented", "workers"):
        return loader(Augmented(rows), batch_size=BATCH, shuffle=True, num_workers=2 * (kind == "workers"))
    stays = kind.startswith("stays")
    if kind == "stays and draws":
        rows = Augmented(rows)
    return loader(rows, BATCH, shuffle=kind != "in order", num_workers=2 * stays, persistent_workers=stays)


class Data(LightningDataModule):
    def __init__(self, plan: str, rank: int) -> None:
        super().__init__()
        self.plan, self.rank, self.asked = plan, rank, 0

    def train_dataloader(self) -> Any:
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1 + self.rank))
        if "drawn" in self.plan:  # by the numbers of the process, when the hook is called
            rows = torch.randn(ROWS, WIDTH)
        if self.plan == "plain reloads":
            rows = rows + self.trainer.current_epoch
        if self.plan.startswith("plain"):
            return plain(self.plan, rows)
        if self.plan == "iterable":
            return StatefulDataLoader(Stream(rows), batch_size=BATCH)
        if self.plan == "endless":  # no position, but a generator of its own
            own = torch.Generator().manual_seed(5)
            return torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, generator=own)
        if self.plan == "weighted":  # of two ranks Lightning shares it out
            weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(8))
            sampler = torch.utils.data.WeightedRandomSampler(weights.tolist(), ROWS)
            return StatefulDataLoader(rows, batch_size=BATCH, sampler=sampler)
        if self.plan == "shuffled":  # by the number of the epoch
            shuffled = torch.utils.data.DistributedSampler(rows, num_replicas=1, rank=0)
            return StatefulDataLoader(rows, batch_size=BATCH, sampler=shuffled)
        if self.plan == "reloads":
            rows = rows + self.trainer.current_epoch
        own = torch.Generator().manual_seed(5) if self.plan == "own order" else None
        workers = 2 * (self.plan == "workers")
        return StatefulDataLoader(rows, batch_size=BATCH, shuffle=True, generator=own, num_workers=workers)

    def val_dataloader(self) -> Any:
        rows = torch.randn(2 * BATCH, WIDTH, generator=torch.Generator().manual_seed(99))
        if "drawn" in self.plan:
            rows = torch.randn(2 * BATCH, WIDTH)
        stays = self.plan in ("plain validation stays", "plain stays and draws", "plain validation reloads")
        if self.plan in ("plain stays and draws", "plain validation reloads"):
            rows = Augmented(torch.cat([rows, rows]))
        own = (
            torch.Generator().manual_seed(6)
            if self.plan in ("plain validation own", "plain validation reloads")
            else None
        )
        return torch.utils.data.DataLoader(
            rows, batch_size=BATCH, num_workers=stays, persistent_workers=stays, shuffle=own is not None, generator=own
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.asked += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


class Model(LightningModule):
    def __init__(self, plan: str) -> None:
        super().__init__()
        self.plan = plan
        self.automatic_optimization = "manual" not in plan
        self.body = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, WIDTH))
        if plan == "manual norms":  # statistics differ by rank, for nobody sends them
            self.body.append(torch.nn.BatchNorm1d(WIDTH))
        self.other = torch.nn.Linear(WIDTH, WIDTH)
        if plan == "compiled":
            self.body = torch.compile(self.body, backend="eager")
        self.register_buffer("mean", torch.zeros(WIDTH, 16).T.contiguous())
        self.error = torchmetrics.MeanSquaredError()
        self.seen, self.lr = 0.0, 1e-2

    def _loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, list):
            batch = batch[0] + batch[1].mean()
        return (self.other(self.body(batch)) - batch.roll(1, 1)).square().mean()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
        loss = self._loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        if self.plan == "measured":
            self.error(loss.detach(), torch.zeros(()))
            self.log("error", self.error, on_step=False, on_epoch=True)
            if index % 5 == 0:
                self.log("seldom", loss)
        self.seen += float(loss.detach())
        if self.automatic_optimization:
            return loss
        first, second = self.optimizers()
        for optimizer in (first, second) if index % 3 == 0 else (first,):
            optimizer.zero_grad()
        self.manual_backward(loss)
        first.step()
        if index % 3 == 0:
            second.step()
        return None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if "cuts" in self.plan and batch_idx == 7 and self.trainer.current_epoch % 2 == 0 else None

    def on_train_batch_end(self, *_: Any) -> None:
        self.mean.lerp_(next(self.body.parameters()).detach(), 0.3)  # an average, of the weights behind each step

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        reached("val", self.trainer)
        loss = self._loss(batch)
        stuck = self.plan in ("plateau", "stops")
        self.log("val", torch.tensor(1.0) if stuck else loss + 0.01 * torch.rand(()))  # a validation that draws

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def configure_optimizers(self) -> Any:
        if "manual" in self.plan:
            return [torch.optim.AdamW(self.body.parameters(), 1e-2), torch.optim.SGD(self.other.parameters(), 1e-2)]
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], self.lr)
        if self.plan == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}


STRIKE = Strike()


def reached(moment: str, trainer: Any) -> None:
    """Ends this process once, if it is its moment."""
    if not trainer.sanity_checking:
        STRIKE.reached(f"{moment}:{trainer.global_step}", trainer.global_rank, trainer.strategy.barrier)


class Counts(Callback):
    """Listed behind holdfast's: what is counted here is counted last."""

    def __init__(self) -> None:
        self.count = {"batches": 0, "validations": 0, "epochs": 0, "epochs begun": 0}
        self.by_hook = 0.0
        self.starts: list[int] = []

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.starts.append(trainer.global_step)

    def on_train_epoch_start(self, *_: Any) -> None:
        self.count["epochs begun"] += 1
        torch.rand(1)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        reached("begin", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.count["batches"] += 1
        self.by_hook += 0.5
        reached("batch", trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.count["validations"] += not trainer.sanity_checking
        reached("validated", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.count["epochs"] += 1
        reached("epoch", trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        reached("end", trainer)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.count)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = dict(state)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["by hook"] = self.by_hook

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.by_hook = checkpoint["by hook"]


class Thaws(BaseFinetuning):
    """A group of the optimizer that comes with the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=1e-3)


class Saves(ModelCheckpoint):
    """Lightning's own saves."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        reached("saving", trainer)
        super()._save_checkpoint(trainer, filepath)
        reached("saved", trainer)


class Lines(Logger):
    """A log that outlives the process: the last value under each step and name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    name, version = "lines", 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for name, value in metrics.items():
                file.write(json.dumps([f"{name} at {step}", float(value).hex()]) + "\n")

    def all(self) -> dict[str, str]:
        return dict(map(json.loads, self.path.read_text(encoding="utf-8").splitlines())) if self.path.exists() else {}


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.blake2b(b"".join(each.detach().numpy().tobytes() for each in tensors), digest_size=8).hexdigest()


def callbacks_of(plan: str, options: argparse.Namespace) -> list[Any]:
    if plan == "stops":
        return [EarlyStopping("val", patience=3)]
    if "seldom" in plan:
        return [ModelCheckpoint(options.facts.with_suffix(".own"), every_n_train_steps=4, save_last=True)]
    if plan == "saves":
        return [ModelCheckpoint(options.facts.with_suffix(".own"), monitor="val", save_top_k=2, save_last=True)]
    if plan in ("job", "plain job"):
        best = Saves(options.facts.with_suffix(".own"), monitor="val", save_top_k=2, save_last=True)
        return [EarlyStopping("val", patience=9), best, EMAWeightAveraging(), LearningRateMonitor()]
    if plan == "best":  # in a directory that the logger names, anew at each start
        return [ModelCheckpoint(monitor="val", save_top_k=2)]
    if plan == "average":
        return [WeightAveraging(use_buffers=False)]
    by_epoch = {
        "by epoch": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
        "swa": lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=2, annealing_epochs=2),
        "groups": Thaws,
        "finds": lambda: LearningRateFinder(num_training_steps=6),
    }
    if plan in by_epoch:
        return [by_epoch[plan]()]
    return []


def live(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("facts", type=Path)
    parser.add_argument("--plan", choices=PLANS)
    parser.add_argument("--kill", default="")
    parser.add_argument("--of", type=int, default=0, help="the rank that is killed; -1: all")
    parser.add_argument("--term", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--every", default="1")
    parser.add_argument("--resume", help="what `fit` is told; `last`: the last checkpoint of Lightning's own")
    parser.add_argument("--zero", action="store_true")
    options = parser.parse_args(words)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    rank = int(os.environ.get("RANK", "0")) if options.ranks > 1 else 0
    STRIKE.aim(options.facts, rank, at=options.kill, of=options.of, term=options.term)
    model, data, counts = Model(options.plan), Data(options.plan, rank), Counts()
    lines = Lines(options.facts.with_suffix(f".log{rank}"))
    kept = [] if options.zero else [keeper(options.root, every=options.every)]
    callbacks = [*callbacks_of(options.plan, options), *kept, counts]
    torch.manual_seed(7 + rank)
    loggers = [CSVLogger(options.facts.parent), lines] if options.plan == "best" else lines
    settings = {"use_distributed_sampler": False, **PLANS[options.plan]}
    trainer = Trainer(
        accelerator="cpu", devices=options.ranks, strategy="ddp" if options.ranks > 1 else "auto", logger=loggers,
        callbacks=callbacks, log_every_n_steps=2, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=options.plan in ("job", "plain job", "saves", "seldom", "manual and seldom", "best"), default_root_dir=options.facts.parent,
        **settings,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=options.resume)
    every = [(one.state, each) for one in trainer.optimizers for group in one.param_groups for each in group["params"]]
    moments = [
        tensor for of, each in every if each in of for _, tensor in sorted(of[each].items()) if torch.is_tensor(tensor)
    ]
    own = options.facts.with_suffix(".own")
    facts = {
        "step": trainer.global_step, "epoch": trainer.current_epoch, "parameters": digest(list(model.parameters())),
        "buffers": digest(list(model.buffers())), "optimizer": digest(moments), "seen": model.seen.hex(), "asked": data.asked,
        "rates": [group["lr"] for one in trainer.optimizers for group in one.param_groups], "counts": counts.count,
        "by hook": counts.by_hook, "logged": lines.all(), "random": torch.rand(1).item().hex(),
        "metrics": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
        "own": sorted(path.name for path in own.iterdir()) if own.is_dir() else [],
        "stopped": [one.wait_count for one in callbacks if isinstance(one, EarlyStopping)],
        "average model": [digest(list(one._average_model.parameters())) for one in callbacks if isinstance(one, WeightAveraging)],
        "best": [[float(score).hex() for score in one.best_k_models.values()] for one in callbacks if options.plan == "best" and isinstance(one, ModelCheckpoint)],
        "starts": counts.starts,
    }  # fmt: skip
    if rank == 0:
        options.facts.write_text(json.dumps(facts), encoding="utf-8")
    else:
        options.facts.with_suffix(f".{rank}").write_text(json.dumps(facts), encoding="utf-8")


def main(words: list[str]) -> None:
    live(words)
    # After DDP is gone: as the last owner of the group it would end it with the interpreter locked, while a thread of gloo may
    # wait for that lock to drop what the last evaluation gathered.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    serve(main) if sys.argv[1:] == ["--serve"] else main(sys.argv[1:])
