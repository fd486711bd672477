"""Folds: each builds a Trainer of Lightning that knows nothing of holdfast, and fits. Not a test itself.

lightning_folds.py FACTS
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

warnings.filterwarnings("ignore")
torch.set_num_threads(1)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, _):
        return (self.layer(batch) - batch.roll(1, 1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


facts = []
for fold in range(2):
    torch.manual_seed(fold)
    model, rows = Model(), torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4, shuffle=True)
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )  # fmt: skip
    trainer.fit(model, rows)
    facts.append([trainer.global_step, float(sum(each.detach().double().sum() for each in model.parameters()))])
Path(sys.argv[1]).write_text(json.dumps(facts), encoding="utf-8")
