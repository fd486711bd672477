"""torchdata's `StatefulDataLoader`, with worker processes: it goes on with the next batch. Needs `torchdata`.

python examples/doors/stateful_loader.py --steps 200
"""

from __future__ import annotations

import argparse

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.testing.gpt import ByteGPT, Text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints/stateful_loader")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = ByteGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs, targets = next(Text(batch=24))  # three batches an epoch
    rows = torch.utils.data.TensorDataset(inputs, targets)
    # A generator of its own: a loader that is resumed makes one iterator more, and draws a number for each. From the
    # process's generator these would be numbers that dropout is to get.
    own = torch.Generator().manual_seed(0)
    loader = StatefulDataLoader(rows, batch_size=8, shuffle=True, num_workers=2, generator=own)

    checkpointer = holdfast.Checkpointer(options.checkpoints, model=model, optimizer=optimizer, loader=loader)
    step = start = checkpointer.restore()
    print(f"rank 0 starts at step {start}", flush=True)
    while step < options.steps:
        for batch in loader:
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank 0 step {step} loss {loss.item():.17g}", flush=True)
            checkpointer.step(step)
            step += 1
            if step == options.steps:
                break
    checkpointer.close()


if __name__ == "__main__":
    main()
