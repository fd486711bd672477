"""The scripts of the Lightning door: a byte-level GPT, real text, a resumable data loader. Not a test itself.

torchrun lightning_worker.py ROOT --steps N --way ddp|fsdp|flat|io [--wide] [--own DIR] [--resume PATH]

--own: Lightning also saves by itself, every second step. --resume: `fit` is told a path.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.adapters.lightning import keeper
from holdfast.adapters.lightning.checkpoint_io import checkpoint_io
from holdfast.testing.contracts import adapter_output

warnings.filterwarnings("ignore")
LENGTH, ROWS = 32, 56


class Text(torch.utils.data.Dataset):
    """Bytes of Python's own documentation, in rows; every rank has its own part."""

    def __init__(self, rank: int) -> None:
        text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        start = rank * ROWS
        self.rows = [torch.tensor(list(text[i * LENGTH : (i + 1) * LENGTH])) for i in range(start, start + ROWS)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Model(LightningModule):
    def __init__(self, width: int, shard: bool) -> None:
        super().__init__()
        self.shard = shard
        layer = torch.nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.embed, self.head = torch.nn.Embedding(256, width), torch.nn.Linear(width, 256)
        self.body = torch.nn.TransformerEncoder(layer, 2)

    def configure_model(self) -> None:
        if self.shard and not isinstance(self.head.weight, torch.distributed.tensor.DTensor):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.body.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out = self.head(self.body(self.embed(batch[:, :-1])))
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.loss = self(batch)
        return self.loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100), "interval": "step"}
        ]


class OnCpu(FSDPStrategy):
    """Lightning's strategy with the device named to FSDP. Lightning offers it for devices only: it refuses the class itself
    elsewhere, and gives FSDP the number of a device, which a CPU has none of.
    """

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        policy = {torch.nn.TransformerEncoderLayer}
        wrap = torch.distributed.fsdp.wrap.ModuleWrapPolicy(policy)
        whole = FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=wrap, **self.kwargs)
        return super()._setup_model(whole)


class Draws(Callback):
    """Random numbers by the step: Lightning's own checkpoints keep none."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        torch.manual_seed(100 * trainer.global_step + trainer.global_rank)


class Tell(Callback):
    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        adapter_output.start(trainer.global_rank, trainer.global_step)
        adapter_output.whole(trainer.global_rank, trainer.global_step, list(module.parameters()))

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        state = trainer.optimizers[0].state
        mine = [state.get(p, {}) for p in module.parameters()]  # FSDPStrategy leaves some to other ranks
        moments = [of_one[key] for of_one in mine for key in sorted(of_one)]
        adapter_output.step(trainer.global_rank, trainer.global_step - 1, [module.loss, *module.parameters(), *moments])

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        adapter_output.whole(trainer.global_rank, trainer.global_step, list(module.parameters()))


def train() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--way", choices=("ddp", "fsdp", "flat", "io"))
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--own", default="")
    parser.add_argument("--resume", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = Model(80 if options.wide else 64, options.way == "fsdp")
    strategies = {"fsdp": lambda: ModelParallelStrategy(world_size, 1), "flat": OnCpu}
    strategy = strategies.get(options.way, DDPStrategy)()
    torch.manual_seed(100 + rank)
    ways: dict[str, Any] = {"callbacks": [Tell(), keeper(options.root)], "enable_checkpointing": False}
    if options.own:
        own = ModelCheckpoint(options.own, filename="{step}", save_top_k=-1, every_n_train_steps=2)
        ways = {"callbacks": [*ways["callbacks"], own]}
    last = Path(options.root, "last.ckpt")
    if options.way == "io":
        saves = ModelCheckpoint(options.root, save_last=True, every_n_train_steps=1)
        plugin = checkpoint_io(Path(options.root, "holdfast"))
        ways = {"callbacks": [Draws(), Tell(), saves], "plugins": [plugin]}
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=options.steps, max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **ways,
    )  # fmt: skip
    loader = StatefulDataLoader(Text(rank), batch_size=8, shuffle=options.way != "io")
    resume = str(last) if options.way == "io" and last.exists() else options.resume or None
    trainer.fit(model, loader, ckpt_path=resume)


def main() -> None:
    train()
    dist.destroy_process_group()  # after DDP is gone, see lightning_story.py


if __name__ == "__main__":
    main()
