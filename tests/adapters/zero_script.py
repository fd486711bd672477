"""A training script that knows nothing of holdfast. Not a test itself.

torchrun zero_script.py --steps N [--wide]
"""

import argparse
import hashlib
import json
import sys

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


def digest(tensors):
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def say(**facts):
    sys.stdout.write(f"door {json.dumps(facts)}\n")  # one write, so that lines of several ranks do not mix
    sys.stdout.flush()


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--wide", action="store_true")
options = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
width = 320 if options.wide else 256
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, width))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
torch.manual_seed(100 + rank)
total, history = 0.0, [1.0]

for step in range(options.steps):
    if not hasattr(sys, "told"):  # of this process, unlike everything that the script has and that is carried
        sys.told = True
        say(rank=rank, start=step)
    loss = model(torch.randn(4, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    total += loss.item()
    history.append(total)
    moments = [optimizer.state[p][key] for p in model.parameters() for key in sorted(optimizer.state[p])]
    say(rank=rank, step=step, digest=digest([loss, *model.parameters(), *moments, torch.tensor([total, *history])]))

print(f"rank {rank} ends with {total:.3f}")
dist.destroy_process_group()
