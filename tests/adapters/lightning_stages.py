"""Trainings of one script with one path: none that trains nothing, a fit, a second one of the same Trainer, another Trainer. Not a test itself.

lightning_stages.py ROOT FACTS
"""

import json
import signal
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

from holdfast.adapters.lightning import keeper

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
root, out = Path(sys.argv[1]), Path(sys.argv[2])


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, _):
        return (self.layer(batch) - batch.roll(1, 1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def trainer(epochs):
    return Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[keeper(root)],
    )  # fmt: skip


def told(model):
    facts.append([float(each.detach().double().sum()).hex() for each in model.parameters()])


facts, rows = (
    [],
    torch.utils.data.DataLoader(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), batch_size=4),
)
torch.manual_seed(0)
model = Model()
trainer(0).fit(model, rows)
is_let_go = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
first = trainer(1)
first.fit(model, rows)
told(model)
with torch.no_grad():
    model.layer.weight.mul_(0.5)
first.fit_loop.max_epochs = 3
first.fit(model, rows)
told(model)
other = Model()
trainer(2).fit(other, rows)
told(other)
out.write_text(json.dumps({"facts": facts, "let go": is_let_go}), encoding="utf-8")
