"""A Lightning Trainer that goes on where it was killed: one callback. Needs the extra `lightning`.

torchrun --nproc-per-node 2 examples/doors/lightning_fit.py --steps 200
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.adapters.lightning import keeper
from holdfast.testing.gpt import ByteGPT, Text


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = ByteGPT()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = self.gpt(*batch)
        print(f"rank {self.global_rank} step {self.global_step} loss {loss.item():.17g}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/lightning")
    options = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(rank)
    inputs, targets = next(Text(batch=256, rank=rank, world_size=world_size))
    loader = StatefulDataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto", max_steps=options.steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[keeper(options.checkpoints)],  # the one line
    )  # fmt: skip
    trainer.fit(model, loader)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # behind main: DDP is gone then, and the group ends unlocked
