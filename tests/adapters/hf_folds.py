"""Folds: each builds a transformers.Trainer that knows nothing of holdfast, and trains it. Not a test itself.

hf_folds.py FACTS
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
facts = []
for fold in range(2):
    torch.manual_seed(fold)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 8))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            output_dir=place, max_steps=3, per_device_train_batch_size=4, use_cpu=True, save_strategy="no", report_to=[],
            disable_tqdm=True, learning_rate=1e-2,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    facts.append([trainer.state.global_step, float(sum(each.detach().double().sum() for each in model.parameters()))])
Path(sys.argv[1]).write_text(json.dumps(facts), encoding="utf-8")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
