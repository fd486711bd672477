"""A GAN as people write it with Lightning: each optimizer's step uses half of the parameters. Not a test itself.

lightning_gan.py FACTS [STRATEGY]; nothing of holdfast in it.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

warnings.filterwarnings("ignore")


class Gan(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        for optimizer, loss in zip(self.optimizers(), (self.fooled, self.caught), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def fooled(self, batch):
        return -self.critic(self.generator(batch[:, :4])).mean()

    def caught(self, batch):
        return self.critic(self.generator(batch[:, :4]).detach()).mean() - self.critic(batch).mean()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 1e-2) for part in (self.generator, self.critic)]


torch.set_num_threads(1)
torch.manual_seed(0)
rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
model = Gan()
trainer = Trainer(
    accelerator="cpu", devices=1, strategy=sys.argv[2] if len(sys.argv) > 2 else "auto", max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
weights = [weight for parameter in model.parameters() for weight in parameter.flatten().tolist()]
Path(sys.argv[1]).write_text(json.dumps({"strategy": type(trainer.strategy).__name__, "weights": weights}))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
