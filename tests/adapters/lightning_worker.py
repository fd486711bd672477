"""The scripts of the Lightning door: a byte-level GPT, real text, a resumable data loader. Not a test itself.

torchrun lightning_worker.py ROOT --steps N --way ddp|fsdp [--wide]
"""

from __future__ import annotations

import argparse
import os
import warnings
from pydoc_data import topics
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.adapters.lightning import keeper
from holdfast.testing.contracts import telling

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


class Tell(Callback):
    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        telling.start(trainer.global_rank, trainer.global_step)
        telling.whole(trainer.global_rank, trainer.global_step, list(module.parameters()))

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        state = trainer.optimizers[0].state
        moments = [state[p][key] for p in module.parameters() for key in sorted(state[p])]
        telling.step(trainer.global_rank, trainer.global_step - 1, [module.loss, *module.parameters(), *moments])

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        telling.whole(trainer.global_rank, trainer.global_step, list(module.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--way", choices=("ddp", "fsdp"))
    parser.add_argument("--wide", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = Model(80 if options.wide else 64, options.way == "fsdp")
    strategy = DDPStrategy() if options.way == "ddp" else ModelParallelStrategy(world_size, 1)
    torch.manual_seed(100 + rank)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=options.steps, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[Tell(), keeper(options.root)],
    )  # fmt: skip
    trainer.fit(model, StatefulDataLoader(Text(rank), batch_size=8, shuffle=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
