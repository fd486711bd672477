"""One process with Accelerate or a Trainer and a parameter that a step does not use. Not a test itself.

hf_unused.py FACTS trainer|accelerate [find]; nothing of holdfast in it. find: what DDP needs for it is asked for.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from transformers import Trainer, TrainingArguments


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {"loss": self.one(x).square().mean()}


def with_trainer(model, rows):
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            output_dir=place, max_steps=4, per_device_train_batch_size=4, use_cpu=True, save_strategy="no", report_to=[],
            disable_tqdm=True, seed=3, remove_unused_columns=False, **({"ddp_find_unused_parameters": True} if FIND else {}),
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=[{"x": row} for row in rows])
        trainer.train()
    return trainer.model_wrapped


def with_accelerate(model, rows):
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if FIND else []
    )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-2))
    for row in rows[:4]:
        accelerator.backward(model(row)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return model


FIND = sys.argv[3:] == ["find"]
torch.set_num_threads(1)
torch.manual_seed(0)
rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    trained = {"trainer": with_trainer, "accelerate": with_accelerate}[sys.argv[2]](Halves(), rows)
weights = [weight for parameter in trained.parameters() for weight in parameter.flatten().tolist()]
Path(sys.argv[1]).write_text(json.dumps({"kind": type(trained).__name__, "weights": weights}))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
