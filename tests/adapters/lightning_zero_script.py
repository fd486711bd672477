"""A Lightning Trainer that knows nothing of holdfast. Not a test itself.

torchrun lightning_zero_script.py --steps N [--plain]
"""

import argparse
import json
import os
import sys
import warnings

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.filterwarnings("ignore")


def say(**facts):
    sys.stdout.write(f"door {json.dumps(facts)}\n")
    sys.stdout.flush()


class Tell(Callback):
    def on_train_start(self, trainer, module):
        say(rank=trainer.global_rank, start=trainer.global_step)

    def on_train_batch_end(self, trainer, module, *_):
        total = sum(parameter.detach().double().sum() for parameter in module.parameters())
        # Told when the next batch begins, so that the callback behind this one has saved the step.
        self.step, self.digest = trainer.global_step - 1, total.item().hex()

    def on_train_batch_start(self, trainer, *_):
        self.on_train_end(trainer)

    def on_train_end(self, trainer, *_):
        if hasattr(self, "step"):
            say(rank=trainer.global_rank, step=self.step, digest=self.digest)
            del self.step


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8))

    def training_step(self, batch, _):
        return self.body(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument(
    "--plain", action="store_true", help="a loader that says no place, of which Lightning gives each rank a part"
)
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 32))
loader = torch.utils.data.DataLoader(data, 2, shuffle=True) if options.plain else StatefulDataLoader(data, batch_size=2)
world = int(os.environ["WORLD_SIZE"])
trainer = Trainer(
    accelerator="cpu", devices=world, strategy="ddp", max_steps=options.steps, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=options.plain, callbacks=[Tell()],
)  # fmt: skip
trainer.fit(Model(), loader)
torch.distributed.destroy_process_group()
