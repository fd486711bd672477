"""A loop with Accelerate that is killed once, and the rows and weights that it ended with. Not a test itself.

accelerate_story.py ROOT FACTS --plan PLAN [--kill STEP]

PLAN: where the order of rows comes from. STEP: finished steps when the process is killed. FACTS: a file, written at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from holdfast.adapters.huggingface import wrap

ROWS, BATCH, EPOCHS = 40, 4, 3
CONFIGURATIONS = {
    "process": {},
    "generator": {},
    "seedable": {"use_seedable_sampler": True},
    "stateful": {"use_stateful_dataloader": True},
    "both": {"use_stateful_dataloader": True, "use_seedable_sampler": True},
}


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("facts", type=Path)
    parser.add_argument("--plan", choices=CONFIGURATIONS)
    parser.add_argument("--kill", type=int, default=-1)
    parser.add_argument("--of", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(**CONFIGURATIONS[options.plan]),
    )
    rank, world_size = accelerator.process_index, accelerator.num_processes
    own = torch.Generator().manual_seed(5) if options.plan == "generator" else None
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH, shuffle=True, generator=own)
    models = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(models[0].parameters(), 1e-2), torch.optim.SGD(models[1].parameters(), 1e-5)]
    first, second, *wrapped, loader = accelerator.prepare(*models, *optimizers, loader)
    torch.manual_seed(100 + rank)
    marker, seen = options.facts.with_suffix(f".killed{rank}"), options.facts.with_suffix(f".rows{rank}")
    checkpointer = wrap(accelerator, options.root)
    step = start = checkpointer.restore()
    length = ROWS // BATCH // world_size
    accumulated = (length + 1) // 2  # optimizer steps of an epoch; one is saved as one step
    stateful = CONFIGURATIONS[options.plan].get("use_stateful_dataloader", False)
    for _ in range(start // accumulated, EPOCHS):
        done = 2 * (step % accumulated)
        active = accelerator.skip_first_batches(loader, done) if done and not stateful else loader
        for batch in active:
            with accelerator.accumulate(first, second), seen.open("a") as file:
                file.write(
                    json.dumps([f"{step}.{len(batch)}.{int(accelerator.sync_gradients)}", batch[:, 0].tolist()]) + "\n"
                )
                accelerator.backward((second(first(batch / ROWS)) - batch).square().mean())
                for optimizer in wrapped:
                    optimizer.step()
                    optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            checkpointer.step(step)
            step += 1
            if step == options.kill and not marker.exists() and options.of in (rank, -1):
                accelerator.wait_for_everyone() if options.of == -1 else None
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    values = b"".join(each.detach().numpy().tobytes() for model in models for each in model.parameters())
    facts = {
        "step": step, "start": start, "parameters": hashlib.blake2b(values, digest_size=8).hexdigest(),
        "rows": dict(map(json.loads, seen.read_text().splitlines())), "random": torch.rand(1).item().hex(),
    }  # fmt: skip
    options.facts.with_suffix(f".{rank}").write_text(json.dumps(facts))
    accelerator.end_training()


if __name__ == "__main__":
    main()
