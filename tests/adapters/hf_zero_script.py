"""A transformers.Trainer that knows nothing of holdfast. Not a test itself.

torchrun hf_zero_script.py --steps N
"""

import argparse
import json
import sys
import tempfile
import warnings
from pydoc_data import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

warnings.filterwarnings("ignore")
LENGTH = 32


class Tell(TrainerCallback):
    def say(self, **facts):
        sys.stdout.write(f"door {json.dumps(facts)}\n")
        sys.stdout.flush()

    def on_step_begin(self, args, state, control, **kwargs):
        if not hasattr(self, "told"):
            self.told = True
            self.say(rank=args.process_index, start=state.global_step)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        total = sum(parameter.detach().double().sum() for parameter in model.parameters())
        self.say(rank=args.process_index, step=state.global_step - 1, digest=total.item().hex())
        control.should_training_stop = state.global_step >= options.steps


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
options = parser.parse_args()
torch.set_num_threads(1)
text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
rows = [torch.tensor(list(text[i * LENGTH : (i + 1) * LENGTH])) for i in range(64)]
config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as place:
    arguments = TrainingArguments(
        output_dir=place, max_steps=100, per_device_train_batch_size=4, use_cpu=True, save_strategy="no", report_to=[],
        disable_tqdm=True, seed=3,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[Tell()]).train()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
